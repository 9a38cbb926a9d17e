//! Tables of ranked cases, for the terminal and as a Markdown page.

use std::fmt::Write;

use super::agreement::agreement;
use super::case_result::{CaseResult, Group};
use super::compile_report::{CompileReport, GIB};

/// Columns of a case.
const HEAD: [&str; 10] =
    ["case", "behind", "predicted ms", "compute", "memory", "links", "measured ms", "MB per block", "GiB", "of"];

/// Table of ranked groups, with each group's agreement and errors.
pub(crate) fn table(groups: &[Group]) -> String {
    let mut out = String::new();
    for group in groups {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{}{}", if out.is_empty() { "" } else { "\n" }, group.name());
        let mut cells = vec![HEAD.map(str::to_string).to_vec()];
        cells.extend(lines(group));
        out.push_str(&columns(&cells, 1..HEAD.len()));
        notes(group).for_each(|note| out.push_str(&format!("{note}\n")));
    }
    out
}

/// The same as a Markdown page: one table, a group's layouts one below the other.
pub(crate) fn markdown(title: &str, command: &str, groups: &[Group]) -> String {
    let mut compilers: Vec<&str> = Vec::new();
    for compiler in groups.iter().flat_map(|g| &g.rows).filter_map(|row| row.compiler.as_deref()) {
        if !compilers.contains(&compiler) {
            compilers.push(compiler);
        }
    }
    let by = if compilers.is_empty() { String::new() } else { format!(" with {}", compilers.join(", ")) };
    let mut cells = vec![["devices", "configuration", "shape"].into_iter().chain(HEAD).map(str::to_string).collect()];
    for group in groups {
        let parts = || group.parts.iter().cloned();
        let own = |row: &CaseResult, cell: String| if row.has_own_layout() { format!("**{cell}**") } else { cell };
        for (row, mut line) in group.rows.iter().zip(lines(group)) {
            line[0] = own(row, std::mem::take(&mut line[0]));
            cells.push(parts().chain(line).collect::<Vec<_>>());
        }
    }
    let noted = groups.iter().flat_map(|group| notes(group).map(|note| format!("- {}: {note}\n", group.name())));
    let noted: String = noted.map(|note| in_a_line(&note.replace('\n', " ")) + "\n").collect();
    let space = if noted.is_empty() { "" } else { "\n" };
    format!(
        "# {}\n\nMade by `{}`{by}.\n\n\
         Times are of a step with all blocks; *behind* is how much longer it is than that of the fastest layout for the same\n\
         devices, element types, configuration and shape. *Compute*, *memory* and *links* are the predicted milliseconds of\n\
         matmuls, of device memory and of collectives, which overlap in part; *GiB* are what the program needs *of* a device. Bold\n\
         is a configuration's or a slice's own layout, the slice in brackets.\n\n{}{space}{noted}",
        in_a_line(title),
        command.replace('`', "'"),
        markdown_table(&cells, cells[0].len() - HEAD.len() + 1)
    )
}

/// Cells of a group's cases.
fn lines(group: &Group) -> impl Iterator<Item = Vec<String>> {
    group.rows.iter().zip(group.behind()).map(|(row, behind)| line(row, behind))
}

fn line(row: &CaseResult, behind: Option<f64>) -> Vec<String> {
    let mut cells = vec![row.label.clone()];
    let f = row.report.as_ref();
    let predicted = f.and_then(CompileReport::all_blocks);
    let ms = |value: Option<f64>| value.map_or(String::new(), milliseconds);
    cells.extend([
        behind.map_or(String::new(), |b| format!("{:.1} %", b * 100.0)),
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

/// Notes below a group: its agreement, and the errors of its cases.
fn notes(group: &Group) -> impl Iterator<Item = String> {
    let errors = group.rows.iter().filter_map(|row| Some(format!("{}: {}", row.label, row.error.as_ref()?)));
    agreement(&group.rows).map(|agreement| agreement.text()).into_iter().chain(errors)
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

/// The same in Markdown, without columns that are empty but for their head; those from `numbers` on are right-aligned.
fn markdown_table(rows: &[Vec<String>], numbers: usize) -> String {
    let kept: Vec<usize> = (0..rows[0].len()).filter(|n| rows[1..].iter().any(|row| !row[*n].is_empty())).collect();
    let joined = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let line = |row: &Vec<String>| joined(kept.iter().map(|n| in_a_line(&row[*n])).collect());
    let rule = kept.iter().map(|n| if *n < numbers { "---" } else { "---:" }.to_string());
    let rule = joined(rule.collect());
    rows.iter().enumerate().map(|(n, row)| line(row) + if n == 0 { &rule } else { "" }).collect()
}

/// Text that no character of ends a line, a cell or the text, or begins markup of HTML.
pub(super) fn in_a_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ").replace('|', "\\|").replace('<', "&lt;")
}
