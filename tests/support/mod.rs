//! Common code of the integration tests: the CPU plugin, fixtures, distances.
#![allow(dead_code)] // Each test binary uses its part.

pub mod chat;
pub mod cudnn;
pub mod drawn;
pub mod harness;
pub mod hub;
pub mod layout_choice;
pub mod official;
pub mod passes;
pub mod rope;
pub mod single_file;
pub mod standin;
pub mod thresholds;
pub mod tpu;
pub mod tuning_guide;

use ltx2::request::{NoiseOrder, Noising, Request, Shapes};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::OnceLock;

#[allow(unused_imports)] // As above.
pub use harness::{full, hides_ffmpeg};
use ltx2::av::Av;
use ltx2::hlo::DType;
use ltx2::models::Network;
use ltx2::models::connectors::{self, ConnectorsConfig};
use ltx2::models::gemma3::{self, Gemma3Config};
use ltx2::models::presets::Preset;
use ltx2::models::transformer::{CrossModalTimestep, TransformerConfig};
use ltx2::nn::{Build, Lowering};
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::plan::options::RunOptions;
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pipeline::programs::component::run_component;
use ltx2::pipeline::programs::configs::ModelConfigs;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pipeline::runner::Runner;
use ltx2::pipeline::stages::text_to_video::Generated;
use ltx2::pjrt::discover::{self, Platform};
use ltx2::pjrt::{Client, CpuOptions, OptionValue, Plugin};
use ltx2::runtime::{Engine, EngineOptions, Toolchain, platforms};
use ltx2::sampling::Euler;
use ltx2::sampling::denoise::{DenoiseShape, denoise, prepare};
use ltx2::sampling::guidance::{Branch, GuidanceScales, RescaleExtent};
use ltx2::sampling::guiders::Guider;
use ltx2::sampling::sigmas;
use ltx2::tensor::Tensor;
use ltx2::weights::Checkpoint;
use ltx2::weights::{ModelSource, Overrides};
pub use ltx2_test_macros::needs;

/// Returns the compile cache that all tests and their child processes share. The keys contain the program text, the
/// compile options and the plugin, so entries are always up to date. Each plugin and processor type has a separate
/// folder, so that tests which copy entries get none of another plugin.
pub fn programs() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let plugin =
            discover::find(Platform::Cpu, None).found.first().map(|found| found.path.clone()).unwrap_or_default();
        let about = std::fs::metadata(&plugin).ok().map(|m| (m.len(), m.modified().ok()));
        let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let kind: Vec<&str> = processor.lines().filter(|l| l.starts_with("model") || l.starts_with("flags")).collect();
        let mut hasher = std::hash::DefaultHasher::new();
        (plugin, about, kind.first(), kind.last()).hash(&mut hasher);
        Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs").join(format!("{:016x}", hasher.finish()))
    });
    folder.clone()
}

/// Returns the file in which an error says that results are kept.
pub fn kept_file(error: &str) -> &str {
    let (_, kept) = error.split_once(" kept in ").unwrap_or_else(|| panic!("no results are kept: {error}"));
    kept.split("; ").next().expect("a path")
}

/// Returns the cache entries of [`tiny`]'s programs in [`programs`] by name, except the programs `but`.
pub fn tiny_entries(but: &[&str]) -> BTreeMap<String, PathBuf> {
    let programs_of_run = &tiny_sidecar()["programs"];
    let entries = std::fs::read_dir(programs()).expect("programs").map(|entry| entry.expect("an entry").path());
    let mut by_options: BTreeMap<String, (BTreeMap<String, PathBuf>, usize)> = BTreeMap::new();
    for entry in entries.filter(|path| path.extension().is_some_and(|end| end == "pjrt")) {
        let header = header(&entry);
        let [name, options] = ["name", "options"].map(|key| header[key].as_str().unwrap_or_default().to_string());
        let (of_run, all) = by_options.entry(options).or_default();
        *all += 1;
        if !name.is_empty() && !but.contains(&name.as_str()) && programs_of_run[&name] == header["program"] {
            of_run.insert(name, entry);
        }
    }
    // Some tests compile the same programs with other options: take the options with the most programs of this run,
    // then with the most entries.
    by_options.into_values().max_by_key(|(of_run, all)| (of_run.len(), *all)).unwrap_or_default().0
}

/// Creates a cache with [`tiny_entries`].
pub fn copy_programs(cache: &Path, but: &[&str]) {
    std::fs::create_dir(cache).expect("a folder");
    for entry in tiny_entries(but).into_values() {
        std::fs::copy(&entry, cache.join(entry.file_name().expect("a name"))).expect("copied");
    }
}

