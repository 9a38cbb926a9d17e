//! Formats the result of a search: a summary, and the fastest layout as a commented file.

use std::collections::BTreeMap;

use super::result::{ComparedLoop, ComparisonBasis, PruneReason, PrunedLayout, TriedLayout};
use super::{SearchRequest, SearchResult};
use crate::tune::case_result::CaseResult;
use crate::tune::compile_report::GIB;
use crate::tune::table::{columns, milliseconds};

/// Number of layouts that the summary lists per reason.
const NAMED: usize = 3;

/// Returns the fastest layout as a layout file. Comments in the file list each compiled layout with its figures, and
/// each pruned layout with the reason.
pub(crate) fn best_layout(result: &SearchResult, request: &SearchRequest) -> Option<String> {
    let winner = &result.tried[result.winner?];
    let (best, comparison) = (winner.cost?, &result.comparison);
    let count = result.tried.len();
    let mut comments = vec![
        format!(
            "{}: predicted to be the fastest of {count} layouts compiled for {},",
            winner.point.label, request.target
        ),
        format!("by `{}`{}.", request.command, predicted_by(winner)),
        format!("{}.", figures(winner, result)),
        "Compiled:".into(),
    ];
    let mut others: Vec<&TriedLayout> = result.tried.iter().filter(|t| !std::ptr::eq(*t, winner)).collect();
    others.sort_by(|a, b| a.cost.unwrap_or(f64::MAX).total_cmp(&b.cost.unwrap_or(f64::MAX)));
    comments.extend(others.iter().map(|t| format!("  {}: {}", t.point.label, lost(t, best, result))));
    if others.is_empty() {
        comments.push("  no other layout".into());
    }
    for (reason, all) in by_reason(&result.pruned) {
        comments.push(format!("Not compiled: {} layout(s) that {}:", all.len(), reason.words()));
        let mut by_why: Vec<(&str, Vec<&str>)> = Vec::new();
        for pruned in all {
            match by_why.iter_mut().find(|(why, _)| *why == pruned.why) {
                Some((_, labels)) => labels.push(&pruned.label),
                None => by_why.push((&pruned.why, vec![&pruned.label])),
            }
        }
        comments.extend(by_why.into_iter().map(|(why, labels)| format!("  {why}: {}", labels.join("; "))));
    }
    if comparison.parts.len() > 1 {
        let weights = comparison.parts.iter().map(|part| format!("{} x {}", part.steps, part.name));
        comments.insert(2, format!("Times are for {}.", weights.collect::<Vec<_>>().join(" + ")));
    }
    Some(winner.point.source.to_yaml(&comments))
}

/// Returns the summary of a search for the terminal.
pub(crate) fn summary(result: &SearchResult) -> String {
    let mut lines = Vec::new();
    if result.comparison.parts.len() > 1 || result.comparison.per_video {
        lines.push(totals(result));
    }
    lines.push(match result.winner.map(|n| &result.tried[n]) {
        Some(winner) => format!("fastest: {}: {}", winner.point.label, figures(winner, result)),
        None => format!(
            "found no layout that {}",
            if result.limit.is_some() { "fits into device memory" } else { "compiles" }
        ),
    });
    for (reason, all) in by_reason(&result.pruned) {
        let named: Vec<String> = all.iter().take(NAMED).map(|pruned| left_out(pruned)).collect();
        let more = if all.len() > NAMED { ", …" } else { "" };
        lines.push(format!(
            "Not compiled: {} layout(s) that {}: {}{more}",
            all.len(),
            reason.words(),
            named.join("; ")
        ));
    }
    let undecided = result.pruned.iter().filter(|p| p.named && p.reason == PruneReason::OverBudget);
    let undecided: Vec<&str> = undecided.map(|p| p.label.as_str()).collect();
    if !undecided.is_empty() {
        lines.push(format!(
            "Shipped or user-supplied layouts that were not compiled; increase --budget to include them: {}",
            undecided.join("; ")
        ));
    }
    lines.join("\n") + "\n"
}

