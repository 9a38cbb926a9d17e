//! The noise of a request's stages: torch's numbers in the reference's order, and none of them twice.

use crate::support::official;
use crate::support::{Case, cases, cpu, needs, open, plain, request};
use ltx2::config;
use ltx2::hlo::DType;
use ltx2::nn::Layout;
use ltx2::pipeline::batch::{Batch, Drawn, Noise};
use ltx2::pipeline::runner::Runner;
use ltx2::request::{Request, Shapes};
use ltx2::tensor::Tensor;
use ndarray::ArrayD;

fn case(folder: &str, name: &str) -> Case {
    cases(folder).into_iter().find(|c| c.name == format!("{folder}/{name}")).expect("a case")
}

fn draw(noise: &mut Noise, runner: &mut Runner, request: &Request) -> Drawn {
    let sizes = &runner.model.sizes;
    let shapes = Shapes::of(sizes, request).expect("legal sizes");
    noise.draw(&mut runner.executor, &shapes, sizes).expect("draws")
}

fn of(request: &Request) -> Noise {
    Batch::new(std::slice::from_ref(request), &Layout::default()).expect("a batch").noise()
}

/// How many leading numbers two tensors share.
fn shared(a: &ArrayD<f32>, b: &ArrayD<f32>) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[needs(cpu)]
fn a_stage_draws_the_references_numbers_and_the_next_goes_on_behind_them() {
    let client = cpu(1);
    for case in cases("pipeline") {
        let mut runner = open(&client, case.model.to_str().expect("a path"), plain(DType::F32));
        let request = request(&case, &runner.model);
        let drawn = draw(&mut of(&request), &mut runner, &request);
        assert_eq!(Tensor::from(drawn.video), case.outputs["noise.video"], "{}", case.name);
        assert_eq!(Tensor::from(drawn.audio), case.outputs["noise.audio"], "{}", case.name);
        assert!(drawn.appended.is_none());
    }
    let case = case("official", "tiny_a_two_stage");
    let mut runner = open(&client, case.model.to_str().expect("a path"), plain(DType::F32));
    let second = official::request(&case, &runner.model);
    let first = Request { width: second.width / 2, height: second.height / 2, ..second.clone() };
    let mut noise = of(&second);
    draw(&mut noise, &mut runner, &first);
    let drawn = draw(&mut noise, &mut runner, &second);
    assert_eq!(Tensor::from(drawn.video), case.outputs["stage_2.noise.video"]);
}

#[needs(cpu)]
fn a_device_draws_other_numbers_for_each_tensor_and_stage() {
    let client = cpu(1);
    let case = case("official", "tiny_a_two_stage");
    let mut runner = open(&client, case.model.to_str().expect("a path"), plain(DType::F32));
    let request = Request { noise: config::Noise::Device, ..official::request(&case, &runner.model) };
    let mut noise = of(&request);
    let [first, second] = [(); 2].map(|()| draw(&mut noise, &mut runner, &request));
    let again = draw(&mut of(&request), &mut runner, &request);
    assert_eq!((&again.video, &again.audio), (&first.video, &first.audio));
    let other = Request { seed: request.seed + 1, ..request.clone() };
    let other = draw(&mut of(&other), &mut runner, &request);
    for (what, a, b) in [
        ("stages, video", &first.video, &second.video),
        ("stages, audio", &first.audio, &second.audio),
        ("video and audio", &first.video, &first.audio),
        ("seeds", &first.video, &other.video),
    ] {
        assert!(shared(a, b) < 2, "{what} begin with {} numbers alike", shared(a, b));
    }
}
