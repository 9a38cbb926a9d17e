//! Table of a compiled program's figures.

use std::fmt::Write;

use crate::tune::{CompileReport, GIB, columns, name};

pub(super) fn mesh_text<'a>(axes: impl IntoIterator<Item = (&'a String, &'a usize)>) -> String {
    let axes: Vec<String> = axes.into_iter().map(|(a, n)| format!("{a}={n}")).collect();
    if axes.is_empty() { "one device".into() } else { axes.join(",") }
}

const MB: f64 = 1e6;

fn gib(bytes: i64) -> String {
    format!("{:.2} GiB", bytes as f64 / GIB)
}

/// Formats the number of collectives, their output and received bytes, and the share of overlapped bytes.
fn moved(count: f64, [bytes, wire, overlapped]: [f64; 3]) -> String {
    let share = if bytes > 0.0 { 100.0 * overlapped / bytes } else { 0.0 };
    // An empty sum is -0; adding 0 removes the sign.
    format!(
        "{:.0} collectives, {:.1} MB ({:.1} MB received), {share:.0} % overlapped",
        count + 0.0,
        bytes / MB,
        wire / MB
    )
}

/// Formats floating-point operations and bytes of memory traffic.
fn work(flops: f64, bytes: f64) -> String {
    format!("{:.3} TFLOP, {:.2} GB of memory traffic", flops / 1e12, bytes / 1e9)
}

/// Formats the memory that the program needs. `is_part`: only some blocks were compiled; arguments and results are
/// then those of all blocks.
fn memory_text(f: &CompileReport, is_part: bool) -> String {
    let m = &f.memory;
    let host = match m.host_arguments {
        0 => String::new(),
        bytes => format!("; {} of arguments in host memory", gib(bytes)),
    };
    let of = m.capacity.map_or(String::new(), |c| format!(" of {}", gib(c)));
    let (temporaries, code) = (gib(m.temporaries), gib(m.generated_code));
    if is_part {
        let (total, own) = (gib(f.device_bytes() + m.generated_code), gib(f.needed.bytes));
        return format!(
            "{total}{of} per device: arguments and results {own}, temporaries {temporaries} ({} blocks compiled), code \
             {code}{host}",
            f.layers
        );
    }
    format!(
        "{}{of} per device: arguments {}, temporaries {temporaries}, results {} ({} in argument buffers), code {code}{host}",
        gib(m.total),
        gib(m.arguments),
        gib(m.outputs),
        gib(m.aliased)
    )
}

/// Formats the operations and collectives of a step with all blocks.
fn step_text(f: &CompileReport) -> String {
    let (c, more) = (&f.collectives, f.needed.layers as f64 - f.layers as f64);
    let overlapped: f64 = c.list.iter().filter(|e| e.overlapped).map(|e| e.step_bytes()).sum();
    let count = c.list.iter().map(|e| e.runs()).sum::<f64>() + more * c.per_layer_count;
    let all = [
        c.per_step_bytes + more * c.per_layer_bytes,
        c.per_step_wire_bytes + more * c.per_layer_wire_bytes,
        overlapped + more * c.per_layer_overlapped_bytes,
    ];
    let (flops, bytes) = f.work();
    format!("{}; {}", work(flops, bytes), moved(count, all))
}

