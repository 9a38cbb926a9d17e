//! Budgets per layout for bytes moved and copied and FLOPs, checked on the programs of the published model compiled for
//! TPU (`make test-full`). One row per layout, chip and size; a failure prints the complete table.

use crate::support::needs;
use crate::support::tpu::{Case, Compiled, compiled};
use ltx2::analysis::{CollectiveKind, LoopLevel};
use ltx2::models::Network;
use ltx2::runtime::{Shard, shards};

/// A row of the table.
struct Budget {
    config: &'static str,
    layout: &'static str,
    mesh: &'static str,
    target: &'static str,
    size: [usize; 3],
    /// 48 if memory and copies are checked; fewer layers give the same figures per layer.
    layers: usize,
    /// Maximum megabytes of collective output per layer and device.
    at_most: f64,
    /// Minimum: a layout that is kept as an example of waste must show it.
    at_least: f64,
    /// Allowed kinds of collectives in a block, with their counts.
    kinds: &'static [(CollectiveKind, usize)],
}

const SMALL: [usize; 3] = [768, 512, 121];
const LARGE: [usize; 3] = [1280, 768, 121];
const ULYSSES: &[(CollectiveKind, usize)] = &[(CollectiveKind::AllToAll, 4), (CollectiveKind::AllReduce, 2)];
/// Keys, values, and the sharded softmax of video-to-audio attention.
const GATHERS: &[(CollectiveKind, usize)] = &[(CollectiveKind::AllGather, 2), (CollectiveKind::AllReduce, 2)];
/// Four all-reduces of activations, and three of squares for the norms of queries and keys.
const MEGATRON: &[(CollectiveKind, usize)] = &[(CollectiveKind::AllReduce, 7)];
/// All-reduces of both streams that are too large for the compiler to merge.
const MEGATRON_APART: &[(CollectiveKind, usize)] = &[(CollectiveKind::AllReduce, 11)];
/// The same with tokens over other devices: their collectives, and a sharded softmax.
const MEGATRON_OF_TOKENS: &[(CollectiveKind, usize)] = &[(CollectiveKind::AllToAll, 4), (CollectiveKind::AllReduce, 9)];
/// An all-gather for each weight of a block except text keys and values, which are computed before the loop.
const FSDP: &[(CollectiveKind, usize)] =
    &[(CollectiveKind::AllGather, 18), (CollectiveKind::AllToAll, 4), (CollectiveKind::AllReduce, 2)];
/// For LTX-2.3, also those of the text keys and values, which change with the step, of gates and of text modulation.
const FSDP_2_3: &[(CollectiveKind, usize)] =
    &[(CollectiveKind::AllGather, 26), (CollectiveKind::AllToAll, 4), (CollectiveKind::AllReduce, 2)];
const ANY: &[(CollectiveKind, usize)] = &[];

/// Rows for layouts of every attention scheme, on v5p, TPU7x and v6e (`make test-full`).
#[rustfmt::skip]
const BUDGETS: &[Budget] = &[
    Budget { config: "ltx2", layout: "ulysses", mesh: "context=8", target: "tpu:v5p:2x2x2", size: SMALL, layers: 48, at_most: 55.0, at_least: 0.0, kinds: ULYSSES },
    Budget { config: "ltx2", layout: "ulysses", mesh: "context=8", target: "tpu:tpu7x:2x2x1", size: SMALL, layers: 48, at_most: 55.0, at_least: 0.0, kinds: ULYSSES },
    Budget { config: "ltx2", layout: "sequence", mesh: "context=8", target: "tpu:v5p:2x2x2", size: SMALL, layers: 48, at_most: 205.0, at_least: 0.0, kinds: GATHERS },
    Budget { config: "ltx2", layout: "tensor", mesh: "cfg=2,context=2,tensor=2", target: "tpu:v6e:2x4", size: SMALL, layers: 48, at_most: 160.0, at_least: 0.0, kinds: MEGATRON_OF_TOKENS },
    Budget { config: "ltx2", layout: "fsdp-ulysses", mesh: "context=8", target: "tpu:v6e:2x4", size: SMALL, layers: 48, at_most: 772.0 + 55.0, at_least: 600.0, kinds: FSDP },
    Budget { config: "ltx2", layout: "cfg-ulysses", mesh: "cfg=2,context=4", target: "tpu:v5p:2x2x2", size: SMALL, layers: 3, at_most: 55.0, at_least: 0.0, kinds: ULYSSES },
    Budget { config: "ltx2", layout: "before-385", mesh: "context=8", target: "tpu:v5p:2x2x2", size: SMALL, layers: 3, at_most: 830.0, at_least: 805.0, kinds: ANY },
    Budget { config: "ltx2_3", layout: "ulysses", mesh: "context=8", target: "tpu:v5p:2x2x2", size: SMALL, layers: 48, at_most: 110.0, at_least: 0.0, kinds: ULYSSES },
];

