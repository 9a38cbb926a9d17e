//! The noise of a request's stages: torch's numbers in the reference's order, without repetition.

use crate::support::official;
use crate::support::{Case, cases, cpu, needs, open, plain, request};
use ltx2::av::Av;
use ltx2::config;
use ltx2::hlo::DType;
use ltx2::pipeline::runner::Runner;
use ltx2::pipeline::stages::batch::{Batch, BatchNoise, DrawOrder, NoiseTensors};
use ltx2::pipeline::stages::packing::pack;
use ltx2::request::{Condition, Content, NoiseOrder, Placement, PositionSpan, Request, Shapes};
use ltx2::tensor::Tensor;
use ndarray::{ArrayD, Axis, s};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn case(folder: &str, name: &str) -> Case {
    cases(folder).into_iter().find(|c| c.name == format!("{folder}/{name}")).expect("a case")
}

fn draw(noise: &mut BatchNoise, runner: &mut Runner, request: &Request) -> NoiseTensors {
    draw_in(noise, runner, request, DrawOrder::default())
}

fn draw_in(noise: &mut BatchNoise, runner: &mut Runner, request: &Request, order: DrawOrder) -> NoiseTensors {
    let sizes = &runner.model.sizes;
    let shapes = Shapes::from_request(sizes, request).expect("legal sizes");
    noise.draw(&mut runner.executor, &shapes, sizes, order).expect("draws")
}

fn batch_noise(request: &Request) -> BatchNoise {
    Batch { asked: std::slice::from_ref(request), size: 1 }.noise()
}

/// Returns the number of leading values that two tensors share.
fn shared(a: &ArrayD<f32>, b: &ArrayD<f32>) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[needs(cpu)]
fn second_stage_noise_continues_the_torch_random_sequence() {
    let client = cpu(1);
    for case in cases("pipeline") {
        let mut runner = open(&client, case.model.to_str().expect("a path"), plain(DType::F32));
        let request = request(&case, &runner.model);
        let drawn = draw(&mut batch_noise(&request), &mut runner, &request);
        assert_eq!(Tensor::from(drawn.video.expect("frames")), case.outputs["noise.video"], "{}", case.name);
        assert_eq!(Tensor::from(drawn.audio.expect("sound")), case.outputs["noise.audio"], "{}", case.name);
        assert!(drawn.appended.is_none());
    }
    let case = case("official", "tiny_a_two_stage");
    let mut runner = open(&client, case.model.to_str().expect("a path"), plain(DType::F32));
    let second = official::request(&case, &runner.model);
    let first = Request { width: second.width / 2, height: second.height / 2, ..second.clone() };
    let mut noise = batch_noise(&second);
    draw(&mut noise, &mut runner, &first);
    let drawn = draw(&mut noise, &mut runner, &second);
    assert_eq!(Tensor::from(drawn.video.expect("frames")), case.outputs["stage_2.noise.video"]);
}

#[needs(cpu)]
fn device_noise_differs_per_tensor_stage_and_seed() {
    let client = cpu(1);
    let case = case("official", "tiny_a_two_stage");
    let mut runner = open(&client, case.model.to_str().expect("a path"), plain(DType::F32));
    let request = Request { noise: config::Noise::Device, ..official::request(&case, &runner.model) };
    let mut noise = batch_noise(&request);
    let [first, second] = [(); 2].map(|()| draw(&mut noise, &mut runner, &request));
    let again = draw(&mut batch_noise(&request), &mut runner, &request);
    assert_eq!((&again.video, &again.audio), (&first.video, &first.audio));
    let other = Request { seed: request.seed + 1, ..request.clone() };
    let other = draw(&mut batch_noise(&other), &mut runner, &request);
    let video = |drawn: &NoiseTensors| drawn.video.clone().expect("frames");
    let sound = |drawn: &NoiseTensors| drawn.audio.clone().expect("sound");
    for (what, a, b) in [
        ("stages, video", &video(&first), &video(&second)),
        ("stages, audio", &sound(&first), &sound(&second)),
        ("video and audio", &video(&first), &sound(&first)),
        ("seeds", &video(&first), &video(&other)),
    ] {
        assert!(shared(a, b) < 2, "{what} begin with {} numbers alike", shared(a, b));
    }
}

/// Compares the noise of both passes, as tokens, with that of diffusers' pipelines: from text, from a first frame, and
/// from a later frame.
#[needs(cpu)]
fn noise_order_matches_diffusers_pipelines() {
    let text = std::fs::read_to_string("tests/fixtures/noise/diffusers.json").expect("a fixture");
    let fixture: Value = serde_json::from_str(&text).expect("JSON");
    let number = |key: &str| fixture[key].as_u64().expect(key) as usize;
    let client = cpu(1);
    let of_pipeline = case("pipeline", "tiny_2_3_guided");
    for case in fixture["cases"].as_array().expect("cases") {
        let model = format!("tests/fixtures/models/{}", case["model"].as_str().expect("a name"));
        let mut runner = open(&client, &model, plain(DType::F32));
        let image = |placement| Condition {
            content: Content::Image { path: "none.png".into(), crf: 0 },
            placement,
            strength: 1.0,
        };
        let video = match case["images"].as_str().expect("a kind") {
            "text" => vec![],
            "first" => vec![image(Placement::First)],
            _ => vec![image(Placement::Appended { frame: 1, span: PositionSpan::Frame })],
        };
        let (width, height) = (number("width"), number("height"));
        let base = request(&of_pipeline, &runner.model);
        let first = Request {
            seed: number("seed") as u64,
            num_frames: number("num_frames"),
            noise_order: NoiseOrder::Diffusers,
            conditions: Av { video, audio: vec![] },
            ..Request { width, height, ..base }
        };
        let mut noise = batch_noise(&first);
        let second = Request { width: 2 * width, height: 2 * height, ..first.clone() };
        let dtype = if case["dtype"] == "bfloat16" { DType::BF16 } else { DType::F32 };
        for (refines, request) in [(false, &first), (true, &second)] {
            let order = DrawOrder::for_pass(request, refines, dtype);
            let drawn = draw_in(&mut noise, &mut runner, request, order);
            let want = &case["passes"][usize::from(refines)];
            let (video, audio) = (
                drawn.video.expect("frames").into_dimensionality().expect("latents"),
                drawn.audio.expect("sound").into_dimensionality().expect("latents"),
            );
            let mut tokens = pack(&runner.model.sizes, &video, &audio).expect("packs");
            if case["images"] == "first" {
                let own = tokens.video.shape()[1] / video.shape()[2];
                tokens.video = tokens.video.slice(s![.., own.., ..]).to_owned();
            }
            if let Some(appended) = drawn.appended {
                let appended = appended.into_dimensionality().expect("tokens");
                tokens.video =
                    ndarray::concatenate(Axis(1), &[tokens.video.view(), appended.view()]).expect("one width");
            }
            for (stream, tokens) in Av::NAMES.zip(tokens) {
                let what = format!("{case}, refines {refines}, {stream}");
                assert_eq!(serde_json::json!(tokens.shape()), want[stream]["shape"], "{what}");
                let bytes: Vec<u8> = tokens.iter().flat_map(|v| v.to_le_bytes()).collect();
                assert_eq!(want[stream]["sha256"], hex::encode(Sha256::digest(bytes)), "{what}");
            }
        }
    }
}
