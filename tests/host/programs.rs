//! Hashes of the programs of every preset, pipeline, layout and platform: refactoring must not change them.

use ltx2::pipeline::plan::setup;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use crate::support::{LAYOUTS, devices_of, needs};
use ltx2::config::presets::CONFIGS;
use ltx2::config::{CliOverrides, Config, load};
use ltx2::models::connectors::ConnectorsConfig;
use ltx2::models::gemma4::{self, Gemma4Config};
use ltx2::models::presets::Preset;
use ltx2::pipeline::programs::build::{ProgramKind, Programs};
use sha2::{Digest, Sha256};

const IMAGE: &str = "tests/fixtures/images/shapes.png";

/// A configuration and the devices for which its programs are built.
struct Case {
    config: String,
    set: Vec<String>,
    /// Platform and device kind.
    platform: (&'static str, &'static str),
    mesh: Option<&'static str>,
    devices: usize,
    /// Number of transformer blocks; `None`: all.
    layers: Option<usize>,
}

const CPU: (&str, &str) = ("cpu", "");
const CUDA: (&str, &str) = ("cuda", "");
const V5P: (&str, &str) = ("tpu", "TPU v5");

impl Case {
    fn new(config: &str, platform: (&'static str, &'static str)) -> Self {
        Case { config: config.into(), set: Vec::new(), platform, mesh: None, devices: 1, layers: Some(2) }
    }

    fn set(mut self, key: &str, value: &str) -> Self {
        self.set.push(format!("{key}={value}"));
        self
    }

    fn on(self, mesh: &'static str, devices: usize) -> Self {
        Case { mesh: Some(mesh), devices, ..self }
    }

    fn config(&self) -> Config {
        let (files, mesh) = (vec![self.config.clone()], self.mesh.map(Into::into));
        let set = self.set.iter().cloned().chain(["layout=replicated".to_string()].into_iter().take(self.alone()));
        let given = CliOverrides { files, mesh, set: set.collect(), ..CliOverrides::default() };
        load(&given).unwrap_or_else(|e| panic!("{}: {e}", self.name())).config
    }

    /// Returns 1 for a single device, where no layout is set.
    fn alone(&self) -> usize {
        usize::from(self.devices == 1)
    }

    fn name(&self) -> String {
        let (platform, kind) = self.platform;
        let mut name = format!("{} {platform}", self.config);
        let layers = self.layers.map(|n| format!("{n} blocks"));
        let parts = [(!kind.is_empty()).then(|| format!("'{kind}'")), self.mesh.map(Into::into), layers];
        for part in parts.into_iter().flatten().chain(self.set.iter().cloned()) {
            name.push_str(", ");
            name.push_str(&part);
        }
        name
    }
}

/// Hashes a program's text without its locations, which contain source name scopes.
fn hash(text: &str) -> String {
    let mut digest = Sha256::new();
    for line in text.lines() {
        digest.update(line.find(" loc(\"").map_or(line, |at| &line[..at]));
        digest.update("\n");
    }
    hex::encode(&digest.finalize()[..8])
}

/// Returns the shipped slices: `tpu/v6e-8-int8` is eight v6e chips.
fn slices() -> impl Iterator<Item = Case> {
    let of_slice = |name: &str| {
        let mut parts = name.strip_prefix("tpu/")?.split('-');
        let kind = match parts.next()? {
            "v5e" => "TPU v5 lite",
            "v5p" => "TPU v5",
            "v6e" => "TPU v6 lite",
            "tpu7x" => "TPU7x",
            other => panic!("{name}: no chip {other}"),
        };
        let devices = parts.next()?.parse().unwrap_or_else(|e| panic!("{name}: {e}"));
        Some(Case { devices, ..Case::new(&format!("configs/{name}.yml"), ("tpu", kind)) })
    };
    CONFIGS.iter().filter_map(move |(name, _)| of_slice(name))
}

