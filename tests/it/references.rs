//! Videos with reference videos compared with Lightricks' and diffusers' pipelines
//! (scripts/oracle/cases_references.py): every step, with and without a second stage, with references at the stage's
//! size and at half of it, with and without attention strengths.

use std::path::PathBuf;

use ltx2::Config;
use ltx2::hlo::DType;
use ltx2::media::{Frames, write_png_frames};
use ltx2::models::transformer::TransformerConfig;
use ltx2::nn::Build;
use ltx2::pipeline::plan::loras::Loras;
use ltx2::pipeline::runner::Runner;
use ltx2::request::{Request, Shapes};
use ltx2::sampling::denoise::denoise;
use ndarray::{Array4, Axis};
use serde_json::{Value, json};

use crate::layouts::{build, limit};
use crate::support::official::{cases_of, dumping_steps, limit_of, open_with};
use crate::support::thresholds::row;
use crate::support::{Case, cpu, dumped, dumping, full, generate, needs, plain, relative_l2};

/// The generator's patterns, each in its own folder.
pub struct Patterns(tempfile::TempDir);

impl Patterns {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, size) in
            [("wide", (17, 48, 80)), ("tall", (12, 70, 50)), ("mask", (9, 64, 64)), ("square", (9, 32, 32))]
        {
            let byte = |(f, y, x, c)| ((f * 11 + y * 5 + x * 3 + c * 40 + name.len() * 17) % 256) as u8;
            let (frames, height, width) = size;
            let frames = Frames::new(Array4::from_shape_fn((frames, height, width, 3), byte)).expect("frames");
            write_png_frames(&folder.path().join(name), &frames).expect("written");
        }
        Patterns(folder)
    }

    fn path(&self, name: &Value) -> PathBuf {
        self.0.path().join(name.as_str().expect("a name"))
    }

    /// Returns the configuration of a case.
    pub fn config(&self, case: &Case) -> Config {
        let keys = case.scalars["common"].as_array().expect("settings").iter();
        let mut keys: Vec<String> = keys.map(|key| key.as_str().expect("a setting").to_string()).collect();
        let mut videos = case.scalars["references"].clone();
        for video in videos.as_array_mut().expect("references") {
            for key in ["path", "attention_mask"] {
                if !video[key].is_null() {
                    video[key] = json!(self.path(&video[key]));
                }
            }
        }
        keys.extend([format!("request.reference_videos={videos}"), "runtime.dtype=f32".into()]);
        let config = Config::load(case.scalars["preset"].as_str().expect("a preset"), keys);
        config.unwrap_or_else(|e| panic!("{}: {e}", case.name))
    }
}

/// Loads the LoRAs of a configuration into a runner and returns its request.
pub fn ready(runner: &mut Runner, config: &Config) -> Request {
    runner.executor.keep_loras(Loras::open(&config.model).expect("updates")).expect("fits");
    let job = config.jobs().expect("a job").remove(0);
    runner.model.request(config, &job).expect("a request")
}

fn agrees(model: &str, count: usize) {
    let (all, mut runner) = cases_of(&cpu(8), "references", model);
    assert_eq!(all.len(), count);
    // The reference samples come from diffusers' vocoder.
    runner.model.configs = runner.model.configs.with_vocoder_clamp(false);
    let patterns = Patterns::new();
    let mut largest = (0.0, String::new());
    let chosen = |case: &&Case| full() || case.name.ends_with("_mask");
    for case in all.iter().filter(chosen) {
        let request = ready(&mut runner, &patterns.config(case));
        let made = generate(&mut runner, &request, &dumping_steps());
        for name in case.outputs.keys().map(|name| name.trim_end_matches(".strided")) {
            let distance = case.within(name, dumped(&made, name), limit_of(name, row(&case.name).f32()));
            if distance > largest.0 {
                largest = (distance, format!("{} {name}", case.name));
            }
        }
        if case.name.ends_with("whole") {
            // The image's tokens stay unchanged in each stage.
            for (stage, last) in [("", 8), ("stage_2.", 3)] {
                let step = |n: usize| dumped(&made, &format!("{stage}step_{n}.latents.video")).to_f32();
                let [first, last] = [step(0), step(last)].map(|latents| latents.index_axis_move(Axis(2), 0));
                assert_eq!(first, last, "{stage}");
            }
        }
    }
    eprintln!("references {model}: at most {:.1e}, {}", largest.0, largest.1);
}

