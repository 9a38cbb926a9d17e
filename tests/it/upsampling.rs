//! Two passes with upsampling other than 2x in space between them, compared with Lightricks' pipelines
//! (scripts/oracle/cases_upsampling.py): every step, and for one case of each model frames and audio. Upsampler weights
//! are generated from a seed.

use std::path::Path;

use ltx2::config::Config;
use ltx2::hlo::DType;
use ltx2::nn::Build;
use ltx2::pipeline::runner::Runner;
use ltx2::pjrt::Client;
use ltx2::weights::Overrides;

use crate::support::drawn::{WHOLE_2_5, write_upsampler};
use crate::support::official::{dumping_steps, limit_of, open_with_overrides, request};
use crate::support::{Case, case, cpu, dumped, generate, needs, plain, thresholds};

/// Returns a case by name.
pub fn case_of(name: &str) -> Case {
    case("upsampling", Path::new(&format!("tests/fixtures/cases/upsampling/{name}.safetensors")))
}

/// Opens the case's model with its upsamplers, which are written to a folder.
fn open(case: &Case, folder: &Path) -> Runner {
    open_with(case, folder, &cpu(8), plain(DType::F32))
}

/// Like [`open`], with a layout.
pub fn open_with(case: &Case, folder: &Path, client: &Client, how: Build) -> Runner {
    let mut overrides = Overrides::default();
    for (part, own) in case.scalars["upsamplers"].as_object().expect("upsamplers") {
        let path = folder.join(part);
        write_upsampler(&path, &own[0], own[1].as_str().expect("a name"));
        let path = Some(path.to_str().expect("UTF-8").to_string());
        match part.as_str() {
            "latent_upsampler" => overrides.upsampler = path,
            _ => overrides.temporal_upsampler = path,
        }
    }
    let mut runner = open_with_overrides(client, case, overrides, how);
    // The reference samples come from diffusers' vocoder.
    runner.model.configs = runner.model.configs.with_vocoder_clamp(false);
    runner
}

fn agrees(name: &str) {
    let (case, folder) = (case_of(name), tempfile::tempdir().expect("a folder"));
    let mut runner = open(&case, folder.path());
    let request = request(&case, &runner.model);
    let made = generate(&mut runner, &request, &dumping_steps());
    let limit = thresholds::row(&case.name).f32();
    for name in case.outputs.keys().map(|name| name.trim_end_matches(".strided")) {
        case.within(name, dumped(&made, name), limit_of(name, limit));
    }
    assert_eq!((made.frame_rate, made.frames.count()), (request.frame_rate, request.num_frames));
    let steps = made.dump.iter().filter(|(name, _)| name.contains("step_")).count();
    assert_eq!(steps, 2 * (3 + 4), "{}: tensors of steps", case.name);
    if request.passes().0.num_frames == request.num_frames {
        return;
    }
    // After temporal upsampling the audio is that of the first pass, with the length of the final video.
    let sound = dumped(&made, "step_2.latents.audio");
    let seconds = request.num_frames as f64 / request.frame_rate;
    assert_eq!(sound.shape()[2], (seconds * 25.0).round_ties_even() as usize);
    for step in 0..4 {
        assert_eq!(dumped(&made, &format!("stage_2.step_{step}.latents.audio")), sound, "{} {step}", case.name);
    }
}

/// The first pass generates half the frames at two thirds of the size. `make test` upsamples in time in `dfr`, and by 1.5 in
/// `parity`.
#[needs(cpu, full)]
fn ltx2_3_temporal_then_x1_5_upsampling_matches_reference() {
    agrees("tiny_2_3_temporal_x1_5");
}

#[needs(cpu, full)]
fn ltx2_0_temporal_then_x1_5_upsampling_matches_reference() {
    agrees("tiny_a_temporal_x1_5");
}

#[needs(cpu, full)]
fn x1_5_upsampling_matches_reference() {
    ["tiny_a_x1_5", "tiny_2_3_x1_5"].into_iter().for_each(agrees);
}

/// Upsamples by 2 in space and then in time, with keyframes. The frame rate is higher than that of the token positions.
#[needs(cpu, full)]
fn x2_then_temporal_upsampling_matches_reference() {
    ["tiny_a_x2_temporal", "tiny_2_3_x2_temporal"].into_iter().for_each(agrees);
}

/// LTX-2.5's distilled passes with temporal upsampling after spatial upsampling: the second pass has the request's
/// frames and frame rate, and the audio is that of the first pass. There is no reference for this.
#[needs(cpu, full)]
fn ltx2_5_temporal_upsampling_sets_frames_rate_and_audio() {
    let folder = tempfile::tempdir().expect("a folder");
    let own = folder.path().join("upsampler");
    let config = std::fs::read_to_string("tests/fixtures/models/dfr_temporal/temporal_latent_upsampler/config.json");
    write_upsampler(&own, &serde_json::from_str(&config.expect("a file")).expect("JSON"), "in_time");
    let temporal_upsampler = Some(own.to_str().expect("UTF-8").to_string());
    let mut case = case_of("tiny_2_3_x1_5");
    case.model = WHOLE_2_5.into();
    let overrides = Overrides { temporal_upsampler, ..Overrides::default() };
    let mut runner = open_with_overrides(&cpu(8), &case, overrides, plain(DType::F32));
    let set = [
        "two_stage.upsample=[spatial_x2, temporal_x2]",
        "request={prompt: a red ball, width: 128, height: 64, num_frames: 17, frame_rate: 48, max_sequence_length: 64}",
        "runtime.dtype=f32",
    ];
    let config = Config::load("ltx2_5_distilled", set).expect("a configuration");
    let request = runner.model.request(&config, &config.jobs().expect("a job")[0]).expect("a request");
    let made = generate(&mut runner, &request, &dumping_steps());
    assert_eq!((made.frames.count(), made.frame_rate), (17, 48.0));
    let shape = |name: &str| dumped(&made, name).shape().to_vec();
    assert_eq!(shape("step_8.latents.video"), [1, 2, 2, 1, 2]);
    assert_eq!(shape("stage_2.step_0.latents.video"), [1, 2, 3, 2, 4]);
    for step in 0..4 {
        let sound = dumped(&made, &format!("stage_2.step_{step}.latents.audio"));
        assert_eq!(sound, dumped(&made, "step_8.latents.audio"), "{step}");
    }
}
