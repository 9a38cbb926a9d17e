//! JSON of a compiled program, as `compile --json` writes it and [`super::compile_report::CompileReport`] reads it.

use serde_json::{Value, json};

use super::cause::cause;
use super::reason::reason;
use crate::analysis::Collective;
use crate::nn::Placement;
use crate::pipeline::compile::Compilation;
use crate::runtime::Target;

/// Equal collectives, counted.
pub(crate) struct Entry<'a> {
    pub(crate) collective: &'a Collective,
    /// Placement of the tensor that is moved, where known.
    pub(crate) cause: Option<&'a Placement>,
    pub(crate) count: usize,
}

/// Collectives of a program, equal ones as one entry.
pub(crate) fn entries(done: &Compilation) -> Vec<Entry<'_>> {
    let mut all: Vec<Entry> = Vec::new();
    for c in &done.report.collectives {
        match all.iter_mut().find(|e| e.collective == c) {
            Some(known) => known.count += 1,
            None => {
                let cause = cause(c, &done.placements, &done.mesh, done.layers);
                all.push(Entry { collective: c, cause, count: 1 });
            }
        }
    }
    all
}

/// Report in the field names of `--json`.
pub(crate) fn json(done: &Compilation, target: &Target) -> Value {
    let r = &done.report;
    let list: Vec<Value> = entries(done)
        .iter()
        .map(|e| {
            let c = e.collective;
            json!({
                "kind": c.kind,
                "scope": c.scope,
                "tensor": e.cause.map(|p| &p.tensor),
                "rule": e.cause.map(|p| &p.rules),
                "count": e.count,
                "trip_count": r.trips(c),
                "per": c.level,
                "bytes": c.bytes,
                "wire_bytes": c.wire_bytes,
                "axes": c.axes,
                "dtype": c.dtype,
                "async": c.asynchronous,
                "overlapped": c.overlapped,
                "ms": done.report.predicted.map(|_| c.seconds * 1e3),
                "role": e.cause.map(|p| p.role),
                "reason": reason(c, e.cause, &done.placements, &done.notes).to_string(),
            })
        })
        .collect();
    let (layer, step) = (r.per_layer(), r.per_step());
    let mesh: serde_json::Map<String, Value> = done.mesh.axes.iter().map(|(a, n)| (a.clone(), json!(n))).collect();
    let chip = target.chip().map(|c| json!({"name": c.name, "peak": c.peak_bf16, "bandwidth": c.bandwidth}));
    json!({
        "target": target.to_string(),
        "chip": chip,
        "program": done.kind.name(),
        "hash": done.hash,
        "model": done.model,
        "devices": done.mesh.devices(),
        "layout": done.layout,
        "mesh": mesh,
        "layers": done.layers,
        "memory": done.memory,
        "needed": {"layers": done.whole.1, "bytes": done.whole.0},
        "flops": r.step.flops,
        "bytes_accessed": r.step.bytes,
        "per_layer": {"flops": r.layer.flops, "bytes_accessed": r.layer.bytes},
        "collectives": {
            "per_layer_bytes": layer.bytes,
            "per_layer_wire_bytes": layer.wire_bytes,
            "per_layer_overlapped_bytes": layer.overlapped,
            "per_layer_count": layer.count,
            "per_step_bytes": step.bytes,
            "per_step_wire_bytes": step.wire_bytes,
            "list": list,
        },
        "tensors": done.placements.iter().map(|p| tensor(p, done)).collect::<Vec<_>>(),
        "stack_copies": r.stack_copies,
        "predicted_ms": r.predicted,
        "predicted_all_ms": done.predicted_all(),
        "notes": done.notes,
        "compile_seconds": done.seconds,
        "saved": done.saved,
        "does_not_fit": done.shortage,
    })
}

/// Placement of a tensor, with its bytes per device.
fn tensor(p: &Placement, done: &Compilation) -> Value {
    let parts: usize = p.sharding.0.iter().flatten().filter_map(|a| done.mesh.size(a)).product();
    json!({
        "tensor": p.tensor,
        "scope": p.scope,
        "role": p.role,
        "dtype": p.ty.dtype.name(),
        "dims": p.ty.dims,
        "axes": p.axes,
        "sharding": p.sharding.0,
        "bytes": p.ty.bytes() / parts.max(1),
        "rules": p.rules,
    })
}
