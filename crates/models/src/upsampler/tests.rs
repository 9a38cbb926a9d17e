use ndarray::{Array5, s};
use serde_json::{Value as Json, json};

use super::*;
use crate::Network;
use crate::testing::{assert_refused, changed, elements, tensors};
use ltx2_nn::Build;
use ltx2_stablehlo::{DType, Type};

fn config(json: Json) -> UpsamplerConfig {
    UpsamplerConfig::from_json(&json).expect("a supported configuration")
}

fn build(c: &UpsamplerConfig, shape: [usize; 4]) -> Network {
    program(c, shape, &Build::new(DType::BF16)).expect("builds")
}

#[test]
fn upsamplers_declare_every_published_tensor() {
    for (rational, conv) in [(true, "upsampler.conv.weight"), (false, "upsampler.0.weight")] {
        let network = build(&config(json!({"use_rational_resampler": rational})), [1, 16, 8, 12]);
        // LTX-2.0's file also has a blur kernel, which an integer scale does not use.
        let names = tensors(&network);
        assert_eq!((names.len(), elements(&network)), (72, 497_867_904));
        assert!(names.contains(conv) && names.contains("post_upsample_res_blocks.3.norm2.bias"));
        assert_eq!(network.program.results[0].ty, Type::new(DType::F32, [1, 128, 16, 16, 24]));
    }
    // LTX-2.5's temporal upsampler: its file also sets `use_rational_resampler`, which only affects spatial upsampling.
    for rational in [true, false] {
        let c = json!({"mid_channels": 512, "spatial_upsample": false, "temporal_upsample": true,
            "use_rational_resampler": rational});
        let network = build(&config(c).in_time().expect("in time"), [1, 16, 8, 12]);
        assert_eq!((tensors(&network).len(), elements(&network)), (72, 130_968_192));
        assert!(network.params.iter().all(|p| p.component == TEMPORAL));
        assert_eq!(network.program.results[0].ty, Type::new(DType::F32, [1, 128, 31, 8, 12]));
    }
}

#[test]
fn program_output_size_matches_config() {
    let small = json!({"in_channels": 4, "mid_channels": 32, "num_blocks_per_stage": 1});
    let variants = [
        (json!({"rational_spatial_scale": 0.75}), [3, 4, 6], "x0.75"),
        (json!({"rational_spatial_scale": 1.5}), [3, 8, 11], "x1.5"),
        (json!({"rational_spatial_scale": 4.0}), [3, 20, 28], "x4"),
        (json!({"use_rational_resampler": false}), [3, 10, 14], "x2"),
        (json!({"spatial_upsample": false, "temporal_upsample": true}), [5, 5, 7], "x2 in time"),
        (json!({"temporal_upsample": true}), [5, 10, 14], "x2 and x2 in time"),
        (json!({"dims": 2}), [3, 10, 14], "x2"),
    ];
    for (changes, want, name) in variants {
        let c = config(changed(small.clone(), &changes));
        assert_eq!((c.size([3, 5, 7]), c.describe().as_str()), (want, name));
        let result = &build(&c, [2, 3, 5, 7]).program.results[0];
        assert_eq!(result.logical_dims, [&[2, 4], &want[..]].concat(), "{name}");
    }
}

#[test]
fn unsupported_value_errors_name_the_key() {
    let scales = "rational_spatial_scale = 3.0 is not supported, only 0.75, 1.5, 2 and 4";
    let cases = [
        (json!({"rational_spatial_scale": 3.0}), scales),
        (json!({"mid_channels": 48}), "multiples of 32"),
        (json!({"spatial_upsample": false}), "true if temporal_upsample is false"),
        (json!({"dims": 2, "temporal_upsample": true}), "false if dims is 2"),
    ];
    assert_refused("latent_upsampler", UpsamplerConfig::from_json, cases);
    let spatial = [(json!({}), "doubles only the frames"), (json!({"temporal_upsample": true}), "only the frames")];
    assert_refused(TEMPORAL, |json| UpsamplerConfig::from_json(json)?.in_time(), spatial);
}

