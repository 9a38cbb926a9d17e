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

pub(super) fn table(f: &CompileReport) -> String {
    let mut out = String::new();
    let mut line = |name: &str, text: String| {
        let _ = writeln!(out, "{name:<12}{text}");
    };
    line("target", format!("{}, {} devices, layout {}, {}", f.target, f.devices, f.layout, mesh_text(&f.mesh)));
    let has_blocks = f.per_layer.flops > 0.0;
    let blocks = if has_blocks { format!(", {} blocks", f.layers) } else { String::new() };
    line("program", format!("{}{blocks}, compiled in {:.1} s", f.program, f.compile_seconds));
    line("hash", f.hash.clone());
    if let Some(saved) = &f.saved {
        line("saved", format!("{}, {:.2} MB", saved.path.display(), saved.bytes as f64 / MB));
    }
    line("model", f.model.clone());
    let m = &f.memory;
    let host = match m.host_arguments {
        0 => String::new(),
        bytes => format!("; {} of arguments in host memory", gib(bytes)),
    };
    let of = m.capacity.map_or(String::new(), |c| format!(" of {}", gib(c)));
    line(
        "memory",
        format!(
            "{}{of} per device: arguments {}, temporaries {}, results {} ({} in argument buffers), code {}{host}",
            gib(m.total),
            gib(m.arguments),
            gib(m.temporaries),
            gib(m.outputs),
            gib(m.aliased),
            gib(m.generated_code)
        ),
    );
    let work = |flops: f64, bytes: f64| format!("{:.3} TFLOP, {:.2} GB of memory traffic", flops / 1e12, bytes / 1e9);
    let c = &f.collectives;
    if has_blocks {
        let bytes = [c.per_layer_bytes, c.per_layer_wire_bytes, c.per_layer_overlapped_bytes];
        let (own, all) = (work(f.per_layer.flops, f.per_layer.bytes_accessed), moved(c.per_layer_count, bytes));
        line("per block", format!("{own}; {all}"));
    }
    let overlapped = c.list.iter().filter(|e| e.overlapped).map(|e| e.step_bytes()).sum();
    let all = moved(c.list.iter().map(|e| e.runs()).sum(), [c.per_step_bytes, c.per_step_wire_bytes, overlapped]);
    line("per step", format!("{}; {all}", work(f.flops, f.bytes_accessed)));
    let predicted = f.all_blocks();
    if f.host_bytes() > 0.0 {
        let time = predicted.filter(|p| p.host_copy > 0.0).map_or(String::new(), |p| {
            format!(", predicted {:.1} ms, {:.1} ms of it exposed", p.host_copy, p.exposed_host_copy)
        });
        line("host copies", format!("{:.2} GB per step{time}", f.host_bytes() / 1e9));
    }
    if let Some(p) = predicted {
        let by = if f.needed.layers > f.layers {
            format!(" for {} blocks ({} compiled)", f.needed.layers, f.layers)
        } else {
            String::new()
        };
        line(
            "predicted",
            format!(
                "{:.1} ms per step{by}: compute {:.1}, memory {:.1}, links {:.1}",
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
    format!("\n{}", columns(&rows, 0..0))
}
