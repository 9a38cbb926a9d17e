//! Fixture models in Lightricks' published format: one file, other tensor names, the configuration in the header.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use ltx2::weights::Component;
use ltx2::weights::keys::SingleFileKeys;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

/// LTX-2.0 model as a diffusers folder.
pub const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/tiny_a");

/// LTX-2.5 transformer as a diffusers folder.
pub const TINY_2_5: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/dit_2_5");

/// LTX-2.3 model as a diffusers folder.
pub const TINY_2_3: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/tiny_2_3");

/// Tensor of a file: element type, dimensions, bytes.
pub type TensorData = (Dtype, Vec<usize>, Vec<u8>);

/// Reads all tensors of a file.
pub fn read(path: &Path) -> BTreeMap<String, TensorData> {
    let bytes = fs::read(path).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    file.iter().map(|(k, t)| (k.to_string(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect()
}

/// Writes a file with an optional configuration in its header.
pub fn write(path: &Path, tensors: &BTreeMap<String, TensorData>, config: Option<&Value>) {
    let views = tensors.iter().map(|(k, (d, s, b))| (k, TensorView::new(*d, s.clone(), b).expect("a tensor")));
    let metadata = config.map(|c| HashMap::from([("config".to_string(), c.to_string())]));
    fs::write(path, safetensors::serialize(views, metadata).expect("bytes")).expect("written");
}

const TRANSFORMER: &[(&str, &str)] = &[
    ("proj_in", "patchify_proj"),
    ("audio_proj_in", "audio_patchify_proj"),
    ("time_embed", "adaln_single"),
    ("audio_time_embed", "audio_adaln_single"),
    ("prompt_adaln", "prompt_adaln_single"),
    ("audio_prompt_adaln", "audio_prompt_adaln_single"),
    ("av_cross_attn_video_scale_shift", "av_ca_video_scale_shift_adaln_single"),
    ("av_cross_attn_audio_scale_shift", "av_ca_audio_scale_shift_adaln_single"),
    ("av_cross_attn_video_a2v_gate", "av_ca_a2v_gate_adaln_single"),
    ("av_cross_attn_audio_v2a_gate", "av_ca_v2a_gate_adaln_single"),
    ("video_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_video"),
    ("audio_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_audio"),
    ("norm_q", "q_norm"),
    ("norm_k", "k_norm"),
];

const TEXT_PROJECTION: &[(&str, &str)] = &[
    ("text_proj_in", "aggregate_embed"),
    ("video_text_proj_in", "video_aggregate_embed"),
    ("audio_text_proj_in", "audio_aggregate_embed"),
];

const CONNECTORS: &[(&str, &str)] = &[
    ("video_connector", "video_embeddings_connector"),
    ("audio_connector", "audio_embeddings_connector"),
    ("transformer_blocks", "transformer_1d_blocks"),
    ("norm_q", "q_norm"),
    ("norm_k", "k_norm"),
];

const VOCODER: &[(&str, &str)] = &[
    ("upsamplers", "ups"),
    ("resnets", "resblocks"),
    ("conv_in", "conv_pre"),
    ("conv_out", "conv_post"),
    ("act_out", "act_post"),
];

/// Returns Lightricks' name of a tensor, given its diffusers name.
fn original(component: Component, name: &str) -> String {
    let renamed = |rules: &[(&str, &str)]| {
        let segments = name.split('.').map(|s| rules.iter().find(|(from, _)| *from == s).map_or(s, |(_, to)| *to));
        segments.collect::<Vec<_>>().join(".")
    };
    match component {
        Component::Transformer => format!("model.diffusion_model.{}", renamed(TRANSFORMER)),
        Component::Connectors if name.contains("text_proj_in.") => {
            format!("text_embedding_projection.{}", renamed(TEXT_PROJECTION))
        }
        Component::Connectors => format!("model.diffusion_model.{}", renamed(CONNECTORS)),
        Component::Vae => format!("vae.{}", original_vae(name)),
        Component::AudioVae => format!("audio_vae.{}", original_statistics(name)),
        Component::Vocoder => {
            format!("vocoder.{}", renamed(VOCODER)).replace(".downsample.filter", ".downsample.lowpass.filter")
        }
        other => panic!("{other} is not in a single file"),
    }
}

fn original_statistics(name: &str) -> &str {
    match name {
        "latents_mean" => "per_channel_statistics.mean-of-means",
        "latents_std" => "per_channel_statistics.std-of-means",
        other => other,
    }
}

/// Numbers all blocks in one list: stages at even indices, resolution changes at odd ones; the decoder's middle block
/// first.
fn original_vae(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    let stage = |i: &str, after: usize| 2 * i.parse::<usize>().expect("a number") + after;
    match parts[..] {
        ["encoder", "mid_block", "resnets", ref rest @ ..] => {
            format!("encoder.down_blocks.8.res_blocks.{}", rest.join("."))
        }
        ["encoder", "down_blocks", i, "resnets", ref rest @ ..] => {
            format!("encoder.down_blocks.{}.res_blocks.{}", stage(i, 0), rest.join("."))
        }
        ["encoder", "down_blocks", i, "downsamplers", "0", ref rest @ ..] => {
            format!("encoder.down_blocks.{}.{}", stage(i, 1), rest.join("."))
        }
        ["decoder", "mid_block", "resnets", ref rest @ ..] => {
            format!("decoder.up_blocks.0.res_blocks.{}", rest.join("."))
        }
        ["decoder", "up_blocks", i, "upsamplers", "0", ref rest @ ..] => {
            format!("decoder.up_blocks.{}.{}", stage(i, 1), rest.join("."))
        }
        ["decoder", "up_blocks", i, "resnets", ref rest @ ..] => {
            format!("decoder.up_blocks.{}.res_blocks.{}", stage(i, 2), rest.join("."))
        }
        _ => original_statistics(name).to_string(),
    }
}

/// Keys of published headers that affect no result.
fn silent_keys() -> [(&'static str, Value); 4] {
    let transformer = json!({
        "_diffusers_version": "0.25.1", "attention_type": "default", "double_self_attention": false, "dropout": 0.0,
        "norm_num_groups": 32, "num_embeds_ada_norm": 1000, "num_vector_embeds": null, "only_cross_attention": false,
        "cross_attention_norm": true, "upcast_attention": false, "use_linear_projection": false,
        "connector_num_learnable_registers": 128, "connector_norm_output": true,
    });
    let vae = json!({
        "scaling_factor": 1.0, "use_quant_conv": false, "normalize_latent_channels": false, "encoder_base_channels": 128,
    });
    let audio = json!({"sampling_rate": 16000, "max_wav_value": 32768.0, "duration": 5.12, "stereo": true, "causal_padding": 3});
    let scheduler = json!({"_diffusers_version": "0.25.1", "base_resolution": null, "sampler": "LinearQuadratic"});
    [("/transformer", transformer), ("/vae", vae), ("/audio_vae/preprocessing/audio", audio), ("/scheduler", scheduler)]
}

/// Returns the header of a published LTX-2.0 file, with the keys known from such files and this model's sizes.
pub fn header() -> Value {
    let res = |n: usize| json!(["res_x", {"num_layers": n, "inject_noise": false}]);
    let down = |kind: &str, n: usize| json!([format!("compress_{kind}_res"), {"multiplier": n}]);
    let up = || json!(["compress_all", {"residual": true, "multiplier": 2}]);
    let down_blocks =
        [res(1), down("space", 1), res(1), down("time", 2), res(1), down("all", 1), res(1), down("all", 1), res(1)];
    let mut all = json!({
        "transformer": {
            "_class_name": "AVTransformer3DModel", "activation_fn": "gelu-approximate", "attention_bias": true,
            "attention_head_dim": 16, "num_attention_heads": 2, "cross_attention_dim": 32, "in_channels": 8,
            "out_channels": 8, "num_layers": 3, "caption_channels": 24, "norm_elementwise_affine": false,
            "norm_eps": 1e-6, "qk_norm": "rms_norm", "standardization_norm": "rms_norm", "share_ff": false,
            "positional_embedding_type": "rope", "positional_embedding_theta": 10000.0,
            "positional_embedding_max_pos": [20, 2048, 2048], "timestep_scale_multiplier": 1000,
            "causal_temporal_positioning": true, "use_audio_video_cross_attention": true, "av_cross_ada_norm": true,
            "use_middle_indices_grid": true, "rope_type": "split", "frequencies_precision": "float64",
            "av_ca_timestep_scale_multiplier": 1000.0, "audio_num_attention_heads": 2, "audio_attention_head_dim": 8,
            "audio_in_channels": 4, "audio_out_channels": 4, "audio_cross_attention_dim": 16,
            "audio_positional_embedding_max_pos": [20], "use_embeddings_connector": true,
            "connector_num_attention_heads": 2, "connector_attention_head_dim": 12, "connector_num_layers": 2,
            "connector_positional_embedding_max_pos": [4096],
        },
        "vae": {
            "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3,
            "latent_channels": 8, "patch_size": 4, "norm_layer": "pixel_norm", "latent_log_var": "uniform",
            "causal_decoder": false, "timestep_conditioning": false, "decoder_base_channels": 4,
            "encoder_blocks": down_blocks, "decoder_blocks": [res(2), up(), res(1), up(), res(1), up(), res(1)],
        },
        "audio_vae": {
            "model": {"params": {"sampling_rate": 16000, "ddconfig": {
                "double_z": true, "mel_bins": 8, "z_channels": 2, "resolution": 32, "downsample_time": false,
                "in_channels": 2, "out_ch": 2, "ch": 4, "ch_mult": [1, 2, 4], "num_res_blocks": 2,
                "attn_resolutions": [], "dropout": 0.0, "mid_block_add_attention": false, "norm_type": "pixel",
                "causality_axis": "height",
            }}},
            "preprocessing": {
                "audio": {"sampling_rate": 16000, "max_wav_value": 32768.0, "duration": 5.12, "stereo": true,
                    "causal_padding": 3}, "mel": {"n_mel_channels": 8, "mel_fmin": 0, "mel_fmax": 8000},
                "stft": {"filter_length": 1024, "hop_length": 160, "win_length": 1024, "causal": true},
            },
        },
        "vocoder": {
            "resblock": "1", "stereo": true, "upsample_initial_channel": 32, "upsample_rates": [6, 5, 2, 2, 2],
            "upsample_kernel_sizes": [16, 15, 8, 4, 4], "resblock_kernel_sizes": [3, 7, 11],
            "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        },
        "scheduler": {"_class_name": "RectifiedFlowScheduler", "num_train_timesteps": 1000, "shifting": null},
    });
    for (section, keys) in silent_keys() {
        let section = all.pointer_mut(section).and_then(Value::as_object_mut).expect("a section");
        section.extend(keys.as_object().expect("an object").clone());
    }
    all
}

/// Returns the header of a published LTX-2.3 file, with the keys known from such files and the tiny model's sizes.
pub fn header_2_3() -> Value {
    let res = |n: usize| json!(["res_x", {"num_layers": n}]);
    let down = |kind: &str, n: usize| json!([format!("compress_{kind}_res"), {"multiplier": n}]);
    let up = |kind: &str, n: usize| json!([format!("compress_{kind}"), {"multiplier": n}]);
    let mut all = header();
    let mut set = |section: &str, values: Value| {
        for (key, value) in values.as_object().expect("an object") {
            all[section][key] = value.clone();
        }
    };
    set(
        "transformer",
        json!({
            "in_channels": 2, "out_channels": 2, "apply_gated_attention": true, "cross_attention_adaln": true,
            "caption_proj_before_connector": true, "caption_projection_first_linear": false,
            "caption_projection_second_linear": false, "caption_proj_input_norm": false,
            "connector_apply_gated_attention": true, "connector_num_layers": 3, "connector_num_attention_heads": 2,
            "connector_attention_head_dim": 16, "audio_connector_attention_head_dim": 8,
            "connector_learnable_registers_std": 1, "text_encoder_norm_type": "per_token_rms",
        }),
    );
    set(
        "vae",
        json!({
            "latent_channels": 2, "decoder_base_channels": 2, "spatial_padding_mode": "zeros",
            "encoder_blocks": [res(2), down("space", 2), res(3), down("time", 2), res(2), down("all", 2), res(1),
                down("all", 1), res(1)],
            "decoder_blocks": [res(2), up("space", 2), res(3), up("time", 2), res(2), up("all", 1), res(1), up("all", 2),
                res(1)],
        }),
    );
    all["audio_vae"]["model"]["params"]["ddconfig"]["num_res_blocks"] = json!(1);
    let generator = |width: usize, kernels: Value, rates: Value, dilations: Value| {
        json!({
            "resblock": "AMP1", "stereo": true, "use_tanh_at_final": false, "use_bias_at_final": false,
            "activation": "snakebeta", "upsample_initial_channel": width, "upsample_kernel_sizes": kernels,
            "upsample_rates": rates, "resblock_kernel_sizes": [3, 7, 11], "resblock_dilation_sizes": dilations,
        })
    };
    let (kernels, rates) = (json!([11, 4, 4, 4, 4, 4]), json!([5, 2, 2, 2, 2, 2]));
    let first = generator(64, kernels, rates, json!([[1, 3, 5], [1, 3], [1]]));
    let (kernels, rates) = (json!([12, 11, 4, 4, 4]), json!([6, 5, 2, 2, 2]));
    let mut bwe = generator(32, kernels, rates, json!([[1], [1, 3], [1, 3, 5]]));
    for (key, value) in [
        ("n_fft", 96),
        ("win_size", 96),
        ("hop_length", 80),
        ("num_mels", 6),
        ("input_sampling_rate", 16000),
        ("output_sampling_rate", 48000),
    ] {
        bwe[key] = json!(value);
    }
    bwe["apply_final_activation"] = json!(false);
    all["vocoder"] = json!({"vocoder": first, "bwe": bwe});
    all
}

/// Returns the header of a published LTX-2.5 transformer file, with the tiny model's sizes.
pub fn header_2_5() -> Value {
    let mut transformer = header_2_3()["transformer"].take();
    let own = json!({
        "in_channels": 2, "out_channels": 2, "attention_head_dim": 10, "cross_attention_dim": 20, "num_layers": 2,
        "audio_attention_head_dim": 6, "audio_cross_attention_dim": 12, "caption_channels": 16, "ff_bias": false,
        "use_keyframes_abs_pos_embedding": true, "text_encoder_norm_type": "PER_TOKEN_RMS",
    });
    transformer.as_object_mut().expect("an object").extend(own.as_object().expect("an object").clone());
    json!({"transformer": transformer, "scheduler": {"_class_name": "RectifiedFlowScheduler", "sampler": "LinearQuadratic"}})
}

/// Returns the header of a single-file LTX-2.5 model, with the tiny model's connectors.
pub fn header_2_5_whole() -> Value {
    let mut all = header_2_5();
    let own = json!({
        "connector_num_layers": 1, "connector_attention_head_dim": 10, "audio_connector_attention_head_dim": 6,
    });
    all["transformer"].as_object_mut().expect("an object").extend(own.as_object().expect("an object").clone());
    all
}

/// Returns tiny_a's tensors under Lightricks' names, with an unused statistic.
pub fn combined() -> BTreeMap<String, TensorData> {
    combined_of(TINY)
}

/// Returns a model's tensors under Lightricks' names, with an unused statistic.
pub fn combined_of(model: &str) -> BTreeMap<String, TensorData> {
    let mut all = combined_parts(model, &IN_FILE);
    all.insert("vae.per_channel_statistics.mean-of-stds".into(), (Dtype::BF16, vec![8], vec![0; 16]));
    all
}

/// Returns the tensors of some components under Lightricks' names.
pub fn combined_parts(model: &str, parts: &[Component]) -> BTreeMap<String, TensorData> {
    let mut all = BTreeMap::new();
    let mut names = Vec::new();
    for &c in parts {
        let files =
            fs::read_dir(Path::new(model).join(c.folder())).expect("a folder").map(|e| e.expect("a file").path());
        for file in files.filter(|f| f.extension().is_some_and(|e| e == "safetensors")) {
            for (name, tensor) in read(&file) {
                let key = original(c, &name);
                assert!(all.insert(key.clone(), tensor).is_none(), "{key} twice");
                names.push((key, c, name));
            }
        }
    }
    let keys = SingleFileKeys::new(all.keys().map(String::as_str));
    for (key, c, name) in names {
        assert_eq!(keys.map(&key), Some((c, name)), "{key}");
    }
    all
}

/// Components in a combined file.
pub const IN_FILE: [Component; 5] =
    [Component::Transformer, Component::Connectors, Component::Vae, Component::AudioVae, Component::Vocoder];