/// The kind of an upsampler is derived from its configuration, not from its file name.
#[test]
fn wrong_upsampler_kind_error_says_what_to_change() {
    use Upsampling::{SpatialX1_5, SpatialX2, TemporalX2};
    let kinds = [
        (json!({}), Some(SpatialX2)),
        (json!({"use_rational_resampler": false}), Some(SpatialX2)),
        (json!({"rational_spatial_scale": 1.5}), Some(SpatialX1_5)),
        (json!({"spatial_upsample": false, "temporal_upsample": true}), Some(TemporalX2)),
        (json!({"rational_spatial_scale": 4.0}), None),
        (json!({"temporal_upsample": true}), None),
    ];
    for (json, kind) in &kinds {
        let c = config(json.clone());
        assert_eq!(c.upsampling(), *kind, "{json}");
        for asked in [SpatialX2, SpatialX1_5, TemporalX2] {
            assert_eq!(c.check_kind(asked).is_ok(), *kind == Some(asked), "{json} {asked:?}");
        }
    }
    let said = |kind: usize, asked: Upsampling| config(kinds[kind].0.clone()).check_kind(asked).expect_err("another");
    assert_eq!(
        said(0, SpatialX1_5),
        "this latent upsampler is x2, but two_stage.upsample requests spatial_x1_5: set model.upsampler to a \
         spatial_x1_5 upsampler, or two_stage.upsample to [spatial_x2]"
    );
    assert_eq!(
        said(3, SpatialX2),
        "this latent upsampler is x2 in time, but two_stage.upsample requests spatial_x2: set \
         model.temporal_upsampler to this file and model.upsampler to a spatial_x2 upsampler"
    );
    assert!(
        said(4, SpatialX2).ends_with(
            "is x4, but two_stage.upsample requests spatial_x2: set model.upsampler to a spatial_x2 upsampler"
        )
    );
}

#[test]
fn shape_mismatch_reports_both_shapes() {
    let c = config(json!({}));
    assert_eq!(c.check_fit([128, 3, 4, 6], [128, 3, 8, 12]), Ok(()));
    let width = c.check_fit([8, 3, 4, 6], [8, 3, 8, 12]).expect_err("other channels");
    assert!(width.contains("128 channels") && width.contains("have 8"), "{width}");
    let size = config(json!({"rational_spatial_scale": 1.5})).check_fit([128, 3, 4, 6], [128, 3, 8, 12]);
    let size = size.expect_err("another size");
    assert!(
        size.contains("(x1.5) upsamples [3, 4, 6]")
            && size.contains("to [3, 6, 9], but the second stage needs [3, 8, 12]"),
        "{size}"
    );
}

#[test]
fn adain_matches_the_moments_of_the_reference() {
    let x = Array5::from_shape_vec((1, 1, 1, 2, 2), vec![1.0, 2.0, 3.0, 4.0]).expect("fits");
    // Mean 10, unbiased variance 4.
    let reference = Array5::from_shape_vec((1, 1, 1, 1, 3), vec![8.0, 10.0, 12.0]).expect("fits");
    let all = adain(x.view(), reference.view(), 1.0);
    let std = (5.0f32 / 3.0).sqrt();
    for (got, v) in all.iter().zip([1.0f32, 2.0, 3.0, 4.0]) {
        assert!((got - ((v - 2.5) / std * 2.0 + 10.0)).abs() < 1e-5, "{got}");
    }
    let half = adain(x.view(), reference.view(), 0.5);
    assert!(half.iter().zip(&x).zip(&all).all(|((h, x), a)| (h - (x + a) / 2.0).abs() < 1e-5));
    assert_eq!(adain(x.view(), reference.view(), 0.0), x);
}

#[test]
fn tone_map_compresses_large_values() {
    let x = Array5::from_shape_vec((1, 1, 1, 1, 4), vec![0.0, 1.0, -1.0, 4.0]).expect("fits");
    assert_eq!(tone_map(x.view(), 0.0), x);
    let y = tone_map(x.view(), 1.0);
    // At |x| = 1 the sigmoid is a half: 1 - 0.8 * 0.75 / 2.
    assert!((y[[0, 0, 0, 0, 1]] - 0.7).abs() < 1e-6 && (y[[0, 0, 0, 0, 2]] + 0.7).abs() < 1e-6);
    let far = 4.0 * (1.0 - 0.6 / (1.0 + (-9.0f32).exp()));
    assert!((y[[0, 0, 0, 0, 3]] - far).abs() < 1e-6 && y.slice(s![0, 0, 0, 0, 0]).into_scalar() == &0.0);
}
