//! The figures of a compiled program as a table.

use std::fmt::Write;

use crate::pipeline::compile::Compilation;
use crate::runtime::Target;
use crate::tune::columns;
use crate::tune::compile_json::entries;

pub(super) fn mesh_text(axes: &[(String, usize)]) -> String {
    match axes {
        [] => "one device".into(),
        axes => axes.iter().map(|(a, n)| format!("{a}={n}")).collect::<Vec<_>>().join(","),
    }
}

const MB: f64 = 1e6;

fn gib(bytes: i64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

pub(crate) fn table(done: &Compilation, target: &Target) -> String {
    let r = &done.report;
    let mut out = String::new();
    let mut line = |name: &str, text: String| {
        let _ = writeln!(out, "{name:<12}{text}");
    };
    line(
        "target",
        format!("{target}, {} devices, layout {}, {}", done.mesh.devices(), done.layout, mesh_text(&done.mesh.axes)),
    );
    let blocks = if done.kind.has_blocks() { format!(", {} blocks", done.layers) } else { String::new() };
    line("program", format!("{}{blocks}, compiled in {:.1} s", done.kind.name(), done.seconds));
    line("hash", done.hash.clone());
    if let Some(saved) = &done.saved {
        line("saved", format!("{}, {:.2} MB", saved.path.display(), saved.bytes as f64 / MB));
    }
    line("model", done.model.clone());
    let m = &done.memory;
    let of = m.capacity.map_or(String::new(), |c| format!(" of {}", gib(c)));
    line(
        "memory",
        format!(
            "{}{of} per device: arguments {}, temporaries {}, results {} ({} in place), code {}",
            gib(m.total),
            gib(m.arguments),
            gib(m.temporaries),
            gib(m.outputs),
            gib(m.aliased),
            gib(m.generated_code)
        ),
    );
    let work =
        |w: &crate::analysis::Work| format!("{:.3} TFLOP, {:.2} GB of memory traffic", w.flops / 1e12, w.bytes / 1e9);
    let moved = |t: &crate::analysis::Traffic| {
        let share = if t.bytes > 0.0 { 100.0 * t.overlapped / t.bytes } else { 0.0 };
        format!(
            "{:.0} collectives, {:.1} MB ({:.1} MB received), {share:.0} % overlapped",
            t.count,
            t.bytes / MB,
            t.wire_bytes / MB
        )
    };
    if r.layers > 0.0 {
        line("per block", format!("{}; {}", work(&r.layer), moved(&r.per_layer())));
    }
    line("per step", format!("{}; {}", work(&r.step), moved(&r.per_step())));
    if let Some(p) = &r.predicted {
        line(
            "predicted",
            format!(
                "{:.1} ms per step: compute {:.1}, memory {:.1}, links {:.1}",
                p.step, p.compute, p.memory, p.collective
            ),
        );
    }
    let copied: f64 = r.stack_copies.iter().map(|c| c.bytes).sum();
    match r.stack_copies.as_slice() {
        [] => line("copies", "no stack of layers is copied".into()),
        copies => {
            line("copies", format!("{} stacks of layers, {:.1} MB:", copies.len(), copied / MB));
            for c in copies {
                let scope = if c.scope.is_empty() { String::new() } else { format!(" under {}", c.scope) };
                line("", format!("{} {} {:.1} MB{scope}", c.opcode, c.shape, c.bytes / MB));
            }
        }
    }
    done.notes.iter().for_each(|note| line("note", note.clone()));
    out.push_str(&collectives(done));
    out
}

fn collectives(done: &Compilation) -> String {
    let head =
        ["per", "runs", "kind", "MB", "received", "type", "axes", "how", "scope", "tensor", "rule"].map(str::to_string);
    let mut rows = vec![head.to_vec()];
    for e in entries(done) {
        let c = e.collective;
        let how = match (c.asynchronous, c.overlapped) {
            (false, _) => "sync",
            (true, false) => "async, alone",
            (true, true) => "async",
        };
        let rule = e.cause.map(|p| p.rules.join("; ")).unwrap_or_default();
        rows.push(vec![
            format!("{:?}", c.level).to_lowercase(),
            format!("{}", c.times * e.count as f64),
            c.kind.name().into(),
            format!("{:.3}", c.bytes / MB),
            format!("{:.3}", c.wire_bytes / MB),
            c.dtype.clone(),
            c.axes.join(","),
            how.into(),
            c.scope.clone(),
            e.cause.map(|p| p.tensor.clone()).unwrap_or_default(),
            rule,
        ]);
    }
    if rows.len() == 1 {
        return "no collectives\n".into();
    }
    format!("\n{}", columns(&rows, 0..0))
}
