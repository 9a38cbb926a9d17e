//! Spatial sharding on eight virtual devices: a convolution gets the rows beyond its block from the neighbours, and
//! nothing else is communicated.

use std::collections::BTreeMap;

use crate::support::{cpu, full, lowering_of, needs, quick, relative_l2};
use ltx2::analysis::Module;
use ltx2::hlo::{DType, DeviceMesh, ProgramOutput, Value};
use ltx2::media::Frames;
use ltx2::models::Network;
use ltx2::models::pixels::Pixels;
use ltx2::models::presets::Preset;
use ltx2::models::upsampler::{self, UpsamplerConfig};
use ltx2::models::video_vae::{VideoVaeConfig, decoder_program, encoder_program};
use ltx2::nn::{
    Axis, Build, ContextParallelPolicy, Conv3d, Conv3dLowering, Layout, Lowering, Padding, Params, Rule, ShardedVideo,
};
use ltx2::runtime::{Engine, ShardedTensor};
use ltx2::tensor::Tensor;
use ndarray::ArrayD;

/// Rows over four devices, columns over two.
fn blocks() -> Build {
    let rule = |axis, mesh_axis: &str| Rule { axis, mesh_axes: vec![mesh_axis.into()], place: "blocks.yml:1".into() };
    let rules = vec![rule(Axis::Height, "context"), rule(Axis::Width, "cfg")];
    let mesh = DeviceMesh::new(&[("cfg", 2), ("context", 4)]);
    let layout = Layout::new(mesh, rules, vec![], vec![], ContextParallelPolicy::default()).expect("valid");
    Build { layout, ..one() }
}

fn one() -> Build {
    Build { lowering: lowering_of("cpu"), ..Build::new(DType::F32) }
}

fn with_conv3d(build: Build, conv3d: Conv3dLowering) -> Build {
    Build { lowering: Lowering { conv3d, ..build.lowering }, ..build }
}

const PADDINGS: [Padding; 3] = [Padding::Zeros, Padding::Reflect, Padding::Replicate];

/// A frame's height and width, the kernel size, and the stride.
type Convolved = ([usize; 2], usize, usize);

const FRAMES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

/// Builds independent convolutions with every padding for each frame.
fn convolutions(build: &Build, all: &[Convolved]) -> Network {
    let p = Params::new("convolutions", "vae", build);
    let results = all.iter().enumerate().map(|(n, convolved)| convolution(&p, n, convolved)).collect();
    Network::finish(&p, results).expect("builds")
}

fn convolution(p: &Params, n: usize, &([height, width], size, step): &Convolved) -> (ProgramOutput, Value) {
    let video = ShardedVideo::new(p, FRAMES[n], [1, 2, 3, height, width], [step; 2]);
    let x = video.input(p);
    let y = video.run(p, &x, None, |blocks, x, _| {
        // The padded region is no longer zero.
        let x = &(x + 0.5);
        let all = PADDINGS.map(|padding| {
            let (kernel, stride) = ([3, size, size], [1, step, step]);
            let conv = Conv3d { kernel, stride, causal: false, padding, temporal_padding: padding };
            conv.apply(&p.pp(format!("{n}.{padding:?}")), x, 2, &blocks)
        });
        x.builder().concat(&all.iter().collect::<Vec<_>>(), 1)
    });
    video.output(p, &format!("y.{n}"), &y)
}

