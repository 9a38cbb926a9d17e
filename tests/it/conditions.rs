//! Fixed audio: tokens of the audio stream with known clean latents, compared with the transformer on tokens with
//! separate noise levels.

use std::path::Path;

use ltx2::av::Av;
use ltx2::hlo::DType;
use ltx2::models::transformer::CrossModalTimestep;
use ltx2::pipeline::output::tensors;
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pipeline::runner::Runner;
use ltx2::pipeline::stages::packing::pack;
use ltx2::request::{Condition, Content, Placement, Request};
use ltx2::tensor::Tensor;
use ndarray::{Array1, Array3, Axis, Ix4, Ix5, s};

use crate::support::{Case, cases, cpu, dumped, dumping, generate, needs, open, plain, quick, request, run_case};

/// Audio tokens of the case inside the span; the case has 6 tokens of 0.04 s, the first of 0.01 s.
const KEPT: std::ops::Range<usize> = 2..4;

fn kept(path: &Path, strength: f32) -> Av<Vec<Condition>> {
    let content = Content::AudioLatents { path: path.into() };
    let placement = Placement::Span { start: 0.03, end: 0.14 };
    Av { video: Vec::new(), audio: vec![Condition { content, placement, strength }] }
}

/// Returns dumped latents as normalised tokens.
fn tokens(runner: &Runner, video: &Tensor, audio: &Tensor) -> Av<Array3<f32>> {
    let mut video = video.to_f32().into_dimensionality::<Ix5>().expect("five axes");
    runner.model.statistics.video.normalize(&mut video, 1).expect("the model's channels");
    let audio = audio.to_f32().into_dimensionality::<Ix4>().expect("four axes");
    let mut packed = pack(&runner.model.sizes, &video, &audio).expect("a request's sizes");
    runner.model.statistics.audio.normalize(&mut packed.audio, 2).expect("the model's channels");
    packed
}

fn distance(a: &Array3<f32>, b: &Array3<f32>) -> f32 {
    (a - b).iter().fold(0.0, |most, x| most.max(x.abs()))
}

fn plain_case() -> Case {
    cases("pipeline").into_iter().find(|c| c.name.ends_with("/tiny_a_plain")).expect("a case")
}

/// In `make test`, `given_video` compares fixed tokens of both streams with the reference.
#[needs(cpu, full)]
fn fixed_audio_is_kept_and_other_tokens_depend_on_seed() {
    let (client, case) = (cpu(8), plain_case());
    let mut runner = open(&client, case.model.to_str().expect("UTF-8"), plain(DType::F32));
    let first = request(&case, &runner.model);
    let before = generate(&mut runner, &first, &dumping(None));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("before.safetensors");
    tensors::write(&path, &before.dump).expect("writes");
    let other = Request { seed: first.seed + 1, ..first };
    let free = generate(&mut runner, &other, &dumping(None));
    let held = Request { conditions: kept(&path, 1.0), ..other };
    let held = [generate(&mut runner, &held, &dumping(None)), generate(&mut runner, &held, &dumping(Some(1)))];
    assert_eq!(dumped(&held[0], "latents.audio"), dumped(&held[1], "latents.audio"), "in one call and in two");
    let [before, free, held] = [&before, &free, &held[0]]
        .map(|made| tokens(&runner, dumped(made, "latents.video"), dumped(made, "latents.audio")));
    let part = |t: &Av<Array3<f32>>, kept: bool| {
        let of = (0..6).filter(|n| KEPT.contains(n) == kept).collect::<Vec<_>>();
        t.audio.select(Axis(1), &of)
    };
    assert!(distance(&part(&held, true), &part(&before, true)) < 1e-6);
    assert!(distance(&part(&held, false), &part(&before, false)) > 0.1, "another seed");
    // Both streams attend to the fixed audio.
    assert!(distance(&part(&held, false), &part(&free, false)) > 1e-4);
    assert!(distance(&held.video, &free.video) > 1e-4);
}

