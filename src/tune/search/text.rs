//! What a search found, to read: a summary, and the fastest layout as a file that says why.

use std::fmt::Write;

use super::{Found, Out, Quest};
use crate::tune::experiment::Row;
use crate::tune::table::milliseconds;

const GIB: f64 = 1073741824.0;
/// Layouts that are named, of each reason.
const NAMED: usize = 3;
/// Compiled layouts that are named beside the winner.
const BESIDE: usize = 12;

/// The winner as a layout file, with what it was compared with.
pub fn found(found: &Found, quest: &Quest) -> Option<String> {
    let winner = found.winner.as_ref()?;
    let row = &found.rows[winner.row];
    let best = row.cost()?;
    let shape = quest.shape.as_deref().unwrap_or("the configuration's shape");
    let file = quest.given.file.as_deref().unwrap_or("the defaults");
    let mut comments = vec![
        format!("{}: the fastest predicted of {} programs compiled for {},", row.label, found.rows.len(), quest.target),
        format!("{shape}, {file}, by `ltx2 experiment --search --budget {} --seed {}`.", quest.budget, quest.seed),
        format!("{}.", figures(row)),
    ];
    comments.push("Compiled and slower, or too large:".into());
    let mut others: Vec<&Row> =
        found.rows.iter().enumerate().filter(|(n, _)| *n != winner.row).map(|(_, row)| row).collect();
    others.sort_by(|a, b| a.cost().unwrap_or(f64::MAX).total_cmp(&b.cost().unwrap_or(f64::MAX)));
    for other in others.iter().take(BESIDE) {
        comments.push(format!("  {}: {}", other.label, lost(other, best, quest.fit)));
    }
    if others.len() > BESIDE {
        comments.push(format!("  and {} more", others.len() - BESIDE));
    }
    comments.extend(left_out(found));
    Some(winner.source.to_yaml(&comments))
}

/// A few lines for the terminal.
pub fn summary(found: &Found, quest: &Quest) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = match found.winner.as_ref().map(|w| &found.rows[w.row]) {
        Some(row) => writeln!(out, "fastest: {}: {}", row.label, figures(row)),
        None => writeln!(out, "no layout was found that {}", if quest.fit { "fits" } else { "compiles" }),
    };
    left_out(found).iter().for_each(|line| {
        let _ = writeln!(out, "{line}");
    });
    out
}

fn unit(row: &Row) -> &'static str {
    if row.predicted().is_some() { "ms" } else { "MB received" }
}

/// A cost with its unit.
fn cost(value: f64, unit: &str) -> String {
    match unit {
        "ms" => format!("{} ms", milliseconds(value)),
        _ => format!("{:.3} MB received", value / 1e6),
    }
}

fn figures(row: &Row) -> String {
    let Some(f) = &row.figures else { return row.error.clone().unwrap_or_default() };
    let parts = f.all_blocks().map_or(String::new(), |p| {
        let [compute, memory, links] = [p.compute, p.memory, p.collective].map(milliseconds);
        format!(" (products {compute}, memory {memory}, links {links})")
    });
    let of = f.memory.capacity.map_or(String::new(), |c| format!(" of {:.2}", c as f64 / GIB));
    format!(
        "{} a step{parts}, {:.1} MB of exchanges a block, {:.2}{of} GiB a device",
        row.cost().map_or(String::new(), |c| cost(c, unit(row))),
        f.collectives.per_layer_bytes / 1e6,
        (f.needed.bytes + f.memory.temporaries) as f64 / GIB
    )
}

fn lost(row: &Row, best: f64, fit: bool) -> String {
    match (&row.error, row.cost()) {
        (Some(error), _) => error.clone(),
        (None, Some(_)) if fit && !row.fits() => format!("does not fit: {}", figures(row)),
        (None, Some(value)) => format!("{:+.1} %: {}", (value / best - 1.0) * 100.0, figures(row)),
        (None, None) => "no figures".into(),
    }
}

fn left_out(found: &Found) -> Vec<String> {
    let unit = if found.timed { "ms" } else { "MB received" };
    let mut lines = Vec::new();
    for (why, all) in &found.out {
        let what = match why {
            Out::Illegal => "do not divide, contradict themselves or repeat work",
            Out::Memory => "hold more parameters than a device has room for",
            Out::Same => "are the program of another",
            Out::Slower => "cannot be faster",
            Out::Left => "were left for a larger --budget or --seconds",
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
    if !found.undecided.is_empty() {
        lines.push(format!("Undecided shipped layouts, give a larger --budget: {}", found.undecided.join("; ")));
    }
    lines
}