// From `before-385` to `out-unsharded` 604 MB of weights leave the block: 302 of feed-forward, 208 of queries, keys and
// values, 94 of outputs.
/// More rows (`make test-full`): other chips, the larger size, the steps of the tuning history, LTX-2.3's four
/// branches.
#[rustfmt::skip]
const MORE: &[Budget] = &[
    Budget { config: "ltx2", layout: "tensor", mesh: "tensor=8", target: "tpu:v6e:2x4", size: SMALL, layers: 48, at_most: 415.0, at_least: 0.0, kinds: MEGATRON },
    Budget { config: "ltx2", layout: "sequence", mesh: "context=8", target: "tpu:tpu7x:2x2x1", size: SMALL, layers: 48, at_most: 205.0, at_least: 0.0, kinds: GATHERS },
    Budget { config: "ltx2", layout: "fsdp-ulysses", mesh: "cfg=2,context=8", target: "tpu:v5e:4x4", size: SMALL, layers: 48, at_most: 772.0 + 55.0, at_least: 600.0, kinds: FSDP },
    Budget { config: "ltx2", layout: "cfg", mesh: "cfg=2", target: "tpu:v5p:2x2x1", size: SMALL, layers: 3, at_most: 0.0, at_least: 0.0, kinds: ANY },
    Budget { config: "ltx2", layout: "ulysses", mesh: "context=8", target: "tpu:v5p:2x2x2", size: LARGE, layers: 3, at_most: 55.0 * 2.5, at_least: 0.0, kinds: ULYSSES },
    Budget { config: "ltx2", layout: "sequence", mesh: "context=8", target: "tpu:v5p:2x2x2", size: LARGE, layers: 3, at_most: 205.0 * 2.5, at_least: 0.0, kinds: GATHERS },
    Budget { config: "ltx2", layout: "tensor", mesh: "tensor=8", target: "tpu:v6e:2x4", size: LARGE, layers: 3, at_most: 415.0 * 2.5, at_least: 0.0, kinds: MEGATRON_APART },
    Budget { config: "ltx2", layout: "fsdp-ulysses", mesh: "context=8", target: "tpu:v6e:2x4", size: LARGE, layers: 3, at_most: 772.0 + 55.0 * 2.5, at_least: 600.0, kinds: FSDP },
    Budget { config: "ltx2", layout: "ffn-matched", mesh: "context=8", target: "tpu:v5p:2x2x2", size: SMALL, layers: 3, at_most: 530.0, at_least: 510.0, kinds: ANY },
    Budget { config: "ltx2", layout: "qkv-unsharded", mesh: "context=8", target: "tpu:v5p:2x2x2", size: SMALL, layers: 3, at_most: 320.0, at_least: 305.0, kinds: ANY },
    Budget { config: "ltx2", layout: "out-unsharded", mesh: "context=8", target: "tpu:v5p:2x2x2", size: SMALL, layers: 3, at_most: 220.0, at_least: 210.0, kinds: ANY },
    Budget { config: "ltx2_3", layout: "cfg-ulysses", mesh: "cfg=2,context=4", target: "tpu:v5p:2x2x2", size: SMALL, layers: 48, at_most: 108.0, at_least: 0.0, kinds: ULYSSES },
    Budget { config: "ltx2_3", layout: "sequence", mesh: "context=8", target: "tpu:v5p:2x2x2", size: SMALL, layers: 48, at_most: 410.0, at_least: 0.0, kinds: GATHERS },
    Budget { config: "ltx2_3", layout: "tensor", mesh: "cfg=2,context=2,tensor=2", target: "tpu:v6e:2x4", size: SMALL, layers: 48, at_most: 320.0, at_least: 0.0, kinds: MEGATRON_OF_TOKENS },
    Budget { config: "ltx2_3", layout: "tensor", mesh: "tensor=8", target: "tpu:v6e:2x4", size: SMALL, layers: 48, at_most: 2.0 * 415.0, at_least: 0.0, kinds: MEGATRON_APART },
    Budget { config: "ltx2_3", layout: "fsdp-ulysses", mesh: "context=8", target: "tpu:v6e:2x4", size: SMALL, layers: 48, at_most: 780.0 + 110.0, at_least: 600.0, kinds: FSDP_2_3 },
    Budget { config: "ltx2_3", layout: "cfg-ulysses", mesh: "cfg=2,context=4", target: "tpu:tpu7x:2x2x1", size: SMALL, layers: 48, at_most: 108.0, at_least: 0.0, kinds: ULYSSES },
    Budget { config: "ltx2_3", layout: "cfg-ulysses", mesh: "cfg=2,context=16", target: "tpu:v5p:2x4x4", size: SMALL, layers: 48, at_most: 28.0, at_least: 0.0, kinds: ULYSSES },
    Budget { config: "ltx2_3", layout: "tensor", mesh: "cfg=2,context=2,tensor=4", target: "tpu:v5e:4x4", size: SMALL, layers: 48, at_most: 265.0, at_least: 0.0, kinds: MEGATRON_OF_TOKENS },
    Budget { config: "ltx2_3", layout: "tensor", mesh: "cfg=2,context=4,tensor=2", target: "tpu:v6e:4x4", size: SMALL, layers: 48, at_most: 160.0, at_least: 0.0, kinds: MEGATRON_OF_TOKENS },
    Budget { config: "ltx2_3", layout: "tensor", mesh: "cfg=2,context=16,tensor=2", target: "tpu:v6e:8x8", size: SMALL, layers: 48, at_most: 44.0, at_least: 0.0, kinds: MEGATRON_OF_TOKENS },
];