/// The expected result of a single step is computed with one transformer call and two blends of the fixed tokens.
#[needs(cpu)]
fn fixed_audio_tokens_have_a_separate_noise_level() {
    let (sigma, strength) = (0.7_f32, 0.75_f32);
    let (client, case) = (cpu(8), plain_case());
    let mut runner = open(&client, case.model.to_str().expect("UTF-8"), plain(DType::F32));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sound.safetensors");
    let sound = Tensor::from(&case.outputs["latents.audio"].to_f32() * 1.5);
    tensors::write(&path, &[("latents.audio".into(), sound.clone())]).expect("writes");
    let cross = CrossModalTimestep::Own;
    let request = request(&case, &runner.model);
    let request = Request { conditions: kept(&path, strength), sigmas: vec![sigma, 0.0], cross, ..request };
    let made = generate(&mut runner, &request, &dumping(None));

    let embeds = dumped(&made, "prompt_embeds").clone();
    let given = [("prompt_embeds".into(), embeds), ("attention_mask".into(), case.outputs["attention_mask"].clone())];
    let build = plain(DType::F32);
    let mut case = case;
    case.scalars.clear();
    let mut text = run_case(&client, ProgramKind::Connectors, &case, given.into(), quick(), &build);

    let noise = |name: &str| dumped(&made, name).to_f32();
    let video = noise("noise.video").into_dimensionality::<Ix5>().expect("five axes");
    let audio = noise("noise.audio").into_dimensionality::<Ix4>().expect("four axes");
    let Av { video: x_video, audio: mut x_audio } =
        pack(&runner.model.sizes, &video, &audio).expect("a request's sizes");
    let clean = tokens(&runner, dumped(&made, "latents.video"), &sound).audio;
    let mask = 1.0 - strength;
    let blend = |x: &mut Array3<f32>| {
        let mut own = x.slice_mut(s![.., KEPT, ..]);
        own.zip_mut_with(&clean.slice(s![.., KEPT, ..]), |x, c| *x = *x * mask + c * strength);
    };
    blend(&mut x_audio);
    let part = |n: usize| if KEPT.contains(&n) { mask } else { 1.0 };
    let levels = Array3::from_shape_fn((1, 6, 1), |(_, n, _)| sigma * part(n));
    let mut take = |name: &str| text.remove(name).expect("an output");
    let inputs = [
        ("hidden_states".to_string(), Tensor::from(x_video.clone())),
        ("audio_hidden_states".into(), x_audio.clone().into()),
        ("encoder_hidden_states".into(), take("video")),
        ("audio_encoder_hidden_states".into(), take("audio")),
        ("timestep".into(), Array1::from(vec![1000.0 * sigma]).into()),
        ("audio_timestep".into(), (&levels.index_axis(Axis(2), 0) * 1000.0).into()),
    ];
    let number = |name: &str, value: f64| (name.to_string(), serde_json::json!(value as usize));
    let (_, _, frames, height, width) = video.dim();
    case.scalars = [("num_frames", frames), ("height", height), ("width", width), ("audio_num_frames", 6)]
        .into_iter()
        .map(|(name, n)| number(name, n as f64))
        .collect();
    case.scalars.insert("fps".into(), serde_json::json!(request.frame_rate));
    let velocity = run_case(&client, ProgramKind::Transformer, &case, inputs.into(), quick(), &build);
    let velocity = |name: &str| velocity[name].to_f32().into_dimensionality::<ndarray::Ix3>().expect("three axes");
    let want_video = x_video - velocity("video") * sigma;
    let mut want_audio = x_audio - velocity("audio") * &levels;
    blend(&mut want_audio);

    let Av { video, audio } = tokens(&runner, dumped(&made, "latents.video"), dumped(&made, "latents.audio"));
    assert!(distance(&video, &want_video) < 1e-4, "{}", distance(&video, &want_video));
    assert!(distance(&audio, &want_audio) < 1e-4, "{}", distance(&audio, &want_audio));
}
