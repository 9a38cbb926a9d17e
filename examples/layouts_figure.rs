//! Draws a bar chart of the bytes that each layout communicates per transformer block, from `ltx2 compile --json` reports.
//!
//! `cargo run --example layouts_figure benchmarks/layouts/*.json > benchmarks/layouts.svg`; `make layouts-figure` writes
//! the reports first.

use std::fmt::Write;

use serde_json::Value;

/// Categories of collectives with their colours.
const PARTS: [(&str, &str); 5] = [
    ("weights gathered", "#c0504d"),
    ("keys and values gathered", "#e59a3c"),
    ("sums (all-reduce)", "#8064a2"),
    ("tokens for heads (all-to-all)", "#3b7dbd"),
    ("keys and values passed on (permute)", "#5a9e6f"),
];

/// Returns the index in [`PARTS`] of a collective.
fn part(collective: &Value) -> anyhow::Result<usize> {
    let of_weight = collective["tensor"].as_str().is_some_and(|t| t.ends_with("weight"));
    match (of_weight, collective["kind"].as_str()) {
        (_, Some("all-reduce" | "reduce-scatter")) => Ok(2),
        (true, _) => Ok(0),
        (_, Some("all-gather")) => Ok(1),
        (_, Some("all-to-all")) => Ok(3),
        (_, Some("collective-permute")) => Ok(4),
        (_, kind) => anyhow::bail!("no colour for {kind:?}"),
    }
}

/// One bar: layout, devices, and MB per block of each category.
struct Bar {
    name: String,
    devices: String,
    parts: [f64; PARTS.len()],
}

impl Bar {
    fn read(path: &str) -> anyhow::Result<Bar> {
        let figures: Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
        let text = |v: &Value| v.as_str().map(str::to_string).unwrap_or_default();
        let mut parts = [0.0; PARTS.len()];
        let list = figures["collectives"]["list"].as_array().map(Vec::as_slice).unwrap_or_default();
        let number = |v: &Value| v.as_f64().unwrap_or(f64::NAN);
        for c in list.iter().filter(|c| c["per"] == "layer") {
            let runs = number(&c["count"]) * number(&c["trip_count"]) / number(&figures["layers"]);
            parts[part(c)?] += number(&c["bytes"]) * runs / 1e6;
        }
        let (drawn, said) = (parts.iter().sum::<f64>(), number(&figures["collectives"]["per_layer_bytes"]) / 1e6);
        anyhow::ensure!(
            (said - drawn).abs() < 0.01,
            "{path}: collectives add up to {drawn} MB per block, per_layer_bytes is {said} MB"
        );
        let mesh = figures["mesh"].as_object().into_iter().flatten().map(|(a, n)| format!("{a}={n}"));
        let chip = text(&figures["target"]).replace("tpu:", "");
        let devices = format!("{chip} {}", mesh.collect::<Vec<_>>().join(" "));
        Ok(Bar { name: text(&figures["layout"]), devices, parts })
    }

    fn total(&self) -> f64 {
        self.parts.iter().sum()
    }
}

fn main() -> anyhow::Result<()> {
    let mut bars = std::env::args().skip(1).map(|path| Bar::read(&path)).collect::<anyhow::Result<Vec<_>>>()?;
    anyhow::ensure!(!bars.is_empty(), "usage: layouts_figure FIGURES.json…");
    bars.sort_by(|a, b| a.total().total_cmp(&b.total()));
    let longest = bars.iter().map(Bar::total).fold(1.0, f64::max);
    let (left, wide, top, step) = (150.0, 560.0, 92.0, 34.0);
    let height = top + step * bars.len() as f64 + 8.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 800 {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"12\" y=\"22\" font-size=\"15\">MB that collectives put out in one transformer block, on one device</text>\n"
    );
    for (i, (name, colour)) in PARTS.iter().enumerate() {
        let (x, y) = (12 + i % 3 * 250, 38 + i / 3 * 20);
        writeln!(svg, "<rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>")?;
        writeln!(svg, "<text x=\"{}\" y=\"{}\">{name}</text>", x + 18, y + 10)?;
    }
    for (i, bar) in bars.iter().enumerate() {
        let y = top + step * i as f64;
        let end = left - 8.0;
        writeln!(svg, "<text x=\"{end}\" y=\"{}\" text-anchor=\"end\">{}</text>", y + 10.0, bar.name)?;
        let small = "text-anchor=\"end\" font-size=\"9\" fill=\"#555\"";
        writeln!(svg, "<text x=\"{end}\" y=\"{}\" {small}>{}</text>", y + 21.0, bar.devices)?;
        let mut x = left;
        for (megabytes, (_, colour)) in bar.parts.iter().zip(PARTS) {
            let width = megabytes / longest * wide;
            writeln!(svg, "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"22\" fill=\"{colour}\"/>")?;
            x += width;
        }
        writeln!(svg, "<text x=\"{:.1}\" y=\"{}\">{:.1}</text>", x + 6.0, y + 15.0, bar.total())?;
    }
    println!("{svg}</svg>");
    Ok(())
}
