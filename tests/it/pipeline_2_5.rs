//! LTX-2.5 from prompt to frames and audio compared with diffusers, with two features of Lightricks' pipelines added to
//! it: the first-frame marker and the noise of ancestral steps (scripts/oracle/cases_2_5.py).

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use crate::support::drawn::{WHOLE_2_5 as MODEL, with_diffusion_decoder, write_upsampler};
use crate::support::official::open_with_overrides;
use crate::support::{Case, case, cpu, dumped, dumping, generate, needs, open, plain, thresholds};
use ltx2::config::Config;
use ltx2::hlo::DType;
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::plan::options::RunOptions;
use ltx2::pipeline::{Generated, Runner};
use ltx2::request::{Condition, Request, TileSizes};
use ltx2::weights::Overrides;
use serde_json::Value;

fn named(name: &str) -> Case {
    case("pipeline_2_5", Path::new(&format!("tests/fixtures/cases/pipeline_2_5/{name}.safetensors")))
}

/// Returns the preset's configuration with the case's sizes, prompt and seed.
fn config(case: &Case, preset: &str, more: &[&str]) -> Config {
    config_of(MODEL, case, preset, more)
}

fn config_of(model: &str, case: &Case, preset: &str, more: &[&str]) -> Config {
    let s = &case.scalars;
    let mut set = vec![format!("model.path={model}"), "runtime.dtype=f32".to_string()];
    for key in
        ["prompt", "negative_prompt", "width", "height", "num_frames", "frame_rate", "max_sequence_length", "seed"]
    {
        set.push(format!("request.{key}={}", s[key]));
    }
    Config::load(preset, set.into_iter().chain(more.iter().map(ToString::to_string))).expect("a configuration")
}

/// Returns the request of the case `guided`.
pub fn guided(model: &OpenModel) -> Request {
    let config = config(&named("guided"), "ltx2_5", &["sampler.steps=3", "guidance.stg_blocks=[1]"]);
    model.request(&config, &config.jobs().expect("a prompt").remove(0)).expect("a request")
}

/// Runs a case with its preset and compares all of its tensors.
fn agrees(case: &Case, config: &Config) -> (Runner, Request, Generated) {
    let mut runner = open(&cpu(8), &config.model.path, plain(DType::F32));
    let job = config.jobs().expect("a prompt").remove(0);
    let request = runner.model.request(config, &job).expect("a request");
    let made = generate(&mut runner, &request, &dumping(None));
    compare(case, &made);
    (runner, request, made)
}

fn compare(case: &Case, made: &Generated) {
    let limit = thresholds::row(&case.name).f32();
    for name in case.outputs.keys().map(|name| name.trim_end_matches(".strided")) {
        case.within(name, dumped(made, name), limit);
    }
}

/// Writes a copy of a tokenizer folder whose post-processor adds no BOS.
pub fn tokenizer_without_bos(source: &Path, folder: &Path) {
    for (file, key, value) in
        [("tokenizer.json", "post_processor", Value::Null), ("tokenizer_config.json", "add_bos_token", false.into())]
    {
        let mut data: Value =
            serde_json::from_str(&fs::read_to_string(source.join(file)).expect("a file")).expect("JSON");
        data[key] = value;
        fs::write(folder.join(file), data.to_string()).expect("written");
    }
}

