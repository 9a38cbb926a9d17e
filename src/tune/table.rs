//! Tables on the terminal.

use std::fmt::Write;

use super::agreement::agreement;
use super::compile_report::{CompileReport, GIB};
use super::experiment::CaseResult;

/// Table of ranked groups, with each group's agreement and errors.
pub(crate) fn table(groups: &[(String, Vec<CaseResult>)]) -> String {
    let mut out = String::new();
    for (name, rows) in groups {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{}{name}", if out.is_empty() { "" } else { "\n" });
        let head = ["case", "predicted ms", "compute", "memory", "links", "measured ms", "MB per block", "GiB", "of"];
        let mut cells = vec![head.map(str::to_string).to_vec()];
        cells.extend(rows.iter().map(line));
        out.push_str(&columns(&cells, 1..head.len()));
        if let Some(agreement) = agreement(rows) {
            let _ = writeln!(out, "{}", agreement.text());
        }
        for (row, error) in rows.iter().filter_map(|row| Some((row, row.error.as_ref()?))) {
            let _ = writeln!(out, "{}: {error}", row.label);
        }
    }
    out
}

fn line(row: &CaseResult) -> Vec<String> {
    let mut cells = vec![row.label.clone()];
    let f = row.report.as_ref();
    let predicted = f.and_then(CompileReport::all_blocks);
    let ms = |value: Option<f64>| value.map_or(String::new(), milliseconds);
    cells.extend([
        ms(predicted.map(|p| p.step)),
        ms(predicted.map(|p| p.compute)),
        ms(predicted.map(|p| p.memory)),
        ms(predicted.map(|p| p.collective)),
        ms(row.measured.map(|s| s * 1e3)),
        f.map_or(String::new(), |f| format!("{:.1}", f.collectives.per_layer_bytes / 1e6)),
        f.map_or(String::new(), |f| format!("{:.2}", f.device_bytes() as f64 / GIB)),
        f.and_then(|f| f.memory.capacity).map_or(String::new(), |c| format!("{:.1}", c as f64 / GIB)),
    ]);
    cells
}

/// Milliseconds, with more digits below one.
pub(super) fn milliseconds(value: f64) -> String {
    if value < 1.0 { format!("{value:.4}") } else { format!("{value:.2}") }
}

/// Cells in columns, left-aligned but for the columns of `numbers`.
pub(crate) fn columns(rows: &[Vec<String>], numbers: std::ops::Range<usize>) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |n: usize| rows.iter().filter_map(|r| r.get(n)).map(|c| c.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(n, (cell, w))| match numbers.contains(&n) {
            true => format!("{cell:>w$}"),
            false => format!("{cell:<w$}"),
        });
        let _ = writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    out
}