#[needs(cpu, full)]
fn ltx2_0_reference_videos_match_lightricks() {
    agrees("tiny_a", 2);
}

#[needs(cpu)]
fn ltx2_3_reference_videos_match_reference() {
    agrees("tiny_2_3", 4);
}

#[needs(cpu, full)]
fn ltx2_5_reference_videos_match_reference() {
    agrees("tiny_2_5", 1);
}

fn sharded(model: &str, names: &[&str], layouts: &[(&str, &str)]) {
    let (client, patterns) = (cpu(8), Patterns::new());
    let (all, runner) = cases_of(&client, "references", model);
    drop(runner);
    for case in all.iter().filter(|case| names.iter().any(|name| case.name.ends_with(name))) {
        let config = patterns.config(case);
        let run = |how: Build| {
            let mut runner = open_with(&client, case, how);
            let request = ready(&mut runner, &config);
            generate(&mut runner, &request, &dumping(None))
        };
        let whole = run(plain(DType::F32));
        for (layout, mesh) in layouts {
            let got = run(build(layout, mesh, 8));
            for name in ["latents.video", "latents.audio", "video"] {
                let distance = relative_l2(dumped(&got, name), dumped(&whole, name));
                eprintln!("{} {layout} {mesh} {name}: {distance:.1e}", case.name);
                assert!(distance <= limit(layout), "{} {layout} {mesh} {name}: {distance:e}", case.name);
            }
        }
    }
}

/// Runs conditioned requests with every kind of attention communication. The attention mask has a separate row for each
/// query.
#[needs(cpu, full)]
fn ltx2_0_layouts_match_single_device_result() {
    let layouts = [
        ("cfg", "cfg=4"),
        ("sequence", "context=4"),
        ("fsdp-ulysses", "cfg=4,context=2"),
        ("tensor", "cfg=2,context=2,tensor=2"),
        ("hybrid", "context=8"),
        ("ring", "context=2"),
    ];
    sharded("tiny_a", &["half", "whole"], &layouts);
}

#[needs(cpu, full)]
fn ltx2_3_layouts_match_single_device_result() {
    let layouts = [("fsdp-ulysses", "context=2"), ("tensor", "context=2,tensor=2"), ("ring", "context=2")];
    sharded("tiny_2_3", &["mask"], &layouts);
}

/// Only the first stage of requests with an attention strength below 1 has a mask; other programs have none.
#[needs(cpu)]
fn only_attention_strengths_below_one_add_a_mask() {
    let (client, patterns) = (cpu(8), Patterns::new());
    let (all, mut runner) = cases_of(&client, "references", "tiny_a");
    for case in &all {
        let config = std::fs::read_to_string(case.model.join("transformer/config.json")).expect("a configuration");
        let c = TransformerConfig::from_json(&serde_json::from_str(&config).expect("JSON")).expect("valid");
        let request = ready(&mut runner, &patterns.config(case));
        let (first, second) = request.passes();
        assert_eq!(second.is_some(), case.name.ends_with("whole"));
        for (request, references) in [Some((first, true)), second.map(|second| (second, false))].into_iter().flatten() {
            let sizes = &runner.model.sizes;
            let shapes = Shapes::from_request(sizes, &request).expect("legal sizes");
            assert_eq!(shapes.appended.video > 0, references, "{}", case.name);
            let shape = request.denoise_shape(sizes, &shapes, 1);
            let network = denoise(&c, &shape, &plain(DType::F32)).expect("builds");
            let mask = network.program.argument("self_mask.video").map(|a| &a.ty.dims);
            let n = shapes.tokens.video;
            assert_eq!(mask, case.name.ends_with("half").then(|| vec![1, n, n]).as_ref(), "{}", case.name);
        }
    }
}