/// An image in the middle and a reference of half the size append 384 and 1536 tokens to the video's 6144, a factor of
/// 1.3125. Compiling does not need the files.
const GIVEN: &[&str] = &[
    "pipeline=image_to_video",
    "request.images=[{path: none.png, frame: 60, strength: 1.0, crf: 0}]",
    "request.reference_videos=[{path: none.mp4, frames: 121}]",
    "conditioning.reference_downscale_factor=2",
    "conditioning.reference_temporal_scale_factor=1",
];
/// Budgets of requests with appended tokens: the communicated bytes grow with the tokens, and nothing else does.
#[rustfmt::skip]
const CONDITIONED: &[Budget] = &[
    Budget { config: "ltx2", layout: "ulysses", mesh: "context=8", target: "tpu:v5p:2x2x2", size: SMALL, layers: 3, at_most: 55.0 * 1.3125, at_least: 55.0, kinds: ULYSSES },
    Budget { config: "ltx2", layout: "sequence", mesh: "context=8", target: "tpu:v5p:2x2x2", size: SMALL, layers: 3, at_most: 205.0 * 1.3125, at_least: 205.0, kinds: GATHERS },
];

impl Budget {
    /// Returns the bytes of stacks that may be copied before the loop: on TPU7x the compiler transposes LTX-2.3's six
    /// stacks of gates once.
    fn copied_once(&self) -> f64 {
        if self.config == "ltx2_3" && self.target.contains("tpu7x") { 57e6 } else { 0.0 }
    }

