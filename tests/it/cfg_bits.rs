//! A guidance branch on a separate device has the same bits as in a batch with the others: `cfg` gives one device's
//! latents for models of different sizes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ltx2::av::Av;
use ltx2::nn::Build;
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::plan::origin::{Origin, Weights};
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pjrt::Client;
use ltx2::request::Request;
use ltx2::runtime::{Engine, EngineOptions};
use ltx2::sampling::guidance::GuidanceScales;
use ltx2::tensor::Tensor;
use ltx2::weights::{ModelSource, Overrides};
use serde_json::{Value, json};

use crate::layouts::build;
use crate::support::passes::Pass;
use crate::support::{cases, cpu, dumped, dumping, generate, needs, open, optimized, quick, relative_l2, request};

/// A transformer with random weights: heads and head dimensions (also of the audio stream), blocks, and other keys.
struct Variant {
    base: &'static str,
    heads: [usize; 2],
    audio_heads: [usize; 2],
    layers: usize,
    more: Value,
}

/// One head and several, narrow and wide, odd sizes; other activations, norms and biases than the published models.
fn variants() -> Vec<Variant> {
    let plain = json!({});
    let v = |base, heads, audio_heads, layers, more: &Value| Variant {
        base,
        heads,
        audio_heads,
        layers,
        more: more.clone(),
    };
    vec![
        v("tiny_a", [3, 10], [3, 6], 2, &json!({"activation_fn": "geglu", "attention_bias": false})),
        v("tiny_2_3", [3, 32], [3, 12], 1, &json!({"activation_fn": "swiglu"})),
        v("tiny_a", [1, 16], [1, 8], 2, &plain),
        v("tiny_b", [4, 32], [4, 16], 1, &json!({"norm_elementwise_affine": true, "ff_bias": false})),
        v("tiny_2_3", [1, 14], [1, 10], 2, &plain),
    ]
}

impl Variant {
    /// Writes the configurations of its base model with its own transformer.
    fn write(&self, folder: &Path) {
        let base = base(self.base);
        for part in ["transformer", "connectors", "text_encoder", "vae", "audio_vae", "vocoder", "scheduler"] {
            let name = if part == "scheduler" { "scheduler_config.json" } else { "config.json" };
            let text = std::fs::read_to_string(base.join(part).join(name)).expect("a configuration");
            let mut config: Value = serde_json::from_str(&text).expect("JSON");
            match part {
                "transformer" => self.change(&mut config),
                // LTX-2.3's connectors have the widths of the streams.
                "connectors" if self.base == "tiny_2_3" => self.widen(&mut config),
                _ => {}
            }
            std::fs::create_dir_all(folder.join(part)).expect("a folder");
            std::fs::write(folder.join(part).join(name), config.to_string()).expect("writes");
        }
    }

    fn change(&self, config: &mut Value) {
        let [[heads, dim], [audio_heads, audio_dim]] = [self.heads, self.audio_heads];
        let sizes = json!({
            "num_attention_heads": heads, "attention_head_dim": dim, "cross_attention_dim": heads * dim,
            "audio_num_attention_heads": audio_heads, "audio_attention_head_dim": audio_dim,
            "audio_cross_attention_dim": audio_heads * audio_dim, "num_layers": self.layers,
        });
        for changes in [&sizes, &self.more] {
            for (key, value) in changes.as_object().expect("an object") {
                config[key] = value.clone();
            }
        }
    }

    fn widen(&self, config: &mut Value) {
        for (stream, [heads, dim]) in [("video", self.heads), ("audio", self.audio_heads)] {
            config[format!("{stream}_hidden_dim")] = (heads * dim).into();
            config[format!("{stream}_connector_num_attention_heads")] = heads.into();
            config[format!("{stream}_connector_attention_head_dim")] = dim.into();
        }
    }
}

fn base(name: &str) -> PathBuf {
    Path::new("tests/fixtures/models").join(name)
}

/// Length of a pass's video and text, and its guidance.
#[derive(Clone, Copy, Debug)]
enum Video {
    OfCase,
    /// 17 frames, 24 text tokens, guidance scale 3.5: attention with other numbers of queries and keys.
    Longer,
}

/// A model's pass with as many branches as its generation supports, on meshes of `cfg`.
struct Subject {
    name: String,
    source: Arc<ModelSource>,
    weights: Weights,
}

impl Subject {
    fn committed(name: &str) -> Self {
        let source = source(&base(name));
        Subject { name: name.into(), weights: Weights::Files(source.clone()), source }
    }

    fn random(variant: &Variant, seed: u64, folder: &Path) -> Self {
        variant.write(folder);
        let [[heads, dim], [audio_heads, audio_dim]] = [variant.heads, variant.audio_heads];
        let name = format!("{} {heads}x{dim} {audio_heads}x{audio_dim} seed {seed}", variant.base);
        Subject { name, source: source(folder), weights: Weights::Random(seed) }
    }

    fn is_newer(&self) -> bool {
        self.name.starts_with("tiny_2_3")
    }

