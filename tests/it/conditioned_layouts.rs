//! Requests with conditions on several devices: one pass of each kind, chained clips, and upsampling factors other than
//! two. Complete requests with input videos, audio and references are tested in `given_video`, `audio_to_video` and
//! `references`.

use ltx2::av::Av;
use ltx2::hlo::DType;
use ltx2::pipeline::runner::Runner;
use ltx2::pjrt::Client;
use ltx2::request::{Request, Shared};
use ltx2::weights::{ModelSource, Overrides};

use crate::layouts::{build, limit};
use crate::support::official::{cases_of, open_with, request};
use crate::support::passes::Pass;
use crate::support::{Case, cpu, dumped, dumping, generate, needs, open, plain, relative_l2};
use crate::{chain, given_video, references, upsampling};

fn case_of(client: &Client, component: &str, model: &str, name: &str) -> (Case, Runner) {
    let (all, runner) = cases_of(client, component, model);
    let named = |case: &Case| case.name.ends_with(&format!("/{model}_{name}"));
    (all.into_iter().find(named).expect("a case"), runner)
}

/// Compares the loop of a request's first pass with one device, starting from the inputs that one device prepared.
fn agrees(client: &Client, case: &Case, mut runner: Runner, request: &Request, layout: &str, mesh: &str) {
    let model = case.model.to_str().expect("UTF-8");
    let source = ModelSource::open(model, &Overrides::default()).expect("a model");
    let (first, one) = (request.passes().0, plain(DType::F32));
    let pass = Pass::new(&source, &runner.model, &first);
    let prepared = pass.prepared(&mut runner.executor, &one);
    let whole = pass.denoised(&mut runner.executor, &one, prepared.clone());
    let build = build(layout, mesh, 8);
    let mut sharded = open(client, model, build.clone());
    let got = pass.denoised(&mut sharded.executor, &build, prepared);
    for ((stream, got), want) in Av::NAMES.zip(got.as_ref()).zip(whole.as_ref()) {
        let distance = relative_l2(got, want);
        eprintln!("{} {layout} {mesh} {stream}: {distance:.1e}", case.name);
        assert!(distance <= limit(layout), "{} {layout} {mesh} {stream}: {distance:e}", case.name);
    }
}

/// Three requests, each under one layout: known tokens in both streams, fixed audio, and a reference video with attention
/// strengths. In `make test`, `newer_layouts` shards a conditioned pass.
#[needs(cpu, full)]
fn sharded_conditioned_passes_match_single_device() {
    let client = cpu(8);
    let (case, runner) = case_of(&client, "given_video", "tiny_2_3", "retake");
    let retake = given_video::request(&case, &runner.model, &Shared::from(given_video::clip()), &[]);
    agrees(&client, &case, runner, &retake, "cfg-ulysses", "cfg=2,context=2");
    let (case, runner) = case_of(&client, "official", "tiny_a", "audio");
    let given = request(&case, &runner.model);
    agrees(&client, &case, runner, &given, "tensor", "cfg=2,tensor=2");
    let (case, runner) = case_of(&client, "references", "tiny_a", "half");
    let config = references::Patterns::new().config(&case);
    let beside = runner.model.request(&config, &config.jobs().expect("a job")[0]).expect("a request");
    agrees(&client, &case, runner, &beside, "ring", "context=2");
}

/// Compares three clips, each continuing the previous one, with one device.
fn clips_agree(model: &str, preset: &str, layout: &str, mesh: &str) {
    let client = cpu(8);
    let (case, mut runner) = case_of(&client, "given_video", model, "extend");
    let request = chain::request(&runner, preset, &case.scalars["common"], &chain::CHAIN);
    let whole = chain::clips(&mut runner, &request);
    let got = chain::clips(&mut open_with(&client, &case, build(layout, mesh, 8)), &request);
    assert_eq!((whole.len(), got.len()), (3, 3));
    for (n, (got, want)) in got.iter().zip(&whole).enumerate() {
        for name in ["latents.video", "latents.audio", "video"] {
            let distance = relative_l2(dumped(got, name), dumped(want, name));
            eprintln!("{model} {layout} {mesh} clip {n} {name}: {distance:.1e}");
            assert!(distance <= limit(layout), "{model} {layout} {mesh} clip {n} {name}: {distance:e}");
        }
    }
}

#[needs(cpu, full)]
fn sharded_chained_clips_match_single_device() {
    clips_agree("tiny_a", "ltx2", "cfg-ulysses", "cfg=2,context=2");
    clips_agree("tiny_2_3", "ltx2_3", "cfg-ulysses", "cfg=2,context=2");
}

/// Runs both passes, with temporal upsampling and spatial upsampling by 1.5 between them.
#[needs(cpu, full)]
fn sharded_upsampling_matches_single_device() {
    let client = cpu(8);
    for name in ["tiny_a_temporal_x1_5", "tiny_2_3_temporal_x1_5"] {
        let case = upsampling::case_of(name);
        let run = |how| {
            let folder = tempfile::tempdir().expect("a folder");
            let mut runner = upsampling::open_with(&case, folder.path(), &client, how);
            let request = request(&case, &runner.model);
            generate(&mut runner, &request, &dumping(None))
        };
        let whole = run(plain(DType::F32));
        let (layout, mesh) = ("cfg-ulysses", "cfg=2,context=2");
        let got = run(build(layout, mesh, 8));
        for tensor in ["stage_1.latents.video", "latents.video", "latents.audio", "video", "audio"] {
            let distance = relative_l2(dumped(&got, tensor), dumped(&whole, tensor));
            eprintln!("{name} {layout} {mesh} {tensor}: {distance:.1e}");
            assert!(distance <= limit(layout), "{name} {layout} {mesh} {tensor}: {distance:e}");
        }
    }
}
