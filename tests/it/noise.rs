//! The noise of a request's stages: torch's numbers in the reference's order, and none of them twice.

use ltx2::request::{Request, Shapes};
use crate::support::{Case, cases, cpu, needs, open, request};
use ltx2::config;
use ltx2::nn::Layout;
use ltx2::pipeline::batch::{Batch, Drawn, Noise};
use ltx2::pipeline::executor::Executor;
use ltx2::pipeline::model::Model;
use ltx2::tensor::Tensor;
use ndarray::ArrayD;

fn case(folder: &str, name: &str) -> Case {
    cases(folder).into_iter().find(|c| c.name == format!("{folder}/{name}")).expect("a case")
}

fn draw(noise: &mut Noise, models: &Model, executor: &mut Executor, request: &Request) -> Drawn {
    let shapes = Shapes::of(&models.sizes, request).expect("legal sizes");
    noise.draw(executor, &shapes, &models.sizes).expect("draws")
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
        let (models, mut executor) = open(&client, case.model.to_str().expect("a path"));
        let request = request(&case, &models);
        let drawn = draw(&mut of(&request), &models, &mut executor, &request);
        assert_eq!(Tensor::from(drawn.video), case.outputs["noise.video"], "{}", case.name);
        assert_eq!(Tensor::from(drawn.audio), case.outputs["noise.audio"], "{}", case.name);
        assert!(drawn.appended.is_none());
    }
    let case = case("stages", "two_stage");
    let (models, mut executor) = open(&client, case.model.to_str().expect("a path"));
    let second = request(&case, &models);
    let first = Request { width: second.width / 2, height: second.height / 2, ..second.clone() };
    let mut noise = of(&second);
    draw(&mut noise, &models, &mut executor, &first);
    let drawn = draw(&mut noise, &models, &mut executor, &second);
    assert_eq!(Tensor::from(drawn.video), case.outputs["stage_2.noise.video"]);
}

#[needs(cpu)]
fn a_device_draws_other_numbers_for_each_tensor_and_stage() {
    let client = cpu(1);
    let case = case("stages", "two_stage");
    let (models, mut executor) = open(&client, case.model.to_str().expect("a path"));
    let request = Request { noise: config::Noise::Device, ..request(&case, &models) };
    let mut noise = of(&request);
    let [first, second] = [(); 2].map(|()| draw(&mut noise, &models, &mut executor, &request));
    let again = draw(&mut of(&request), &models, &mut executor, &request);
    assert_eq!((&again.video, &again.audio), (&first.video, &first.audio));
    let other = Request { seed: request.seed + 1, ..request.clone() };
    let other = draw(&mut of(&other), &models, &mut executor, &request);
    for (what, a, b) in [
        ("stages, video", &first.video, &second.video),
        ("stages, audio", &first.audio, &second.audio),
        ("video and audio", &first.video, &first.audio),
        ("seeds", &first.video, &other.video),
    ] {
        assert!(shared(a, b) < 2, "{what} begin with {} numbers alike", shared(a, b));
    }
}