    /// LTX-2.0's with three heads also generates a longer video.
    fn videos(&self) -> &'static [Video] {
        if self.name.starts_with("tiny_a 3x") { &[Video::OfCase, Video::Longer] } else { &[Video::OfCase] }
    }

    fn model(&self) -> OpenModel {
        match &self.weights {
            Weights::Files(source) => OpenModel::open(source),
            Weights::Random(seed) => OpenModel::random(Origin::Files(self.source.clone()), *seed),
        }
        .expect("a model")
    }

    fn latents(&self, client: &Client, options: EngineOptions, mesh: &str, video: Video) -> Av<Tensor> {
        let model = self.model();
        let name = if self.is_newer() { "/tiny_2_3_guided" } else { "/tiny_a_cfg" };
        let case = cases("pipeline").into_iter().find(|c| c.name.ends_with(name)).expect("a case");
        let request = Request { width: 96, height: 64, ..request(&case, &model) };
        let request = match video {
            Video::OfCase => request,
            Video::Longer => {
                let scales = request.scales.map(|own| GuidanceScales { cfg: 3.5, ..own });
                Request { num_frames: 17, max_sequence_length: 24, scales, ..request }
            }
        };
        let request = Request { stg_blocks: request.stg_blocks.map(|own| own.iter().map(|_| 0).collect()), ..request };
        let mut executor = Executor::new(Engine::new(client.clone(), options), self.weights.clone());
        let layout = if mesh.is_empty() { build("replicated", "data=1", 1) } else { build("cfg", mesh, 4) };
        Pass::new(&self.source, &model, &request).latents(&mut executor, &layout)
    }
}

fn source(folder: &Path) -> Arc<ModelSource> {
    Arc::new(ModelSource::open(folder.to_str().expect("UTF-8"), &Overrides::default()).expect("a model"))
}

/// Compares bits under these compile options for all variants with `seeds` seeds each; lists the differences.
fn compare(options: &EngineOptions, seeds: u64) {
    let client = cpu(4);
    let dir = tempfile::tempdir().expect("a folder");
    let mut subjects = Vec::from(["tiny_a", "tiny_b", "tiny_2_3"].map(Subject::committed));
    for (i, variant) in variants().iter().enumerate() {
        subjects.extend((0..seeds).map(|seed| Subject::random(variant, seed, &dir.path().join(format!("{i}-{seed}")))));
    }
    let mut differ = Vec::new();
    let videos = subjects.iter().flat_map(|subject| subject.videos().iter().map(move |video| (subject, *video)));
    for (subject, video) in videos {
        let whole = subject.latents(&client, options.clone(), "", video);
        let meshes: &[&str] = if subject.is_newer() { &["cfg=2", "cfg=4"] } else { &["cfg=2"] };
        for mesh in meshes {
            let got = subject.latents(&client, options.clone(), mesh, video);
            for ((stream, got), want) in Av::NAMES.zip(got.as_ref()).zip(whole.as_ref()) {
                let line = format!("{} {video:?} {mesh} {stream}: {:.1e}", subject.name, relative_l2(got, want));
                eprintln!("{line}");
                if got != want {
                    differ.push(line);
                }
            }
        }
    }
    assert_eq!(differ, [""; 0], "not bitwise equal to one device");
}

/// Runs a test of this file in a process with XLA's newer emitters, which users have; this process uses the older ones.
fn with_newer_emitters(test: &str) {
    let mut child = std::process::Command::new(std::env::current_exe().expect("this file"));
    child.args(["--exact", &format!("cfg_bits::{test}"), "--nocapture"]);
    let out = child.env("XLA_FLAGS", "").env("LTX2_TEST_MEMBER", test).output().expect("starts");
    let said = String::from_utf8_lossy(&out.stdout);
    eprintln!("{}", String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && said.contains("1 passed"), "{said}");
}

/// The newer emitters take five times as long as the older ones.
#[needs(cpu, full)]
fn sharded_guidance_branches_equal_batched_ones_bitwise() {
    with_newer_emitters("quick_compile_keeps_sharded_branches_bitwise_equal");
}

#[needs(member)]
fn quick_compile_keeps_sharded_branches_bitwise_equal() {
    compare(&quick(), 4);
}

/// Compiles with LLVM's optimizations, which vectorize sums.
#[needs(cpu, full)]
fn llvm_optimizations_keep_guidance_branches_bitwise_equal() {
    with_newer_emitters("optimized_compile_keeps_sharded_branches_bitwise_equal");
}

#[needs(member)]
fn optimized_compile_keeps_sharded_branches_bitwise_equal() {
    compare(&optimized(), 1);
}

/// Compares all tensors from prompt to frames and audio.
#[needs(cpu, full)]
fn guided_video_is_bitwise_equal_to_single_device() {
    with_newer_emitters("sharded_guided_video_has_identical_bits");
}

#[needs(member)]
fn sharded_guided_video_has_identical_bits() {
    let client = cpu(4);
    let case = cases("pipeline").into_iter().find(|c| c.name.ends_with("/tiny_a_cfg")).expect("a case");
    let made = |build: Build| {
        let mut runner = open(&client, case.model.to_str().expect("a path"), build);
        let request = request(&case, &runner.model);
        generate(&mut runner, &request, &dumping(None))
    };
    let (whole, split) = (made(build("replicated", "data=1", 1)), made(build("cfg", "cfg=2", 4)));
    for name in ["noise.video", "prompt_embeds", "latents.video", "latents.audio", "video", "audio"] {
        assert!(dumped(&split, name) == dumped(&whole, name), "{name}: other bits");
    }
}