/// Returns the first line of a cache entry; null if another process removed it.
pub fn header(entry: &Path) -> serde_json::Value {
    let bytes = std::fs::read(entry).unwrap_or_default();
    serde_json::from_slice(bytes.split(|byte| *byte == b'\n').next().unwrap_or_default()).unwrap_or_default()
}

/// Returns the folder of optimized modules that tests share, except tests of such folders.
pub fn modules() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("modules")
}

/// Returns a command of the `ltx2` binary that uses the tests' folders instead of the user's, downloads nothing, and
/// finds no other program unless the test requires ffmpeg.
pub fn ltx2() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ltx2"));
    command.env("LTX2_COMPILE_CACHE", programs()).env("LTX2_PLUGIN_DOWNLOAD", "off");
    command.env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
    if hides_ffmpeg() {
        command.env("PATH", "");
    }
    command
}

/// Removes the environment variables that set a proxy, in both spellings.
pub fn without_proxies(command: &mut Command) -> &mut Command {
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    command
}

/// Returns the configuration of a short run (one second, half of that of `nano`) on the reference's smallest model.
/// Compiles its programs on the first call, because otherwise concurrent tests would each compile them.
pub fn tiny() -> &'static str {
    tiny_sidecar();
    TINY
}

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny.yml");

/// Returns the sidecar of a run of [`tiny`].
pub fn tiny_sidecar() -> &'static serde_json::Value {
    static SIDECAR: OnceLock<serde_json::Value> = OnceLock::new();
    SIDECAR.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let ran = ltx2().args(["generate", "-c", TINY, "-o"]).arg(folder.path().join("first.mp4")).output();
        let ran = ran.expect("the binary runs");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        let sidecar = std::fs::read(folder.path().join("first.json")).expect("a sidecar");
        serde_json::from_slice(&sidecar).expect("JSON")
    })
}

/// Returns a run of the smallest component, with `in.safetensors` and `out.safetensors` in a folder.
pub fn run_upsampler(folder: &Path) -> Command {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/upsampler_rational");
    let latents = Tensor::F32(ndarray::ArrayD::from_elem(vec![1, 8, 3, 2, 3], 0.5));
    ltx2::pipeline::output::tensors::write(&folder.join("in.safetensors"), &[("latents".into(), latents)])
        .expect("written");
    let mut run = ltx2();
    run.args(["run", "upsampler", "--platform", "cpu", "--model", model, "--force", "--inputs"]);
    run.arg(folder.join("in.safetensors")).arg("-o").arg(folder.join("out.safetensors"));
    run
}

/// Setting that disables LLVM's optimizations, which halves the compile time.
pub const QUICK: &str = "runtime.xla_flags.xla_backend_optimization_level=0";

/// All shipped layouts except `tensor`, each with a mesh.
pub const LAYOUTS: [(&str, &str); 20] = [
    ("sequence", "context=8"),
    ("ulysses", "context=8"),
    ("ring", "context=8"),
    ("hybrid", "context=8"),
    ("cfg", "cfg=2"),
    ("cfg-ulysses", "cfg=2,context=4"),
    ("fsdp-ulysses", "fsdp=2,context=4"),
    ("before-385", "context=4"),
    ("ffn-matched", "context=4"),
    ("qkv-unsharded", "context=4"),
    ("out-unsharded", "context=4"),
    ("tensor-gathered-ffn", "tensor=2"),
    ("rope-gathered", "context=8"),
    ("cfg-ulysses-encoder", "cfg=2,context=4"),
    ("cfg-hybrid", "cfg=2,context=4"),
    ("tensor-encoder", "cfg=2,context=2,tensor=2"),
    ("tensor-sequence", "cfg=2,context=2,tensor=2"),
    ("fsdp-sequence", "cfg=2,context=4"),
    ("fsdp-ffn", "cfg=2,context=4"),
    ("tensor-hybrid", "context=8"),
];

/// Returns the number of devices of a mesh such as `cfg=2,context=4`.
pub fn devices_of(mesh: &str) -> usize {
    mesh.split(',').map(|axis| axis.split('=').nth(1).expect("a size").parse::<usize>().expect("a number")).product()
}

/// Creates a CPU client with `devices` virtual devices.
pub fn cpu(devices: usize) -> Client {
    let search = discover::find(Platform::Cpu, None);
    let found = search.found.first().unwrap_or_else(|| panic!("{}", search.not_found()));
    let plugin = Plugin::load(&found.path).expect("the plugin loads");
    let options = CpuOptions { devices: Some(devices), ..CpuOptions::default() };
    Client::new(&plugin, &options.to_attributes()).expect("a client")
}

