//! The shipped layouts differ in which bytes a device holds and what it communicates. Both are computed here from the
//! model's sizes, independently of the code that shards tensors, and compared with the compiled programs.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::support::{cases, cpu, full, lowering_of, needs, quick};
use ltx2::analysis::{CollectiveKind, LoopLevel, Module, Report, report};
use ltx2::av::Av;
use ltx2::config::{Config, parse_mesh};
use ltx2::hlo::DType;
use ltx2::models::Network;
use ltx2::models::transformer::TransformerConfig;
use ltx2::nn::{Axis, Build, Param};
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pipeline::programs::component::run_component;
use ltx2::pipeline::programs::configs::ModelConfigs;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::runtime::Engine;
use ltx2::sampling::denoise::{DenoiseShape, denoise};
use ltx2::sampling::guidance::Branch;
use ltx2::weights::{ModelSource, Overrides};

const F32: usize = 4;
/// Conditional and negative branch.
const ROWS: usize = 2;
const VIDEO_TOKENS: usize = 64;
const AUDIO_TOKENS: usize = 24;
const HEADS: usize = 8;

/// Returns the tiny model with as many heads as devices, so that every rule divides evenly.
fn model() -> TransformerConfig {
    let text = std::fs::read_to_string("tests/fixtures/models/tiny_a/transformer/config.json").expect("a model");
    let mut json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (key, value) in [
        ("num_attention_heads", HEADS),
        ("cross_attention_dim", 128),
        ("audio_num_attention_heads", HEADS),
        ("audio_cross_attention_dim", 64),
    ] {
        json[key] = value.into();
    }
    TransformerConfig::from_json(&json).expect("valid")
}

/// Sizes of the activations of all rows, in bytes.
struct Sizes {
    video: f64,
    audio: f64,
    /// Collectives that merge video-to-audio attention over sharded keys: maxima, then values with sums.
    joined: [f64; 2],
    /// Cosines or sines of video self-attention.
    rope: f64,
}

fn sizes(c: &TransformerConfig) -> Sizes {
    let (video, audio) = (c.video().attention.heads, c.audio().attention.heads);
    let bytes = |n: usize| (n * F32) as f64;
    Sizes {
        video: bytes(ROWS * VIDEO_TOKENS * video.width()),
        audio: bytes(ROWS * AUDIO_TOKENS * audio.width()),
        joined: [bytes(ROWS * AUDIO_TOKENS * HEADS), bytes(ROWS * AUDIO_TOKENS * HEADS * (audio.dim + 1))],
        rope: bytes(VIDEO_TOKENS * video.width() / 2),
    }
}

/// The denoising loop under a layout, compiled for CPU.
struct Compiled {
    network: Network,
    report: Report,
}

fn network(layout: &str, mesh: &str) -> Network {
    let c = model();
    let shape = DenoiseShape::plain(
        vec![Branch::Conditional, Branch::Negative],
        Av { video: VIDEO_TOKENS, audio: AUDIO_TOKENS },
        16,
        Av::both(c.caption_channels),
    );
    let network = denoise(&c, &shape, &build(layout, mesh)).expect("builds");
    assert_eq!(network.notes, [""; 0], "{layout}: every size divides");
    network
}

/// Compiles, and checks the size of a device's arguments.
fn compile(engine: &Engine, layout: &str, mesh: &str) -> Compiled {
    let network = network(layout, mesh);
    let executable = engine.compile(layout, &network.program).expect("compiles");
    let memory = executable.compiled().memory().expect("figures");
    assert_eq!(memory.arguments as usize, held(layout, &network), "{layout}: bytes of arguments a device");
    let optimized = executable.compiled().optimized_program().expect("an optimized program");
    let module = Module::decode(&optimized.format, &optimized.bytes).expect("a module");
    let report = report(&module, &network.program.mesh.axes, &[model().num_layers], None);
    for x in &report.collectives {
        eprintln!("{layout}: {:?} {} x{} {:?} {} B {}", x.level, x.kind.name(), x.times, x.axes, x.bytes, x.scope);
    }
    Compiled { network, report }
}

fn build(layout: &str, mesh: &str) -> Build {
    let mesh = Some(parse_mesh(mesh).expect("a mesh"));
    let layout = Config { layout: layout.into(), mesh, ..Config::default() }.placement(8).expect("a layout");
    Build { layout, lowering: lowering_of("cpu"), ..Build::new(DType::F32) }
}

/// Number of runs and bytes by kind.
type Traffic = BTreeMap<CollectiveKind, (f64, f64)>;