/// Returns a table of all compiled layouts with the total cost, and the cost of a step of each program.
fn totals(result: &SearchResult) -> String {
    let ComparisonBasis { parts, timed, per_video } = &result.comparison;
    let unit = if *timed { "ms" } else { "MB received" };
    let whole = if *per_video { format!("{unit} per video") } else { format!("{unit} for all steps") };
    let name = |part: &ComparedLoop| {
        format!("{} x {}", part.steps, if part.name.is_empty() { "one step" } else { &part.name })
    };
    let head = ["layout".to_string(), whole].into_iter().chain(parts.iter().map(name)).chain(["GiB".to_string()]);
    let mut tried: Vec<&TriedLayout> = result.tried.iter().collect();
    tried.sort_by(|a, b| a.cost.unwrap_or(f64::MAX).total_cmp(&b.cost.unwrap_or(f64::MAX)));
    let line = |t: &TriedLayout| {
        let each = t.rows.iter().map(|row| cell(row.cost(), *timed));
        let gib = format!("{:.2}", t.bytes() as f64 / GIB);
        [t.point.label.clone(), cell(t.cost, *timed)].into_iter().chain(each).chain([gib]).collect::<Vec<_>>()
    };
    let rows: Vec<Vec<String>> = [head.collect()].into_iter().chain(tried.into_iter().map(line)).collect();
    columns(&rows, 1..rows[0].len())
}

/// Formats milliseconds or megabytes.
fn cell(cost: Option<f64>, timed: bool) -> String {
    cost.map_or(String::new(), |cost| if timed { milliseconds(cost) } else { format!("{:.3}", cost / 1e6) })
}

/// Returns the chip and the compiler that a layout's figures come from.
fn predicted_by(tried: &TriedLayout) -> String {
    let row = tried.rows.first();
    let chip =
        row.and_then(|row| row.report.as_ref()?.chip.as_ref()).map(|chip| format!(", for the chip {}", chip.name));
    let compiler = row.and_then(|row| row.compiler.as_ref()).map(|compiler| format!(", with {compiler}"));
    [chip, compiler].into_iter().flatten().collect()
}

fn figures(tried: &TriedLayout, result: &SearchResult) -> String {
    let errors = tried.rows.iter().find_map(|row| row.error.clone());
    let Some(cost) = tried.cost else { return errors.unwrap_or_default() };
    let each = match tried.rows.as_slice() {
        [one] => step(one),
        rows => {
            let one = |(row, part): (&CaseResult, &ComparedLoop)| {
                format!("; {} {}{}", part.name, cell(row.cost(), result.comparison.timed), step(row))
            };
            rows.iter().zip(&result.comparison.parts).map(one).collect()
        }
    };
    let reports = || tried.rows.iter().filter_map(|row| row.report.as_ref());
    let limit = result.limit.or_else(|| reports().find_map(|f| f.memory.capacity));
    let of = limit.map_or(String::new(), |c| format!(" of {:.2}", c as f64 / GIB));
    let block: Vec<String> = reports().map(|f| format!("{:.1}", f.collectives.per_layer_bytes / 1e6)).collect();
    let (cost, gib) = (result.comparison.text(cost), tried.bytes() as f64 / GIB);
    format!("{cost}{each}, {} MB of collectives per block, {gib:.2}{of} GiB per device", block.join(" and "))
}

/// Formats the predicted components of a step, in parentheses.
fn step(row: &CaseResult) -> String {
    let predicted = row.report.as_ref().and_then(|f| f.all_blocks());
    predicted.map_or(String::new(), |p| {
        let [compute, memory, links] = [p.compute, p.memory, p.collective].map(milliseconds);
        format!(" (matmuls {compute}, memory {memory}, links {links})")
    })
}

fn lost(tried: &TriedLayout, best: f64, result: &SearchResult) -> String {
    match (tried.rows.iter().find_map(|row| row.error.as_ref()), tried.cost) {
        (Some(error), _) => error.clone(),
        (None, Some(_)) if !tried.may_win() => format!("does not fit: {}", figures(tried, result)),
        (None, Some(cost)) if best > 0.0 => {
            format!("{:+.1} %: {}", (cost / best - 1.0) * 100.0, figures(tried, result))
        }
        (None, Some(_)) => figures(tried, result),
        (None, None) => "the compiler returned no report".into(),
    }
}

fn by_reason(pruned: &[PrunedLayout]) -> BTreeMap<PruneReason, Vec<&PrunedLayout>> {
    let mut all: BTreeMap<PruneReason, Vec<&PrunedLayout>> = BTreeMap::new();
    pruned.iter().for_each(|p| all.entry(p.reason).or_default().push(p));
    all
}

fn left_out(pruned: &PrunedLayout) -> String {
    format!("{} ({})", pruned.label, pruned.why)
}
