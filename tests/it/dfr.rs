//! DFR from prompt to frames and audio compared with Lightricks' and diffusers' pipelines, for each pass and round
//! (scripts/oracle/cases_dfr.py). All draw the same noise from the same seed.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use crate::support::drawn::write_component;
use crate::support::{Case, case, cpu, dumped, dumping, full, generate, link_parts, needs, open, plain, thresholds};
use ltx2::config::Config;
use ltx2::hlo::DType;
use ltx2::models::upsampler::{UpsamplerConfig, program};
use ltx2::pipeline::plan::loras::Loras;
use ltx2::pipeline::plan::options::RunOptions;
use ltx2::pipeline::{Generated, Runner};
use ltx2::request::{DfrPlan, Request};

const PART: &str = "temporal_latent_upsampler";

/// Writes a model with a temporal upsampler and returns its path.
fn model(folder: &Path) -> String {
    link_parts("tests/fixtures/models/tiny_2_5", folder);
    let source = Path::new("tests/fixtures/models/dfr_temporal");
    let text = fs::read_to_string(source.join(PART).join("config.json")).expect("a file");
    let config = UpsamplerConfig::from_json(&serde_json::from_str(&text).expect("JSON")).expect("valid");
    let network = program(&config, [1, 2, 2, 2], &plain(DType::F32)).expect("builds");
    write_component(source, PART, &network, &[], folder);
    folder.to_str().expect("a path").to_string()
}

/// Returns the preset's configuration with a case's sizes, prompt and seed.
fn config(case: &Case, model: &str) -> Config {
    let s = &case.scalars;
    let mut set = vec![
        format!("model.path={model}"),
        "runtime.dtype=f32".to_string(),
        format!("reference={}", s["reference"].as_str().expect("a word")),
        format!("dfr.temporal_rounds={}", s["temporal_rounds"]),
        // The model's scheduler is that of a dev transformer, unlike the case's.
        "sampler.sigma_shift=official".to_string(),
    ];
    for key in
        ["prompt", "negative_prompt", "width", "height", "num_frames", "frame_rate", "max_sequence_length", "seed"]
    {
        set.push(format!("request.{key}={}", s[key]));
    }
    let images =
        s.get("images").and_then(|images| images.as_array()).map_or(&[][..], Vec::as_slice).iter().map(|image| {
            let [name, frame, strength] = ["name", "frame", "strength"].map(|key| &image[key]);
            let path = format!("tests/fixtures/images/{}", name.as_str().expect("a name"));
            format!("{{path: {path}, frame: {frame}, strength: {strength}, crf: 0}}")
        });
    set.push(format!("request.images=[{}]", images.collect::<Vec<_>>().join(", ")));
    if let Some(lora) = s.get("detailing_lora") {
        set.push(format!("dfr.detailing_lora={lora}"));
    }
    Config::load("ltx2_5_dfr", set).expect("a configuration")
}

/// Runs a case and compares all of its tensors. The model is written to `folder`.
fn agrees(name: &str, folder: &Path) -> (Runner, Request, Generated) {
    let case = case("dfr", Path::new(&format!("tests/fixtures/cases/dfr/{name}.safetensors")));
    let config = config(&case, &model(folder));
    let mut runner = open(&cpu(8), &config.model.path, plain(DType::F32));
    runner.executor.keep_loras(Loras::open(&config.model).expect("updates")).expect("fits");
    let job = config.jobs().expect("a prompt").remove(0);
    let request = runner.model.request(&config, &job).expect("a request");
    let made = generate(&mut runner, &request, &dumping(None));
    let limit = thresholds::row(&case.name).f32();
    for name in case.outputs.keys().map(|name| name.trim_end_matches(".strided")) {
        case.within(name, dumped(&made, name), limit);
    }

    let number = |key: &str| case.scalars[key].as_f64().expect("a number");
    let scale = 2f64.powi(number("temporal_rounds") as i32);
    assert_eq!(made.frame_rate, number("frame_rate") * scale);
    assert_eq!(made.frames.data().dim().0 as f64, (number("num_frames") - 1.0) * scale + 1.0);
    (runner, request, made)
}

/// Tiles attend to the audio of the first pass. Token positions are computed as if the 48 frames per second were 60.
#[needs(cpu, full)]
fn dfr_with_one_round_matches_diffusers() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut runner, request, made) = agrees("diffusers", folder.path());
    let bytes = generate(&mut runner, &request, &RunOptions::default());
    assert_eq!(bytes.frames.data(), made.frames.data());
}

/// Tiles have no audio, and their token positions are computed at 48 frames per second.
#[needs(cpu, full)]
fn dfr_with_one_round_and_no_audio_matches_reference() {
    let folder = tempfile::tempdir().expect("a folder");
    agrees("official", folder.path());
}

/// The second pass follows the first pass, with a detailing LoRA of strength 0.7.
#[needs(cpu)]
fn dfr_with_detailing_lora_matches_reference() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut runner, request, made) = agrees("detailing", folder.path());
    let appended = |request: &Request| request.passes().1.expect("two passes").conditions.video.len();
    let plain = Request { dfr: request.dfr.clone().map(|dfr| DfrPlan { detailing: false, ..dfr }), ..request.clone() };
    assert_eq!(appended(&request), appended(&plain) + 1);
    if full() {
        let mut other = request.clone();
        other.seed += 1;
        let both = runner.generate_batch(&[request, other], &dumping(None), &mut |_, _, _| ControlFlow::Continue(()));
        let both = both.expect("runs");
        let case = case("dfr", Path::new("tests/fixtures/cases/dfr/detailing.safetensors"));
        case.within("latents.video", dumped(&both[0], "latents.video"), thresholds::row(&case.name).f32());
        assert_ne!(both[1].frames.data(), made.frames.data());
    }
}

/// Two rounds after a second pass with a detailing LoRA, which the rounds do not use, and with images.
#[needs(cpu, full)]
fn dfr_with_detailing_lora_and_two_rounds_matches_reference() {
    let folder = tempfile::tempdir().expect("a folder");
    agrees("detailing_rounds", folder.path());
}

/// Two rounds with conditioning images of partial strength, of which the later one lies in a tile of every round. The
/// canvas is padded, and all passes compute token positions at 60 frames per second.
#[needs(cpu, full)]
fn dfr_with_two_rounds_and_images_matches_reference() {
    let folder = tempfile::tempdir().expect("a folder");
    agrees("images", folder.path());
}
