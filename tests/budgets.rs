//! What each layout may move, copy and compute, in the programs that the TPU compiler makes of the published model
//! (`make test-tpu`). One line a layout, chip and size; a failure prints the whole table.

mod common;

use common::tpu::{denoise_on, libtpu};
use ltx2::analysis::{Kind, Module, Phase, Report, report};
use ltx2::models::Network;
use ltx2::pjrt::CompiledMemory;
use ltx2::runtime::{Part, parts};

/// One line of the table.
struct Budget {
    layout: &'static str,
    mesh: &'static str,
    target: &'static str,
    tokens: usize,
    /// 48 where memory and copies are judged; fewer give the same figures a layer.
    layers: usize,
    /// Megabytes of collective output a layer a device.
    at_most: f64,
    /// And at least: a layout kept for its waste must show it.
    at_least: f64,
    /// What may happen in a block, with how often.
    kinds: &'static [(Kind, usize)],
}

/// 768x512x121 and 1280x768x121.
const SMALL: usize = 6144;
const LARGE: usize = 15360;
const ULYSSES: &[(Kind, usize)] = &[(Kind::AllToAll, 4), (Kind::AllReduce, 2)];
/// Keys, values, and the split softmax of video-to-audio attention.
const GATHERS: &[(Kind, usize)] = &[(Kind::AllGather, 2), (Kind::AllReduce, 2)];
/// Four sums of activations, and three of squares for the norms of queries and keys.
const MEGATRON: &[(Kind, usize)] = &[(Kind::AllReduce, 7)];
/// A gather for each weight of a block but the text keys and values, which are made before the loop.
const FSDP: &[(Kind, usize)] = &[(Kind::AllGather, 18), (Kind::AllToAll, 4), (Kind::AllReduce, 2)];
const ANY: &[(Kind, usize)] = &[];

#[rustfmt::skip]
const BUDGETS: &[Budget] = &[
    Budget { layout: "ulysses", mesh: "context=8", target: "v5p:2x2x2", tokens: SMALL, layers: 48, at_most: 55.0, at_least: 0.0, kinds: ULYSSES },
    Budget { layout: "ulysses", mesh: "context=8", target: "tpu7x:2x2x1", tokens: SMALL, layers: 48, at_most: 55.0, at_least: 0.0, kinds: ULYSSES },
    Budget { layout: "sequence", mesh: "context=8", target: "v5p:2x2x2", tokens: SMALL, layers: 48, at_most: 205.0, at_least: 0.0, kinds: GATHERS },
    Budget { layout: "sequence", mesh: "context=8", target: "tpu7x:2x2x1", tokens: SMALL, layers: 48, at_most: 205.0, at_least: 0.0, kinds: GATHERS },
    Budget { layout: "tensor", mesh: "tensor=8", target: "v6e:2x4", tokens: SMALL, layers: 48, at_most: 415.0, at_least: 0.0, kinds: MEGATRON },
    Budget { layout: "fsdp-ulysses", mesh: "context=8", target: "v6e:2x4", tokens: SMALL, layers: 48, at_most: 772.0 + 55.0, at_least: 600.0, kinds: FSDP },
    Budget { layout: "fsdp-ulysses", mesh: "cfg=2,context=8", target: "v5e:4x4", tokens: SMALL, layers: 48, at_most: 772.0 + 55.0, at_least: 600.0, kinds: FSDP },
    Budget { layout: "cfg-ulysses", mesh: "cfg=2,context=4", target: "v5p:2x2x2", tokens: SMALL, layers: 3, at_most: 55.0, at_least: 0.0, kinds: ULYSSES },
    Budget { layout: "cfg", mesh: "cfg=2", target: "v5p:2x2x1", tokens: SMALL, layers: 3, at_most: 0.0, at_least: 0.0, kinds: ANY },
    Budget { layout: "ulysses", mesh: "context=8", target: "v5p:2x2x2", tokens: LARGE, layers: 3, at_most: 55.0 * 2.5, at_least: 0.0, kinds: ULYSSES },
    Budget { layout: "sequence", mesh: "context=8", target: "v5p:2x2x2", tokens: LARGE, layers: 3, at_most: 205.0 * 2.5, at_least: 0.0, kinds: GATHERS },
    Budget { layout: "tensor", mesh: "tensor=8", target: "v6e:2x4", tokens: LARGE, layers: 3, at_most: 415.0 * 2.5, at_least: 0.0, kinds: MEGATRON },
    Budget { layout: "fsdp-ulysses", mesh: "context=8", target: "v6e:2x4", tokens: LARGE, layers: 3, at_most: 772.0 + 55.0 * 2.5, at_least: 600.0, kinds: FSDP },
    Budget { layout: "before-385", mesh: "context=8", target: "v5p:2x2x2", tokens: SMALL, layers: 3, at_most: 969.0, at_least: 600.0, kinds: ANY },
    Budget { layout: "ffn-matched", mesh: "context=8", target: "v5p:2x2x2", tokens: SMALL, layers: 3, at_most: 701.0, at_least: 300.0, kinds: ANY },
    Budget { layout: "qkv-unsharded", mesh: "context=8", target: "v5p:2x2x2", tokens: SMALL, layers: 3, at_most: 355.0, at_least: 206.0, kinds: ANY },
    Budget { layout: "out-unsharded", mesh: "context=8", target: "v5p:2x2x2", tokens: SMALL, layers: 3, at_most: 205.0, at_least: 0.0, kinds: GATHERS },
];