impl Compiled {
    /// Returns the collectives of a loop level: per block, step or run.
    fn collectives(&self, phase: LoopLevel) -> Traffic {
        let mut sums = Traffic::new();
        for c in self.report.collectives.iter().filter(|c| c.level == phase) {
            let sum = sums.entry(c.kind).or_default();
            *sum = (sum.0 + c.times, sum.1 + c.times * c.bytes);
        }
        sums
    }

    /// Returns the bytes all-gathered in a block under scopes that end with one of `ends`.
    fn gathered_in(&self, ends: &[&str]) -> f64 {
        let within = |scope: &str| ends.iter().any(|end| scope.ends_with(end));
        let found = self
            .report
            .collectives
            .iter()
            .filter(|c| c.level == LoopLevel::Block && c.kind == CollectiveKind::AllGather);
        found.filter(|c| within(&c.scope)).map(|c| c.times * c.bytes).sum()
    }

    fn axes(&self) -> Vec<&[String]> {
        let mut axes: Vec<&[String]> = self.report.collectives.iter().map(|c| c.axes.as_slice()).collect();
        axes.sort();
        axes.dedup();
        axes
    }
}

fn engine() -> Engine {
    Engine::new(cpu(8), quick())
}

/// Adds the all-reduces that merge video-to-audio attention over sharded video tokens.
fn with_joined(kinds: &[(CollectiveKind, (f64, f64))]) -> Traffic {
    let joined = sizes(&model()).joined;
    kinds.iter().copied().chain([(CollectiveKind::AllReduce, (2.0, joined[0] + joined[1]))]).collect()
}

fn statistics_only(step: &Traffic) {
    assert!(step.keys().all(|k| *k == CollectiveKind::AllReduce), "{step:?}");
    assert!(step.values().all(|(_, bytes)| *bytes <= 64.0), "{step:?}");
}

#[needs(cpu, full)]
fn cfg_layout_gathers_only_predictions_in_each_step() {
    let engine = engine();
    assert_eq!(compile(&engine, "replicated", "data=1").report.collectives, []);

    let cfg = compile(&engine, "cfg", "cfg=2");
    // Each branch's clean prediction, once per step; nothing in a block.
    let c = model();
    let predictions = ROWS * (VIDEO_TOKENS * c.in_channels + AUDIO_TOKENS * c.audio_in_channels) * F32;
    assert_eq!(cfg.collectives(LoopLevel::Step), [(CollectiveKind::AllGather, (2.0, predictions as f64))].into());
    assert_eq!((cfg.collectives(LoopLevel::Block), cfg.collectives(LoopLevel::Outside)), Default::default());
    assert_eq!(cfg.axes(), [["cfg"]]);
}

#[needs(cpu)]
fn token_sharded_layouts_have_expected_collectives() {
    let engine = engine();
    let s = sizes(&model());
    let n = 4.0;
    // Queries, keys, values and the result; each device receives its share of the heads.
    let ulysses = [(CollectiveKind::AllToAll, (4.0, 4.0 * s.video / n))];
    // Keys and values pass around all other devices.
    let ring = [(CollectiveKind::CollectivePermute, (2.0 * (n - 1.0), 2.0 * (n - 1.0) * s.video / n))];
    // All-to-all over heads between two devices; then keys and values with half of the heads are exchanged with the
    // other group.
    let hybrid = [
        (CollectiveKind::AllToAll, (4.0, 4.0 * s.video / n)),
        (CollectiveKind::CollectivePermute, (2.0, 2.0 * s.video / n)),
    ];
    let sequence = [(CollectiveKind::AllGather, (2.0, 2.0 * s.video))];
    let layouts = [("ulysses", &ulysses[..]), ("hybrid", &hybrid), ("ring", &ring), ("sequence", &sequence)];
    for (layout, kinds) in layouts.into_iter().take(if full() { 4 } else { 1 }) {
        let compiled = compile(&engine, layout, "context=4");
        assert_eq!(compiled.collectives(LoopLevel::Block), with_joined(kinds), "{layout}");
        statistics_only(&compiled.collectives(LoopLevel::Step));
        assert_eq!(compiled.collectives(LoopLevel::Outside), Traffic::new(), "{layout}");
        assert_eq!(compiled.axes(), [["context"]], "{layout}");
    }

    if !full() {
        return;
    }
    // `sequence` with gathered RoPE tables; they are equal in every block, so this compiler gathers them once.
    let gathered = compile(&engine, "rope-gathered", "context=4");
    assert_eq!(gathered.collectives(LoopLevel::Block), with_joined(&sequence));
    assert_eq!(gathered.collectives(LoopLevel::Outside), [(CollectiveKind::AllGather, (2.0, 2.0 * s.rope))].into());
    statistics_only(&gathered.collectives(LoopLevel::Step));

    // Half of the rows on each half of the mesh.
    let both = compile(&engine, "cfg-ulysses", "cfg=2,context=4");
    let half: Traffic = with_joined(&ulysses).into_iter().map(|(k, (n, bytes))| (k, (n, bytes / 2.0))).collect();
    assert_eq!(both.collectives(LoopLevel::Block), half);
    assert_eq!(both.collectives(LoopLevel::Step)[&CollectiveKind::AllGather].0, 2.0, "the predictions");
    assert!(both.report.collectives.iter().all(|c| c.axes == ["context"] || c.level == LoopLevel::Step));
}

