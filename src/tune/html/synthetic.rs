//! Synthetic results that are hard to display: labels that are long or of equal length, values that are close or equal,
//! failures, several groups, and as many tensors and collectives as in a real model.

use crate::analysis::Predicted;
use crate::config::Case;
use crate::nn::Role;
use crate::tune::case_result::{CaseGroup, CaseResult, GroupDiagnosis, ranked};
use crate::tune::compile_report::tests::{gather, placed, report};
use crate::tune::compile_report::{ChipRates, CompileReport, GIB};
use crate::tune::diagnose::{Diagnosis, Suggestion, TradeOff};
use crate::tune::difference::{CollectiveDelta, Difference};

const LAYOUTS: [&str; 8] =
    ["sequence", "ulysses", "hybrid", "ring", "tensor", "fsdp-ulysses", "cfg-ulysses", "tensor-gathered-ffn"];
const MESHES: [&str; 6] = [
    "context=8",
    "cfg=2,context=4",
    "cfg=2,fsdp=2,context=2",
    "data=2,cfg=2,context=2,tensor=1",
    "fsdp=2,context=2,tensor=2",
    "context=2,tensor=4",
];
const MODULES: [&str; 10] = [
    "attn1.to_q",
    "attn1.to_k",
    "attn1.to_v",
    "attn1.to_out",
    "attn2.to_q",
    "attn2.to_k",
    "attn2.to_v",
    "ff.up",
    "ff.down",
    "norm",
];
const BLOCK: &str = "transformer.transformer_blocks.*";

/// Generates deterministic pseudo-random numbers from 0 to 1.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as f64 / (1u64 << 31) as f64
    }
}

/// Returns the label of a case. Every fifth label is too long for any plot, and neighbouring labels differ only at
/// their ends.
fn label(n: usize) -> String {
    let (layout, mesh) = (LAYOUTS[n % LAYOUTS.len()], MESHES[n / LAYOUTS.len() % MESHES.len()]);
    match n % 5 {
        0 => format!(
            "{layout}-of-a-long-name {mesh} xla_tpu_scoped_vmem_limit_kib=65536 xla_tpu_enable_async_collective_fusion={n:04}"
        ),
        _ => format!("{layout} {mesh} v{n:04}"),
    }
}

fn compiled(target: &str, n: usize, numbers: &mut Numbers) -> CompileReport {
    let mut f = report(target);
    let (layout, mesh) = (LAYOUTS[n % LAYOUTS.len()], MESHES[n / LAYOUTS.len() % MESHES.len()]);
    f.layout = layout.into();
    f.layers = 3;
    f.needed.layers = 48;
    f.needed.bytes = ((20.0 + 30.0 * numbers.next()) * GIB) as i64;
    f.memory.temporaries = ((5.0 + 60.0 * numbers.next()) * GIB) as i64;
    f.memory.capacity = target.starts_with("tpu").then_some((95.0 * GIB) as i64);
    (f.flops, f.bytes_accessed) = (6e12, 1.2e10 * (1.0 + numbers.next()));
    (f.per_layer.flops, f.per_layer.bytes_accessed) = (2e12, f.bytes_accessed / 3.0);
    (f.collectives.per_layer_bytes, f.collectives.per_layer_wire_bytes) = (1e8 * (1.0 + numbers.next()), 9e7);
    f.compile_seconds = 20.0 + 90.0 * numbers.next();
    for stream in ["", "audio_"] {
        for (m, module) in MODULES.iter().enumerate() {
            let tensor = format!("{BLOCK}{stream}{module}.weight");
            let axes = if m % 2 == 0 { ["embed", "mlp"] } else { ["heads", "embed"] };
            let mut placement = placed(&tensor, if m % 3 == 0 { Role::FsdpSharded } else { Role::Parameter }, axes);
            placement.dims = vec![4096, 4096 + 128 * (n % 3)];
            placement.bytes = 4096 * 4096 * 2 / (1 + n % 4);
            placement.rules = vec![format!("{layout}.yml:{}: embed: fsdp", 3 + m)];
            f.tensors.push(placement.clone());
            for part in ["lora", "bias", "scale", "residual", "gate"] {
                let tensor = format!("{BLOCK}{stream}{module}.{part}");
                f.tensors.push(crate::tune::compile_report::TensorPlacement { tensor, ..placement.clone() });
            }
            let mut moved = gather(&format!("blocks/{stream}{module}/{mesh}"), Some(&tensor), 0.05 + 0.01 * m as f64);
            moved.trip_count = 3.0;
            moved.bytes = 4e6 * (1 + n % 3) as f64;
            moved.reason = "FSDP-sharded parameter, gathered before its use".into();
            f.collectives.list.push(moved);
        }
    }
    f
}

