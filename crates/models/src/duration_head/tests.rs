use serde_json::json;

use super::*;
use crate::av::Av;
use crate::testing::{assert_refused, elements, tensors_once};
use ltx2_nn::Build;
use ltx2_stablehlo::{DType, Type};

#[test]
fn duration_head_declares_every_published_tensor() {
    let c = DurationHeadConfig::from_json(&json!({"_class_name": "LTX2DurationHead"})).expect("reads");
    let network = program(&c, 1, Av::both(1024), &Build::new(DType::BF16)).expect("builds");
    let names = tensors_once(&network);
    assert_eq!((elements(&network), names.len()), (1_903_361, 19));
    for name in ["attention_pooler.query_tokens", "attention_pooler.to_v.bias", "audio_modality_emb", "mlp_out.weight"]
    {
        assert!(names.contains(name), "{name}");
    }
    assert_eq!(network.program.results[0].ty, Type::new(DType::F32, [1]));
}

#[test]
fn unsupported_value_errors_name_the_key() {
    let cases = [
        (
            json!({"num_pooler_heads": 3}),
            "pooler_hidden_dim = 256 is not supported, only multiples of num_pooler_heads",
        ),
        (json!({"num_queries": 0}), "num_queries = 0"),
        (json!({"bounds": 3}), "unknown key bounds = 3"),
    ];
    assert_refused(COMPONENT, DurationHeadConfig::from_json, cases);
}

#[test]
fn durations_become_valid_frame_counts_within_bounds() {
    for grid in [FrameRounding::Official, FrameRounding::Diffusers] {
        let at_24 = [0.3, 2.0, 4.99, 5.05, 19.9, 25.0].map(|seconds| frames(seconds, 24.0, 8, grid));
        assert_eq!(at_24, [25, 41, 113, 121, 473, 473]);
        // Rounds half to even: 60.5 becomes 60, 61.5 becomes 62.
        assert_eq!([2.420, 2.460].map(|seconds| frames(seconds, 25.0, 1, grid)), [60, 62]);
    }
}

/// Only very low frame rates or large steps leave no valid count within the bounds (1 to 20 seconds).
#[test]
fn bounds_without_a_valid_count_use_the_reference_rules() {
    // 0.1 frames per second: 1 to 2 frames, and 1 is valid.
    assert_eq!([FrameRounding::Official, FrameRounding::Diffusers].map(|grid| frames(30.0, 0.1, 8, grid)), [1, 1]);
    // 2 to 32 frames with step 64: the nearest valid counts are 1 and 65.
    for (seconds, official, diffusers) in [(1.0, 32, 1), (20.0, 32, 1)] {
        let both = [FrameRounding::Official, FrameRounding::Diffusers].map(|grid| frames(seconds, 1.6, 64, grid));
        assert_eq!(both, [official, diffusers], "{seconds}");
    }
    // 2 to 40 frames with step 48: 40 is nearer to 49 than to 1.
    assert_eq!([FrameRounding::Official, FrameRounding::Diffusers].map(|grid| frames(20.0, 2.0, 48, grid)), [40, 49]);
}
