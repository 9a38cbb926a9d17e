//! Guidance that changes from step to step, guiders and samplers, compared with Lightricks' pipeline after every step,
//! and for some requests in frames and samples (scripts/oracle/cases_guidance_steps.py). Without cached programs a test
//! takes up to a minute on one core: each request is a separate program.

use std::sync::Arc;

use ltx2::av::Av;
use ltx2::hlo::{Builder, DType, Type, Value};
use ltx2::models::transformer::TransformerConfig;
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pipeline::runner::Runner;
use ltx2::request::{Request, Shapes};
use ltx2::runtime::Engine;
use ltx2::sampling::GuidanceSteps;
use ltx2::sampling::denoise::denoise;
use ltx2::sampling::guidance::{Branch, MaskedStatistics, RescaleExtent, StreamGuidance, combine};
use ltx2::sampling::guiders::Guider;
use ltx2::tensor::Tensor;
use ltx2::weights::{Component, ModelSource, Overrides};
use ndarray::Array3;

use crate::layouts::build;
use crate::support::official::{cases_of, dumping_steps, limit_of, requests};
use crate::support::passes::Pass;
use crate::support::thresholds::row;
use crate::support::{cpu, dumped, dumping, full, generate, needs, open, plain, quick, relative_l2};

const COMPONENT: &str = "official_by_step";

fn agrees(model: &str, count: usize, names: &[&str]) {
    let (all, mut runner) = cases_of(&cpu(8), COMPONENT, model);
    // The reference samples come from diffusers' vocoder.
    runner.model.configs = runner.model.configs.with_vocoder_clamp(false);
    let (case, limit) = (&all[0], row(&all[0].name).f32());
    let asked = requests(case, &runner.model);
    assert_eq!((all.len(), asked.len()), (1, count));
    for (prefix, request) in asked {
        if !full() && !names.contains(&prefix.trim_end_matches('.')) {
            continue;
        }
        let made = generate(&mut runner, &request, &dumping_steps());
        let own = case.outputs.keys().map(|name| name.trim_end_matches(".strided"));
        let own = own.filter_map(|name| Some((name, name.strip_prefix(&prefix)?)));
        let (mut largest, mut steps) = (0.0f64, 0);
        for (name, dumped_name) in own {
            let distance = case.within(name, dumped(&made, dumped_name), limit_of(name, limit));
            (largest, steps) = (largest.max(distance), steps + usize::from(name.contains("latents")));
        }
        assert_eq!(steps, 2 * (request.sigmas.len() - 1), "{prefix}: tensors of steps");
        eprintln!("{model} {prefix} at most {largest:.1e}");
    }
}

/// The streams skip different steps, and all guidance branches are used. All guiders and samplers run in the full test.
#[needs(cpu, full)]
fn ltx2_0_guidance_steps_match_lightricks() {
    agrees("tiny_a", 6, &[]);
}

#[needs(cpu)]
fn ltx2_3_guidance_steps_match_lightricks() {
    agrees("tiny_2_3", 8, &["by_sigma"]);
}

fn compiles(executor: &Executor) -> usize {
    executor.engine().statistics().values().map(|s| s.compiles + s.cache_hits).sum()
}

/// Returns a request of a model's case by name.
fn requested(model: &str, name: &str) -> (Runner, Request) {
    let (all, runner) = cases_of(&cpu(8), COMPONENT, model);
    let mut asked = requests(&all[0], &runner.model);
    let at = asked.iter().position(|(prefix, _)| *prefix == format!("{name}.")).expect("a request");
    (runner, asked.swap_remove(at).1)
}

/// Changed skip intervals (with the same sets of branches), sigma bounds and guidance scales are inputs of the same
/// program.
#[needs(cpu)]
fn changed_skips_and_sigma_bounds_reuse_the_program() {
    let (mut runner, request) = requested("tiny_a", "skip_apart");
    let made = generate(&mut runner, &request, &dumping(None));
    let before = compiles(&runner.executor);
    let every = |skip| GuidanceSteps { skip, ..GuidanceSteps::default() };
    let other = Request { guidance_steps: Av { video: every(4), audio: every(1) }, ..request.clone() };
    let again = generate(&mut runner, &other, &dumping(None));
    assert_ne!(dumped(&again, "latents.video"), dumped(&made, "latents.video"));
    assert_eq!(compiles(&runner.executor), before);

    let (mut runner, request) = requested("tiny_2_3", "by_sigma");
    let made = generate(&mut runner, &request, &dumping(None));
    let before = compiles(&runner.executor);
    let mut other = request.clone();
    other.guidance_steps.video.by_sigma[1].sigma = 0.9;
    other.guidance_steps.video.by_sigma[1].scales.cfg = 2.0;
    other.guidance_steps.audio.by_sigma[1].sigma = 0.85;
    let again = generate(&mut runner, &other, &dumping(None));
    assert_ne!(dumped(&again, "latents.video"), dumped(&made, "latents.video"));
    assert_eq!(compiles(&runner.executor), before);
}

