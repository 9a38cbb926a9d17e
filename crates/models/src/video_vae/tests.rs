use serde_json::{Value as Json, json};

use super::layers::Layers;
use super::*;
use crate::Network;
use crate::pixels::Pixels;
use crate::testing::{assert_refused, changed, elements, published, tensors};
use ltx2_nn::{
    Axis, Build, ContextParallelPolicy, Conv3dLowering, Layout, Lowering, Padding, Params, Rule, SpatialShards,
};
use ltx2_stablehlo::{DType, DeviceMesh, Type};

/// Returns `vae/config.json` of LTX-2.0 with some keys replaced.
fn file(changes: Json) -> Json {
    changed(published("ltx2", "vae"), &changes)
}

fn released_2_3() -> Json {
    file(json!({
        "block_out_channels": [256, 512, 1024, 1024], "layers_per_block": [4, 6, 4, 2, 2],
        "decoder_block_out_channels": [256, 512, 512, 1024], "decoder_layers_per_block": [4, 6, 4, 2, 2],
        "decoder_spatio_temporal_scaling": true, "decoder_inject_noise": false,
        "upsample_type": ["spatiotemporal", "spatiotemporal", "temporal", "spatial"],
        "upsample_factor": [2, 2, 1, 2], "upsample_residual": false, "decoder_spatial_padding_mode": "zeros"
    }))
}

fn decoder(config: &Json, shape: [usize; 4], lowering: Conv3dLowering) -> Network {
    let c = VideoVaeConfig::from_json(config).and_then(|c| c.decoder()).expect("a supported configuration");
    decoder_program(
        &c,
        shape,
        Pixels::Values,
        &Build { lowering: Lowering { conv3d: lowering, ..Lowering::default() }, ..Build::new(DType::BF16) },
    )
    .expect("builds")
}

fn encoder(config: &Json, shape: [usize; 4]) -> Network {
    let c = VideoVaeConfig::from_json(config).and_then(|c| c.encoder()).expect("a supported configuration");
    encoder_program(&c, shape, &Build::new(DType::BF16)).expect("builds")
}

#[test]
fn video_vaes_declare_every_published_tensor() {
    let (v2_0, v2_3) = (file(json!({})), released_2_3());
    let decoders = [&v2_0, &v2_3].map(|c| decoder(c, [1, 2, 4, 6], Conv3dLowering::Direct));
    let encoders = [&v2_0, &v2_3].map(|c| encoder(c, [1, 9, 128, 192]));
    assert_eq!(decoders.each_ref().map(elements), [528_380_720, 407_169_072]);
    assert_eq!(encoders.each_ref().map(elements), [694_098_881, 318_936_897]);
    assert_eq!(decoders.each_ref().map(|c| tensors(c).len()), [90, 84]);
    assert_eq!(encoders.each_ref().map(|c| tensors(c).len()), [92, 84]);
    for name in ["decoder.mid_block.resnets.4.conv1.conv.weight", "decoder.up_blocks.2.upsamplers.0.conv.conv.bias"] {
        assert!(tensors(&decoders[0]).contains(name), "{name}");
    }
    for name in ["encoder.down_blocks.3.downsamplers.0.conv.conv.weight", "encoder.conv_out.conv.bias"] {
        assert!(tensors(&encoders[0]).contains(name), "{name}");
    }
    for d in &decoders {
        assert_eq!(d.program.results[0].ty, Type::new(DType::F32, [1, 3, 9, 128, 192]));
    }
    for e in &encoders {
        assert_eq!(e.program.results[0].ty, Type::new(DType::F32, [1, 128, 2, 4, 6]));
    }
}

#[test]
fn identical_blocks_become_loops_and_tap_lowering_uses_2d_convolutions() {
    let direct = decoder(&file(json!({})), [1, 1, 2, 2], Conv3dLowering::Direct).program.text;
    let taps = decoder(&file(json!({})), [1, 1, 2, 2], Conv3dLowering::Taps).program.text;
    let volumes = |text: &str| text.matches("x[o, i, 0, 1, 2]").count();
    let images = |text: &str| text.matches("x[o, i, 0, 1]->").count();
    // Four loops with two convolutions each, three upsamplers, and the first and the last convolution.
    assert_eq!((direct.matches(".while(").count(), volumes(&direct), images(&direct)), (4, 13, 0));
    assert_eq!((volumes(&taps), images(&taps)), (0, 39));
}

