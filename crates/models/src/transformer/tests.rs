use super::*;
use crate::testing::{assert_refused, changed, elements, tensors_once};
use ltx2_nn::Build;

fn released() -> TransformerConfig {
    TransformerConfig::from_json(&serde_json::json!({"rope_type": "split"})).expect("the released values")
}

fn shape() -> ForwardShape {
    ForwardShape {
        batch: 2,
        tokens: Av { video: 6144, audio: 126 },
        text: Av::both(1024),
        text_channels: Av::both(3840),
        cross: CrossModalTimestep::GateOnly,
        ..ForwardShape::default()
    }
}

#[test]
fn ltx_2_0_config_declares_every_parameter_once() {
    let component = program(&released(), &shape(), &Build::new(DType::BF16)).expect("builds");
    assert_eq!(elements(&component), 18_876_174_592);
    let tensors = tensors_once(&component);
    assert_eq!(tensors.len(), 3510, "as many tensors as the released checkpoint has");
    for name in ["transformer_blocks.47.attn1.to_out.0.weight", "audio_caption_projection.linear_2.bias"] {
        assert!(tensors.contains(name), "{name}");
    }
}

#[test]
fn ltx_2_3_program_has_published_tensor_and_parameter_counts() {
    let c = TransformerConfig::from_json(&serde_json::json!({
        "rope_type": "split", "gated_attn": true, "cross_attn_mod": true, "audio_gated_attn": true,
        "audio_cross_attn_mod": true, "use_prompt_embeddings": false, "perturbed_attn": true
    }))
    .expect("the released values");
    let shape = ForwardShape { text_channels: Av { video: 4096, audio: 2048 }, ..shape() };
    let component = program(&c, &shape, &Build::new(DType::BF16)).expect("builds");
    assert_eq!(elements(&component), 18_988_838_144);
    assert_eq!(component.params.iter().flat_map(|p| p.source.tensors()).count(), 4186);
}

fn released_2_5() -> serde_json::Value {
    serde_json::json!({
        "rope_type": "split", "gated_attn": true, "cross_attn_mod": true, "audio_gated_attn": true,
        "audio_cross_attn_mod": true, "use_prompt_embeddings": false, "perturbed_attn": true, "ff_bias": false,
        "use_keyframes_abs_pos_embedding": true
    })
}

/// Compared with LTX-2.3, LTX-2.5 lacks 96 tensors (the biases in the feed-forward layers of the video stream) and adds
/// one (the keyframe embedding).
#[test]
fn ltx_2_5_config_declares_all_published_tensors() {
    let count = |c: &serde_json::Value, keyframes: bool| {
        let c = TransformerConfig::from_json(c).expect("the released values");
        let shape = ForwardShape { text_channels: Av { video: 4096, audio: 2048 }, keyframes, ..shape() };
        let component = program(&c, &shape, &Build::new(DType::BF16)).expect("builds");
        (elements(&component), tensors_once(&component).len())
    };
    assert_eq!(count(&released_2_5(), true), (18_987_859_200, 4091));
    // Without a keyframe mask the embedding is not loaded.
    assert_eq!(count(&released_2_5(), false), (18_987_859_200 - 4096, 4090));
    // Without prompt AdaLN, 6 tensors per stream are missing.
    let fixed = changed(released_2_5(), &serde_json::json!({"use_prompt_adaln_single": false}));
    let adaln = |w: usize| 256 * w + w + w * w + w + 2 * w * w + 2 * w;
    assert_eq!(count(&fixed, true), (18_987_859_200 - adaln(4096) - adaln(2048), 4091 - 12));
}

#[test]
fn key_and_value_weights_take_text_width_without_caption_projection() {
    let shape = ForwardShape { text_channels: Av::both(3840), ..shape() };
    let c = TransformerConfig { use_prompt_embeddings: false, audio_cross_attention_dim: 2048, ..released() };
    // Without the caption projection, text embeddings should be as wide as the streams; other widths still build, with
    // differently shaped key and value weights.
    let component = program(&c, &shape, &Build::new(DType::BF16)).expect("builds");
    let kv = component.params.iter().find(|p| p.name.ends_with("blocks.*.attn2.to_k.weight+to_v.weight"));
    assert_eq!(kv.map(|p| p.ty.dims.clone()), Some(vec![48, 2, 32, 128, 3840]));
}

#[test]
fn unsupported_qk_norm_is_rejected() {
    let message = "qk_norm = \"layer_norm\" is not supported, only rms_norm_across_heads";
    assert_refused(
        "transformer",
        TransformerConfig::from_json,
        [(serde_json::json!({"qk_norm": "layer_norm"}), message)],
    );
}