/// Returns the presets of published models.
fn presets() -> impl Iterator<Item = &'static str> {
    CONFIGS.iter().map(|(name, _)| *name).filter(|name| name.starts_with("ltx2"))
}

/// Videos with references, one of which has an attention strength.
fn beside_references() -> impl Iterator<Item = Case> {
    [("ltx2_distilled", V5P), ("ltx2_3_distilled", CUDA)].into_iter().map(|(preset, platform)| {
        let videos = "[{path: depth.mp4, frames: 121}, {path: pose.mp4, frames: 97, attention_strength: 0.5}]";
        let scales = "{reference_downscale_factor: 2, reference_temporal_scale_factor: 1}";
        let beside = Case::new(preset, platform).set("pipeline", "in_context").set("request.reference_videos", videos);
        beside.set("conditioning", scales)
    })
}

/// HDR video, whose second stage has tiles.
fn hdr() -> Case {
    let videos = "[{path: sdr.mp4, frames: 121}]";
    let own = Case::new("ltx2_3_distilled", CUDA).set("pipeline", "hdr").set("request.reference_videos", videos);
    own.set("conditioning", "{hdr_transform: logc3, reference_downscale_factor: 1, reference_temporal_scale_factor: 1}")
}

/// Integer weights with looped and unrolled blocks.
fn integer_weights() -> Vec<Case> {
    let mut all = Vec::new();
    for platform in [V5P, CUDA, CPU] {
        for activations in ["bf16", "int8"] {
            let integers = Case::new("ltx2", platform).set("runtime.weights", "int8");
            all.push(integers.set("runtime.activations", activations));
        }
        let rotated = Case::new("ltx2_5", platform).set("runtime.weights", "int8-convrot");
        all.push(rotated.set("runtime.activations", "int8"));
    }
    let rotated = Case::new("ltx2_5", CUDA).set("runtime.weights", "int8-convrot");
    all.push(rotated.set("layout", "sequence").on("context=2", 2));
    all
}

fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for preset in presets() {
        all.extend([CPU, CUDA, V5P].map(|platform| Case::new(preset, platform)));
    }
    // Full depth.
    all.extend([CPU, CUDA, V5P].map(|platform| Case { layers: None, ..Case::new("ltx2", platform) }));
    // Image conditioning.
    let images = |frames: &[(usize, &str)]| {
        let each = frames.iter().map(|(frame, s)| format!("{{path: {IMAGE}, frame: {frame}, strength: {s}}}"));
        format!("[{}]", each.collect::<Vec<_>>().join(", "))
    };
    for preset in ["ltx2", "ltx2_3"] {
        let first = Case::new(preset, CUDA).set("pipeline", "image_to_video");
        all.push(first.set("request.images", &images(&[(0, "1.0")])));
        let two = Case::new(preset, V5P).set("pipeline", "keyframes");
        all.push(two.set("request.images", &images(&[(0, "1.0"), (120, "0.5")])));
    }
    // Fixed audio latents with full and partial strength.
    for (preset, strength) in [("ltx2", "1.0"), ("ltx2_3", "0.5")] {
        let kept = format!("[{{path: sound.safetensors, start: 1.0, strength: {strength}}}]");
        all.push(Case::new(preset, V5P).set("request.audio_latents", &kept));
    }
    all.extend(beside_references());
    all.push(hdr());
    // Text generation by both text encoders.
    for (preset, platform) in [("ltx2", V5P), ("ltx2_3", CPU), ("ltx2_5", CUDA)] {
        all.push(Case::new(preset, platform).set("request.enhance_prompt", "true"));
    }
    // Temporal rounds without audio and with audio.
    for (reference, platform) in [("official", CUDA), ("diffusers", V5P)] {
        let rounds = Case::new("ltx2_5_dfr", platform).set("dfr.temporal_rounds", "2");
        all.push(rounds.set("reference", reference));
    }
    // Temporal upsampling between two stages, after and before spatial upsampling.
    for (upsample, platform) in [("[spatial_x2, temporal_x2]", CUDA), ("[temporal_x2, spatial_x2]", V5P)] {
        let frames = Case::new("ltx2_5_two_stage", platform).set("request.num_frames", "129");
        all.push(frames.set("two_stage.upsample", upsample));
    }
    let staged = Case::new("ltx2_two_stage", CPU);
    all.push(staged.set("request.images", &images(&[(0, "0.9")])));
    // Every layout, for both generations.
    let layouts = [("tensor", "tensor=8"), ("tensor", "data=2,cfg=2,context=2,tensor=1")].into_iter().chain(LAYOUTS);
    for (n, (layout, mesh)) in layouts.enumerate() {
        let devices = devices_of(mesh);
        for (turn, platform) in [V5P, CUDA, CPU].into_iter().enumerate() {
            let preset = if (n + turn) % 2 == 0 { "ltx2" } else { "ltx2_3" };
            all.push(Case::new(preset, platform).set("layout", layout).on(mesh, devices));
        }
    }
    all.extend(slices());
    // Settings that change programs.
    for (key, value) in [
        ("runtime.dtype", "f32"),
        ("runtime.numerics", "official"),
        ("runtime.weights", "fp8"),
        ("runtime.attention", "plain"),
        ("reference", "diffusers"),
        ("sampler.noise", "device"),
        ("sampler.kind", "res_2s"),
        ("guidance.rescale_scope", "batch"),
        ("request.negative_prompt", ""),
        ("runtime.tiling", "{}"),
    ] {
        all.push(Case::new("ltx2_3", CUDA).set(key, value));
    }
    // Guidance by step with looped and unrolled blocks, over several devices; guiders and samplers.
    let levels = "[{sigma: 1.0}, {sigma: 0.5, stg: 0, cfg: 1}]";
    all.push(Case::new("ltx2_3", CUDA).set("guidance.video.by_sigma", levels));
    all.push(
        Case::new("ltx2", V5P).set("guidance.video.skip", "1").set("layout", "cfg-ulysses").on("cfg=2,context=4", 8),
    );
    all.push(Case::new("ltx2", CPU).set("guidance.video.skip", "1").set("guidance.audio.skip", "0"));
    for kind in ["gradient_estimation", "cfg_pp"] {
        all.push(Case::new("ltx2", CPU).set("sampler.kind", kind));
    }
    all.push(Case::new("ltx2", CPU).set("guidance.kind", "legacy_apg"));
    all.extend(integer_weights());
    // Small models: nano and the reference's tiny models.
    all.extend(["nano", "nano_two_stage"].map(|nano| Case::new(nano, CPU)));
    all.push(Case::new("nano_2_0", CPU).set("model.path", "nano"));
    all.push(Case::new("nano_2_3", CPU).set("model.path", "nano_2_3"));
    all.push(Case::new("nano_2_5", CPU).set("model.path", "nano_2_5"));
    for model in ["tiny_a", "tiny_b", "tiny_2_3"] {
        let path = format!("tests/fixtures/models/{model}");
        let base = if model == "tiny_2_3" { "nano_2_3" } else { "nano_2_0" };
        all.push(Case::new(base, CPU).set("model.path", &path));
        all.push(Case::new(base, CUDA).set("model.path", &path).set("layout", "ulysses").on("context=2", 2));
    }
    all
}

/// Returns the programs of a case, one line each.
fn table(case: &Case) -> String {
    let fail = |e: &dyn std::fmt::Display| -> ! { panic!("{}: {e}", case.name()) };
    let config = case.config();
    let programs = Programs::from_config(&config, case.layers).unwrap_or_else(|e| fail(&e));
    let (platform, kind) = case.platform;
    let build = setup::build(&config, case.devices, platform, kind).unwrap_or_else(|e| fail(&e));
    let mut table = format!("{}\n", case.name());
    for program in programs.kinds().chain([ProgramKind::Transformer]) {
        let network = programs.network(program, &build).unwrap_or_else(|e| fail(&e));
        let _ = writeln!(table, "  {:14}  {}", program.name(), hash(&network.program.text));
    }
    table
}