pub(super) fn table(f: &CompileReport) -> String {
    let mut out = String::new();
    let mut line = |name: &str, text: String| {
        let _ = writeln!(out, "{name:<12}{text}");
    };
    line("target", format!("{}, {} devices, layout {}, {}", f.target, f.devices, f.layout, mesh_text(&f.mesh)));
    let has_blocks = f.per_layer.flops > 0.0;
    let is_part = has_blocks && f.needed.layers > f.layers;
    let of_all = if is_part { format!(" of {}", f.needed.layers) } else { String::new() };
    let blocks = if has_blocks { format!(", {}{of_all} blocks", f.layers) } else { String::new() };
    line("program", format!("{}{blocks}, compiled in {:.1} s", f.program, f.compile_seconds));
    line("hash", f.hash.clone());
    if let Some(saved) = &f.saved {
        line("saved", format!("{}, {:.2} MB", saved.path.display(), saved.bytes as f64 / MB));
    }
    line("model", f.model.clone());
    let whole = if is_part { format!("for all {} blocks: ", f.needed.layers) } else { String::new() };
    line("memory", format!("{whole}{}", memory_text(f, is_part)));
    let c = &f.collectives;
    if has_blocks {
        let bytes = [c.per_layer_bytes, c.per_layer_wire_bytes, c.per_layer_overlapped_bytes];
        let (own, all) = (work(f.per_layer.flops, f.per_layer.bytes_accessed), moved(c.per_layer_count, bytes));
        line("per block", format!("{own}; {all}"));
    }
    line("per step", format!("{whole}{}", step_text(f)));
    let predicted = f.all_blocks();
    if f.host_bytes() > 0.0 {
        let time = predicted.filter(|p| p.host_copy > 0.0).map_or(String::new(), |p| {
            format!(", predicted {:.1} ms, {:.1} ms of it exposed", p.host_copy, p.exposed_host_copy)
        });
        line("host copies", format!("{whole}{:.2} GB per step{time}", f.host_bytes() / 1e9));
    }
    if let Some(p) = predicted {
        line(
            "predicted",
            format!(
                "{whole}{:.1} ms per step: compute {:.1}, memory {:.1}, links {:.1}",
                p.step, p.compute, p.memory, p.collective
            ),
        );
    }
    let copied: f64 = f.stack_copies.iter().map(|c| c.bytes).sum();
    match f.stack_copies.as_slice() {
        [] => line("copies", "no stacked layer parameters are copied".into()),
        copies => {
            line("copies", format!("{} copies of stacked layer parameters, {:.1} MB:", copies.len(), copied / MB));
            for c in copies {
                let scope = if c.scope.is_empty() { String::new() } else { format!(" under {}", c.scope) };
                line("", format!("{} {} {:.1} MB{scope}", c.opcode, c.shape, c.bytes / MB));
            }
        }
    }
    f.notes.iter().for_each(|note| line("note", note.clone()));
    out.push_str(&collectives(f));
    out
}

fn collectives(f: &CompileReport) -> String {
    let head = ["per", "runs per step", "kind", "MB", "received", "type", "axes", "how", "scope", "tensor", "rule"];
    let mut rows = vec![head.map(str::to_string).to_vec()];
    for e in &f.collectives.list {
        let how = match (e.asynchronous, e.overlapped) {
            (false, _) => "sync",
            (true, false) => "async, not overlapped",
            (true, true) => "async",
        };
        rows.push(vec![
            name(e.per),
            e.runs().to_string(),
            e.kind.name().into(),
            format!("{:.3}", e.bytes / MB),
            format!("{:.3}", e.wire_bytes / MB),
            e.dtype.clone(),
            e.axes.join(","),
            how.into(),
            e.scope.clone(),
            e.tensor.clone().unwrap_or_default(),
            e.rule.as_ref().map(|rules| rules.join("; ")).unwrap_or_default(),
        ]);
    }
    if rows.len() == 1 {
        return "no collectives\n".into();
    }
    let part =
        if f.needed.layers > f.layers { format!("collectives of {} blocks:\n", f.layers) } else { String::new() };
    format!("\n{part}{}", columns(&rows, 0..0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::{example_collective, example_report};

    #[test]
    fn figures_of_some_blocks_are_extrapolated_and_labeled() {
        let mut report = example_report("cpu:2");
        assert!(table(&report).contains("program     denoise, 1 blocks, compiled in"), "{}", table(&report));
        assert!(!table(&report).contains("for all"), "{}", table(&report));
        report.collectives.list.push(example_collective("blocks/ff", None, 0.5));
        report.collectives.per_layer_bytes = 1e6;
        (report.needed.layers, report.needed.bytes) = (48, 3 << 30);
        report.memory.temporaries = 1 << 30;
        let text = table(&report);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_string();
        assert!(line("program").contains("denoise, 1 of 48 blocks"), "{text}");
        let memory = "memory      for all 48 blocks: 4.00 GiB of 0.00 GiB per device: arguments and results 3.00 GiB, \
                      temporaries 1.00 GiB (1 blocks compiled), code 0.00 GiB";
        assert_eq!(line("memory"), memory);
        let step = "per step    for all 48 blocks: 48.000 TFLOP, 48.00 GB of memory traffic; 48 collectives, 47.0 MB ";
        assert!(line("per step").starts_with(step), "{text}");
        assert!(line("per block").contains("1.000 TFLOP, 1.00 GB"), "{text}");
        assert!(text.contains("\ncollectives of 1 blocks:\n"), "{text}");
    }
}