    fn case(&self, set: &'static [&'static str]) -> Case {
        let layers = (self.layers < 48).then_some(self.layers);
        let whole = Case::denoise(self.layout, self.mesh, self.target);
        Case { config: self.config, size: self.size, layers, set, ..whole }
    }
}

/// Returns the bytes of the program's arguments on a device, according to the layout.
fn argument_bytes(network: &Network) -> f64 {
    let program = &network.program;
    let bytes = program.arguments.iter().map(|a| {
        let first: Shard = shards(&a.ty, &program.mesh, a.sharding.as_ref()).remove(0);
        first.size.iter().product::<usize>() * a.ty.dtype.size()
    });
    bytes.sum::<usize>() as f64
}

/// Returns the violated limits of a row.
fn faults(budget: &Budget, m: &Compiled, useful: f64) -> Vec<String> {
    let mut faults = Vec::new();
    let mut check = |fine: bool, what: String| {
        if !fine {
            faults.push(what);
        }
    };
    let layer = m.report.per_layer();
    let mb = layer.bytes / 1e6;
    check(mb <= budget.at_most && mb >= budget.at_least, format!("{mb:.1} MB a layer"));
    let blocks: Vec<_> = m.report.collectives.iter().filter(|c| c.level == LoopLevel::Block).collect();
    if !budget.kinds.is_empty() {
        for kind in [
            CollectiveKind::AllGather,
            CollectiveKind::AllReduce,
            CollectiveKind::AllToAll,
            CollectiveKind::CollectivePermute,
            CollectiveKind::ReduceScatter,
        ] {
            let allowed = budget.kinds.iter().find(|(k, _)| *k == kind).map_or(0, |(_, n)| *n);
            let found = blocks.iter().filter(|c| c.kind == kind).count();
            check(found == allowed, format!("{found} {kind:?}, not {allowed}"));
        }
    }
    if budget.layout == "tensor" {
        // All-reduces of the video stream, with or without their audio counterpart; of the audio stream; and of the
        // norms, 4 bytes per token.
        let between = |low: f64, high: f64| {
            let sums = blocks.iter().filter(|c| c.kind == CollectiveKind::AllReduce && !c.scope.contains("sdpa"));
            let sums = sums.map(|c| c.bytes / 1e6).filter(move |mb| (low..high).contains(mb));
            sums.fold((0, 0.0), |(n, all), mb| (n + 1, all + mb))
        };
        let (video, _) = between(4.0, f64::MAX);
        check(video == 4, format!("{video} sums of activations"));
        let (_, norms) = between(0.0, 1.0);
        let pixels = |size: [usize; 3]| size.iter().product::<usize>() as f64;
        let pairs = if budget.config == "ltx2_3" { 2.0 } else { 1.0 };
        check(norms <= pairs * 0.5 * pixels(budget.size) / pixels(SMALL), format!("{norms:.2} MB of norm sums"));
    }
    if budget.layout == "fsdp-ulysses" {
        let gathers = || blocks.iter().filter(|c| c.kind == CollectiveKind::AllGather);
        let hidden: f64 = gathers().filter(|c| c.overlapped).map(|c| c.bytes).sum();
        let share = hidden / gathers().map(|c| c.bytes).sum::<f64>();
        check(share >= 0.9, format!("{:.0} % of the gathers run behind other work", share * 100.0));
        // Two collectives with the same scope would gather one weight twice.
        let mut scopes: Vec<&str> = gathers().map(|c| c.scope.as_str()).collect();
        let all = scopes.len();
        scopes.sort_unstable();
        scopes.dedup();
        check(scopes.len() == all, "a weight is gathered twice".into());
    }
    if ["sequence", "ulysses", "cfg-ulysses"].contains(&budget.layout) {
        // RoPE tables, feed-forward activations and projection weights must not be communicated.
        let strays: Vec<&str> = blocks
            .iter()
            .map(|c| c.scope.as_str())
            .filter(|s| !s.contains("attn1/sdpa") && !s.contains("video_to_audio"))
            .collect();
        check(strays.is_empty(), format!("collectives in {strays:?}"));
    }
    let copied: f64 =
        m.report.stack_copies.iter().map(|c| c.bytes * if c.level == LoopLevel::Outside { 1.0 } else { 1e9 }).sum();
    check(copied <= budget.copied_once(), format!("stacks are copied: {:?}", m.report.stack_copies));
    // LTX-2.3's text keys and values change with the step. Every device computes all of them, which is cheaper than
    // gathering them; on sixteen devices of `context` this is a quarter of the work.
    let least = match (budget.config, budget.mesh.contains("context=16")) {
        ("ltx2_3", true) => 0.72,
        ("ltx2_3", false) => 0.8,
        _ => 0.95,
    };
    check(useful >= least, format!("{:.1} % of the FLOPs are useful", useful * 100.0));
    let (stated, held) = (argument_bytes(&m.network), m.memory.arguments as f64);
    // Tiling pads dimensions that it does not divide.
    check((held / stated - 1.0).abs() <= 0.02, format!("{held} bytes of arguments, the layout says {stated}"));
    if budget.layers == 48 {
        // Memory for the activations of a block: three chunks of f32 scores and, if weights are gathered, those of a
        // block.
        let gathered: f64 = blocks.iter().filter(|c| c.kind == CollectiveKind::AllGather).map(|c| c.bytes).sum();
        let need = 3.0 * f64::from(1 << 28) + gathered;
        let temporaries = m.memory.temporaries as f64;
        check(temporaries <= need + 0.05 * held, format!("{temporaries} bytes of temporaries"));
    }
    faults
}

