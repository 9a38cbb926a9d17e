//! Formats a diagnosis as text.

use std::fmt::Write;

use super::compile_report::{CompileReport, GIB, name};
use super::diagnose::{Diagnosis, MIN_GAIN, Suggestion, TradeOff};
use super::table::columns;

const MB: f64 = 1e6;
/// Minimum size in bytes of a collective that gets its own row.
const SHOWN: f64 = 5e4;
/// Minimum cost, as a fraction of the total, of a collective that gets its own row. The others are summed in one line.
const SMALL: f64 = 0.002;

/// Formats a table of collectives with their reasons, followed by the suggestions. If `only` is set, lists only the
/// collective with this number.
pub(crate) fn diagnosis_text(diagnosis: &Diagnosis, only: Option<usize>) -> String {
    let base = &diagnosis.base;
    let mut out = String::new();
    let memory = base.device_bytes() as f64 / GIB;
    let capacity = base.memory.capacity.map_or(String::new(), |c| format!(" of {:.1}", c as f64 / GIB));
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "{}, layout {}: {} per step of {} blocks (compiled: {}), {:.1} MB of collectives per block, {memory:.2}{capacity} GiB per device\n",
        base.target,
        base.layout,
        base.cost_unit().text(base.whole_cost()),
        base.needed.layers,
        base.layers,
        base.collectives.per_layer_bytes / MB
    );
    out.push_str(&collectives(base, only));
    if let Some(shipped) = &diagnosis.shipped {
        let (unit, best) = (base.cost_unit(), &shipped.fastest);
        let (own, fastest) = (unit.text(shipped.estimate), unit.text(best.estimate));
        out.push_str("\nshipped layouts, estimated without compiling:\n");
        let _ = writeln!(out, "the fastest is {} ({}): {fastest} per step; this layout: {own}", best.layout, best.mesh);
        shipped.lines.iter().for_each(|line| out += &format!("{line}\n"));
    }
    out.push_str("\nsingle-rule changes, each compiled:\n");
    if diagnosis.suggestions.is_empty() {
        let _ = writeln!(out, "no change shortens the step by {:.0} % or more", MIN_GAIN * 100.0);
    }
    for (n, suggestion) in diagnosis.suggestions.iter().enumerate() {
        out.push_str(&one(n + 1, suggestion, base));
    }
    for (change, gain) in &diagnosis.no_gain {
        let _ = writeln!(out, "no gain: {change} ({:+.1} % of the step)", -gain * 100.0);
    }
    for (change, reason) in &diagnosis.rejected {
        let _ = writeln!(out, "rejected: {change} ({reason})");
    }
    if !diagnosis.not_compiled.is_empty() {
        let _ = writeln!(out, "not compiled within --budget: {}", diagnosis.not_compiled.join("; "));
    }
    out
}

fn collectives(base: &CompileReport, only: Option<usize>) -> String {
    let list = &base.collectives.list;
    let all: f64 = list.iter().map(|e| e.step_cost()).sum();
    let head = ["", "runs per step", "MB each", "ms per step", "kind", "role", "tensor", "rule", "reason"];
    let mut rows = vec![head.map(str::to_string).to_vec()];
    let mut order: Vec<usize> = (0..list.len()).collect();
    order.sort_by(|a, b| list[*b].step_cost().total_cmp(&list[*a].step_cost()));
    let mut small = (0, 0.0);
    for n in order {
        let e = &list[n];
        if only.is_some_and(|number| number != n + 1) {
            continue;
        }
        if only.is_none() && e.step_cost() < SMALL * all {
            small = (small.0 + 1, small.1 + e.step_bytes());
            continue;
        }
        rows.push(vec![
            (n + 1).to_string(),
            e.runs().to_string(),
            format!("{:.3}", e.bytes / MB),
            e.ms.map_or(String::new(), |ms| format!("{:.2}", e.runs() * ms)),
            e.kind.name().into(),
            e.role.map(name).unwrap_or_default(),
            e.tensor.clone().unwrap_or_else(|| e.scope.clone()),
            e.rule.iter().flatten().cloned().collect::<Vec<_>>().join("; "),
            e.reason.clone(),
        ]);
    }
    if rows.len() == 1 && small.0 == 0 {
        return "no collectives\n".into();
    }
    let mut out = columns(&rows, 0..4);
    if small.0 > 0 {
        let _ = writeln!(out, "and {} small collectives, {:.3} MB per step in total", small.0, small.1 / MB);
    }
    out
}

/// Formats the suggestions of a diagnosis, and the rules that shipped layouts have and the layout lacks, as items of a
/// Markdown list.
pub(super) fn suggestion_lines(diagnosis: &Diagnosis) -> Vec<String> {
    let unit = diagnosis.base.cost_unit();
    let line = |s: &Suggestion| {
        let [before, after] = s.cost.map(|cost| unit.text(cost));
        let (gain, memory) = (-s.gain() * 100.0, s.difference.memory as f64 / GIB);
        format!("`{}`: {before} to {after} ({gain:+.1} %), {memory:+.2} GiB; {}", s.change, trade_off(s))
    };
    let shipped = diagnosis.shipped.iter().flat_map(|shipped| shipped.lines.iter().cloned());
    diagnosis.suggestions.iter().map(line).chain(shipped).collect()
}

fn trade_off(suggestion: &Suggestion) -> &'static str {
    match suggestion.trade_off {
        TradeOff::None => "free: no extra memory, no other collectives",
        TradeOff::Memory => "needs more memory",
        TradeOff::OtherCollectives => "replaces collectives by others",
    }
}

fn one(n: usize, a: &Suggestion, base: &CompileReport) -> String {
    let unit = base.cost_unit();
    let kinds = a.difference.by_kind();
    let names = |sign: f64| -> String {
        let kinds = kinds.iter().filter(|(_, bytes)| bytes * sign >= SHOWN);
        let text: Vec<String> = kinds.map(|(kind, b)| format!("{kind} {:.1} MB", b.abs() / MB)).collect();
        if text.is_empty() { "nothing".into() } else { text.join(", ") }
    };
    format!(
        "{n}. {}\n   {} -> {} per step ({:+.1} %), {:.1} -> {:.1} MB per block; {}, {:+.2} GiB per device\n   \
         removed per step: {}; added: {}\n",
        a.change,
        unit.text(a.cost[0]),
        unit.text(a.cost[1]),
        -a.gain() * 100.0,
        a.block_bytes[0] / MB,
        a.block_bytes[1] / MB,
        trade_off(a),
        a.difference.memory as f64 / GIB,
        names(-1.0),
        names(1.0),
    )
}