#[needs(cpu)]
fn tensor_layouts_have_expected_collectives() {
    let engine = engine();
    let s = sizes(&model());
    // Both self-attentions, both text attentions, both cross-modal attentions and both feed-forward layers end in an
    // all-reduce.
    let sums = 4.0 * (s.video + s.audio);
    // One sum of squares per token: for queries and keys of self-attention, queries of text attention, and for each
    // cross-modal attention the queries of one stream and the keys of the other.
    let tokens = [VIDEO_TOKENS, AUDIO_TOKENS].map(|n| (ROWS * n * F32) as f64);
    let squares = 5.0 * (tokens[0] + tokens[1]);
    let tensor = compile(&engine, "tensor", "tensor=4");
    let layer = tensor.collectives(LoopLevel::Block);
    assert_eq!(layer.keys().collect::<Vec<_>>(), [&CollectiveKind::AllReduce]);
    assert_eq!(layer[&CollectiveKind::AllReduce].1, sums + squares);
    assert_eq!((tensor.collectives(LoopLevel::Step), tensor.collectives(LoopLevel::Outside)), Default::default());
    assert_eq!(tensor.axes(), [["tensor"]]);

    if !full() {
        return;
    }
    // The inner activations, four times as wide, are gathered; the second linear layer is replicated and needs no
    // all-reduce.
    let gathered = compile(&engine, "tensor-gathered-ffn", "tensor=4").collectives(LoopLevel::Block);
    assert_eq!(gathered[&CollectiveKind::AllGather], (2.0, 4.0 * (s.video + s.audio)));
    assert_eq!(gathered[&CollectiveKind::AllReduce].1, sums + squares - s.video - s.audio);
    assert_eq!(gathered.len(), 2, "{gathered:?}");
}

/// Returns whether `fsdp-ulysses` shards a weight for storage: matrices on the residual stream.
fn stored_apart(p: &Param) -> bool {
    p.axes.contains(&Axis::Embed) && p.axes.iter().filter(|a| **a != Axis::Layers).count() > 1
}