/// A compiled line.
struct Measured {
    network: Network,
    report: Report,
    memory: CompiledMemory,
    seconds: f64,
}

fn measure(budget: &Budget) -> Option<Measured> {
    let plugin = libtpu()?;
    let compiled = denoise_on(&plugin, budget.target, budget.layout, budget.mesh, budget.tokens, budget.layers);
    let (network, executable, seconds) = compiled;
    let program = executable.optimized_program().expect("an optimized program");
    let module = Module::decode(&program.format, &program.bytes).expect("a module");
    let report = report(&module, &network.program.mesh, budget.layers, None);
    Some(Measured { network, report, memory: executable.memory().expect("figures"), seconds })
}

/// What the rules say a device holds of the program's arguments.
fn argument_bytes(network: &Network) -> f64 {
    let program = &network.program;
    let bytes = program.arguments.iter().map(|a| {
        let first: Part = parts(&a.ty, &program.mesh, a.sharding.as_ref()).remove(0);
        first.size.iter().product::<usize>() * a.ty.dtype.size()
    });
    bytes.sum::<usize>() as f64
}

/// What is wrong with a line.
fn faults(budget: &Budget, m: &Measured, useful: f64) -> Vec<String> {
    let mut faults = Vec::new();
    let mut check = |fine: bool, what: String| {
        if !fine {
            faults.push(what);
        }
    };
    let layer = m.report.per_layer();
    let mb = layer.bytes / 1e6;
    check(mb <= budget.at_most && mb >= budget.at_least, format!("{mb:.1} MB a layer"));
    let blocks: Vec<_> = m.report.collectives.iter().filter(|c| c.phase == Phase::Layer).collect();
    if !budget.kinds.is_empty() {
        for kind in [Kind::AllGather, Kind::AllReduce, Kind::AllToAll, Kind::CollectivePermute, Kind::ReduceScatter] {
            let allowed = budget.kinds.iter().find(|(k, _)| *k == kind).map_or(0, |(_, n)| *n);
            let found = blocks.iter().filter(|c| c.kind == kind).count();
            check(found == allowed, format!("{found} {kind:?}, not {allowed}"));
        }
    }
    if budget.layout == "tensor" {
        let sums = |wide: bool| blocks.iter().filter(move |c| (c.bytes > 1e6) == wide);
        check(sums(true).count() == 4, format!("{} sums of activations", sums(true).count()));
        let norms: f64 = sums(false).map(|c| c.bytes).sum::<f64>() / 1e6;
        check(norms <= 0.5, format!("{norms:.2} MB of norm sums"));
    }
    if budget.layout == "fsdp-ulysses" {
        let gathers = || blocks.iter().filter(|c| c.kind == Kind::AllGather);
        let hidden: f64 = gathers().filter(|c| c.overlapped).map(|c| c.bytes).sum();
        let share = hidden / gathers().map(|c| c.bytes).sum::<f64>();
        check(share >= 0.9, format!("{:.0} % of the gathers run behind other work", share * 100.0));
        // Two collectives under one scope would gather one weight twice.
        let mut scopes: Vec<&str> = gathers().map(|c| c.scope.as_str()).collect();
        let all = scopes.len();
        scopes.sort_unstable();
        scopes.dedup();
        check(scopes.len() == all, "a weight is gathered twice".into());
    }
    if ["sequence", "ulysses", "cfg-ulysses"].contains(&budget.layout) {
        // Neither tables nor feed-forward activations nor weights of the projections travel.
        let strays: Vec<&str> = blocks
            .iter()
            .map(|c| c.scope.as_str())
            .filter(|s| !s.contains("attn1/sdpa") && !s.contains("video_to_audio"))
            .collect();
        check(strays.is_empty(), format!("exchanges in {strays:?}"));
    }
    check(m.report.stack_copies.is_empty(), format!("stacks are copied: {:?}", m.report.stack_copies));
    check(useful >= 0.95, format!("{:.1} % of the products are useful", useful * 100.0));
    let (stated, held) = (argument_bytes(&m.network), m.memory.arguments as f64);
    // Tiles fill up what does not divide by them.
    check((held / stated - 1.0).abs() <= 0.02, format!("{held} bytes of arguments, the layout says {stated}"));
    if budget.layers == 48 {
        // What the activations of a block need: three chunks of scores in f32, and where weights are gathered, a
        // block's.
        let gathered: f64 = blocks.iter().filter(|c| c.kind == Kind::AllGather).map(|c| c.bytes).sum();
        let need = 3.0 * f64::from(1 << 28) + gathered;
        let temporaries = m.memory.temporaries as f64;
        check(temporaries <= need + 0.05 * held, format!("{temporaries} bytes of temporaries"));
        check(m.seconds <= 60.0 || !quiet(), format!("compiled in {:.0} s", m.seconds));
    }
    faults
}

