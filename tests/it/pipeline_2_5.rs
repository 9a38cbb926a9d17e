//! LTX-2.5 from prompt to frames and sound against diffusers, whose pipelines are given what Lightricks' have and they do
//! not: the marker of the first frame, and draws of ancestral steps (scripts/oracle/cases_2_5.py).

use std::fs;
use std::path::Path;

use crate::support::{Case, case, cpu, dumped, dumping, generate, needs, open, plain, thresholds};
use ltx2::config::Config;
use ltx2::hlo::DType;
use ltx2::pipeline::model::Model;
use ltx2::pipeline::{Generated, Runner};
use ltx2::request::Request;
use serde_json::Value;

const MODEL: &str = "tests/fixtures/models/tiny_2_5";

fn named(name: &str) -> Case {
    case("pipeline_2_5", Path::new(&format!("tests/fixtures/cases/pipeline_2_5/{name}.safetensors")))
}

/// The preset of a case's pipeline with the case's own sizes, words and seed.
fn config(case: &Case, preset: &str, more: &[&str]) -> Config {
    let s = &case.scalars;
    let mut set = vec![format!("model.path={MODEL}"), "runtime.dtype=f32".to_string()];
    for key in
        ["prompt", "negative_prompt", "width", "height", "num_frames", "frame_rate", "max_sequence_length", "seed"]
    {
        set.push(format!("request.{key}={}", s[key]));
    }
    Config::load(preset, set.into_iter().chain(more.iter().map(ToString::to_string))).expect("a configuration")
}

/// Runs a case as its preset has it and compares every tensor that it holds.
fn agrees(case: &Case, config: &Config) -> (Runner, Request, Generated) {
    let mut runner = open(&cpu(8), MODEL, plain(DType::F32));
    let job = config.jobs().expect("a prompt").remove(0);
    let request = runner.model.request(config, &job).expect("a request");
    let made = generate(&mut runner, &request, &dumping(None));
    let limit = thresholds::row(&case.name).f32();
    for name in case.outputs.keys().map(|name| name.trim_end_matches(".strided")) {
        let distance = case.distance(name, dumped(&made, name));
        eprintln!("{} {name}: {distance:.1e}", case.name);
        assert!(distance <= limit, "{} {name}: {distance:e}", case.name);
    }
    (runner, request, made)
}

/// A tokenizer folder like the model's, of which nothing adds the token in front.
fn tokenizer_without_bos(folder: &Path) {
    let source = Path::new(MODEL).join("tokenizer");
    for (file, key, value) in
        [("tokenizer.json", "post_processor", Value::Null), ("tokenizer_config.json", "add_bos_token", false.into())]
    {
        let mut data: Value =
            serde_json::from_str(&fs::read_to_string(source.join(file)).expect("a file")).expect("JSON");
        data[key] = value;
        fs::write(folder.join(file), data.to_string()).expect("written");
    }
}

/// Every branch of guidance, by plain Euler. The token in front of prompts is the tokenizer's, but where `reference` is
/// official, which adds one that is missing.
#[needs(cpu)]
fn one_pass_agrees_with_the_reference() {
    let case = named("guided");
    let set = ["sampler.steps=3", "guidance.stg_blocks=[1]"];
    let (mut runner, request, made) = agrees(&case, &config(&case, "ltx2_5", &set));

    let folder = tempfile::tempdir().expect("a folder");
    tokenizer_without_bos(folder.path());
    let tokenizer = format!("model.tokenizer={}", folder.path().display());
    for (reference, same) in [("official", true), ("diffusers", false)] {
        let reference_set = format!("reference={reference}");
        let more = [&set[..], &[&tokenizer, &reference_set]].concat();
        runner.model.tokenizer = Model::of(&config(&case, "ltx2_5", &more)).expect("a model").tokenizer;
        let again = generate(&mut runner, &request, &dumping(None));
        for name in ["prompt_embeds", "negative_prompt_embeds", "latents.video", "latents.audio"] {
            assert_eq!(dumped(&again, name) == dumped(&made, name), same, "{reference}: {name}");
        }
    }
}

/// Eight ancestral steps at half size, three plain ones behind the upsampler, all by the preset's own values.
#[needs(cpu)]
fn two_distilled_passes_agree_with_the_reference() {
    let case = named("distilled");
    agrees(&case, &config(&case, "ltx2_5_distilled", &["two_stage.audio=stage_2"]));
}
