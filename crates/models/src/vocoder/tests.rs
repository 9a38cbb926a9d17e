use serde_json::{Value as Json, json};

use super::*;
use crate::Network;
use crate::testing::{assert_refused, changed, elements, published, tensors};
use ltx2_nn::Build;
use ltx2_stablehlo::DType;

fn build(config: Json, shape: [usize; 4]) -> Network {
    let c = VocoderConfig::from_json(&config).expect("a supported configuration");
    vocoder_program(&c, shape, &Build::new(DType::F32)).expect("builds")
}

fn tiny(changes: Json) -> Json {
    let config = json!({"in_channels": 6, "hidden_channels": 16, "upsample_kernel_sizes": [11, 4],
        "upsample_factors": [5, 2], "resnet_kernel_sizes": [3, 4], "resnet_dilations": [[1, 3], [2]]});
    changed(config, &changes)
}

#[test]
fn vocoder_declares_every_published_tensor() {
    let c = build(published("ltx2", "vocoder"), [1, 2, 501, 64]);
    assert_eq!(elements(&c), 55_592_802);
    assert_eq!((tensors(&c).len(), &c.program.results[0].ty.dims[..]), (194, &[1, 2, 501 * 240][..]));
    for name in ["upsamplers.4.weight", "resnets.14.convs2.2.bias", "conv_out.bias"] {
        assert!(tensors(&c).contains(name), "{name}");
    }
}

#[test]
fn ltx_2_3_vocoder_declares_all_tensors_except_the_inverse_basis() {
    let c = build(published("ltx2_3", "vocoder"), [1, 2, 501, 64]);
    // Both generators' parameters, their 400 filters of 12 taps, and the Fourier and mel bases.
    let stored = 400 * 12 + 514 * 512 + 64 * 257;
    assert_eq!(elements(&c), 128_537_448 + stored);
    // The checkpoint has 1227 tensors; `inverse_basis` is not used.
    assert_eq!((tensors(&c).len(), &c.program.results[0].ty.dims[..]), (1226, &[1, 2, 501 * 480][..]));
    for name in ["vocoder.act_out.act.beta", "bwe_generator.conv_out.weight", "mel_stft.stft_fn.forward_basis"] {
        assert!(tensors(&c).contains(name), "{name}");
    }
}

#[test]
fn bwe_class_defaults_match_the_published_config() {
    let published = VocoderConfig::from_json(&published("ltx2_3", "vocoder")).expect("supported");
    let bare = VocoderConfig::from_json(&json!({"_class_name": "LTX2VocoderWithBWE"})).expect("supported");
    assert_eq!(format!("{bare:?}"), format!("{published:?}"));
    assert_eq!(bare.output_sampling_rate, 48000);
}

#[test]
fn mismatched_bandwidth_extension_is_rejected_by_key() {
    let cases = [
        (json!({"output_sampling_rate": 40000}), "output_sampling_rate = 40000 is not supported"),
        (json!({"window_length": 700}), "window_length = 700"),
        (json!({"bwe_in_channels": 64}), "bwe_in_channels = 64 is not supported, only out_channels * num_mel"),
        (json!({"bwe_out_channels": 1}), "bwe_out_channels = 1"),
        (json!({"bwe_upsample_factors": [6, 5, 2, 2, 1]}), "bwe_upsample_factors = [6,5,2,2,1]"),
        (json!({"bwe_upsample_factors": [6, 5, 2, 2, 0]}), "bwe_upsample_factors[4] = 0 is out of range"),
        (
            json!({"output_sampling_rate": 192_000, "input_sampling_rate": 1000}),
            "input_sampling_rate = 192 is out of range",
        ),
        (json!({"bwe_hidden_channels": 3}), "bwe_hidden_channels = 3"),
        (json!({"bwe_act_fn": "relu"}), "bwe_act_fn: unknown variant `relu`"),
    ];
    let extended = json!({"_class_name": "LTX2VocoderWithBWE"});
    assert_refused("vocoder", |changes| VocoderConfig::from_json(&changed(extended.clone(), changes)), cases);
}

#[test]
fn resnet_kernels_may_have_different_numbers_of_dilations() {
    let c = build(tiny(json!({"final_bias": false, "out_channels": 1})), [2, 2, 5, 3]);
    assert_eq!(c.program.results[0].ty.dims, [2, 1, 50]);
    let names = tensors(&c);
    assert!(names.contains("resnets.2.convs1.1.weight") && names.contains("resnets.3.convs1.0.weight"));
    assert!(!names.contains("resnets.3.convs1.1.weight") && !names.contains("conv_out.bias"));
}

#[test]
fn periodic_activations_declare_their_parameters_and_filters() {
    let c = build(tiny(json!({"act_fn": "snakebeta", "antialias": true, "final_act_fn": null})), [1, 2, 4, 3]);
    assert_eq!(c.program.results[0].ty.dims, [1, 2, 40]);
    let names = tensors(&c);
    for name in ["resnets.0.acts1.1.act.beta", "resnets.3.acts2.0.downsample.filter", "act_out.upsample.filter"] {
        assert!(names.contains(name), "{name}");
    }
    let plain = tensors(&build(tiny(json!({"act_fn": "snake"})), [1, 2, 4, 3]));
    assert!(plain.contains("resnets.0.acts1.0.alpha") && !plain.contains("resnets.0.acts1.0.beta"));
    assert!(plain.contains("act_out.act.beta"));
}

#[test]
fn unsupported_value_errors_name_the_key() {
    let cases = [
        (json!({"_class_name": "BigVGAN"}), "_class_name = \"BigVGAN\" is not supported"),
        (json!({"antialias": true}), "antialias = true is not supported, only false if act_fn is leaky_relu"),
        (json!({"upsample_factors": [5]}), "upsample_factors = [5]"),
        (json!({"resnet_dilations": [[1]]}), "resnet_dilations = [[1]]"),
        (json!({"upsample_kernel_sizes": [11, 1]}), "upsample_kernel_sizes = [11,1]"),
        (json!({"resnet_kernel_sizes": [3, 0]}), "resnet_kernel_sizes[1] = 0 is out of range: it must be 1 to 1024"),
        (json!({"hidden_channels": 3}), "hidden_channels = 3"),
        (json!({"act_fn": "relu"}), "unknown variant `relu`"),
        (json!({"final_act_fn": "sigmoid"}), "unknown variant `sigmoid`"),
    ];
    assert_refused("vocoder", |changes| VocoderConfig::from_json(&tiny(changes.clone())), cases);
}

#[test]
fn wrong_spectrogram_width_is_rejected() {
    let c = VocoderConfig::from_json(&tiny(json!({}))).expect("supported");
    let e = vocoder_program(&c, [1, 2, 5, 4], &Build::new(DType::F32)).expect_err("8 is not 6").to_string();
    assert!(e.contains("tensor<1x2x5x4xf32>") && e.contains("in_channels = 6"), "{e}");
}