#[needs(cpu)]
fn fsdp_gathers_each_weight_once_per_block() {
    let engine = engine();
    let c = model();
    let compiled = compile(&engine, "fsdp-ulysses", "fsdp=2,context=4");
    let bytes = |stacked: bool| -> Vec<f64> {
        let layers = if stacked { c.num_layers } else { 1 };
        let params = compiled.network.params.iter().filter(|p| stored_apart(p));
        let mut all: Vec<f64> =
            params.filter(|p| (p.axes[0] == Axis::Layers) == stacked).map(|p| (p.ty.bytes() / layers) as f64).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let gathers = |phase: LoopLevel| -> Vec<f64> {
        let gathers =
            compiled.report.collectives.iter().filter(|x| x.level == phase && x.kind == CollectiveKind::AllGather);
        let mut all: Vec<f64> = gathers
            .inspect(|x| assert_eq!((x.times, x.axes.as_slice()), (1.0, &["fsdp".into(), "context".into()][..])))
            .map(|x| x.bytes)
            .collect();
        all.sort_by(f64::total_cmp);
        all
    };
    assert_eq!(gathers(LoopLevel::Block), bytes(true), "each weight of a block, whole, once");
    assert_eq!(gathers(LoopLevel::Outside), bytes(false), "weights outside the blocks");
    let mut rest = compiled.collectives(LoopLevel::Block);
    rest.remove(&CollectiveKind::AllGather);
    assert_eq!(rest, with_joined(&[(CollectiveKind::AllToAll, (4.0, sizes(&c).video))]));
    statistics_only(&compiled.collectives(LoopLevel::Step));
}

/// Each step of the published tuning removes a family of weights from the all-gathers.
#[needs(cpu, full)]
fn each_tuning_step_reduces_all_gather_bytes() {
    let engine = engine();
    let names = ["before-385", "ffn-matched", "qkv-unsharded", "out-unsharded"];
    let all = names.map(|layout| compile(&engine, layout, "context=4"));
    let ffn = all.each_ref().map(|c| c.gathered_in(&["/ff/proj", "/ff/2"]));
    let qkv = all.each_ref().map(|c| c.gathered_in(&["to_q+to_k+to_v", "to_q", "to_k+to_v"]));
    let out = all.each_ref().map(|c| c.gathered_in(&["attn1/0", "attn2/0", "_attn/0"]));
    assert!(ffn[0] > 0.0 && ffn[1..] == [0.0; 3], "{ffn:?}");
    assert!(qkv[..2].iter().all(|b| *b > 0.0) && qkv[2..] == [0.0; 2], "{qkv:?}");
    assert!(out[..3].iter().all(|b| *b > 0.0) && out[3] == 0.0, "{out:?}");
    let total = all.each_ref().map(|c| c.collectives(LoopLevel::Block)[&CollectiveKind::AllGather].1);
    assert!(total.windows(2).all(|w| w[0] > w[1]), "{total:?}");
    // What remains are the keys and values of `sequence`, and the audio state.
    let s = sizes(&model());
    assert_eq!(total[3], 2.0 * s.video + s.audio, "{total:?}");
}

/// Returns the number of shards of an argument, specified by hand.
fn parts(layout: &str, name: &str, param: Option<&Param>) -> usize {
    let is = |axis: Axis| param.is_some_and(|p| p.axes.contains(&axis));
    let named = |part: &str| name.contains(part);
    let video_tokens = ["latents.video", "rope.video", "rope.cross_video"].iter().any(|n| name.starts_with(n));
    let text = name.starts_with("text.");
    match layout {
        "cfg" if text => 2,
        "cfg-ulysses" if text => 2,
        "replicated" | "cfg" => 1,
        "tensor" | "tensor-gathered-ffn" => {
            let gathered = layout == "tensor-gathered-ffn" && named("ff.net.2");
            let heads = text || name.starts_with("rope.") || is(Axis::Heads);
            if heads || (is(Axis::Mlp) && !gathered) { 4 } else { 1 }
        }
        _ if video_tokens => 4,
        "fsdp-ulysses" if param.is_some_and(stored_apart) => 8,
        "before-385" | "ffn-matched" | "qkv-unsharded" | "out-unsharded" if is(Axis::Embed) => {
            let whole: &[&str] = match layout {
                "before-385" => &[],
                "ffn-matched" => &["ff.net"],
                "qkv-unsharded" => &["ff.net", ".to_q", ".to_k"],
                _ => &["ff.net", ".to_q", ".to_k", ".to_out"],
            };
            if whole.iter().any(|w| named(w)) { 1 } else { 4 }
        }
        _ => 1,
    }
}

/// Returns the size of a network's arguments on one device, computed by hand.
fn held(layout: &str, network: &Network) -> usize {
    let part = |name: &str, bytes: usize| {
        let param = network.params.iter().find(|p| p.name == name);
        bytes / parts(layout, name, param)
    };
    network.program.arguments.iter().map(|a| part(&a.name, a.ty.bytes())).sum()
}

/// The other tests compare the argument sizes of their compiled programs with the same calculation.
#[needs(cpu)]
fn argument_bytes_decrease_as_more_weights_are_sharded() {
    let held = |layout: &str, mesh: &str| held(layout, &network(layout, mesh));
    // `tensor` and `fsdp-ulysses` shard nearly all weights, `ulysses` none.
    let order = [
        held("fsdp-ulysses", "fsdp=2,context=4"),
        held("tensor", "tensor=4"),
        held("tensor-gathered-ffn", "tensor=4"),
        held("cfg-ulysses", "cfg=2,context=4"),
        held("ulysses", "context=4"),
        held("replicated", "data=1"),
    ];
    assert!(order.windows(2).all(|w| w[0] < w[1]), "{order:?}");
    let history = ["before-385", "ffn-matched", "qkv-unsharded", "out-unsharded", "sequence"];
    let history = history.map(|layout| held(layout, "context=4"));
    assert!(history.windows(2).all(|w| w[0] < w[1]), "{history:?}");
}

#[needs(cpu, full)]
fn gathered_rope_tables_give_bitwise_identical_results() {
    let client = cpu(8);
    let all = cases("transformer");
    let case = all.iter().find(|c| c.name.ends_with("/tiny_a")).expect("the case");
    let run = |layout: &str| {
        let source = ModelSource::open(case.model.to_str().expect("a path"), &Overrides::default()).expect("a model");
        let source = Arc::new(source);
        let mut executor = Executor::new(Engine::new(client.clone(), quick()), source.clone());
        let inputs = case.inputs.clone();
        let build = build(layout, "context=8");
        run_component(
            ProgramKind::Transformer,
            &ModelConfigs::from_source(&source),
            &mut executor,
            inputs,
            &case.scalars,
            &build,
        )
        .expect("runs")
    };
    let [stay, travel] = ["sequence", "rope-gathered"].map(run);
    assert_eq!(stay.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["video", "audio"]);
    assert!(stay == travel, "other bits");
}
