//! Tests of LTX-2.5's video VAE with the diffusion decoder, in Lightricks' layout.

use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::validate::validate;
use super::super::*;
use super::official::official_config;
use super::{fails, open, open_with, put, safetensors};

/// Returns the `vae` section in the header of the published file.
fn vae() -> Value {
    let conv = &official_config()["vae"];
    json!({
        "_class_name": "CausalDiffusionVAE",
        "model_output_type": "x0",
        "encoder": {"blocks": conv["encoder_blocks"], "out_channels": 128, "in_channels": 3, "patch_size": 4},
        "decoder": {
            "in_channels": 128, "out_channels": 3, "patch_size": 4, "head_dim": 64, "t_emb_dim": 384,
            "stage_channels": [2048, 1024, 512, 512, 256], "stage_depths": [4, 6, 4, 2, 8],
            "stage_kernels": [[3, 7, 7], [3, 7, 7], [3, 5, 5], [3, 5, 5], [11, 11, 11]],
            "upsamples": [[[1, 2, 2], 2], [[2, 1, 1], 2], [[2, 2, 2], 1], [[2, 2, 2], 2]],
            "stage5_kernel": [11, 11, 11], "timestep_scale_multiplier": 1000.0, "default_num_inference_steps": 1,
        },
    })
}

type TensorValues<'a> = (&'a str, &'a [usize], &'a [f32]);

/// Writes a file of bf16 tensors with values.
fn file(path: PathBuf, prefix: &str, vae: &Value, tensors: &[TensorValues]) -> PathBuf {
    let names: Vec<String> = tensors.iter().map(|(name, ..)| format!("{prefix}{name}")).collect();
    let shapes: Vec<_> = names.iter().zip(tensors).map(|(name, (_, shape, _))| (&**name, "BF16", *shape)).collect();
    let header = json!({"config": json!({"vae": vae}).to_string(), "model_version": "2.5.0"});
    let values: Vec<u8> =
        tensors.iter().flat_map(|(.., values)| *values).flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
    let mut bytes = safetensors(&shapes, header);
    let data = bytes.len() - values.len();
    bytes[data..].copy_from_slice(&values);
    put(path, bytes)
}