/// A step that reuses the predictions of both streams has no matmul. A step that reuses those of one stream has fewer
/// matmuls than a full step.
#[needs(nothing)]
fn step_skipped_in_both_streams_has_no_matmul() {
    let source = Arc::new(ModelSource::open("tests/fixtures/models/tiny_a", &Overrides::default()).expect("a model"));
    let c =
        TransformerConfig::from_json(&source.config(Component::Transformer).expect("a configuration")).expect("valid");
    let model = OpenModel::open(&source).expect("complete");
    let set = ["guidance.video.cfg=3", "guidance.video.skip=1", "guidance.audio.skip=2"];
    let size = ["request.width=64", "request.height=64", "request.num_frames=9", "request.max_sequence_length=64"];
    let config = ltx2::Config::load("ltx2", set.into_iter().chain(size)).expect("a configuration");
    let request = model.request(&config, &config.jobs().expect("a job")[0]).expect("legal");
    let shapes = Shapes::from_request(&model.sizes, &request).expect("legal sizes");
    let shape = request.denoise_shape(&model.sizes, &shapes, 1);
    let text = denoise(&c, &shape, &plain(DType::F32)).expect("builds").program.text;
    let choice = text.split("\"stablehlo.case\"").nth(1).expect("a choice");
    let bodies = choice.split("}) : (tensor<i32>)").next().expect("its end");
    let products: Vec<usize> = bodies.split("}, {\n").map(|body| body.matches("dot_general").count()).collect();
    let [both, video, audio, none] = products[..] else { panic!("{products:?}") };
    assert!(both > video.max(audio) && video.min(audio) > 0 && none == 0, "{products:?}");
    // If guidance does not change from step to step, there is no conditional.
    let same = Request { guidance_steps: Av::default(), ..request };
    let shape = same.denoise_shape(&model.sizes, &shapes, 1);
    let text = denoise(&c, &shape, &plain(DType::F32)).expect("builds").program.text;
    assert!(!text.contains("stablehlo.case") && !text.contains("tensor<257x2x4xf32>"));
}

/// Guidance branches are sharded over devices, and a set of branches that does not divide evenly is padded.
#[needs(cpu, full)]
fn sharded_guidance_branches_match_single_device() {
    const MODEL: &str = "tests/fixtures/models/tiny_a";
    let (mut runner, request) = requested("tiny_a", "skip_apart");
    let source = ModelSource::open(MODEL, &Overrides::default()).expect("a model");
    let pass = Pass::new(&source, &runner.model, &request);
    let one = plain(DType::F32);
    let prepared = pass.prepared(&mut runner.executor, &one);
    let whole = pass.denoised(&mut runner.executor, &one, prepared.clone());
    for (layout, mesh) in [("cfg", "cfg=2"), ("cfg-ulysses", "cfg=2,context=2")] {
        let build = build(layout, mesh, 8);
        let mut sharded = open(&cpu(8), MODEL, build.clone());
        let got = pass.denoised(&mut sharded.executor, &build, prepared.clone());
        for ((stream, got), want) in Av::NAMES.zip(got.as_ref()).zip(whole.as_ref()) {
            let distance = relative_l2(got, want);
            eprintln!("{layout} {mesh} {stream}: {distance:.1e}");
            assert!(distance <= 1e-5, "{layout} {mesh} {stream}: {distance:e}");
        }
    }
}

/// Compares with the reference's values for two tokens at scale 3, with a single sample and with a sample in a padded
/// batch.
#[needs(cpu)]
fn guiders_match_reference() {
    let engine = Engine::new(cpu(1), quick());
    let apg = Guider::Apg { eta: 0.5, threshold: 1.0 };
    let legacy = Guider::LegacyApg { eta: 0.5, threshold: 1.0, momentum: 0.5 };
    let wanted = [
        (Guider::Cfg, [1.0, 2.0, 2.0, -4.0]),
        (Guider::CfgStar, [0.8, 1.6, 1.2, -4.4]),
        (apg, [0.2, 0.4, 0.2, -1.4]),
        (legacy, [0.3, 0.6, 0.3, -2.1]),
    ];
    let [c, u] = [[1.0f32, 2.0, 3.0, -1.0], [0.5, 1.0, 2.0, 1.0]];
    for dims in [[1, 2, 2], [2, 3, 2]] {
        let b = Builder::new("guiders");
        let [conditional, negative] = ["c", "u"].map(|name| b.argument(name, Type::new(DType::F32, dims)));
        let statistics = MaskedStatistics::new(&b, &conditional, [1, 2, 2]);
        let results: Vec<(String, Value)> = wanted
            .iter()
            .map(|(guider, _)| {
                let row = [&[3.0, 0.0, 1.0, 0.0][..], &guider.parameters()].concat();
                let scales = b.constant(&[row.len()], &row);
                let branches = [Branch::Conditional, Branch::Negative];
                let rescale = RescaleExtent::PerSample;
                let guidance =
                    StreamGuidance { branches: &branches, guider: guider.kind(), rescale, statistics: &statistics };
                let state = (guider.kind() == legacy.kind()).then(|| &conditional * 0.0);
                let (guided, _) = combine(&guidance, &[conditional.clone(), negative.clone()], &scales, state.as_ref());
                (format!("{guider:?}"), guided - &conditional)
            })
            .collect();
        let named: Vec<(&str, &Value)> = results.iter().map(|(name, y)| (name.as_str(), y)).collect();
        let executable = engine.compile("guiders", &b.finish(&named).expect("builds")).expect("compiles");
        // The padding has large values.
        let padded = |values: [f32; 4]| {
            Tensor::from(Array3::from_shape_fn(dims, |(i, j, k)| if i == 0 && j < 2 { values[2 * j + k] } else { 9.0 }))
        };
        let given = [("c", c), ("u", u)]
            .map(|(name, v)| (name, engine.upload(&executable, name, &padded(v)).expect("uploads")));
        let find = |name: &str| given.iter().find(|(n, _)| *n == name).map(|(_, b)| b);
        let outputs = engine.run(&executable, find).expect("runs");
        for ((name, _), (_, want)) in results.iter().zip(wanted) {
            let got = outputs.tensor(name).expect("a result").to_f32();
            for (at, want) in want.into_iter().enumerate() {
                assert!((got[[0, at / 2, at % 2]] - want).abs() < 1e-5, "{name} of {dims:?}: {got:?}, want {want}");
            }
        }
    }
}
