//! The denoising loop marks the tokens selected by its mask: those of the first frame and of generated keyframes.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::support::{cases, cpu, needs, plain, quick, relative_l2};
use ltx2::av::Av;
use ltx2::hlo::DType;
use ltx2::models::Network;
use ltx2::models::transformer::TransformerConfig;
use ltx2::nn::Heads;
use ltx2::nn::rope::{grid, table};
use ltx2::pipeline::programs::executor::{Executor, Inputs};
use ltx2::runtime::Engine;
use ltx2::sampling::denoise::{DenoiseShape, denoise, prepare};
use ltx2::sampling::guidance::Branch;
use ltx2::tensor::Tensor;
use ltx2::weights::{Component, ModelSource, Overrides};
use ndarray::{Array1, Array2, Array4, Ix3, Ix4, arr0, s};

/// Runs a program on known inputs and returns its results.
fn run(executor: &mut Executor, network: &Network, known: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let program = executor.prepare("part", network).expect("compiles");
    let weights: Vec<&str> = network.params.iter().map(|p| p.name.as_str()).collect();
    let names = program.arguments().iter().map(|a| a.name.clone()).filter(|name| !weights.contains(&name.as_str()));
    let given: Vec<_> = names.map(|name| (name.clone(), known[&name].clone())).collect();
    let inputs = executor.give_all(&program, Inputs::default(), given).expect("uploads");
    let outputs = executor.run(&program, &inputs).expect("runs");
    network.program.results.iter().map(|r| (r.name.clone(), outputs.tensor(&r.name).expect("a result"))).collect()
}

/// One Euler step equals the latents plus the reference's velocity times the change of the noise level.
#[needs(cpu)]
fn euler_step_with_marked_keyframes_matches_reference() {
    let case = cases("transformer").into_iter().find(|c| c.name.ends_with("tiny_v2_5_slots")).expect("a case");
    let source = ModelSource::open(case.model.to_str().expect("a path"), &Overrides::default()).expect("a model");
    let json = source.config(Component::Transformer).expect("a configuration");
    let c = TransformerConfig::from_json(&json).expect("valid");
    let mut executor = Executor::new(Engine::new(cpu(1), quick()), Arc::new(source));

    let three = |name: &str| case.inputs[name].to_f32().into_dimensionality::<Ix3>().expect("three axes");
    let latents = Av { video: "hidden_states", audio: "audio_hidden_states" }.map(three);
    let text = Av { video: "encoder_hidden_states", audio: "audio_encoder_hidden_states" }.map(three);
    let tokens = latents.as_ref().map(|x| x.dim().1);
    let channels = text.as_ref().map(|x| x.dim().2);
    let mut shape = DenoiseShape::plain(vec![Branch::Conditional], tokens, text.video.dim().1, channels);
    shape.keyframes = true;

    let sigma = case.inputs["sigma"].to_f32()[[0]] / 1000.0;
    let next = 0.25 * sigma;
    let sigmas = Array1::from_shape_fn(257, |i| if i == 0 { sigma } else { next });
    let mask = case.inputs["video_keyframes_mask"].to_f32().into_shape_with_order((1, tokens.video)).expect("a row");
    assert_eq!(mask.sum(), 45.0, "the first frame and two slots of 15 tokens, and not the second frame");
    let mut known = BTreeMap::from([
        ("begin".to_string(), Tensor::from(arr0(0_i32))),
        ("end".to_string(), arr0(1_i32).into()),
        ("sigmas".to_string(), sigmas.into()),
        ("scales".to_string(), Array2::from_shape_fn((2, 4), |(_, k)| [1.0_f32, 0.0, 1.0, 0.0][k]).into()),
        ("keyframes.video".to_string(), mask.into()),
    ]);
    for (name, (latents, text)) in Av::NAMES.zip(latents.as_ref().zip(text)) {
        known.insert(format!("latents.{name}"), latents.clone().into());
        known.insert(format!("text.{name}"), text.insert_axis(ndarray::Axis(0)).into());
    }
    let coords = |name: &str| case.inputs[name].to_f32().into_dimensionality::<Ix4>().expect("four axes");
    let time = |x: &Array4<f32>| grid(x.slice(s![.., 0..1, .., ..]), &[20.0], DType::F32);
    let (video, audio) = (coords("video_coords"), coords("audio_coords"));
    let heads = |count: usize, dim: usize| Heads { count, dim };
    for (name, positions, heads) in [
        ("rope.video", grid(video.view(), &[20.0, 2048.0, 2048.0], DType::F32), heads(2, 10)),
        ("rope.audio", time(&audio), heads(2, 6)),
        ("rope.cross_video", time(&video), heads(2, 6)),
        ("rope.cross_audio", time(&audio), heads(2, 6)),
    ] {
        let table = table(positions.view(), heads, 10000.0, true);
        known.extend([(format!("{name}.cos"), table.cos.into()), (format!("{name}.sin"), table.sin.into())]);
    }

    let build = plain(DType::F32);
    let prepared = run(&mut executor, &prepare(&c, &shape, &build).expect("builds"), &known);
    known.extend(prepared);
    let made = run(&mut executor, &denoise(&c, &shape, &build).expect("builds"), &known);
    for (name, latents) in Av::NAMES.zip(latents) {
        let velocity = case.outputs[name].to_f32().into_dimensionality::<Ix3>().expect("three axes");
        let want = latents + velocity * (next - sigma);
        let distance = relative_l2(&made[&format!("latents.{name}")], &Tensor::from(want));
        eprintln!("{name}: {distance:.1e}");
        assert!(distance <= 1e-5, "{name}: {distance:e}");
    }
}
