use std::collections::BTreeSet;

use serde_json::{Value as Json, json};

use super::config::AttentionConfig;
use super::rope::RopeSettings;
use super::*;
use crate::connectors::ConnectorsConfig;
use crate::gemma::{COMPONENT, LayerKind};
use crate::testing::{self, assert_refused, changed, elements, tensors_once};
use crate::text_encoder::TextEncoder;
use ltx2_nn::{Axis, Build, Heads, Lowering};
use ltx2_stablehlo::DType;

fn fixture(model: &str) -> Json {
    let file = format!("{}/../../tests/fixtures/models/{model}/text_encoder/config.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(file).expect("the fixture is there")).expect("JSON")
}

fn read(text: Json) -> Gemma4Config {
    Gemma4Config::from_json(&json!({"text_config": text})).expect("reads")
}

/// Returns the published Gemma 4 text encoder with LTX-2.3's connectors.
fn published() -> (Gemma4Config, ConnectorsConfig) {
    let connectors = ConnectorsConfig::from_json(&testing::published("ltx2_3", "connectors")).expect("reads");
    (Gemma4Config::from_json(&fixture("gemma4_12b")).expect("reads"), connectors)
}

#[test]
fn every_numeric_key_has_a_range() {
    testing::assert_covers::<config::Gemma4ConfigFile>(COMPONENT);
}

/// The publisher's keys plus the class defaults give the same configuration as a file saved by transformers.
#[test]
fn publisher_and_transformers_keys_are_equivalent() {
    let short = read(json!({
        "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_hidden_layers": 48, "attention_k_eq_v": true, "num_global_key_value_heads": 1, "global_head_dim": 512,
        "final_logit_softcapping": 30.0, "num_experts": null, "layer_types": vec!["sliding_attention"; 48].iter()
            .enumerate().map(|(i, kind)| if (i + 1) % 6 == 0 { "full_attention" } else { kind }).collect::<Vec<_>>()
    }));
    assert_eq!(short, published().0);
    let full: Vec<usize> = (0..48).filter(|&i| short.layers[i] == LayerKind::FullAttention).collect();
    assert_eq!(full, [5, 11, 17, 23, 29, 35, 41, 47]);
    let heads = |count, dim| Heads { count, dim };
    let (local, global) =
        (RopeSettings { theta: 1e4, share: 1.0, factor: 1.0 }, RopeSettings { theta: 1e6, share: 0.25, factor: 1.0 });
    let sliding = AttentionConfig { heads: heads(16, 256), kv_heads: heads(8, 256), k_eq_v: false, rope: local };
    assert_eq!(short.sliding, sliding);
    assert_eq!(
        short.full,
        AttentionConfig { heads: heads(16, 512), kv_heads: heads(1, 512), k_eq_v: true, rope: global }
    );
}

#[test]
fn missing_keys_use_class_defaults() {
    let common = json!({"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4});
    let with = |more: Json| read(changed(common.clone(), &more));
    // `num_global_key_value_heads` applies only if keys and values are shared.
    assert_eq!(with(json!({"num_global_key_value_heads": 2})).full.kv_heads, Heads { count: 4, dim: 512 });
    let shared = with(json!({"num_global_key_value_heads": 2, "attention_k_eq_v": true}));
    assert_eq!(shared.full.kv_heads, Heads { count: 2, dim: 512 });
    // If a full-attention layer has no override, or an empty one, `head_dim` applies instead of `global_head_dim`.
    for none in [json!({}), json!({"2": {}})] {
        assert_eq!(with(json!({"per_layer_config": none, "global_head_dim": 8})).full.heads.dim, 256);
    }
    // The last layer has full attention.
    let sliding = with(json!({"layer_types": vec!["sliding_attention"; 3]}));
    assert_eq!(sliding.layers[1..], [LayerKind::SlidingAttention, LayerKind::FullAttention]);
}

/// The expected frequencies are those of the reference, rounded to four decimal places.
#[test]
fn rope_frequencies_match_the_reference() {
    let (c, _) = published();
    let [sliding, full] = [c.sliding, c.full].map(|a| a.rope.frequencies(a.heads.dim));
    let near = |got: &[f32], want: &[f32]| got.iter().zip(want).all(|(a, b)| (a - b).abs() < 5e-5);
    assert!(near(&sliding, &[1.0, 0.9306, 0.8660]) && sliding.len() == 128, "{sliding:?}");
    assert!(near(&full, &[1.0, 0.9475, 0.8977]) && near(&full[62..], &[0.0352, 0.0334, 0.0]), "{full:?}");
    assert_eq!(full.iter().filter(|w| **w == 0.0).count(), 192);
}

#[test]
fn unsupported_value_errors_name_the_key() {
    let cases = [
        (json!({"hidden_activation": "gelu"}), "hidden_activation = \"gelu\" is not supported, only gelu_pytorch_tanh"),
        (json!({"use_bidirectional_attention": "all"}), "use_bidirectional_attention = \"all\" is not supported"),
        (json!({"num_kv_shared_layers": 18}), "num_kv_shared_layers = 18 is not supported, only 0"),
        (json!({"use_double_wide_mlp": true}), "use_double_wide_mlp = true is not supported, only false"),
        (json!({"enable_moe_block": true}), "enable_moe_block = true is not supported, only false"),
        (json!({"hidden_size_per_layer_input": 256}), "hidden_size_per_layer_input = 256 is not supported, only 0"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads = 3 is not supported, only a divisor"),
        (json!({"head_dim": 7}), "head_dim = 7 is not supported, only an even number"),
        (
            json!({"layer_types": ["full_attention"]}),
            "layer_types length = 1 is not supported, only one entry for each",
        ),
        (
            json!({"per_layer_config": {"03": {"head_dim": 8}}}),
            "per_layer_config.3 = {\"head_dim\":8,\"num_key_value_heads\":null} is not supported, only the same values \
             for every full_attention layer",
        ),
        (
            json!({"per_layer_config": {"05": {"head_dim": 8}, "11": {"head_dim": 16}}, "num_hidden_layers": 12}),
            "per_layer_config.11 = ",
        ),
        (json!({"per_layer_config": {"99": {}}}), "per_layer_config = \"99\" is not supported, only layer numbers"),
        (json!({"per_layer_config": {"05": {"sliding_window": 8}}}), "unknown field `sliding_window`"),
        (json!({"rope_parameters": {"sliding_attention": {}}}), "rope_parameters: missing field `full_attention`"),
        (rope(json!({"rope_type": "yarn", "rope_theta": 1e4})), "rope_type = \"yarn\" is not supported"),
        (rope(json!({"rope_type": "default"})), "rope_theta = null is not supported, only a positive number"),
        (
            rope(json!({"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 1.5})),
            "partial_rotary_factor = 1.5 is out of range: it must be 0 to 1",
        ),
        (json!({"hidden_size": "wide"}), "hidden_size: invalid type"),
        (json!({"novel": 1}), "unknown key novel = 1"),
    ];
    assert_refused("text_encoder", Gemma4Config::from_json, cases);
}

fn rope(full: Json) -> Json {
    json!({"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": full}})
}

/// Each tensor of the checkpoint's language model is declared exactly once, with layer loops and with unrolled layers.
#[test]
fn gemma_4_12b_declares_every_text_tensor_once() {
    let (text, connectors) = published();
    for unroll_layers in [false, true] {
        let lowering = Lowering { unroll_layers, ..Lowering::default() };
        let build = Build { lowering, ..Build::new(DType::BF16) };
        let network = program(&text, Some(&connectors), 2, 1024, &build).expect("builds");
        let tensors = tensors_once(&network);
        let (own, projections): (Vec<_>, Vec<_>) =
            tensors.iter().partition(|name| name.starts_with("language_model.model."));
        assert_eq!((own.len(), projections.len()), (2 + 40 * 14 + 8 * 13, 4));
        // 48 layer scalars, which the checkpoint stores as buffers.
        assert_eq!(elements(&network), 11_907_350_272 + 48 + 770_707_456 + 385_353_728);
        for name in ["layers.47.layer_scalar", "layers.0.self_attn.v_proj.weight", "layers.5.self_attn.k_proj.weight"] {
            assert!(tensors.contains(&format!("language_model.model.{name}")), "{name}");
        }
        assert!(!tensors.contains("language_model.model.layers.5.self_attn.v_proj.weight"));
    }
    let alone = program(&text, None, 1, 128, &Build::new(DType::BF16)).expect("builds");
    assert!(alone.params.iter().all(|p| p.component == COMPONENT));
    assert_eq!(elements(&alone), 11_907_350_272 + 48);
}

/// Returns the name and the shape of every tensor of the transformers class at the published size, with one entry per
/// layer.
fn published_tensors() -> Vec<(String, Vec<usize>)> {
    let file = "../../tests/fixtures/models/gemma4_12b/text_encoder/tensors.tsv";
    let text = std::fs::read_to_string(format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))).expect("the fixture is there");
    let rows = text.lines().skip(2).map(|row| row.split('\t').collect::<Vec<_>>());
    rows.flat_map(|row| {
        let [name, layers, shape] = row[..] else { panic!("{row:?}") };
        let shape: Vec<usize> = shape.split('x').map(|n| n.parse().expect("a number")).collect();
        layers.split(',').map(|l| (name.replace('*', l), shape.clone())).collect::<Vec<_>>()
    })
    .collect()
}

#[test]
fn all_published_text_tensors_are_declared() {
    let all = published_tensors();
    let size = |of: &[&(String, Vec<usize>)]| of.iter().map(|(_, s)| s.iter().product::<usize>()).sum::<usize>();
    let (text, others): (Vec<_>, Vec<_>) = all.iter().partition(|(name, _)| name.starts_with("model.language_model."));
    assert_eq!(size(&all.iter().collect::<Vec<_>>()), 11_959_730_224);
    // Image and audio tensors.
    assert_eq!(size(&others), 49_922_304 + 2_457_600);
    let network = program(&published().0, None, 1, 128, &Build::new(DType::BF16)).expect("builds");
    let declared = network.params.iter().flat_map(|p| p.source.tensors());
    let declared: BTreeSet<(String, Vec<usize>)> = declared.map(|(name, s)| (name.to_string(), s.to_vec())).collect();
    let own = |name: &str| name.replace("model.language_model.", "language_model.model.");
    assert_eq!(declared, text.iter().map(|(name, shape)| (own(name), shape.clone())).collect());
    assert_eq!(declared.len(), 666);
}

/// Regardless of the number of layers, the program has one loop over the repetitions of the layer pattern and a nested
/// loop over the sliding-window layers of the pattern.
#[test]
fn program_has_two_loops_and_no_stacked_hidden_states() {
    let (text, connectors) = published();
    let network = program(&text, Some(&connectors), 2, 1024, &Build::new(DType::BF16)).expect("builds");
    let program = &network.program.text;
    assert_eq!(program.matches(".while(").count(), 2);
    assert!(program.len() < 150_000, "{} bytes", program.len());
    assert!(!program.contains("2x1024x188160") && !program.contains("49x2x1024x3840"));
    let stacks = |name: &str| -> Vec<(&str, usize)> {
        let of = network.params.iter().filter(|p| p.name.ends_with(name));
        of.map(|p| (&p.name[..], p.ty.dims[0])).collect()
    };
    let layers = "text_encoder.language_model.model.layers";
    assert_eq!(stacks("down_proj.weight"), [(&format!("{layers}.*.mlp.down_proj.weight")[..], 48)]);
    let q = ["sliding_attention", "full_attention"].map(|kind| format!("{layers}.{kind}.self_attn.q_proj.weight"));
    assert_eq!(stacks("q_proj.weight"), [(&q[0][..], 40), (&q[1][..], 8)]);
}

#[test]
fn projection_of_a_different_encoder_is_rejected() {
    let (mut text, connectors) = published();
    text.layers.truncate(34);
    let error = program(&text, Some(&connectors), 1, 128, &Build::new(DType::F32)).expect_err("49 states expected");
    assert!(error.to_string().contains("35 hidden states of width 3840"), "{error}");
}

#[test]
fn weights_are_stacked_over_all_layers_and_per_kind() {
    let lengths = |config: &Gemma4Config| {
        let network = program(config, None, 1, 128, &Build::new(DType::BF16)).expect("builds");
        let stacks = network.params.iter().filter(|p| p.axes.first() == Some(&Axis::Layers));
        stacks.map(|p| p.ty.dims[0]).collect::<BTreeSet<_>>()
    };
    let whole = published().0;
    assert_eq!(whole.stacks(), [48, 40, 8]);
    assert_eq!(lengths(&whole), BTreeSet::from([48, 40, 8]));
    let uniform = read(json!({"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}));
    assert_eq!(uniform.stacks(), [1]);
}
