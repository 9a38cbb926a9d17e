//! Tests of GGUF files as the transformer and as the text encoder of a model.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::*;
use super::quantized::gguf;
use super::{fails, open, open_with, put};
use ltx2_stablehlo::DType;

/// Numbers of GGUF types.
const F32: u32 = 0;
const Q4_0: u32 = 2;
const BF16: u32 = 30;

type Tensors = Vec<(String, u32, Vec<u64>)>;

/// Writes a file whose tensors overlap, so that models of the published sizes take no space.
fn file(path: PathBuf, texts: &[(&str, &str)], tensors: &Tensors) -> PathBuf {
    let tensors: Vec<_> = tensors.iter().map(|(name, kind, shape)| (&**name, *kind, &shape[..], &[][..])).collect();
    let path = put(path, gguf(texts, &tensors));
    OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(1 << 31)).expect("a sparse file");
    path
}

/// Returns tensors that determine the configuration of the published transformers.
fn transformer(version: Version) -> Tensors {
    let mut tensors = vec![
        ("patchify_proj.weight", BF16, vec![4096, 128]),
        ("proj_out.weight", BF16, vec![128, 4096]),
        ("audio_patchify_proj.weight", BF16, vec![2048, 128]),
        ("audio_proj_out.weight", BF16, vec![128, 2048]),
        ("transformer_blocks.0.attn2.to_k.weight", Q4_0, vec![4096, 4096]),
        ("transformer_blocks.0.audio_attn2.to_k.weight", Q4_0, vec![2048, 2048]),
        ("transformer_blocks.0.ff.net.0.proj.weight", Q4_0, vec![16384, 4096]),
        ("transformer_blocks.0.audio_ff.net.0.proj.bias", F32, vec![8192]),
        ("transformer_blocks.47.attn1.q_norm.weight", F32, vec![4096]),
    ];
    match version {
        Version::V2_0 => tensors.push(("caption_projection.linear_1.weight", Q4_0, vec![4096, 3840])),
        _ => tensors.extend([
            ("prompt_adaln_single.linear.weight", Q4_0, vec![8192, 4096]),
            ("transformer_blocks.0.attn1.to_gate_logits.weight", BF16, vec![32, 4096]),
            ("transformer_blocks.0.audio_attn1.to_gate_logits.weight", BF16, vec![32, 2048]),
        ]),
    }
    match version {
        Version::V2_5 => tensors.push(("keyframes_abs_pos_embedding", BF16, vec![1, 4096])),
        _ => tensors.push(("transformer_blocks.0.ff.net.0.proj.bias", F32, vec![16384])),
    }
    tensors.into_iter().map(|(name, kind, shape)| (name.to_string(), kind, shape)).collect()
}

/// Writes a file with these tensors under names without prefix.
pub(super) fn published(path: PathBuf, version: Version) -> PathBuf {
    file(path, &LTXV, &transformer(version))
}

const LTXV: [(&str, &str); 1] = [("general.architecture", "ltxv")];

#[test]
fn transformer_config_is_derived_from_tensors() {
    let dir = TempDir::new().expect("dir");
    let presets = [
        (Version::V2_0, include_str!("../../../models/src/presets/ltx2.json")),
        (Version::V2_3, include_str!("../../../models/src/presets/ltx2_3.json")),
        (Version::V2_5, include_str!("../../../models/src/presets/ltx2_5.json")),
    ];
    for (version, preset) in presets {
        for prefix in ["", "model.diffusion_model."] {
            let tensors =
                transformer(version).into_iter().map(|(name, kind, shape)| (format!("{prefix}{name}"), kind, shape));
            let source = open(&file(dir.path().join("ltx-Q4_0.gguf"), &LTXV, &tensors.collect())).expect("opens");
            assert_eq!(source.version().expect("known"), version);
            let config = source.config(Component::Transformer).expect("derived");
            let preset: Value = serde_json::from_str(preset).expect("JSON");
            for (key, want) in preset["transformer"].as_object().expect("an object") {
                let (got, want) = (&config[key], want);
                assert!(
                    got == want || got.as_f64().is_some() && got.as_f64() == want.as_f64(),
                    "{version} {key}: {got}"
                );
            }
            let tensors = source.checkpoint(Component::Transformer).expect("there");
            let view = tensors.get_float("transformer_blocks.0.attn2.to_k.weight").expect("floats");
            assert_eq!((view.dtype(), view.shape()), (DType::F32, &[4096, 4096][..]));
            source.refuse_unread().expect("all tensors are read");
            let missing = ["ltx-Q4_0.gguf", "contains no video VAE", "--vae"];
            fails(source.require([Component::Transformer, Component::Vae]), &missing);
        }
    }
}