/// Pseudo-random numbers.
fn scattered(shape: &[usize]) -> Tensor {
    let mut state = 1u64;
    ArrayD::from_shape_simple_fn(shape, || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
    .into()
}

fn run(engine: &Engine, network: &Network, result: &str) -> Tensor {
    results(engine, network, scattered).remove(result).expect("a result")
}

fn results(engine: &Engine, network: &Network, value: impl Fn(&[usize]) -> Tensor) -> BTreeMap<String, Tensor> {
    let executable = engine.compile("blocks", &network.program).expect("compiles");
    let arguments: BTreeMap<String, ShardedTensor> = executable
        .arguments()
        .iter()
        .map(|a| (a.name.clone(), engine.upload(&executable, &a.name, &value(&a.logical_dims)).expect("uploads")))
        .collect();
    let outputs = engine.run(&executable, |name| arguments.get(name)).expect("runs");
    outputs.iter().map(|(name, value)| (name.to_string(), value.download().expect("downloads"))).collect()
}

#[needs(cpu)]
fn sharded_convolutions_match_unsharded() {
    let client = cpu(8);
    let engine = Engine::new(client, quick());
    // Blocks of several rows, of one row, and blocks outside the frame.
    let sizes = [([8, 6], 3, 1), ([8, 6], 5, 1), ([5, 7], 5, 1), ([7, 3], 3, 1), ([2, 5], 3, 1), ([8, 8], 3, 2)];
    let sizes: Vec<Convolved> = sizes.into_iter().chain([([5, 7], 3, 2), ([9, 2], 3, 2)]).collect();
    // `layouts` compares sharded decoders and encoders in the direct form.
    for form in [Conv3dLowering::Taps, Conv3dLowering::Direct].into_iter().take(if full() { 2 } else { 1 }) {
        let run = |build| results(&engine, &convolutions(&with_conv3d(build, form), &sizes), scattered);
        let [whole, joined] = [one(), blocks()].map(run);
        for (n, (frame, size, step)) in sizes.iter().enumerate() {
            let [whole, joined] = [&whole, &joined].map(|all| &all[&format!("y.{n}")]);
            // Each padding's two channels separately, so that a wrong edge is not averaged out.
            for (i, padding) in PADDINGS.iter().enumerate() {
                let part = |t: &Tensor| {
                    let all = t.to_f32();
                    Tensor::from(all.slice_axis(ndarray::Axis(1), (2 * i..2 * i + 2).into()).to_owned())
                };
                let distance = relative_l2(&part(joined), &part(whole));
                assert!(distance <= 1e-6, "{frame:?}, {size}, {step}, {padding:?}, {form:?}: {distance:e}");
            }
        }
    }
}

/// The upsampler's norms include the blocks of all devices and exclude the padding of a block.
#[needs(cpu)]
fn sharded_upsampling_matches_unsharded() {
    let client = cpu(8);
    let engine = Engine::new(client, quick());
    let json = |scale: f64, dims: usize| {
        serde_json::json!({"in_channels": 2, "mid_channels": 64, "num_blocks_per_stage": 1, "dims": dims,
            "rational_spatial_scale": scale})
    };
    let all = [(1.5, 3, [9, 5]), (2.0, 2, [5, 3]), (1.5, 3, [8, 4]), (2.0, 3, [8, 4])];
    for (scale, dims, [height, width]) in all.into_iter().take(if full() { 4 } else { 1 }) {
        let c = UpsamplerConfig::from_json(&json(scale, dims)).expect("valid");
        let network = |build: &Build| upsampler::program(&c, [1, 2, height, width], build).expect("builds");
        let whole = run(&engine, &network(&one()), "latents");
        let joined = run(&engine, &network(&blocks()), "latents");
        assert_eq!(whole.shape(), joined.shape());
        let distance = relative_l2(&joined, &whole);
        eprintln!("x{scale}, {dims} dimensions, {height}x{width}: {distance:.1e}");
        assert!(distance <= 2e-6, "x{scale}, {dims} dimensions, {height}x{width}: {distance:e}");
    }
}

#[needs(cpu)]
fn sharded_convolutions_exchange_only_edges() {
    let client = cpu(8);
    let engine = Engine::new(client, quick());
    let preset = Preset::named("nano").expect("a configuration");
    let config = preset.config("vae").expect("an autoencoder");
    let decoder = VideoVaeConfig::from_json(config).and_then(|c| c.decoder()).expect("valid");
    let encoder = VideoVaeConfig::from_json(config).and_then(|c| c.encoder()).expect("valid");
    let [rows, columns] = encoder.reduction();
    let networks = [
        decoder_program(&decoder, [1, 2, 8, 4], Pixels::Values, &blocks()).expect("builds"),
        encoder_program(&encoder, [1, 9, 8 * rows, 4 * columns], &blocks()).expect("builds"),
    ];
    // The encoder only in the full test; `layouts` compares its results.
    for network in &networks[..if full() { 2 } else { 1 }] {
        assert_eq!(network.notes, [""; 0], "everything divides");
        let count = |op: &str| network.program.text.matches(&format!("stablehlo.{op}")).count();
        // Two edges in each direction for every convolution.
        assert_eq!(count("collective_permute"), 4 * count("convolution"));
        let compiled = engine.compile("blocks", &network.program).expect("compiles");
        let program = compiled.compiled().optimized_program().expect("an optimized program");
        let module = Module::decode(&program.format, &program.bytes).expect("a module");
        let moves = ["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"];
        let mut found: Vec<String> =
            module.instructions().map(|i| i.opcode).filter(|o| moves.iter().any(|m| o.starts_with(m))).collect();
        found.sort();
        found.dedup();
        assert_eq!(found, ["collective-permute"]);
        // The result stays sharded too: each device holds an eighth of everything except the weights.
        let memory = compiled.compiled().memory().expect("figures");
        let result = &network.program.results[0].ty;
        assert_eq!(memory.outputs as usize, result.bytes() / 8);
    }
}

/// Bytes computed on the devices equal those that the host computes from the same values, bit for bit, sharded or not.
#[needs(cpu)]
fn device_bytes_match_host_conversion() {
    let client = cpu(8);
    let engine = Engine::new(client, quick());
    let preset = Preset::named("nano").expect("a configuration");
    let config = VideoVaeConfig::from_json(preset.config("vae").expect("an autoencoder"))
        .and_then(|c| c.decoder())
        .expect("valid");
    // Small weights, so that most values are neither black nor white.
    let small = |shape: &[usize]| Tensor::F32(scattered(shape).to_f32() * 0.05);
    let builds = if full() { vec![one(), blocks()] } else { vec![blocks()] };
    for build in builds {
        // The second size does not divide, so that blocks are padded. The first size only in the full test.
        for sizes in [[1, 2, 8, 4], [1, 2, 5, 3]] {
            if sizes[2] == 8 && !full() {
                continue;
            }
            let program = |pixels| decoder_program(&config, sizes, pixels, &build).expect("builds");
            let values = results(&engine, &program(Pixels::Values), small).remove("video").expect("values").into_f32();
            let bytes = results(&engine, &program(Pixels::Bytes), small);
            let turned = values.mapv(|v| (v * 0.5 + 0.5).clamp(0.0, 1.0)).permuted_axes(vec![0, 2, 1, 3, 4]);
            let video = turned.index_axis(ndarray::Axis(0), 0).into_dimensionality().expect("four dimensions");
            let want = Frames::from_video(video).expect("a video");
            let got = bytes["video"].bytes().into_owned();
            assert_eq!(bytes["video"].shape()[1..], *want.data().shape());
            assert!(got == *want.data().as_slice().expect("dense"), "{sizes:?}: other bytes");
            let distinct = got.iter().collect::<std::collections::BTreeSet<_>>().len();
            assert!(distinct > 100, "{distinct} distinct bytes say little");
            assert_eq!(bytes["finite"], Tensor::from(ndarray::arr0(true)));
        }
    }
    let broken = |shape: &[usize]| match shape.len() {
        5 if shape[1] == config.latent_channels => Tensor::F32(ArrayD::from_elem(shape, f32::NAN)),
        _ => small(shape),
    };
    let program = decoder_program(&config, [1, 2, 5, 3], Pixels::Bytes, &blocks()).expect("builds");
    assert_eq!(results(&engine, &program, broken)["finite"], Tensor::from(ndarray::arr0(false)));
}