/// Whether this machine does nothing else: compile times are judged only then.
fn quiet() -> bool {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = load.split_whitespace().next().and_then(|l| l.parse().ok()).unwrap_or(f64::MAX);
    load <= 3.0
}

/// Products of a block on one device that does everything, by the number of video tokens.
fn whole_flops(tokens: usize) -> Option<f64> {
    let plugin = libtpu()?;
    let (network, executable, _) = denoise_on(&plugin, "v5p:2x2x1", "replicated", "data=1", tokens, 3);
    let program = executable.optimized_program().expect("an optimized program");
    let module = Module::decode(&program.format, &program.bytes).expect("a module");
    Some(report(&module, &network.program.mesh, 3, None).layer.flops)
}

#[test]
fn every_layout_keeps_its_budget() {
    if libtpu().is_none() {
        return;
    }
    let mut whole = std::collections::BTreeMap::new();
    let mut table = String::new();
    let mut failed = 0;
    let only = std::env::var("LTX2_BUDGETS").unwrap_or_default();
    for budget in BUDGETS.iter().filter(|b| format!("{} {}", b.layout, b.target).contains(&only)) {
        let all = *whole.entry(budget.tokens).or_insert_with(|| whole_flops(budget.tokens).expect("libtpu"));
        let m = measure(budget).expect("libtpu");
        let devices = m.network.program.devices() as f64;
        let useful = all / devices / m.report.layer.flops;
        let faults = faults(budget, &m, useful);
        failed += usize::from(!faults.is_empty());
        let layer = m.report.per_layer();
        let line = format!(
            "{:14} {:15} {:11} {:5} tokens {:2} layers: {:6.1} MB ({:.1}..{:.1}), {:3} collectives, wire {:6.1} MB, useful \
             {:5.1} %, temporaries {:5.2} GB, arguments {:5.2} GB, {:3.0} s{}\n",
            budget.layout,
            budget.mesh,
            budget.target,
            budget.tokens,
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