/// Returns case `n` on a known chip: predicted, and usually measured. Every eleventh case has a fixed value, so that
/// some cases are equal.
fn on_tpu(n: usize, numbers: &mut Numbers) -> CaseResult {
    let mut f = compiled("tpu:v5p:2x2x2", n, numbers);
    f.chip = Some(ChipRates { name: "v5p".into(), peak: 4.59e14, bandwidth: 2.765e12 });
    let spread = if n % 11 == 10 { 0.3 } else { numbers.next() };
    let (compute, memory, collective) = (180.0, 31.0 + 3.0 * spread, 12.0 + 60.0 * spread);
    let all = Predicted {
        compute,
        memory,
        launch: 0.4,
        collective,
        step: compute + memory + 0.6 * collective,
        ..Predicted::default()
    };
    f.predicted_all_ms = Some(all);
    f.predicted_ms = Some(Predicted { step: all.step / 16.0, ..all });
    let measured = (n % 4 != 3).then_some(all.step * (0.97 + 0.08 * spread) / 1e3);
    row(n, "tpu:v5p:2x2x2", Some(f), measured, None)
}

fn row(
    n: usize,
    target: &str,
    report: Option<CompileReport>,
    measured: Option<f64>,
    error: Option<&str>,
) -> CaseResult {
    let layout = (!n.is_multiple_of(7)).then(|| LAYOUTS[n % LAYOUTS.len()].to_string());
    let case = Case { layout, target: Some(target.into()), shape: Some("768x512x121".into()), ..Case::default() };
    CaseResult {
        case,
        label: label(n),
        precision: None,
        report,
        measured,
        error: error.map(String::from),
        compiler: None,
        room: None,
    }
}

fn delta(kind: &str, what: &str, bytes: f64) -> CollectiveDelta {
    CollectiveDelta { kind: kind.into(), what: format!("{BLOCK}{what}"), runs: 3.0, bytes }
}

fn suggestion(change: &str, trade_off: TradeOff, before: f64, gain: f64, memory: f64) -> Suggestion {
    let increased =
        if trade_off == TradeOff::OtherCollectives { vec![delta("all-to-all", "attn1", 2e6)] } else { vec![] };
    let decreased = vec![delta("all-gather", "ff.up.weight", 4.1e7), delta("all-gather", "attn1.to_q.weight", 8e6)];
    Suggestion {
        change: change.into(),
        trade_off,
        families: 1,
        cost: [before, before * (1.0 - gain)],
        block_bytes: [1.2e8, 8e7],
        difference: Difference { decreased, increased, memory: (memory * GIB) as i64 },
        collectives: vec![1, 4],
        layout: format!("# {change}\nmesh: {{context: 8}}\nrules:\n  - tokens: context\n  - mlp: none\n"),
    }
}

/// Returns a diagnosis whose costs have the unit of the diagnosed case.
fn diagnosis(row: &CaseResult) -> GroupDiagnosis {
    let base = row.report.clone().expect("a case that compiled");
    let cost = base.whole_cost();
    let cost = if base.predicted_ms.is_some() { cost } else { cost.max(1e7) };
    let suggestions = vec![
        suggestion("rules: drop mlp: fsdp", TradeOff::None, cost, 0.214, 0.0),
        suggestion("tensors: transformer.*attn*: embed: none", TradeOff::Memory, cost, 0.071, 1.4),
        suggestion("context_parallel: ulysses", TradeOff::OtherCollectives, cost, 0.032, -0.2),
    ];
    let diagnosis = Diagnosis {
        base,
        suggestions,
        no_gain: vec![("rules: heads: context".into(), -0.042)],
        rejected: vec![("storage: embed: none".into(), "does not fit into device memory".into())],
        not_compiled: vec!["tensors: transformer.*norm*: none".into()],
        shipped: None,
    };
    GroupDiagnosis { label: row.label.clone(), result: Ok(diagnosis) }
}

/// Returns groups with `count` results: most on TPUs, a tenth on CPUs without predicted times, and some failures.
pub(super) fn groups(count: usize) -> Vec<CaseGroup> {
    let mut numbers = Numbers(7);
    let rows = (0..count).map(|n| match n % 20 {
        13 => row(n, "tpu:v5p:2x2x2", None, None, Some("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")),
        5 | 6 => row(n, "cpu:8", Some(compiled("cpu:8", n, &mut numbers)), None, None),
        _ => on_tpu(n, &mut numbers),
    });
    let mut groups = ranked(rows.collect());
    for group in &mut groups {
        group.diagnosis = group.fastest().map(diagnosis);
    }
    groups
}