const TENSORS: [TensorValues; 12] = [
    ("encoder.conv_in.conv.weight", &[1], &[1.0]),
    ("decoder.conv_in_x_t.weight", &[1, 2], &[1.0, 2.0]),
    ("decoder.t_embedder.mlp.2.bias", &[1], &[4.0]),
    ("decoder.det_stages.0.1.attn.qkv.weight", &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    ("decoder.det_stages.0.1.attn.qkv.bias", &[3], &[7.0, 8.0, 9.0]),
    ("decoder.diff_blocks.0.attn.k_norm.weight", &[1], &[1.0]),
    ("decoder.diff_blocks.0.attn.proj.weight", &[2, 2], &[1.0, 2.0, 3.0, 4.0]),
    ("decoder.diff_blocks.0.attn.proj.bias", &[2], &[5.0, 6.0]),
    ("decoder.diff_blocks.0.gate_msa", &[2], &[2.0, -0.5]),
    ("decoder.coarse_head.qkv.weight", &[3], &[0.0; 3]),
    ("per_channel_statistics.mean-of-means", &[2], &[0.5, 1.5]),
    ("per_channel_statistics.std-of-means", &[2], &[2.0, 3.0]),
];

fn values(source: &ModelSource, name: &str) -> Vec<f32> {
    let view = source.checkpoint(Component::DiffusionDecoder).and_then(|c| c.get(name));
    view.and_then(|view| view.to_tensor()).expect("there").to_f32().into_iter().collect()
}

#[test]
fn one_file_contains_encoder_and_diffusion_decoder() {
    let dir = TempDir::new().expect("dir");
    for prefix in ["", "vae."] {
        let path = file(dir.path().join(format!("{prefix}file.safetensors")), prefix, &vae(), &TENSORS);
        let source = open(&path).expect("opens");
        source.refuse_unread().expect("all of it is known");
        let config = source.config(Component::DiffusionDecoder).expect("derived");
        assert_eq!(config, published());
        let vae = source.config(Component::Vae).expect("derived");
        let conv = conv_config();
        let of_decoder = |key: &str| ["decoder_", "up", "out_", "timestep_"].iter().any(|start| key.starts_with(start));
        for (key, value) in conv.as_object().expect("an object").iter().filter(|(key, _)| !of_decoder(key)) {
            assert_eq!(vae[key], *value, "{key}");
        }
        assert_eq!(vae["decoder_block_out_channels"], json!([]));

        let checkpoint = source.checkpoint(Component::DiffusionDecoder).expect("there");
        let names: Vec<&str> = checkpoint.names().filter(|name| !is_inert(Component::DiffusionDecoder, name)).collect();
        assert_eq!(
            names,
            [
                "decoder.conv_in_x_t.weight",
                "decoder.det_stages.0.1.attn.to_k.bias",
                "decoder.det_stages.0.1.attn.to_k.weight",
                "decoder.det_stages.0.1.attn.to_q.bias",
                "decoder.det_stages.0.1.attn.to_q.weight",
                "decoder.det_stages.0.1.attn.to_v.bias",
                "decoder.det_stages.0.1.attn.to_v.weight",
                "decoder.diff_blocks.0.attn.norm_k.weight",
                "decoder.diff_blocks.0.attn.to_out.0.bias",
                "decoder.diff_blocks.0.attn.to_out.0.weight",
                "decoder.t_embedder.timestep_embedder.linear_2.bias",
                "latents_mean",
                "latents_std",
            ]
        );
        let attention = "decoder.det_stages.0.1.attn";
        assert_eq!(values(&source, &format!("{attention}.to_q.weight")), [1.0, 2.0]);
        assert_eq!(values(&source, &format!("{attention}.to_v.weight")), [5.0, 6.0]);
        assert_eq!(values(&source, &format!("{attention}.to_k.bias")), [8.0]);
        // Gates are multiplied into the rows, also in a partial read.
        let out = "decoder.diff_blocks.0.attn.to_out.0";
        assert_eq!(values(&source, &format!("{out}.weight")), [2.0, 4.0, -1.5, -2.0]);
        assert_eq!(values(&source, &format!("{out}.bias")), [10.0, -3.0]);
        let mut last = [0; 4];
        let weight = checkpoint.get(&format!("{out}.weight")).expect("there");
        weight.read_at(4, &mut last).expect("reads");
        assert_eq!(last.map(|byte| byte), bytemuck::cast::<[bf16; 2], [u8; 4]>([-1.5, -2.0].map(bf16::from_f32)));
        // Both the VAE and the decoder contain the statistics.
        assert!(source.checkpoint(Component::Vae).expect("there").contains("latents_std"));
        assert_eq!(values(&source, "latents_mean"), [0.5, 1.5]);
    }
}

/// Returns `diffusion_decoder/config.json` as diffusers saves it.
fn published() -> Value {
    json!({
        "_class_name": "LTX2VideoDiffusionDecoderModel", "out_channels": 3, "latent_channels": 128, "patch_size": 4,
        "scaling_factor": 1.0, "decoder_head_dim": 64, "decoder_stage_channels": [2048, 1024, 512, 512, 256],
        "decoder_stage_depths": [4, 6, 4, 2, 8],
        "decoder_stage_kernels": [[3, 7, 7], [3, 7, 7], [3, 5, 5], [3, 5, 5]],
        "decoder_upsample_strides": [[1, 2, 2], [2, 1, 1], [2, 2, 2], [2, 2, 2]],
        "decoder_upsample_channel_reductions": [2, 2, 1, 2], "decoder_stage5_kernel": [11, 11, 11],
        "decoder_t_emb_dim": 384, "decoder_timestep_scale_multiplier": 1000.0, "decoder_model_output_type": "x0",
        "decoder_num_inference_steps": 1, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8,
    })
}

/// Returns `vae/config.json` of the convolutional VAE.
fn conv_config() -> Value {
    let s = json!({"vae": official_config()["vae"]});
    official_vae::video(section::Section::new(Path::new("conv"), &s, "vae")).expect("derived")
}

#[test]
fn mismatches_are_reported_by_key() {
    let dir = TempDir::new().expect("dir");
    let written =
        |vae: &Value, tensors: &[TensorValues]| open(&file(dir.path().join("f.safetensors"), "", vae, tensors));
    fn tensors<'a>(more: TensorValues<'a>) -> Vec<TensorValues<'a>> {
        [&TENSORS[..2], &[more]].concat()
    }
    let checkpoint = |tensors: &[TensorValues]| {
        let source = written(&vae(), tensors).expect("opens");
        source.refuse_unread()?;
        source.checkpoint(Component::DiffusionDecoder)
    };
    fails(
        checkpoint(&tensors(("decoder.diff_blocks.0.attn.qkv.bias", &[4], &[0.0; 4]))),
        &[
            "f.safetensors",
            "decoder.diff_blocks.0.attn.qkv.bias",
            "[4]",
            "divided equally among decoder.diff_blocks.0.attn.to_q.bias",
        ],
    );
    let gate: TensorValues = ("decoder.diff_blocks.0.gate_mlp", &[3], &[0.0; 3]);
    let mut wrong = tensors(gate);
    wrong.push(("decoder.diff_blocks.0.mlp.w_down.weight", &[2, 1], &[0.0; 2]));
    fails(checkpoint(&wrong), &["gate_mlp", "[3]", "[2]"]);
    // A gate without its layer and an unknown decoder tensor are reported as extra.
    let all = checkpoint(&[&tensors(gate)[..], &[("decoder.dream.weight", &[1], &[0.0])]].concat()).expect("opens");
    let report = validate(&all, Component::DiffusionDecoder, [("decoder.conv_in_x_t.weight", &[1, 2][..])]);
    assert_eq!(report.extra, ["decoder.diff_blocks.0.gate_mlp", "decoder.dream.weight"]);

    let with = |section: &str, key: &str, value: Value| {
        let mut vae = vae();
        vae[section][key] = value;
        written(&vae, &TENSORS).and_then(|source| source.config(Component::DiffusionDecoder))
    };
    fails(with("decoder", "dream", json!(1)), &["config.vae.decoder.dream", "is an unknown key (value 1)"]);
    fails(
        with("decoder", "stage5_channels", json!(64)),
        &["stage5_channels", "is 64", "must equal the last entry of stage_channels"],
    );
    fails(with("decoder", "upsamples", json!([[2, 2]])), &["upsamples", "not a list of strides"]);
    fails(with("encoder", "dream", json!(1)), &["config.vae.encoder.dream"]);
    let other = json!({"_class_name": "DreamVAE"});
    fails(written(&other, &TENSORS).and_then(|source| source.config(Component::Vae)), &["DreamVAE", "not supported"]);
}