/// Returns the matmul FLOPs of a block on one device.
fn whole_flops(config: &'static str, size: [usize; 3], set: &'static [&'static str]) -> f64 {
    compiled(Case { config, size, set, layers: Some(3), ..Case::denoise("replicated", "data=1", "tpu:v5p:2x2x1") })
        .report
        .layer
        .flops
}

#[needs(tpu, full)]
fn layouts_stay_within_communication_budgets() {
    keep(BUDGETS, &[]);
}

#[needs(tpu, full)]
fn other_chips_and_sizes_stay_within_communication_budgets() {
    keep(MORE, &[]);
}

#[needs(tpu, full)]
fn appended_tokens_stay_within_communication_budgets() {
    keep(CONDITIONED, GIVEN);
}

/// Checks all rows; `set` has additional keys of their configurations.
fn keep(budgets: &[Budget], set: &'static [&'static str]) {
    let mut whole = std::collections::BTreeMap::new();
    let mut table = String::new();
    let mut failed = 0;
    for budget in budgets {
        let key = (budget.config, budget.size);
        let all = *whole.entry(key).or_insert_with(|| whole_flops(budget.config, budget.size, set));
        let m = compiled(budget.case(set));
        let devices = m.network.program.devices() as f64;
        let useful = all / devices / m.report.layer.flops;
        let faults = faults(budget, &m, useful);
        failed += usize::from(!faults.is_empty());
        let layer = m.report.per_layer();
        let line = format!(
            "{:7} {:14} {:15} {:15} {} {:2} layers: {:6.1} MB ({:.1}..{:.1}), {:3} collectives, wire {:6.1} MB, useful \
             {:5.1} %, temporaries {:5.2} GB, arguments {:5.2} GB, {:3.0} s{}\n",
            budget.config,
            budget.layout,
            budget.mesh,
            budget.target,
            budget.size.map(|n| n.to_string()).join("x"),
            budget.layers,
            layer.bytes / 1e6,
            budget.at_least,
            budget.at_most,
            layer.count,
            layer.wire_bytes / 1e6,
            useful * 100.0,
            m.memory.temporaries as f64 / 1e9,
            m.memory.arguments as f64 / 1e9,
            m.seconds,
            if faults.is_empty() { String::new() } else { format!("\n    FAULT: {}", faults.join("; ")) },
        );
        eprint!("{line}");
        table.push_str(&line);
    }
    assert_eq!(failed, 0, "\n{table}");
}
