use serde_json::{Value as Json, json};

use super::*;
use crate::Network;
use crate::testing::{assert_refused, elements, published, tensors};
use ltx2_nn::Build;
use ltx2_stablehlo::DType;

fn build(config: Json, shape: [usize; 3]) -> Network {
    let c = AudioVaeConfig::from_json(&config).expect("a supported configuration");
    decoder_program(&c, shape, &Build::new(DType::F32)).expect("builds")
}

fn mel(c: &Network) -> &[usize] {
    &c.program.results[0].ty.dims
}

#[test]
fn audio_vae_declares_every_published_tensor() {
    let c = build(published("ltx2", "audio_vae"), [1, 126, 16]);
    assert_eq!(elements(&c), 31_915_138);
    let config = AudioVaeConfig::from_json(&published("ltx2_5", "audio_vae")).expect("a supported configuration");
    let whole = encoder_program(&config, [1, 501, 64], &Build::new(DType::F32)).expect("builds");
    assert_eq!(elements(&c) + elements(&whole), 53_248_146);
    assert_eq!((tensors(&c).len(), mel(&c)), (56, &[1, 2, 501, 64][..]));
    for name in ["mid.block_2.conv2.conv.bias", "up.1.block.0.nin_shortcut.conv.weight", "up.2.upsample.conv.conv.bias"]
    {
        assert!(tensors(&c).contains(&format!("decoder.{name}")), "{name}");
    }
}

#[test]
fn decoder_output_size_does_not_depend_on_causality_or_levels() {
    let tiny = |axis: &str, levels: &[usize]| json!({"base_channels": 4, "ch_mult": levels, "causality_axis": axis, "mel_bins": 10, "latent_channels": 3});
    for axis in ["none", "width", "height", "width-compatibility"] {
        for levels in [&[1, 2][..], &[1, 1, 2], &[1, 1, 1, 2]] {
            // With two levels, the decoder upsamples only once, so the remaining frames are zeros.
            assert_eq!(mel(&build(tiny(axis, levels), [2, 3, 3])), [2, 2, 9, 10], "{axis} {levels:?}");
            assert_eq!(mel(&build(tiny(axis, levels), [1, 1, 3])), [1, 2, 1, 10], "{axis} {levels:?}");
        }
    }
    assert_eq!(mel(&build(json!({"mel_bins": null}), [1, 2, 16])), [1, 2, 5, 16]);
}

#[test]
fn attention_layers_exist_only_where_configured() {
    let names = tensors(&build(
        json!({"base_channels": 32, "ch_mult": [1, 2], "norm_type": "group", "causality_axis": "none",
            "attn_resolutions": [64], "resolution": 64, "mid_block_add_attention": true}),
        [1, 2, 2],
    ));
    let has = |name: &str| names.contains(&format!("decoder.{name}"));
    assert!(has("mid.attn_1.norm.weight") && has("up.0.attn.2.proj_out.bias") && has("norm_out.bias"));
    assert!(!has("up.1.attn.0.q.weight"));
}

#[test]
fn unsupported_value_errors_name_the_key() {
    let cases = [
        (json!({"norm_type": "group"}), "norm_type = \"group\" is not supported, only pixel"),
        (json!({"norm_type": "group", "causality_axis": "none", "base_channels": 48}), "base_channels = 48"),
        (json!({"causality_axis": null}), "causality_axis = null is not supported, only none, width"),
        (json!({"ch_mult": []}), "ch_mult = []"),
        (json!({"ch_mult": vec![1; 9]}), "ch_mult length = 9 is out of range: it must be at most 8"),
        (json!({"mel_bins": 0}), "mel_bins = 0 is out of range: it must be 4 to 1024"),
        (json!({"mel_hop_length": 1}), "sample_rate / mel_hop_length = 16000 is out of range"),
    ];
    assert_refused("audio_vae", AudioVaeConfig::from_json, cases);
}