/// Returns engine options that compile as for users, with the tests' compile cache.
pub fn optimized() -> EngineOptions {
    EngineOptions { compile_cache: Some(programs()), ..EngineOptions::default() }
}

/// Returns engine options without LLVM's optimizations: this halves the compile time, which dominates tests of tiny
/// programs. One case per component is compiled with [`optimized`].
pub fn quick() -> EngineOptions {
    let level = ("xla_backend_optimization_level".to_string(), OptionValue::Int(0));
    EngineOptions { xla_flags: [level].into(), ..optimized() }
}

/// Case of `tests/fixtures/cases`.
pub struct Case {
    /// `component/name`.
    pub name: String,
    /// Model folder that it was computed with.
    pub model: PathBuf,
    /// Non-tensor arguments.
    pub scalars: BTreeMap<String, serde_json::Value>,
    /// Input tensors.
    pub inputs: BTreeMap<String, Tensor>,
    /// Expected tensors; `name.strided` contains every n-th element along each axis.
    pub outputs: BTreeMap<String, Tensor>,
    checkpoint: Checkpoint,
}

impl Case {
    /// Tolerance between two correct f32 runs if the network is worse conditioned than any published one: three times
    /// the distance of the reference from f64; 0 if the case does not state it.
    pub fn rounding(&self, output: &str) -> f64 {
        3.0 * self.number(&format!("f32_spread.{output}")).unwrap_or_default()
    }

    /// Returns a number from the case's metadata.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.checkpoint.metadata(key).and_then(|v| v.parse().ok())
    }

    /// Returns the non-tensor arguments of the component, without those that describe the generation of the inputs.
    pub fn arguments(&self) -> impl Iterator<Item = (String, serde_json::Value)> {
        let known = ["padding_side", "prompts", "max_sequence_length"];
        let own = self.scalars.iter().filter(move |(name, _)| !known.contains(&name.as_str()));
        own.map(|(name, value)| (name.clone(), value.clone()))
    }

    fn list(&self, key: &str) -> Option<Vec<usize>> {
        serde_json::from_str(self.checkpoint.metadata(key)?).ok()
    }

    /// Returns the elements of `got` that the case stores (every n-th along each axis, or all), and the expected output
    /// `name`.
    pub fn pair(&self, name: &str, got: &Tensor) -> (Tensor, &Tensor) {
        if let Some(want) = self.outputs.get(name) {
            return (got.clone(), want);
        }
        let want = self.outputs.get(&format!("{name}.strided")).unwrap_or_else(|| panic!("{}: no '{name}'", self.name));
        let shape = self.list(&format!("shape.{name}")).expect("the whole shape");
        assert_eq!(got.shape(), shape, "{}: shape of '{name}'", self.name);
        let strides = self.list(&format!("strides.{name}")).expect("the strides");
        let mut view = got.to_f32();
        for (axis, step) in strides.iter().enumerate() {
            let every: Vec<usize> = (0..view.shape()[axis]).step_by(*step).collect();
            view = view.select(ndarray::Axis(axis), &every);
        }
        (Tensor::F32(view), want)
    }

    /// Returns the relative L2 distance of `got` from the case's output `name`.
    pub fn distance(&self, name: &str, got: &Tensor) -> f64 {
        let (got, want) = self.pair(name, got);
        relative_l2(&got, want)
    }

    /// Returns [`Case::distance`]; fails if it exceeds `limit`, and logs it for the table of distances.
    pub fn within(&self, name: &str, got: &Tensor, limit: f64) -> f64 {
        let distance = self.distance(name, got);
        eprintln!("{} {name}: {distance:.1e}", self.name);
        harness::note_distance(&self.name, name, distance, limit);
        assert!(distance <= limit, "{} {name}: {distance:e} > {limit:e}", self.name);
        distance
    }
}

/// Returns all cases of a component.
pub fn cases(component: &str) -> Vec<Case> {
    let dir = Path::new("tests/fixtures/cases").join(component);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|e| e.expect("an entry").path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no cases in {}", dir.display());
    files.iter().map(|f| case(component, f)).collect()
}