#[test]
fn timestep_conditioned_decoder_takes_temb() {
    let d = decoder(&file(json!({"timestep_conditioning": true})), [2, 1, 2, 2], Conv3dLowering::Direct);
    assert_eq!(d.program.argument("temb").expect("declared").ty.dims, [2]);
    let names = tensors(&d);
    for name in [
        "decoder.timestep_scale_multiplier",
        "decoder.scale_shift_table",
        "decoder.time_embedder.timestep_embedder.linear_1.weight",
        "decoder.up_blocks.0.time_embedder.timestep_embedder.linear_2.bias",
        "decoder.mid_block.resnets.4.scale_shift_table",
    ] {
        assert!(names.contains(name), "{name}");
    }
}

#[test]
fn channel_change_adds_a_normalized_shortcut_convolution() {
    let changes = json!({"decoder_block_out_channels": [256, 512, 256], "upsample_factor": [1, 1, 1],
        "upsample_residual": false});
    let names = tensors(&decoder(&file(changes), [1, 1, 2, 2], Conv3dLowering::Direct));
    for name in ["up_blocks.1.conv_in.norm3.bias", "up_blocks.2.conv_in.conv_shortcut.weight"] {
        assert!(names.contains(&format!("decoder.{name}")), "{name}");
    }
}

#[test]
fn unsupported_value_errors_name_the_key() {
    let cases = [
        (json!({"decoder_inject_noise": [false, true, false, false]}), "decoder_inject_noise = true"),
        (json!({"patch_size_t": 2}), "patch_size_t = 2 is not supported, only 1"),
        (json!({"upsample_type": ["conv", "spatial", "spatial"]}), "upsample_type = \"conv\""),
        (json!({"upsample_type": ["spatial"]}), "upsample_type has only 1 of the 3 entries that the blocks need"),
        (json!({"patch_size": 0}), "patch_size = 0"),
        (
            json!({"spatial_compression_ratio": 16}),
            "spatial_compression_ratio = 16 is not supported, only the product of the patch size",
        ),
        (json!({"temporal_compression_ratio": 4}), "temporal_compression_ratio = 4"),
        (
            json!({"spatio_temporal_scaling": vec![true; 64], "spatial_compression_ratio": null}),
            "spatial_compression_ratio = 18446744073709551615 is out of range: it must be at most 4096",
        ),
        (json!({"upsample_factor": [2, 0, 2]}), "upsample_factor[1] = 0 is out of range: it must be 1 to 64"),
        (json!({"upsample_factor": [2, 2, 3]}), "upsample_factor = [2,2,3]"),
        (json!({"decoder_spatial_padding_mode": "circular"}), "unknown variant `circular`"),
    ];
    assert_refused("vae", |changes| VideoVaeConfig::from_json(&file(changes.clone())).and_then(|c| c.decoder()), cases);
    let channels = json!({"block_out_channels": [256, 512, 1024, 2044]});
    let case = (channels, "block_out_channels = [256,512,1024,2044]");
    assert_refused(
        "vae",
        |changes| VideoVaeConfig::from_json(&file(changes.clone())).and_then(|c| c.encoder()),
        [case],
    );
}

#[test]
fn latents_too_small_for_reflect_padding_are_rejected() {
    let c = VideoVaeConfig::from_json(&file(json!({}))).and_then(|c| c.decoder()).expect("supported");
    let e = decoder_program(&c, [1, 1, 1, 4], Pixels::Values, &Build::new(DType::F32));
    let e = e.expect_err("one row has nothing to mirror").to_string();
    assert!(e.contains("decoder/conv") && e.contains("reflection padding"), "{e}");
}

