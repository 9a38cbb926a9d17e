use serde_json::json;

use super::blocks::pairs;
use super::*;
use crate::Network;
use crate::pixels::Pixels;
use crate::testing::{assert_refused, elements, tensors_once};
use ltx2_nn::{Axis, Build, ContextParallelPolicy, Layout, Rule};
use ltx2_stablehlo::{DType, DeviceMesh, Type};

fn published() -> DiffusionDecoderConfig {
    DiffusionDecoderConfig::from_json(&json!({"_class_name": "LTX2VideoDiffusionDecoderModel"})).expect("reads")
}

#[test]
fn diffusion_decoder_declares_every_published_tensor() {
    let network = program(&published(), [1, 3, 7, 8], Pixels::Values, &Build::new(DType::BF16)).expect("builds");
    let names = tensors_once(&network);
    // The means and standard deviations of the latents are applied on the host, not in the program.
    assert_eq!((elements(&network), names.len()), (417_133_616, 405));
    for name in [
        "decoder.conv_in.bias",
        "decoder.det_stages.1.5.attn.to_out.0.weight",
        "decoder.upsamples.3.proj.weight",
        "decoder.t_embedder.timestep_embedder.linear_2.weight",
        "decoder.shared_adaln.proj.bias",
        "decoder.diff_blocks.7.attn.norm_k.weight",
        "decoder.diff_blocks.0.scale_shift_table",
        "decoder.diff_blocks.3.mlp.w_gate.weight",
        "decoder.norm_out.weight",
    ] {
        assert!(names.contains(name), "{name}");
    }
    assert_eq!(network.program.results[0].ty, Type::new(DType::F32, [1, 3, 17, 224, 256]));
}

#[test]
fn small_latents_are_padded_and_the_video_is_cropped() {
    let c = published();
    assert_eq!(c.min_latents(), [3, 7, 7]);
    assert_eq!(noise_shape(&c, [1, 16, 16, 24]), [1, 3, 121, 512, 768]);
    assert_eq!(noise_shape(&c, [2, 1, 4, 12]), [2, 3, 17, 224, 384]);
    let network = program(&c, [2, 1, 4, 12], Pixels::Values, &Build::new(DType::BF16)).expect("builds");
    assert_eq!(network.program.results[0].ty, Type::new(DType::F32, [2, 3, 1, 128, 384]));
}

/// At 1920x1088x121 the largest tensor is the hidden activation of an MLP; the attention scores of a batch of blocks
/// are smaller.
#[test]
fn no_tensor_grows_quadratically_with_the_grid() {
    let c = published();
    let text = program(&c, [1, 16, 34, 60], Pixels::Values, &Build::new(DType::BF16)).expect("builds").program.text;
    let largest = text.split("tensor<").skip(1).filter_map(|t| {
        let sizes = t.split('>').next()?.split('x').map_while(|size| size.parse::<usize>().ok());
        Some(sizes.product::<usize>())
    });
    // A token covers 4x4 pixels of a frame and has 1024 hidden features.
    assert_eq!(largest.max(), Some(121 * 272 * 480 * 1024));
}

/// With 16 latent rows, each of eight devices would have two rows, but attention windows reach three rows beyond a
/// block on each side. The rows are therefore sharded over fewer devices.
#[test]
fn spatial_sharding_is_limited_by_window_reach() {
    let rule = |axis, mesh_axes: &[&str]| Rule {
        axis,
        mesh_axes: mesh_axes.iter().map(|a| (*a).to_string()).collect(),
        place: "x.yml:1".into(),
    };
    let rules = vec![rule(Axis::Height, &["context", "tensor"]), rule(Axis::Width, &["cfg"])];
    let mesh = DeviceMesh::new(&[("cfg", 2), ("context", 4), ("tensor", 2)]);
    let layout = Layout::new(mesh, rules, vec![], vec![], ContextParallelPolicy::default()).expect("valid");
    let build = Build { layout, ..Build::new(DType::BF16) };
    let of = |rows, columns| program(&published(), [1, 16, rows, columns], Pixels::Values, &build).expect("builds");
    let axes = |network: &Network, dim: usize| {
        let given = &network.program.arguments.iter().find(|a| a.name == "latents").expect("latents").sharding;
        given.as_ref().expect("a sharding").0[dim].join(",")
    };
    let small = of(16, 24);
    assert_eq!((axes(&small, 3), axes(&small, 4)), ("context".into(), "cfg".into()));
    let note = "diffusion_decoder: sharding 16 latent rows over context x tensor would give shards smaller than the \
                reach of the attention windows; the rows are sharded over context instead";
    assert!(small.notes.iter().any(|n| n == note), "{:?}", small.notes);
    let large = of(64, 24);
    assert_eq!((axes(&large, 3), large.notes.len()), ("context,tensor".into(), 0));
}

#[test]
fn rope_pairs_are_split_by_axis() {
    assert_eq!([64, 16, 8, 24].map(pairs), [[8, 12, 12], [2, 3, 3], [0, 2, 2], [2, 5, 5]]);
}

#[test]
fn unsupported_value_errors_name_the_key() {
    let cases = [
        (json!({"decoder_model_output_type": "eps"}), "decoder_model_output_type: unknown variant `eps`"),
        (
            json!({"decoder_stage_depths": [4, 6]}),
            "decoder_stage_depths has 2 entries, but decoder_stage_kernels requires 5",
        ),
        (json!({"decoder_head_dim": 12}), "decoder_head_dim = 12 is not supported, only a multiple of 8"),
        (json!({"decoder_head_dim": 48}), "only multiples of decoder_head_dim"),
        (
            json!({"decoder_upsample_channel_reductions": [2, 2, 2, 2]}),
            "only the ratios of consecutive decoder_stage_channels",
        ),
        (
            json!({"decoder_upsample_strides": [[3, 2, 2], [2, 1, 1], [2, 2, 2], [2, 2, 2]]}),
            "only frame strides of 1 or 2",
        ),
        (
            json!({"decoder_stage5_kernel": [11, 0, 11]}),
            "decoder_stage5_kernel[1] = 0 is out of range: it must be 1 to 64",
        ),
        (
            json!({"spatial_compression_ratio": 16}),
            "spatial_compression_ratio = 16 is not supported, only the product of the patch size",
        ),
        (json!({"temporal_compression_ratio": 4}), "temporal_compression_ratio = 4"),
        (
            json!({"decoder_upsample_strides": [[1, 64, 64], [2, 64, 64], [2, 2, 2], [2, 2, 2]]}),
            "decoder_upsample_strides = 16384 is out of range: it must be at most 4096",
        ),
        (json!({"patch_size": 0}), "patch_size = 0"),
        (json!({"decoder_num_inference_steps": 0}), "decoder_num_inference_steps = 0"),
        (json!({"scaling_factor": 0.5}), "scaling_factor = 0.5"),
        (json!({"coarse": true}), "unknown key coarse = true"),
    ];
    assert_refused(COMPONENT, DiffusionDecoderConfig::from_json, cases);
}