/// Uses every guidance branch and plain Euler steps. `reference: official` adds a missing BOS token; diffusers uses the
/// tokenizer's ids unchanged.
#[needs(cpu)]
fn one_pass_with_every_guidance_branch_matches_reference() {
    let case = named("guided");
    let set = ["sampler.steps=3", "guidance.stg_blocks=[1]"];
    let (mut runner, request, made) = agrees(&case, &config(&case, "ltx2_5", &set));

    let folder = tempfile::tempdir().expect("a folder");
    tokenizer_without_bos(&Path::new(MODEL).join("tokenizer"), folder.path());
    let tokenizer = format!("model.tokenizer={}", folder.path().display());
    for (reference, same) in [("official", true), ("diffusers", false)] {
        let reference_set = format!("reference={reference}");
        let more = [&set[..], &[&tokenizer, &reference_set]].concat();
        runner.model.tokenizer = OpenModel::from_config(&config(&case, "ltx2_5", &more)).expect("a model").tokenizer;
        let again = generate(&mut runner, &request, &dumping(None));
        for name in ["prompt_embeds", "negative_prompt_embeds", "latents.video", "latents.audio"] {
            assert_eq!(dumped(&again, name) == dumped(&made, name), same, "{reference}: {name}");
        }
    }
}

/// Runs eight ancestral steps at half size and three plain Euler steps after the upsampler, with the preset's values.
#[needs(cpu)]
fn two_distilled_passes_match_reference() {
    let case = named("distilled");
    agrees(&case, &config(&case, "ltx2_5_distilled", &["two_stage.audio=stage_2"]));
}

/// The first pass runs at two thirds of the size instead of half. The upsampler's weights are generated from its name
/// in the case.
#[needs(cpu, full)]
fn two_distilled_passes_with_x1_5_upsampler_match_reference() {
    let (case, folder) = (named("distilled_x1_5"), tempfile::tempdir().expect("a folder"));
    let (drawn, file) = (&case.scalars["upsampler"], folder.path().join("upsampler"));
    write_upsampler(&file, &drawn[0], drawn[1].as_str().expect("a name"));
    let upsampler = format!("model.upsampler={}", file.display());
    let set = ["two_stage.audio=stage_2", "two_stage.upsample=[spatial_x1_5]", &upsampler];
    let config = config(&case, "ltx2_5_distilled", &set);
    let overrides = Overrides { upsampler: config.model.upsampler.clone(), ..Overrides::default() };
    let mut runner = open_with_overrides(&cpu(8), &case, overrides, plain(DType::F32));
    // The cases use diffusers as reference.
    runner.model.configs = runner.model.configs.with_vocoder_clamp(false);
    let job = config.jobs().expect("a prompt").remove(0);
    let request = runner.model.request(&config, &job).expect("a request");
    compare(&case, &generate(&mut runner, &request, &dumping(None)));
}

/// In diffusers no frame is marked, no step adds noise, and the second pass draws its noise in token order.
#[needs(cpu, full)]
fn two_distilled_passes_match_unmodified_diffusers() {
    let case = named("distilled_by_diffusers");
    agrees(&case, &config(&case, "ltx2_5_distilled", &["reference=diffusers"]));
}

/// As in diffusers' pipeline, a generated keyframe is marked, has its own time position, and takes its noise after that
/// of the video from one random sequence.
#[needs(cpu, full)]
fn generated_keyframe_matches_diffusers() {
    let case = named("generated_frame");
    let set = [
        "reference=diffusers",
        "pipeline=text_to_video",
        "sampler.sigma_shift=official",
        "conditioning.first_frame_marker=official",
    ];
    let config = config(&case, "ltx2_5_distilled", &set);
    let mut runner = open(&cpu(8), MODEL, plain(DType::F32));
    let job = config.jobs().expect("a prompt").remove(0);
    let mut request = runner.model.request(&config, &job).expect("a request");
    request.conditions.video.push(Condition::generated(24));
    compare(&case, &generate(&mut runner, &request, &dumping(None)));
}