#[test]
fn connectors_config_of_a_gguf_file_is_derived_from_tensors() {
    let dir = TempDir::new().expect("dir");
    let mut tensors = transformer(Version::V2_3);
    for (stream, width) in [("video", 4096), ("audio", 2048)] {
        let block = format!("{stream}_embeddings_connector.transformer_1d_blocks");
        tensors.push((format!("{block}.0.attn1.to_q.weight"), Q4_0, vec![width, width]));
        tensors.push((format!("{block}.7.attn1.to_q.weight"), Q4_0, vec![width, width]));
        tensors.push((format!("{block}.0.attn1.to_gate_logits.weight"), BF16, vec![32, width]));
        tensors.push((format!("{stream}_embeddings_connector.learnable_registers"), BF16, vec![128, width]));
        tensors.push((
            format!("text_embedding_projection.{stream}_aggregate_embed.weight"),
            BF16,
            vec![width, 188_160],
        ));
    }
    let source = open(&file(dir.path().join("x.gguf"), &LTXV, &tensors)).expect("opens");
    let config = source.config(Component::Connectors).expect("derived");
    for (key, want) in [
        ("video_connector_num_attention_heads", 32),
        ("video_connector_attention_head_dim", 128),
        ("video_connector_num_layers", 8),
        ("audio_connector_num_attention_heads", 32),
        ("audio_connector_attention_head_dim", 64),
        ("audio_connector_num_layers", 8),
        ("text_proj_in_factor", 49),
    ] {
        assert_eq!(config[key], want, "{key}");
    }
    assert_eq!(config["video_gated_attn"], true);
}

#[test]
fn other_gguf_models_are_refused() {
    let dir = TempDir::new().expect("dir");
    let path = || dir.path().join("x.gguf");
    let of = |architecture| file(path(), &[("general.architecture", architecture)], &transformer(Version::V2_3));
    fails(open(&of("wan")), &["x.gguf", "`general.architecture` is \"wan\"", "not LTX's transformer"]);
    let mut narrow = transformer(Version::V2_3);
    narrow.retain(|(name, ..)| name != "proj_out.weight");
    fails(open(&file(path(), &LTXV, &narrow)), &["x.gguf", "`proj_out.weight` is missing"]);
    let model = file(dir.path().join("model.gguf"), &LTXV, &transformer(Version::V2_3));
    let with = |encoder: &Path| {
        open_with(&model, &Overrides { text_encoder: encoder.to_str().map(String::from), ..Overrides::default() })
    };
    fails(with(&of("gemma4")), &["x.gguf", "\"gemma4\"", "gemma4-12b-with-proj-ltx-2.5-bf16.safetensors"]);
    fails(with(&of("llama")), &["x.gguf", "\"llama\"", "is Gemma 3 12B"]);
    fails(with(&of("gemma3")), &["x.gguf", "`token_embd.weight` is missing"]);
    let embeddings = vec![("token_embd.weight".to_string(), Q4_0, vec![100, 64])];
    let bare = file(path(), &[("general.architecture", "gemma3")], &embeddings);
    fails(with(&bare), &["x.gguf", "`gemma3.embedding_length` is missing in the GGUF metadata"]);
}

