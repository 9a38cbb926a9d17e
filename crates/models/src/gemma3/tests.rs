use serde_json::json;

use super::config::RopeBase;
use super::*;
use crate::connectors::ConnectorsConfig;
use crate::testing::{self, assert_refused, changed, tensors_once};
use ltx2_nn::Build;
use ltx2_stablehlo::DType;

fn read(text: serde_json::Value) -> Gemma3Config {
    Gemma3Config::from_json(&json!({"text_config": text})).expect("reads")
}

fn published() -> (Gemma3Config, ConnectorsConfig) {
    let text = Gemma3Config::from_json(&testing::published("ltx2", COMPONENT)).expect("reads");
    (text, ConnectorsConfig::from_json(&testing::published("ltx2", "connectors")).expect("reads"))
}

#[test]
fn every_numeric_key_has_a_range() {
    testing::assert_covers::<config::Gemma3ConfigFile>(COMPONENT);
}

/// The JSON has only the keys of the published file; the class defaults provide the other values.
#[test]
fn published_config_keys_give_gemma_3_12b() {
    let short = read(json!({
        "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_hidden_layers": 48, "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}
    }));
    assert_eq!(short, published().0);
    assert_eq!(short.global, RopeBase { theta: 1e6, factor: 8.0 });
    assert_eq!(short.local, RopeBase { theta: 1e4, factor: 1.0 });
    let full: Vec<usize> = (0..48).filter(|&i| short.layers[i] == LayerKind::FullAttention).collect();
    assert_eq!(full, [5, 11, 17, 23, 29, 35, 41, 47]);
}

#[test]
fn older_and_newer_config_keys_are_equivalent() {
    let common = json!({"num_hidden_layers": 3, "hidden_size": 16});
    let spelled = |more: serde_json::Value| {
        let text = changed(common.clone(), &more);
        // A file with only the text part gives the same configuration as one of the complete model.
        let alone = Gemma3Config::from_json(&text).expect("reads");
        assert_eq!(alone, read(text));
        alone
    };
    let older = spelled(json!({
        "sliding_window_pattern": 2, "rope_theta": 5e4, "rope_local_base_freq": 500.0,
        "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}
    }));
    let newer = spelled(json!({
        "_sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}
        }
    }));
    let between = spelled(json!({
        "_sliding_window_pattern": 2, "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"full_attention": {"rope_theta": 5e4}, "sliding_attention": {"rope_theta": 500.0}}
    }));
    assert_eq!(older, newer);
    assert_eq!(older, between);
}

#[test]
fn unsupported_value_errors_name_the_key() {
    let cases = [
        (json!({"hidden_activation": "gelu"}), "hidden_activation = \"gelu\" is not supported, only gelu_pytorch_tanh"),
        (json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping = 50.0 is not supported, only null"),
        (
            json!({"use_bidirectional_attention": true}),
            "use_bidirectional_attention = true is not supported, only false",
        ),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads = 3 is not supported, only a divisor"),
        (json!({"head_dim": 7}), "head_dim = 7 is not supported, only an even number"),
        (
            json!({"layer_types": ["full_attention"]}),
            "layer_types length = 1 is not supported, only one entry for each",
        ),
        (json!({"layer_types": ["chunked_attention"]}), "layer_types[0]: unknown variant `chunked_attention`"),
        (json!({"sliding_window_pattern": 0}), "sliding_window_pattern = 0 is out of range: it must be 1 to 256"),
        (json!({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}), "rope_type = \"yarn\" is not supported"),
        (json!({"rope_scaling": {"rope_type": "linear"}}), "factor = null is not supported, only a positive number"),
        (json!({"hidden_size": "wide"}), "hidden_size: invalid type"),
    ];
    assert_refused("text_encoder", Gemma3Config::from_json, cases);
}

/// Each checkpoint tensor, except those of the vision tower, is declared exactly once.
#[test]
fn gemma_3_12b_declares_every_text_tensor_once() {
    let (text, connectors) = published();
    let network = program(&text, Some(&connectors), 2, 1024, &Build::new(DType::BF16)).expect("builds");
    let count = |component: &str| {
        network.params.iter().filter(|p| p.component == component).map(|p| p.ty.elements()).sum::<usize>()
    };
    assert_eq!(count(COMPONENT), 11_766_034_176);
    assert_eq!(count("connectors"), 3840 * 188_160);
    let tensors = tensors_once(&network);
    assert_eq!(tensors.len(), 2 + 48 * 13 + 1);
    for name in [
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
        "language_model.model.layers.0.self_attn.k_norm.weight",
        "language_model.model.layers.47.pre_feedforward_layernorm.weight",
        "text_proj_in.weight",
    ] {
        assert!(tensors.contains(name), "{name}");
    }
}

/// Regardless of the number of layers, the program has one loop, no RoPE tables as constants and no stacked hidden
/// states.
#[test]
fn program_has_one_loop_and_no_stacked_hidden_states() {
    let (text, connectors) = published();
    let network = program(&text, Some(&connectors), 2, 1024, &Build::new(DType::BF16)).expect("builds");
    let program = &network.program.text;
    assert_eq!(program.matches(".while(").count(), 1);
    assert!(program.len() < 100_000, "{} bytes", program.len());
    assert!(!program.contains("2x1024x188160") && !program.contains("49x2x1024x3840"));
}

#[test]
fn projection_of_a_different_encoder_is_rejected() {
    let (mut text, connectors) = published();
    text.layers.truncate(34);
    let error = program(&text, Some(&connectors), 1, 128, &Build::new(DType::F32)).expect_err("49 states expected");
    assert!(error.to_string().contains("35 hidden states of width 3840"), "{error}");
    assert!(error.to_string().contains("text_proj_in_factor 49"), "{error}");
}
