use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::testing::{assert_refused, elements, published};
use ltx2_nn::rope::Pairing;

fn read(json: serde_json::Value) -> ConnectorsConfig {
    ConnectorsConfig::from_json(&json).expect("reads")
}

fn tiny(registers: serde_json::Value) -> ConnectorsConfig {
    read(json!({
        "caption_channels": 8, "text_proj_in_factor": 3, "rope_type": "split",
        "video_connector_num_attention_heads": 2, "video_connector_attention_head_dim": 4,
        "video_connector_num_learnable_registers": registers, "video_connector_num_layers": 1,
        "audio_connector_num_attention_heads": 1, "audio_connector_attention_head_dim": 8,
        "audio_connector_num_learnable_registers": registers, "audio_connector_num_layers": 1
    }))
}

fn tensors(network: &Network) -> BTreeMap<String, Vec<usize>> {
    let all = network.params.iter().flat_map(|p| p.source.tensors());
    all.map(|(name, shape)| (name.to_string(), shape.to_vec())).collect()
}

#[test]
fn connectors_declare_every_published_tensor_once() {
    let c = read(json!({"rope_type": "split"}));
    let whole = program(&c, 2, 1024, Input::HiddenStates, &Build::new(DType::BF16)).expect("builds");
    assert_eq!(elements(&whole), 1_431_475_200);
    let names = tensors(&whole);
    assert_eq!(names.len(), 59, "as many tensors as the released checkpoint has");
    assert_eq!(whole.params.iter().map(|p| p.source.tensors().len()).sum::<usize>(), 59);
    assert_eq!(names["text_proj_in.weight"], [3840, 188_160]);
    assert_eq!(names["video_connector.learnable_registers"], [128, 3840]);
    assert_eq!(names["audio_connector.transformer_blocks.1.ff.net.0.proj.weight"], [15360, 3840]);

    // Text that the text encoder has already projected needs no projection weights.
    let projected = program(&c, 2, 1024, Input::PromptEmbeds, &Build::new(DType::BF16)).expect("builds");
    assert_eq!(tensors(&projected).len(), 58);
    assert!(projected.program.text.len() < 100_000, "{} bytes", projected.program.text.len());
}

#[test]
fn ltx_2_3_connectors_declare_every_parameter_once() {
    let c = read(published("ltx2_3", "connectors"));
    let whole = program(&c, 2, 1024, Input::HiddenStates, &Build::new(DType::BF16)).expect("builds");
    assert_eq!(elements(&whole), 3_172_227_584);
    let names = tensors(&whole);
    assert_eq!(names.len(), 262, "as many tensors as the released checkpoint has");
    assert_eq!(names["video_text_proj_in.weight"], [4096, 188_160]);
    assert_eq!(names["audio_text_proj_in.bias"], [2048]);
    assert_eq!(names["audio_connector.transformer_blocks.7.attn1.to_gate_logits.weight"], [32, 2048]);
    assert_eq!(c.text_width(), 4096 + 2048);
}

#[test]
fn gate_weights_are_declared_if_configured() {
    let mut c = tiny(json!(4));
    c.audio_gated_attn = true;
    let names = tensors(&program(&c, 1, 8, Input::PromptEmbeds, &Build::new(DType::F32)).expect("builds"));
    let gates: Vec<&String> = names.keys().filter(|n| n.contains("to_gate_logits")).collect();
    let gate = "audio_connector.transformer_blocks.0.attn1.to_gate_logits";
    assert_eq!(gates, [&format!("{gate}.bias"), &format!("{gate}.weight")]);
}

#[test]
fn rope_tables_cover_every_head_and_token() {
    let inputs: BTreeMap<_, _> = host_inputs(&tiny(json!(4)), 8).into_iter().collect();
    assert_eq!(inputs["rope.video.cos"].shape(), [1, 8, 2, 2]);
    assert_eq!(inputs["rope.audio.sin"].shape(), [1, 8, 1, 4]);
}

#[test]
fn token_count_must_be_a_multiple_of_registers() {
    let error = program(&tiny(json!(4)), 1, 10, Input::PromptEmbeds, &Build::new(DType::F32)).expect_err("10 of 4");
    assert!(
        error
            .to_string()
            .contains("the number of text tokens, 10, must be a multiple of 4 (the connector's register count)"),
        "{error}"
    );
    program(&tiny(json!(null)), 1, 10, Input::PromptEmbeds, &Build::new(DType::F32)).expect("none to place");
}

#[test]
fn null_disables_registers_and_missing_key_uses_default() {
    let key = "video_connector_num_learnable_registers";
    assert_eq!(read(json!({key: null})).video_connector_num_learnable_registers, None);
    assert_eq!(read(json!({})).video_connector_num_learnable_registers, Some(128));
    assert_eq!(read(json!({})).rope_type, Pairing::Interleaved);
    let both = read(json!({key: 96, "audio_connector_num_learnable_registers": 64}));
    assert_eq!(both.token_multiple(), 192);
}

#[test]
fn unsupported_value_errors_name_the_key() {
    let cases = [
        (json!({"per_modality_projections": true}), "video_hidden_dim = 4096 is not supported, only the width"),
        (
            json!({"caption_channels": 2048}),
            "caption_channels = 2048 is not supported, only the width of the connectors",
        ),
        (json!({"caption_channels": 0}), "caption_channels = 0 is out of range: it must be 1 to 65536"),
        (json!({"audio_connector_attention_head_dim": 5}), "audio_connector_attention_head_dim = 5 is not supported"),
        (json!({"video_connector_num_learnable_registers": 0}), "learnable_registers = 0 is out of range"),
        (
            json!({"audio_connector_num_attention_heads": 1024}),
            "audio_connector_attention_head_dim = 131072 is out of range",
        ),
        (json!({"rope_type": "axial"}), "rope_type: unknown variant `axial`"),
    ];
    assert_refused("connectors", ConnectorsConfig::from_json, cases);
}

#[test]
fn block_program_matches_snapshot() {
    let p = Params::new("block", COMPONENT, &Build::new(DType::BF16));
    let video = tiny(json!(4)).connectors().video;
    let x = p.builder().argument("x", Type::new(DType::BF16, [1, 4, 8]));
    let table = |name: &str| p.builder().argument(name, Type::new(DType::F32, [1, 4, 2, 2]));
    let rope = Rope { cos: table("cos"), sin: table("sin") };
    let y = block(&p.pp("transformer_blocks.0"), &video, &x, None, &rope);
    let text =
        Network::finish(&p, vec![p.output("y", &y, &[Axis::Replicated; 3], y.dims())]).expect("builds").program.text;
    let bare: Vec<&str> = text.lines().map(|l| l.split(" loc(").next().unwrap_or(l)).collect();
    insta::assert_snapshot!(bare.join("\n"));
}