#[test]
fn gemma_3_gguf_is_a_text_encoder() {
    let dir = TempDir::new().expect("dir");
    let metadata = [
        ("general.architecture", "gemma3"),
        ("gemma3.embedding_length", "64"),
        ("gemma3.feed_forward_length", "128"),
        ("gemma3.block_count", "1"),
        ("gemma3.attention.head_count", "2"),
        ("gemma3.attention.head_count_kv", "1"),
        ("gemma3.attention.key_length", "32"),
        ("gemma3.attention.layer_norm_rms_epsilon", "0.000001"),
        ("gemma3.attention.sliding_window", "1024"),
        ("gemma3.rope.freq_base", "1000000"),
        ("gemma3.rope.scaling.factor", "8"),
    ];
    let ones = |count: usize| [1.25f32.to_le_bytes()].repeat(count).concat();
    let (norm, head_norm, matrix) = (ones(64), ones(32), vec![0; 128 * 2 * 18]);
    let mut tensors: Vec<(&str, u32, &[u64], &[u8])> = vec![
        ("token_embd.weight", Q4_0, &[100, 64], &matrix[..100 * 36]),
        ("output_norm.weight", F32, &[64], &norm),
        ("blk.0.attn_q_norm.weight", F32, &[32], &head_norm),
        ("blk.0.attn_k_norm.weight", F32, &[32], &head_norm),
    ];
    for name in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
        tensors.push((Box::leak(format!("blk.0.{name}.weight").into_boxed_str()), F32, &[64], &norm));
    }
    for (name, shape) in [
        ("attn_q", &[64, 64]),
        ("attn_k", &[32, 64]),
        ("attn_v", &[32, 64]),
        ("attn_output", &[64, 64]),
        ("ffn_gate", &[128, 64]),
        ("ffn_up", &[128, 64]),
        ("ffn_down", &[64, 128]),
    ] {
        let codes = &matrix[..(shape[0] * shape[1] / 32 * 18) as usize];
        tensors.push((Box::leak(format!("blk.0.{name}.weight").into_boxed_str()), Q4_0, shape, codes));
    }
    let encoder = put(dir.path().join("gemma-Q4_0.gguf"), gguf(&metadata, &tensors));
    let model = file(dir.path().join("model.gguf"), &LTXV, &transformer(Version::V2_3));
    let tokenizer = put(dir.path().join("tokenizer/tokenizer.json"), "{}");
    let text = |path: &Path| path.to_str().map(String::from);
    let overrides = Overrides { text_encoder: text(&encoder), tokenizer: text(&tokenizer), ..Overrides::default() };
    let source = open_with(&model, &overrides).expect("opens");
    source.require([Component::TextEncoder, Component::Tokenizer]).expect("there");
    source.refuse_unread().expect("all tensors are read");
    let config = source.config(Component::TextEncoder).expect("derived");
    assert_eq!((&config["model_type"], &config["text_config"]["vocab_size"]), (&json!("gemma3"), &json!(100)));
    assert_eq!(config["text_config"]["rope_scaling"], json!({"rope_type": "linear", "factor": 8.0}));
    let weights = source.checkpoint(Component::TextEncoder).expect("there");
    let layer = "language_model.model.layers.0";
    for name in [
        format!("{layer}.self_attn.o_proj.weight"),
        format!("{layer}.mlp.down_proj.weight"),
        "language_model.model.embed_tokens.weight".into(),
    ] {
        assert!(weights.contains(&name), "{name}");
    }
    // llama.cpp adds the 1 of Gemma's norms.
    for (name, size) in [("input_layernorm", 64), ("self_attn.q_norm", 32), ("pre_feedforward_layernorm", 64)] {
        let view = weights.get_float(&format!("{layer}.{name}.weight")).expect("floats");
        let values = view.to_tensor().expect("readable").to_f32();
        assert_eq!(values.into_iter().collect::<Vec<_>>(), vec![0.25; size], "{name}");
    }
    let converted = dir.path().join("gemma-int8.safetensors");
    let plan = Conversion::plan(&encoder, Some(crate::quantize::QuantizedForm::Int8)).expect("a plan");
    plan.write(std::fs::File::create(&converted).expect("a file"), &converted, &|_| ()).expect("writes");
    assert_eq!((plan.quantized, plan.copied), (7, 0));
    let of_file = open_with(&model, &Overrides { text_encoder: text(&converted), ..overrides.clone() }).expect("opens");
    of_file.refuse_unread().expect("all tensors are read");
    assert_eq!(of_file.config(Component::TextEncoder).expect("stated"), config);
    let of_file = of_file.checkpoint(Component::TextEncoder).expect("there");
    assert!(of_file.names().eq(weights.names()));
    for name in weights.names().filter(|name| name.ends_with("norm.weight")) {
        let [got, want] =
            [&of_file, &weights].map(|file| file.get(name).expect("there").to_tensor().expect("readable").to_f32());
        assert_eq!(got, want, "{name}");
    }
    let unknown = [("mm.0.weight", F32, &[64][..], &norm[..])];
    put(encoder.clone(), gguf(&metadata, &[&tensors[..], &unknown].concat()));
    let source = open_with(&model, &overrides).expect("opens");
    fails(source.refuse_unread(), &["gemma-Q4_0.gguf", "`mm.0.weight` is not read"]);
}