/// Reads a case from its file.
pub fn case(component: &str, file: &Path) -> Case {
    let checkpoint = Checkpoint::open(file).expect("a fixture");
    let part = |prefix: &str| -> BTreeMap<String, Tensor> {
        checkpoint
            .names()
            .filter_map(|n| n.strip_prefix(prefix).map(|s| (s.to_string(), n)))
            .map(|(s, n)| (s, checkpoint.get(n).and_then(|v| v.to_tensor()).expect("a tensor")))
            .collect()
    };
    let stem = file.file_stem().expect("a name").to_string_lossy();
    Case {
        name: format!("{component}/{stem}"),
        model: Path::new("tests/fixtures/models").join(checkpoint.metadata("model").expect("a model")),
        scalars: serde_json::from_str(checkpoint.metadata("scalars").unwrap_or("{}")).expect("scalars"),
        inputs: part("in."),
        outputs: part("out."),
        checkpoint,
    }
}

/// Returns `|got - want| / |want|` over all elements, computed in f64.
pub fn relative_l2(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.shape(), want.shape(), "shapes");
    let (got, want) = (got.to_f32(), want.to_f32());
    let sum = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
        got.iter().zip(want.iter()).map(|(a, b)| f(f64::from(*a), f64::from(*b)).powi(2)).sum()
    };
    let (difference, size) = (sum(&|a, b| a - b).sqrt(), sum(&|_, b| b).sqrt());
    assert!(difference.is_finite(), "not finite");
    if size == 0.0 { difference } else { difference / size }
}

