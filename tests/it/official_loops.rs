//! Requests beyond one plain stage against the official loops, steps and guider: image conditioning, two stages, the
//! second-order sampler (scripts/oracle/cases_stages.py).

use ltx2::av::Av;
use ltx2::request::{Condition, Content, Placement, RefinePass, Request, Shapes};
use std::ops::ControlFlow;
use std::rc::Rc;

use crate::support::{self, Case, cases, cpu, dumped, dumping, generate, needs, plain, request};
use ltx2::hlo::DType;
use ltx2::models::transformer::CrossTimestep;

use ltx2::pipeline::executor::Executor;
use ltx2::pipeline::model::Model;
use ltx2::pipeline::runner::Runner;
use ltx2::pjrt::Client;
use ltx2::runtime::Engine;
use ltx2::sampling::sigmas;
use ltx2::sampling::{AnySampler, Euler, EulerAncestral, Evaluation, Res2s, Sampler, StreamState};
use ltx2::tensor::Tensor;
use ltx2::weights::{ModelSource, Overrides};
use serde_json::Value;

const IMAGE: &str = "tests/fixtures/images/shapes.png";

fn scalar<'a>(case: &'a Case, name: &str) -> &'a Value {
    case.scalars.get(name).unwrap_or(&Value::Null)
}

/// The model of every case, with the upsampler of those that have one.
fn open(client: &Client) -> Runner {
    let upsampler = Some("tests/fixtures/models/upsampler_rational".to_string());
    let overrides = Overrides { upsampler, ..Overrides::default() };
    let source = Rc::new(ModelSource::open("tests/fixtures/models/tiny_a", &overrides).expect("a model"));
    let executor = Executor::new(Engine::new(client.clone(), support::quick()), source.clone());
    Runner::new(Model::open(&source).expect("complete"), executor, plain(DType::F32))
}

fn staged(case: &Case, model: &Model) -> Request {
    let s = |name: &str| scalar(case, name);
    let flag = |name: &str| s(name).as_bool().unwrap_or_default();
    let given = s("images").as_array().into_iter().flatten().map(|image| {
        let frame = image["frame"].as_u64().expect("a frame") as usize;
        let strength = image["strength"].as_f64().expect("a strength") as f32;
        let appended = frame != 0 || flag("keyframes");
        Condition {
            content: Content::Image { path: IMAGE.into(), crf: 0 },
            placement: if appended { Placement::Appended { frame } } else { Placement::First },
            strength,
        }
    });
    let refine = s("upsampler").is_string().then(|| RefinePass {
        sigmas: vec![0.909375, 0.725, 0.421875, 0.0],
        keeps_audio: flag("keeps_audio"),
        adain: 0.0,
        tone_map: 0.0,
    });
    let second_order = s("sampler") == "res_2s";
    let sampler: AnySampler = if second_order { Res2s.into() } else { Euler.into() };
    let cross = if s("cross_timestep") == "cross" { CrossTimestep::Cross } else { CrossTimestep::Own };
    let mut request = Request {
        conditions: Av { video: given.collect(), audio: Vec::new() },
        refine,
        sampler,
        cross,
        ..request(case, model)
    };
    if second_order {
        let shapes = Shapes::of(&model.sizes, &request.passes().0).expect("legal sizes");
        let tokens = shapes.own_tokens();
        request.sigmas = sigmas::official(request.sigmas.len() - 1, tokens).expect("a schedule");
    }
    request
}

#[needs(cpu)]
fn every_case_agrees_with_the_official_loops() {
    let client = cpu(8);
    let all = cases("stages");
    assert_eq!(all.len(), 7);
    let mut runner = open(&client);
    let compiles =
        |executor: &Executor| executor.engine().statistics().values().map(|s| s.compiles + s.cache_hits).sum::<usize>();
    for case in all {
        let request = staged(&case, &runner.model);
        let made = generate(&mut runner, &request, &dumping(Some(2)));
        for name in case.outputs.keys() {
            let distance = case.distance(name, dumped(&made, name));
            eprintln!("{} {name}: {distance:.1e}", case.name);
            assert!(distance <= 1e-4, "{} {name}: {distance:e}", case.name);
        }
        // A request with other words and another seed compiles nothing.
        let before = compiles(&runner.executor);
        let other = Request { prompt: "something else".into(), seed: 99, ..request };
        let again = generate(&mut runner, &other, &dumping(None));
        assert_ne!(dumped(&again, "latents.video"), dumped(&made, "latents.video"));
        assert_eq!(compiles(&runner.executor), before, "{}", case.name);
    }
}

