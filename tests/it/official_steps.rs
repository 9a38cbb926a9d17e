//! Every step of every pipeline compared with Lightricks' pipelines on the same weights, noise and text
//! (scripts/oracle/cases_official.py). Without cached programs each test takes 15 to 35 seconds on one core, mostly in
//! the compiler: each case has its own denoising programs for its sampler, guidance, conditions and stages.

use ltx2::hlo::DType;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::request::Request;

use crate::support::official::{cases_of, dumping_steps, request};
use crate::support::thresholds::row;
use crate::support::{cpu, dumped, dumping, full, generate, needs};

/// Compares every tensor of every case, and checks that a request with another prompt and seed compiles nothing.
fn agrees(component: &str, model: &str, names: &[&str]) {
    let (mut all, mut runner) = cases_of(&cpu(8), component, model);
    all.retain(|case| names.iter().any(|name| case.name.ends_with(&format!("/{model}_{name}"))));
    assert_eq!(all.len(), names.len());
    let compiles =
        |executor: &Executor| executor.engine().statistics().values().map(|s| s.compiles + s.cache_hits).sum::<usize>();
    let mut largest = (0.0, String::new());
    for case in &all {
        let (request, limit) = (request(case, &runner.model), row(&case.name).f32());
        let made = generate(&mut runner, &request, &dumping_steps());
        let steps = |names: &mut dyn Iterator<Item = &String>| names.filter(|n| n.contains("step_")).count();
        let kept = steps(&mut made.dump.iter().map(|(name, _)| name));
        assert_eq!(kept, steps(&mut case.outputs.keys()), "{}: tensors of steps", case.name);
        for name in case.outputs.keys().map(|name| name.trim_end_matches(".strided")) {
            let distance = case.within(name, dumped(&made, name), limit);
            if distance > largest.0 {
                largest = (distance, format!("{} {name}", case.name));
            }
        }
        let before = compiles(&runner.executor);
        let coarse = Request { positions: DType::BF16, ..request.clone() };
        let coarse = generate(&mut runner, &coarse, &dumping(None));
        assert_ne!(
            dumped(&coarse, "latents.video"),
            dumped(&made, "latents.video"),
            "rounded positions give another result"
        );
        let other = Request { prompt: "something else".into(), seed: 99, ..request };
        let again = generate(&mut runner, &other, &dumping(None));
        assert_ne!(dumped(&again, "latents.video"), dumped(&made, "latents.video"));
        assert_eq!(compiles(&runner.executor), before, "{}", case.name);
    }
    eprintln!("{component} {model}: at most {:.1e}, {}", largest.0, largest.1);
}

/// Cases of every pipeline.
const PIPELINES: [&str; 9] =
    ["audio", "distilled", "hq", "image", "image_gate_only", "image_own", "images", "keyframes", "two_stage"];
/// Cases of `make test`: both samplers, image conditions and second stages. `references` and `images` cover other
/// conditions.
const SOME: [&str; 1] = ["hq"];

/// Cases of version 1.0.0.
const BY_1_0_0: [&str; 5] = ["audio", "image_cross", "images", "keyframes", "two_stage"];

#[needs(cpu, full)]
fn ltx2_0_pipeline_steps_match_lightricks_package_1_2() {
    agrees("official", "tiny_a", &PIPELINES);
}

#[needs(cpu, full)]
fn ltx2_0_pipeline_steps_match_lightricks_package_1_0() {
    agrees("official_1_0", "tiny_a", &BY_1_0_0);
}

#[needs(cpu, full)]
fn ltx2_3_pipeline_steps_match_lightricks_package_1_0() {
    agrees("official_1_0", "tiny_2_3", &BY_1_0_0);
}

#[needs(cpu)]
fn ltx2_3_pipeline_steps_match_lightricks_package_1_2() {
    agrees("official", "tiny_2_3", if full() { &PIPELINES } else { &SOME });
}