#[test]
fn sizes_not_divisible_by_the_strides_are_rejected() {
    let c = VideoVaeConfig::from_json(&file(json!({}))).and_then(|c| c.encoder()).expect("supported");
    for (shape, sizes) in
        [([1, 9, 130, 64], "[9, 130, 64]"), ([1, 8, 64, 64], "[9, 8, 8]"), ([1, 9, 64, 72], "[6, 8, 9]")]
    {
        let e = encoder_program(&c, shape, &Build::new(DType::F32));
        let e = e.expect_err("does not divide").to_string();
        assert!(e.contains(&format!("{sizes} frames, rows and columns are not divisible")), "{e}");
    }
}

#[test]
fn res_block_program_matches_snapshot() {
    let p = Params::new("res_block", COMPONENT, &Build::new(DType::BF16));
    let _ = p.builder().clone().without_locations();
    let x = p.input("x", Type::new(DType::BF16, [1, 2, 3, 4, 5]), &[Axis::Replicated; 5]);
    let y = Layers::new(false, Padding::Zeros, 1e-6, SpatialShards::default()).res_blocks(&p, 1, &x, None);
    insta::assert_snapshot!(p.builder().finish(&[("y", &y)]).expect("builds").text);
}

/// Returns build options that shard the rows over `devices` devices.
fn by_rows(devices: usize) -> Build {
    let rule = Rule { axis: Axis::Height, mesh_axes: vec!["context".into()], place: "rows.yml:2".into() };
    let mesh = DeviceMesh::new(&[("context", devices)]);
    let layout = Layout::new(mesh, vec![rule], vec![], vec![], ContextParallelPolicy::default()).expect("valid");
    Build { layout, ..Build::new(DType::BF16) }
}

#[test]
fn rows_not_divisible_by_the_mesh_are_padded_with_a_note() {
    let c = VideoVaeConfig::from_json(&file(json!({}))).and_then(|c| c.decoder()).expect("supported");
    let d = decoder_program(&c, [1, 1, 34, 4], Pixels::Values, &by_rows(8)).expect("builds");
    let note = "tensor 'vae.latents' tensor<1x128x1x34x4xf32>: height = 34 is not divisible by context = 8 (rows.yml:2: \
                height: [context]); padded to blocks of 5";
    assert_eq!(d.notes, [note]);
    let (latents, video) = (&d.program.arguments[0], &d.program.results[0]);
    assert_eq!((latents.ty.dims[3], latents.logical_dims[3]), (40, 34));
    assert_eq!((video.ty.dims[3], video.logical_dims[3]), (40 * 32, 34 * 32));

    let c = VideoVaeConfig::from_json(&file(json!({}))).and_then(|c| c.encoder()).expect("supported");
    let e = encoder_program(&c, [1, 1, 1088, 64], &by_rows(8)).expect("builds");
    assert!(e.notes[0].contains("height = 1088 is not divisible by context = 8 x 32"), "{:?}", e.notes);
    assert!(e.notes[0].ends_with("padded to blocks of 160"), "{:?}", e.notes);
    assert_eq!(e.program.results[0].logical_dims, [1, 128, 1, 34, 2]);
    let even = encoder_program(&c, [1, 1, 512, 64], &by_rows(8)).expect("builds");
    assert_eq!(even.notes, [""; 0]);
}

#[test]
fn sharding_does_not_change_which_sizes_are_rejected() {
    let c = VideoVaeConfig::from_json(&file(json!({}))).and_then(|c| c.encoder()).expect("supported");
    let e = encoder_program(&c, [1, 9, 130, 64], &by_rows(2)).expect_err("does not divide").to_string();
    assert!(e.contains("[9, 130, 64] frames, rows and columns are not divisible"), "{e}");
    let c = VideoVaeConfig::from_json(&file(json!({}))).and_then(|c| c.decoder()).expect("supported");
    let e = decoder_program(&c, [1, 1, 1, 4], Pixels::Values, &by_rows(2))
        .expect_err("one row has nothing to mirror")
        .to_string();
    assert!(e.contains("decoder/conv") && e.contains("reflect padding of 1 along axis"), "{e}");
}