#[needs(nothing)]
fn program_hashes_are_unchanged() {
    let cases = cases();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // Each thread takes every n-th case, because neighbouring cases have similar sizes.
    let some = |n| cases.iter().enumerate().skip(n).step_by(threads);
    let mut tables: Vec<(usize, String)> = std::thread::scope(|scope| {
        let run = |n| scope.spawn(move || some(n).map(|(at, case)| (at, table(case))).collect::<Vec<_>>());
        let started: Vec<_> = (0..threads).map(run).collect();
        started.into_iter().flat_map(|thread| thread.join().expect("its programs are written")).collect()
    });
    tables.sort_by_key(|(at, _)| *at);
    insta::assert_snapshot!(tables.into_iter().map(|(_, table)| table).collect::<String>());
}

/// Gemma-4 at the published sizes, both prompts in one pass; also tiny models with irregular layer patterns.
#[needs(nothing)]
fn ltx_2_5_text_encoder_hashes_are_unchanged() {
    let json = |file: String| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(&file).expect("a fixture")).expect("JSON")
    };
    let models = Path::new("tests/fixtures/models");
    let projection = |model: &str| match model {
        "gemma4_12b" => Preset::named("ltx2_3").unwrap().config("connectors").unwrap().clone(),
        tiny => json(format!("{}/{tiny}/connectors/config.json", models.display())),
    };
    let mut table = String::new();
    for (model, platform, layout, mesh) in [
        ("gemma4_12b", CPU, "replicated", "data=1"),
        ("gemma4_12b", CUDA, "replicated", "data=1"),
        ("gemma4_12b", V5P, "replicated", "data=1"),
        ("gemma4_12b", V5P, "tensor", "tensor=8"),
        ("gemma4_12b", ("tpu", "TPU v6 lite"), "fsdp-ulysses", "fsdp=2,context=4"),
        ("gemma4_12b", ("tpu", "TPU7x"), "cfg-ulysses", "cfg=2,context=4"),
        ("gemma4_12b", CUDA, "tensor-encoder", "cfg=2,context=2,tensor=2"),
        ("gemma4_a", CPU, "replicated", "data=1"),
        ("gemma4_b", CPU, "replicated", "data=1"),
        ("gemma4_b", CPU, "tensor", "tensor=2"),
    ] {
        let devices = devices_of(mesh);
        let given = Case::new("ltx2_3", platform).set("layout", layout).on(mesh, devices).config();
        let build = setup::build(&given, devices, platform.0, platform.1).expect("a layout");
        let encoder = json(format!("{}/{model}/text_encoder/config.json", models.display()));
        let encoder = Gemma4Config::from_json(&encoder).expect("valid");
        let connectors = ConnectorsConfig::from_json(&projection(model)).expect("valid");
        let network = gemma4::program(&encoder, Some(&connectors), 2, 1024, &build).expect("builds");
        let _ = writeln!(table, "{model} {} '{}', {layout}, {mesh}", platform.0, platform.1);
        let _ = writeln!(table, "  text_encoder    {}", hash(&network.program.text));
    }
    insta::assert_snapshot!(table);
}

#[needs(nothing)]
fn program_cases_cover_every_shipped_layout() {
    let files = std::fs::read_dir("shardings").unwrap().map(|e| e.unwrap().path());
    let shipped: BTreeSet<String> = files.map(|p| p.file_stem().unwrap().to_string_lossy().into_owned()).collect();
    let known = LAYOUTS.iter().map(|(layout, _)| *layout).chain(["replicated", "tensor"]);
    assert_eq!(shipped, known.map(String::from).collect());
}