/// Tiles with features on both sides of every border, each with its own noise, decoded and blended like in diffusers.
#[needs(cpu, full)]
fn tiled_diffusion_decoding_matches_diffusers() {
    let case = named("decoded_tiled");
    let folder = tempfile::tempdir().expect("a folder");
    let model = with_diffusion_decoder(folder.path());
    let set = ["sampler.steps=3", "guidance.stg_blocks=[1]"];
    let config = config_of(&model, &case, "ltx2_5", &set);
    let diffusers = [&set[..], &["reference=diffusers", "model.decoder=diffusion"]].concat();
    let by_diffusers = OpenModel::from_config(&config_of(&model, &case, "ltx2_5", &diffusers)).expect("a model");
    let mut runner = open(&cpu(8), &model, plain(DType::F32));
    runner.model.configs = by_diffusers.configs;
    let number = |key: &str| case.scalars["tiling"][key].as_u64().expect("a number") as usize;
    let tiling = TileSizes {
        pixels: number("pixels"),
        overlap: number("overlap"),
        frames: number("frames"),
        frame_overlap: number("frame_overlap"),
    };
    let job = config.jobs().expect("a prompt").remove(0);
    let request = runner.model.request(&config, &job).expect("a request");
    let request = Request { tiling: Some(tiling), ..request };
    let made = generate(&mut runner, &request, &dumping(None));
    let limit = thresholds::row(&case.name).f32();
    for name in ["latents.video", "video"] {
        case.within(name, dumped(&made, name), limit);
    }
    // In chunks, converted to bytes; `diffusion_decoding_matches_reference` does so without tiles.
    let pieces = generate(&mut runner, &request, &RunOptions::default());
    assert_eq!(pieces.frames.data(), made.frames.data());

    // Lightricks' tiles: a single tile equals untiled decoding, and too little overlap is rejected.
    runner.model.configs = open(&cpu(8), &model, plain(DType::F32)).model.configs;
    let whole = generate(&mut runner, &Request { tiling: None, ..request.clone() }, &RunOptions::default());
    let one = TileSizes { pixels: 64, overlap: 32, frames: 16, frame_overlap: 8 };
    let one = generate(&mut runner, &Request { tiling: Some(one), ..request.clone() }, &RunOptions::default());
    assert_eq!(one.frames.data(), whole.frames.data());
    let refused = runner.generate(&request, &RunOptions::default(), &mut |_, _, _| ControlFlow::Continue(()));
    let refused = refused.err().expect("too little overlap").to_string();
    assert!(refused.contains("runtime.tiling: overlap 8 or frame_overlap 2") && !refused.contains('\n'), "{refused}");
}

/// The decoder's noise continues the random sequence of the denoising pass. Frames can be bytes or floats.
/// `model.decoder` selects the decoder.
#[needs(cpu)]
fn diffusion_decoding_matches_reference() {
    let case = named("decoded");
    let folder = tempfile::tempdir().expect("a folder");
    let model = with_diffusion_decoder(folder.path());
    let set = ["sampler.steps=3", "guidance.stg_blocks=[1]"];
    let (mut runner, request, made) = agrees(&case, &config_of(&model, &case, "ltx2_5", &set));
    let bytes = generate(&mut runner, &request, &RunOptions::default());
    assert_eq!(bytes.frames.data(), made.frames.data());

    let by_diffusion = |model: &str, more: &str| {
        let more = [&set[..], &[more]].concat();
        OpenModel::from_config(&config_of(model, &case, "ltx2_5", &more)).map(|model| model.decodes_by_diffusion())
    };
    let chosen = |more: &str| by_diffusion(&model, more).expect("a model");
    for (more, want) in [
        ("reference=official", true),
        ("reference=diffusers", false),
        ("model.decoder=conv", false),
        ("model.decoder=diffusion", true),
    ] {
        assert_eq!(chosen(more), want, "{more}");
    }
    assert!(!by_diffusion(MODEL, "model.decoder=auto").expect("a model"));
    let absent = by_diffusion(MODEL, "model.decoder=diffusion").expect_err("none").to_string();
    for part in ["diffusion_decoder/config.json", "model.decoder selects diffusion", "video-vae-bf16", "model.vae"] {
        assert!(absent.contains(part) && !absent.contains('\n'), "{absent}");
    }
}