/// Returns the two programs of the published 19B model at 768x512x121 with a negative prompt, for a platform.
pub fn published(platform: &str) -> [(&'static str, Network); 2] {
    published_blocks(platform, None)
}

/// Returns [`published`] with this number of blocks.
pub fn published_blocks(platform: &str, blocks: Option<usize>) -> [(&'static str, Network); 2] {
    let preset = Preset::named("ltx2").expect("the published configuration");
    let mut c = TransformerConfig::from_json(preset.config("transformer").expect("a transformer")).expect("valid");
    c.num_layers = blocks.unwrap_or(c.num_layers);
    let build = Build {
        lowering: (platforms::spec_by_name(platform).lowering)(&Toolchain::default()),
        ..Build::new(DType::BF16)
    };
    let tokens = Av { video: 6144, audio: 126 };
    let shape = DenoiseShape::plain(vec![Branch::Conditional, Branch::Negative], tokens, 1024, Av::both(3840));
    let programs = [("prepare", prepare(&c, &shape, &build)), ("denoise", denoise(&c, &shape, &build))];
    programs.map(|(name, network)| (name, network.expect("builds")))
}

/// Returns the published text encoder and connectors programs for two prompts of 1024 tokens, for a platform.
pub fn published_text(platform: &str) -> [(&'static str, Network); 2] {
    let preset = Preset::named("ltx2").expect("the published configuration");
    let config = |folder: &str| preset.config(folder).expect("a configuration");
    let gemma = Gemma3Config::from_json(config("text_encoder")).expect("valid");
    let c = ConnectorsConfig::from_json(config("connectors")).expect("valid");
    let build = Build {
        lowering: (platforms::spec_by_name(platform).lowering)(&Toolchain::default()),
        ..Build::new(DType::BF16)
    };
    let encoder = gemma3::program(&gemma, Some(&c), 2, 1024, &build).expect("builds");
    let connected = connectors::program(&c, 2, 1024, connectors::Input::PromptEmbeds, &build).expect("builds");
    [("text_encoder", encoder), ("connectors", connected)]
}

/// Returns the lowering of a platform whose device kind is unknown.
pub fn lowering_of(platform: &str) -> Lowering {
    lowering_of_kind(platform, "")
}

/// Returns the lowering of a platform for a device kind.
pub fn lowering_of_kind(platform: &str, kind: &str) -> Lowering {
    (platforms::spec_by_name(platform).lowering)(&Toolchain::of_kind(platform, kind))
}

/// Returns the default build options for the CPU on one device.
pub fn plain(dtype: DType) -> Build {
    Build { lowering: lowering_of("cpu"), ..Build::new(dtype) }
}

/// Opens a model on the devices of a client.
pub fn open(client: &Client, model: &str, build: Build) -> Runner {
    let source = Arc::new(ModelSource::open(model, &Overrides::default()).expect("a model"));
    let executor = Executor::new(Engine::new(client.clone(), quick()), source.clone());
    let mut model = OpenModel::open(&source).expect("complete");
    // The reference of the cases is diffusers, which does not clamp.
    model.configs = model.configs.with_vocoder_clamp(false);
    Runner::new(model, executor, build)
}

/// Links the components of a model into another folder.
pub fn link_parts(model: &str, folder: &Path) {
    for part in std::fs::read_dir(model).expect("a folder") {
        let part = std::fs::canonicalize(part.expect("an entry").path()).expect("a path");
        let name = if part.is_dir() { part.file_name() } else { Some("model_index.json".as_ref()) };
        std::os::unix::fs::symlink(&part, folder.join(name.expect("a name"))).expect("a link");
    }
}

/// Returns run options that keep intermediate tensors.
pub fn dumping(chunk: Option<usize>) -> RunOptions {
    RunOptions { chunk, dump: true, ..RunOptions::default() }
}

/// Runs a component on `inputs`.
pub fn run_case(
    client: &Client,
    component: ProgramKind,
    case: &Case,
    inputs: BTreeMap<String, Tensor>,
    options: EngineOptions,
    build: &Build,
) -> BTreeMap<String, Tensor> {
    let model = case.model.to_str().expect("a path");
    let source = Arc::new(ModelSource::open(model, &Overrides::default()).expect("a model"));
    let mut executor = Executor::new(Engine::new(client.clone(), options), source.clone());
    let scalars = case.arguments().collect();
    run_component(component, &ModelConfigs::from_source(&source), &mut executor, inputs, &scalars, build)
        .unwrap_or_else(|e| panic!("{}: {e}", case.name))
        .into_iter()
        .collect()
}

/// Returns the request of a pipeline case.
pub fn request(case: &Case, models: &OpenModel) -> Request {
    let s = &case.scalars;
    let number = |k: &str| s[k].as_u64().expect(k);
    let text = |k: &str| s[k].as_str().expect(k).to_string();
    let scales = |stream: &str| {
        let g = &s["guidance"][stream];
        let f = |k: &str| g[k].as_f64().expect(k) as f32;
        GuidanceScales { cfg: f("cfg"), stg: f("stg"), modality: f("modality"), rescale: f("rescale") }
    };
    let (width, height, num_frames) =
        (number("width") as usize, number("height") as usize, number("num_frames") as usize);
    let frame_rate = s["frame_rate"].as_f64().expect("frame_rate");
    let steps = number("steps") as usize;
    let shapes = Shapes::new(&models.sizes, width, height, num_frames, frame_rate).expect("legal sizes");
    let sigmas = match s.get("sigma_shift").and_then(|shift| shift.as_str()) {
        Some("official") => sigmas::official(steps, sigmas::OFFICIAL_TOKENS),
        _ => models.scheduler.sigmas(steps, shapes.tokens.video),
    };
    Request {
        prompt: text("prompt"),
        negative_prompt: text("negative_prompt"),
        width,
        height,
        num_frames,
        frame_rate,
        position_rate: None,
        sound_frames: None,
        seed: number("seed"),
        noise: ltx2::config::Noise::Torch,
        noise_order: NoiseOrder::Latents,
        sigmas: sigmas.expect("a schedule"),
        scales: Av::NAMES.map(scales),
        guidance_steps: Av::default(),
        guider: Guider::default(),
        stg_blocks: Av::both(
            s.get("stg_blocks").map_or(vec![], |b| serde_json::from_value(b.clone()).expect("numbers")),
        ),
        rescale: RescaleExtent::PerSample,
        text_embeddings: None,
        max_sequence_length: number("max_sequence_length") as usize,
        sampler: Euler.into(),
        cache: None,
        cross: CrossModalTimestep::GateOnly,
        first_frame_marker: true,
        noising: Noising::Latents,
        clean_prediction: Default::default(),
        motion_speed: s.get("motion_speed").map_or(1.0, |v| v.as_f64().expect("a number")),
        roles: Av::default(),
        draws_kept: true,
        clip: None,
        sound: None,
        composition: Default::default(),
        chain: None,
        positions: DType::F32,
        conditions: Default::default(),
        dfr: None,
        refine: None,
        tiling: None,
        hdr: None,
    }
}

/// Runs a request to completion.
pub fn generate(runner: &mut Runner, request: &Request, options: &RunOptions) -> Generated {
    runner.generate(request, options, &mut |_, _, _| ControlFlow::Continue(())).expect("runs")
}

/// Returns a tensor of a run's dump.
pub fn dumped<'a>(generated: &'a Generated, name: &str) -> &'a Tensor {
    generated.dump.iter().find(|(n, _)| n == name).map(|(_, t)| t).unwrap_or_else(|| panic!("no '{name}'"))
}

/// Returns the SHA-256 of each file, as in sidecars.
pub fn hashes_of(files: &[&str]) -> serde_json::Value {
    use sha2::Digest;
    let hash = |path: &&str| {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{path}: {e}"));
        ((*path).to_string(), hex::encode(sha2::Sha256::digest(bytes)).into())
    };
    serde_json::Value::Object(files.iter().map(hash).collect())
}