/// Tokens of strength 1 keep the conditioning latents, to the bit, after every step.
#[needs(cpu)]
fn tokens_of_full_strength_stay() {
    let client = cpu(8);
    let all = cases("stages");
    let case = all.iter().find(|c| c.name.ends_with("/image")).expect("a case");
    let mut runner = open(&client);
    let request = staged(case, &runner.model);
    let whole = generate(&mut runner, &request, &dumping(None));
    let more =
        Request { sigmas: sigmas::official(5, sigmas::OFFICIAL_TOKENS).expect("a schedule"), seed: 8, ..request };
    let other = generate(&mut runner, &more, &dumping(Some(1)));
    let first = |t: &Tensor| t.to_f32().index_axis(ndarray::Axis(2), 0).to_owned();
    let [a, b] = [&whole, &other].map(|made| first(dumped(made, "latents.video")));
    assert_eq!(a, b);
    assert_ne!(dumped(&whole, "latents.video"), dumped(&other, "latents.video"));
}

/// Ancestral steps are Euler's where no noise is drawn anew, and go elsewhere where it is, by a seed of its own or the
/// request's.
#[needs(cpu)]
fn ancestral_steps_differ_from_euler_s_by_their_noise() {
    let client = cpu(8);
    let all = cases("stages");
    let case = all.iter().find(|c| c.name.ends_with("/image")).expect("a case");
    let mut runner = open(&client);
    let request = staged(case, &runner.model);
    let mut latents = |sampler: AnySampler| {
        let made = generate(&mut runner, &Request { sampler, ..request.clone() }, &dumping(None));
        dumped(&made, "latents.video").to_f32()
    };
    let largest = |a: &ndarray::ArrayD<f32>, b: &ndarray::ArrayD<f32>| {
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    };
    let euler = latents(Euler.into());
    let without = latents(EulerAncestral { eta: 0.0, noise_seed: None }.into());
    assert!(largest(&euler, &without) < 1e-5, "{}", largest(&euler, &without));
    let with = latents(EulerAncestral { eta: 1.0, noise_seed: None }.into());
    assert!(largest(&euler, &with) > 1e-2);
    let seed = Some(request.seed + 10_000);
    assert_eq!(latents(EulerAncestral { eta: 1.0, noise_seed: seed }.into()), with);
    // The image's tokens stay what they are.
    let first = |x: &ndarray::ArrayD<f32>| x.index_axis(ndarray::Axis(2), 0).to_owned();
    assert!(largest(&first(&with), &first(&euler)) < 1e-5);
}

/// A sampler whose tables are not as long as it says, or longer than the programs'.
#[derive(Debug)]
struct Long {
    evaluations: usize,
}

impl Sampler for Long {
    fn evaluations(&self, _steps: usize) -> usize {
        self.evaluations
    }

    fn step(&self, at: &Evaluation, stream: &StreamState) -> Vec<ltx2::hlo::Value> {
        vec![stream.latents * at.change()]
    }
}

#[needs(cpu)]
fn a_sampler_s_tables_are_as_long_as_its_evaluations() {
    let client = cpu(8);
    let all = cases("stages");
    let mut runner = open(&client);
    let request = staged(&all[0], &runner.model);
    let steps = request.sigmas.len() - 1;
    let cases = [
        (257, format!("Long {{ evaluations: 257 }}: {steps} steps are 257 evaluations, there may be at most 256")),
        (
            2 * steps,
            format!(
                "Long {{ evaluations: {n} }}: {steps} steps are {n} evaluations, its schedule has {} levels and 0 rows, \
                 not {} and 0 of 0",
                steps + 1,
                2 * steps + 1,
                n = 2 * steps
            ),
        ),
    ];
    for (evaluations, want) in cases {
        let request = Request { sampler: Long { evaluations }.into(), ..request.clone() };
        let error = runner.generate(&request, &dumping(None), &mut |_, _, _| ControlFlow::Continue(()));
        assert_eq!(error.err().expect("refused").to_string(), want);
    }
}
