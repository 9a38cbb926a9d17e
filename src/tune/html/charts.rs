//! Charts of a report, as SVG.

use std::fmt::Write;

use super::escaped;
use crate::tune::case_result::CaseResult;
use crate::tune::compile_report::{CompileReport, GIB};

const NAMES: f64 = 210.0;
const WIDTH: f64 = 760.0;
const BAR: f64 = 26.0;
const TOP: f64 = 46.0;
const LETTER: f64 = 7.0;

fn figure(title: &str, height: f64, inside: &str) -> String {
    format!(
        "<figure><svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{0}\"><text class=\"title\" x=\"0\" \
         y=\"14\">{0}</text>{inside}</svg></figure>\n",
        escaped(title)
    )
}

fn rect(class: &str, [x, y, width, height]: [f64; 4], title: &str) -> String {
    format!(
        "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height:.1}\"><title>{}</title></rect>",
        width.max(0.0),
        escaped(title)
    )
}

fn text(class: &str, x: f64, y: f64, words: &str) -> String {
    format!("<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escaped(words))
}

fn legend(entries: &[(&str, &str)]) -> String {
    let mut x = 0.0;
    let mut out = String::new();
    for (class, name) in entries {
        out += &rect(class, [x, 24.0, 10.0, 10.0], name);
        out += &text("", x + 14.0, 33.0, name);
        x += 30.0 + LETTER * name.len() as f64;
    }
    out
}

/// Labels beside points, moved down where they would overlap.
fn names(mut points: Vec<(f64, f64, String)>) -> String {
    const LINE: f64 = 12.0;
    let width = |words: &str| LETTER * words.chars().count() as f64;
    points.sort_by(|a, b| a.1.total_cmp(&b.1));
    let mut placed: Vec<(f64, f64, f64)> = Vec::new();
    let mut out = String::new();
    for (x, y, words) in points {
        let (left, right) = (x + 8.0, x + 8.0 + width(&words));
        let mut at = y + 4.0;
        // Downwards only: every iteration ends below one more of the labels placed.
        while let Some(taken) =
            placed.iter().find(|(l, r, taken)| left < *r && *l < right && (at - taken).abs() < LINE - 0.01)
        {
            at = taken.2 + LINE;
        }
        placed.push((left, right, at));
        out += &text("value", left, at, &words);
    }
    out
}

/// Step time: its parts alone, a line at the predicted step, and below the measured step.
pub(super) fn times(rows: &[(&CaseResult, &CompileReport)]) -> String {
    let parts = |f: &CompileReport| f.all_blocks().map(|p| [p.compute, p.memory, p.collective]);
    let longest = rows.iter().map(|(r, f)| {
        let all: f64 = parts(f).map_or(0.0, |p| p.iter().sum());
        all.max(r.measured.map_or(0.0, |s| s * 1e3))
    });
    let longest = longest.fold(0.0, f64::max);
    if longest == 0.0 {
        return String::new();
    }
    let scale = (WIDTH - NAMES - 90.0) / longest;
    let mut out = legend(&[
        ("compute", "compute"),
        ("memory", "memory"),
        ("links", "links"),
        ("step", "predicted step"),
        ("measured", "measured step"),
    ]);
    for (n, (row, f)) in rows.iter().enumerate() {
        let y = TOP + BAR * n as f64;
        out += &text("name", NAMES - 8.0, y + 14.0, &row.label);
        let mut x = NAMES;
        for (class, ms) in ["compute", "memory", "links"].into_iter().zip(parts(f).into_iter().flatten()) {
            out += &rect(class, [x, y + 3.0, ms * scale, 11.0], &format!("{class} {ms:.3} ms"));
            x += ms * scale;
        }
        if let Some(p) = f.all_blocks() {
            let at = NAMES + p.step * scale;
            out += &rect("step", [at - 1.5, y, 3.0, 17.0], &format!("predicted step {:.3} ms", p.step));
            out += &text("value", x.max(at) + 6.0, y + 13.0, &format!("{:.2} ms", p.step));
        }
        if let Some(s) = row.measured {
            out += &rect("measured", [NAMES, y + 16.0, s * 1e3 * scale, 5.0], &format!("measured {:.3} ms", s * 1e3));
        }
    }
    figure("Step time", TOP + BAR * rows.len() as f64 + 4.0, &out)
}

pub(super) fn memory(rows: &[(&CaseResult, &CompileReport)]) -> String {
    let capacity = rows.iter().find_map(|(_, f)| f.memory.capacity).map(|c| c as f64);
    let largest = rows.iter().map(|(_, f)| f.device_bytes() as f64).fold(capacity.unwrap_or(0.0), f64::max);
    let scale = (WIDTH - NAMES - 90.0) / largest.max(1.0);
    let mut out = legend(&[("arguments", "arguments and results, all blocks"), ("temporaries", "temporaries")]);
    for (n, (row, f)) in rows.iter().enumerate() {
        let y = TOP + BAR * n as f64;
        let (arguments, between) = (f.needed.bytes as f64, f.memory.temporaries as f64);
        let title = |what: &str, bytes: f64| format!("{what} {:.3} GiB", bytes / GIB);
        out += &text("name", NAMES - 8.0, y + 14.0, &row.label);
        out += &rect("arguments", [NAMES, y + 3.0, arguments * scale, 14.0], &title("arguments", arguments));
        let at = NAMES + arguments * scale;
        out += &rect("temporaries", [at, y + 3.0, between * scale, 14.0], &title("temporaries", between));
        out +=
            &text("value", at + between * scale + 6.0, y + 14.0, &format!("{:.2} GiB", f.device_bytes() as f64 / GIB));
    }
    let height = TOP + BAR * rows.len() as f64 + 4.0;
    if let Some(capacity) = capacity {
        let title = format!("capacity {:.2} GiB", capacity / GIB);
        out += &rect("step", [NAMES + capacity * scale - 1.0, TOP, 2.0, height - TOP - 4.0], &title);
        out += &text("name", NAMES + capacity * scale + 40.0, TOP - 6.0, &title);
    }
    figure("Memory per device against its capacity", height, &out)
}

/// Roofline: FLOP/s over FLOP per byte of device memory, under the chip's roof.
pub(super) fn roofline(rows: &[(&CaseResult, &CompileReport)]) -> String {
    const HEIGHT: f64 = 300.0;
    const LEFT: f64 = 60.0;
    const BOTTOM: f64 = 260.0;
    let Some(chip) = rows.iter().find_map(|(_, f)| f.chip.as_ref()) else { return String::new() };
    let points: Vec<(&CaseResult, f64, f64, bool)> = rows
        .iter()
        .filter_map(|(row, f)| {
            let seconds = row.measured.or(row.predicted().map(|ms| ms / 1e3))?;
            let (flops, bytes) = f.work();
            let (x, y) = (flops / bytes, flops / seconds);
            (x > 0.0 && y > 0.0 && x.is_finite() && y.is_finite()).then_some((*row, x, y, row.measured.is_some()))
        })
        .collect();
    let knee = chip.peak / chip.bandwidth;
    let low = points.iter().map(|p| p.1).fold(knee, f64::min) / 4.0;
    let high = points.iter().map(|p| p.1).fold(knee, f64::max) * 4.0;
    let floor = points.iter().map(|p| p.2).fold(chip.peak, f64::min) / 4.0;
    let roof = chip.peak * 2.0;
    let log = |v: f64, a: f64, b: f64| (v.ln() - a.ln()) / (b.ln() - a.ln());
    let px = |v: f64| LEFT + (WIDTH - LEFT - 20.0) * log(v, low, high);
    let py = |v: f64| BOTTOM - (BOTTOM - 30.0) * log(v.max(floor), floor, roof);
    let mut out = String::new();
    let start = (floor / chip.bandwidth).max(low);
    let line = [(start, start * chip.bandwidth), (knee, chip.peak), (high, chip.peak)];
    let path: Vec<String> = line.iter().map(|(x, y)| format!("{:.1},{:.1}", px(*x), py(*y))).collect();
    // Writing to a string cannot fail.
    let _ = write!(out, "<polyline class=\"roof\" points=\"{}\"/>", path.join(" "));
    out += &text("value", px(knee), py(chip.peak) - 6.0, &format!("{}: {:.0} TFLOP/s", chip.name, chip.peak / 1e12));
    let _ = write!(out, "<polyline class=\"axis\" points=\"{LEFT},30 {LEFT},{BOTTOM} {WIDTH},{BOTTOM}\"/>");
    out += &text("value", LEFT, BOTTOM + 16.0, &format!("{low:.0}"));
    out += &text("name", WIDTH - 4.0, BOTTOM + 16.0, &format!("{high:.0} FLOP per byte of memory"));
    out += &text("name", LEFT - 4.0, BOTTOM, &format!("{:.0}", floor / 1e12));
    out += &text("name", LEFT - 4.0, 40.0, &format!("{:.0}", roof / 1e12));
    let labels = points.iter().map(|(row, x, y, _)| (px(*x), py(*y), row.label.clone())).collect();
    for (row, x, y, measured) in points {
        let class = if measured { "measured" } else { "step" };
        let _ = write!(
            out,
            "<circle class=\"{class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\"><title>{}: {:.0} TFLOP/s, {x:.0} FLOP per byte</title></circle>",
            px(x),
            py(y),
            escaped(&row.label),
            y / 1e12
        );
    }
    out += &names(labels);
    figure("Roofline of a step: TFLOP/s per device", HEIGHT, &out)
}

/// Measured over predicted milliseconds; on the line they are equal.
pub(super) fn agreement(rows: &[CaseResult]) -> String {
    const SIZE: f64 = 340.0;
    const LEFT: f64 = 60.0;
    const TOP: f64 = 30.0;
    let both: Vec<(&CaseResult, f64, f64)> = rows
        .iter()
        .filter_map(|r| Some((r, r.predicted()?, r.measured? * 1e3)))
        .filter(|(_, p, m)| *p > 0.0 && *m > 0.0)
        .collect();
    if both.len() < 2 {
        return String::new();
    }
    let all = || both.iter().flat_map(|(_, p, m)| [*p, *m]);
    let (low, high) = (all().fold(f64::INFINITY, f64::min) / 1.15, all().fold(0.0, f64::max) * 1.15);
    let part = |v: f64| (v.ln() - low.ln()) / (high.ln() - low.ln());
    let px = |v: f64| LEFT + (WIDTH - LEFT - 200.0) * part(v);
    let py = |v: f64| TOP + (SIZE - TOP - 50.0) * (1.0 - part(v));
    let bottom = py(low);
    let mut out = format!(
        "<polyline class=\"axis\" points=\"{LEFT},{TOP} {LEFT},{bottom} {:.1},{bottom}\"/><polyline class=\"roof\" \
         points=\"{LEFT},{bottom} {:.1},{:.1}\"/>",
        px(high),
        px(high),
        py(high)
    );
    out += &text("value", LEFT, bottom + 16.0, &format!("{low:.0}"));
    out += &text("name", px(high), bottom + 16.0, &format!("{high:.0} ms predicted"));
    out += &text("name", LEFT - 4.0, bottom, &format!("{low:.0}"));
    out += &text("name", LEFT - 4.0, TOP + 10.0, &format!("{high:.0}"));
    let labels = both.iter().map(|(row, p, m)| (px(*p), py(*m), row.label.clone())).collect();
    for (row, predicted, measured) in both {
        let title = format!("{}: predicted {predicted:.2} ms, measured {measured:.2} ms", row.label);
        let (x, y) = (px(predicted), py(measured));
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "<circle class=\"measured\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\"><title>{}</title></circle>",
            escaped(&title)
        );
    }
    out += &names(labels);
    figure("Measured milliseconds over predicted ones", SIZE, &out)
}
