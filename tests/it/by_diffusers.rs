//! End-to-end runs compared with diffusers' pipelines (scripts/oracle/cases_by_diffusers.py): conditions with a
//! strength below 1, another motion speed, and ancestral steps in two passes.

use crate::pipeline_2_5::tokenizer_without_bos;
use crate::references::{Patterns, ready};
use crate::support::drawn::with_diffusion_decoder;
use crate::support::official::cases_of;
use crate::support::thresholds::row;
use crate::support::{Case, cpu, dumped, dumping, generate, needs, open, plain};
use ltx2::config::{Config, Reference};
use ltx2::hlo::DType;
use ltx2::pipeline::Runner;
use ltx2::pipeline::model::OpenModel;
use ltx2::request::Request;
use ltx2::sampling::StepDraws;
use ltx2::sampling::denoise::CleanPrediction;

fn agrees(case: &Case, runner: &mut Runner, request: &Request) {
    let made = generate(runner, request, &dumping(None));
    for name in case.outputs.keys().map(|name| name.trim_end_matches(".strided")) {
        case.within(name, dumped(&made, name), row(&case.name).f32());
    }
}

fn conditions_agree(model: &str, names: &[&str]) {
    let (all, mut runner) = cases_of(&cpu(8), "by_diffusers", model);
    let patterns = Patterns::new();
    for name in names {
        let case = all.iter().find(|case| case.name.ends_with(&format!("{model}_{name}"))).expect("a case");
        let config = patterns.config(case);
        assert_eq!(config.conditioning.clean_prediction, Reference::Diffusers);
        let request = ready(&mut runner, &config);
        assert_eq!(request.clean_prediction, CleanPrediction::Step);
        agrees(case, &mut runner, &request);
    }
}

#[needs(cpu, full)]
fn partial_strength_frames_match_diffusers_for_ltx2_0() {
    conditions_agree("tiny_a", &["first", "strengths"]);
}

/// The two cases differ only in motion speed, so one program runs both.
#[needs(cpu)]
fn partial_strength_and_motion_speed_match_diffusers() {
    conditions_agree("tiny_2_3", &["strengths", "motion"]);
}

#[needs(nothing)]
fn motion_speed_is_rejected_by_pipelines_that_ignore_it() {
    let load = |pipeline: &str, speed: &str| {
        let set = [("pipeline", pipeline), ("request.motion_speed", speed), ("request.prompt", "a")];
        Config::load("ltx2", set.map(|(key, value)| format!("{key}={value}")))
    };
    for (pipeline, speed, why) in [
        ("text_to_audio", "0.5", "the pipeline text_to_audio supports only the motion speed 1"),
        ("dfr", "2", "the pipeline dfr supports only the motion speed 1"),
        ("text_to_video", "0", "must be above 0"),
    ] {
        let error = load(pipeline, speed).expect_err("refused").to_string();
        assert!(error.contains(&format!("request.motion_speed = {speed}")) && error.contains(why), "{error}");
    }
    assert!(load("text_to_audio", "1").is_ok());
}

#[needs(cpu, full)]
fn partial_strength_reference_video_matches_diffusers() {
    conditions_agree("tiny_2_3", &["reference"]);
}

#[needs(cpu, full)]
fn partial_strength_frames_match_diffusers_for_ltx2_5() {
    conditions_agree("tiny_2_5", &["strengths"]);
}

/// The tokenizer adds no BOS, so the empty negative prompt has no tokens.
#[needs(cpu)]
fn prompts_without_bos_match_diffusers() {
    let (all, mut runner) = cases_of(&cpu(8), "by_diffusers", "tiny_a");
    let case = all.iter().find(|case| case.name.ends_with("no_bos")).expect("a case");
    let folder = tempfile::tempdir().expect("a folder");
    tokenizer_without_bos(&case.model.join("tokenizer"), folder.path());
    let mut config = Patterns::new().config(case);
    config.model.path = case.model.to_str().expect("UTF-8").into();
    config.model.tokenizer = Some(folder.path().to_str().expect("UTF-8").into());
    runner.model.tokenizer = OpenModel::from_config(&config).expect("a model").tokenizer;
    let request = ready(&mut runner, &config);
    agrees(case, &mut runner, &request);
}

/// A single generator draws the initial noise and step noise of both passes, and the decoder's noise.
#[needs(cpu, full)]
fn ancestral_noise_of_both_passes_uses_one_generator() {
    let (all, runner) = cases_of(&cpu(8), "by_diffusers", "tiny_2_5");
    drop(runner);
    let case = all.iter().find(|case| case.name.ends_with("ancestral")).expect("a case");
    let folder = tempfile::tempdir().expect("a folder");
    let path = with_diffusion_decoder(folder.path());
    let mut config = Patterns::new().config(case);
    config.model.path.clone_from(&path);
    assert_eq!(config.sampler.options(config.runtime.dtype).draws, StepDraws::Continued);
    let mut runner = open(&cpu(8), &path, plain(DType::F32));
    runner.model.configs = OpenModel::from_config(&config).expect("a model").configs;
    let request = ready(&mut runner, &config);
    agrees(case, &mut runner, &request);
}