/// The decoder's keys may be directly in the VAE's section, as in the training code; missing keys get its defaults.
#[test]
fn decoder_keys_in_vae_section_are_accepted() {
    let dir = TempDir::new().expect("dir");
    let flat = json!({"_class_name": "CausalDiffusionVAE", "stage_depths": [1, 1, 1, 1, 2], "na_head_dim": 32});
    let source = open(&file(dir.path().join("f.safetensors"), "", &flat, &TENSORS)).expect("opens");
    let config = source.config(Component::DiffusionDecoder).expect("derived");
    let read = |key: &str| config[format!("decoder_{key}")].clone();
    assert_eq!([read("stage_depths"), read("head_dim")], [json!([1, 1, 1, 1, 2]), json!(32)]);
    assert_eq!([read("model_output_type"), read("num_inference_steps")], [json!("v"), json!(2)]);
}

#[test]
fn vae_override_selects_decoder() {
    let dir = TempDir::new().expect("dir");
    let root = dir.path();
    let transformer = super::ltx2_5::split(root);
    let conv = root.join("vae/ltx-2.5-video-vae-conv-bf16.safetensors");
    let diffusion = file(root.join("vae/ltx-2.5-video-vae-bf16.safetensors"), "", &vae(), &TENSORS);
    let has = |vae: Option<&Path>| {
        let vae = vae.and_then(Path::to_str).map(String::from);
        let source = open_with(&transformer, &Overrides { vae, ..Overrides::default() }).expect("opens");
        let checkpoint = source.checkpoint(Component::Vae).expect("there");
        (source.has(Component::DiffusionDecoder), checkpoint.path().to_path_buf())
    };
    assert_eq!(has(None), (true, conv.clone()));
    assert_eq!(has(Some(&conv)), (false, conv.clone()));
    assert_eq!(has(Some(&diffusion)), (true, diffusion.clone()));
    std::fs::remove_file(&conv).expect("removed");
    assert_eq!(has(None), (true, diffusion));
}
