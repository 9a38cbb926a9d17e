//! Text of a search: a summary, and the fastest layout as a commented file.

use std::fmt::Write;

use super::{PruneReason, SearchRequest, SearchResult};
use crate::tune::case_result::CaseResult;
use crate::tune::compile_report::GIB;
use crate::tune::table::milliseconds;

/// Number of layouts named per prune reason.
const NAMED: usize = 3;
/// Number of compiled layouts named beside the winner.
const BESIDE: usize = 12;

/// Winner as a layout file; comments list what it was compared with.
pub(crate) fn best_layout(result: &SearchResult, request: &SearchRequest) -> Option<String> {
    let winner = result.winner.as_ref()?;
    let row = &result.rows[winner.row];
    let best = row.cost()?;
    let shape = request.shape.as_deref().unwrap_or("the configuration's shape");
    let files = request.given.files.join(" and ");
    let file = if files.is_empty() { "the defaults" } else { &files };
    let mut comments = vec![
        format!(
            "{}: the fastest predicted of {} programs compiled for {},",
            row.label,
            result.rows.len(),
            request.target
        ),
        format!("{shape}, {file}, by `ltx2 experiment --search --budget {} --seed {}`.", request.budget, request.seed),
        format!("{}.", figures(row)),
    ];
    comments.push("Compiled and slower, or too large:".into());
    let mut others: Vec<&CaseResult> =
        result.rows.iter().enumerate().filter(|(n, _)| *n != winner.row).map(|(_, row)| row).collect();
    others.sort_by(|a, b| a.cost().unwrap_or(f64::MAX).total_cmp(&b.cost().unwrap_or(f64::MAX)));
    for other in others.iter().take(BESIDE) {
        comments.push(format!("  {}: {}", other.label, lost(other, best, request.fit)));
    }
    if others.len() > BESIDE {
        comments.push(format!("  and {} more", others.len() - BESIDE));
    }
    comments.extend(left_out(result));
    Some(winner.source.to_yaml(&comments))
}

/// Summary of a search for the terminal.
pub(crate) fn summary(result: &SearchResult, request: &SearchRequest) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = match result.winner.as_ref().map(|w| &result.rows[w.row]) {
        Some(row) => writeln!(out, "fastest: {}: {}", row.label, figures(row)),
        None => writeln!(out, "no layout was found that {}", if request.fit { "fits" } else { "compiles" }),
    };
    left_out(result).iter().for_each(|line| {
        let _ = writeln!(out, "{line}");
    });
    out
}

fn unit(row: &CaseResult) -> &'static str {
    if row.predicted().is_some() { "ms" } else { "MB received" }
}

fn cost(value: f64, unit: &str) -> String {
    match unit {
        "ms" => format!("{} ms", milliseconds(value)),
        _ => format!("{:.3} MB received", value / 1e6),
    }
}

fn figures(row: &CaseResult) -> String {
    let Some(f) = &row.report else { return row.error.clone().unwrap_or_default() };
    let parts = f.all_blocks().map_or(String::new(), |p| {
        let [compute, memory, links] = [p.compute, p.memory, p.collective].map(milliseconds);
        format!(" (matmuls {compute}, memory {memory}, links {links})")
    });
    let of = f.memory.capacity.map_or(String::new(), |c| format!(" of {:.2}", c as f64 / GIB));
    format!(
        "{} per step{parts}, {:.1} MB of collectives per block, {:.2}{of} GiB per device",
        row.cost().map_or(String::new(), |c| cost(c, unit(row))),
        f.collectives.per_layer_bytes / 1e6,
        f.device_bytes() as f64 / GIB
    )
}

fn lost(row: &CaseResult, best: f64, fit: bool) -> String {
    match (&row.error, row.cost()) {
        (Some(error), _) => error.clone(),
        (None, Some(_)) if fit && !row.fits() => format!("does not fit: {}", figures(row)),
        (None, Some(value)) => format!("{:+.1} %: {}", (value / best - 1.0) * 100.0, figures(row)),
        (None, None) => "the compiler returned no report".into(),
    }
}

fn left_out(result: &SearchResult) -> Vec<String> {
    let unit = if result.timed { "ms" } else { "MB received" };
    let mut lines = Vec::new();
    for (why, all) in &result.pruned {
        let what = match why {
            PruneReason::Invalid => "do not divide, contradict themselves or repeat work",
            PruneReason::TooLarge => "do not fit into device memory beside the other components",
            PruneReason::Duplicate => "are the same program as another",
            PruneReason::Slower => "cannot be faster",
            PruneReason::OverBudget => "were left for a larger --budget or --seconds",
        };
        let named: Vec<String> = all
            .iter()
            .take(NAMED)
            .map(|(label, bound)| match bound {
                Some(b) => format!("{label} (at least {})", cost(*b, unit)),
                None => label.clone(),
            })
            .collect();
        let more = if all.len() > NAMED { ", …" } else { "" };
        lines.push(format!("Not compiled, {} that {what}: {}{more}", all.len(), named.join("; ")));
    }
    if !result.undecided.is_empty() {
        lines.push(format!("Undecided shipped layouts, give a larger --budget: {}", result.undecided.join("; ")));
    }
    lines
}
