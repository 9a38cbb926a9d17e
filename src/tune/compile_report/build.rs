//! Creates the compile report of a compilation.

use super::{Block, ChipRates, CollectiveEntry, Collectives, CompileReport, Needed, TensorPlacement, VERSION};
use crate::nn::{Axis, ValuePlacement};
use crate::pipeline::programs::compile::Compilation;
use crate::runtime::Target;
use crate::tune::cause::cause;
use crate::tune::reason::reason;

impl CompileReport {
    pub(crate) fn from_compilation(done: Compilation, target: &Target) -> CompileReport {
        let r = &done.report;
        let (layer, step) = (r.per_layer(), r.per_step());
        CompileReport {
            version: VERSION,
            target: target.to_string(),
            chip: target.chip().map(|c| ChipRates { name: c.name, peak: c.peak_bf16, bandwidth: c.bandwidth }),
            program: done.kind.name().into(),
            devices: done.mesh.devices(),
            mesh: done.mesh.axes.iter().cloned().collect(),
            layers: done.layers,
            memory: done.memory,
            needed: Needed { layers: done.whole.1, bytes: done.whole.0 },
            flops: r.step.flops,
            bytes_accessed: r.step.bytes,
            host_bytes: r.step.host,
            per_layer: Block { flops: r.layer.flops, bytes_accessed: r.layer.bytes, host_bytes: r.layer.host },
            collectives: Collectives {
                per_layer_bytes: layer.bytes,
                per_layer_wire_bytes: layer.wire_bytes,
                per_layer_overlapped_bytes: layer.overlapped,
                per_layer_count: layer.count,
                per_step_bytes: step.bytes,
                per_step_wire_bytes: step.wire_bytes,
                list: list(&done),
            },
            tensors: done.placements.iter().map(|p| placement(p, &done)).collect(),
            predicted_ms: r.predicted,
            predicted_all_ms: done.predicted_all(),
            compile_seconds: done.seconds,
            hash: done.hash,
            model: done.model,
            layout: done.layout,
            stack_copies: done.report.stack_copies,
            scopes: done.report.scopes,
            notes: done.notes,
            saved: done.saved,
            does_not_fit: done.shortage,
        }
    }
}

/// Lists the collectives of a program; equal collectives share an entry.
fn list(done: &Compilation) -> Vec<CollectiveEntry> {
    let mut all: Vec<(_, CollectiveEntry)> = Vec::new();
    for c in &done.report.collectives {
        if let Some((_, known)) = all.iter_mut().find(|(other, _)| *other == c) {
            known.count += 1;
            continue;
        }
        let cause = cause(c, &done.placements, &done.mesh, done.layers);
        let entry = CollectiveEntry {
            kind: c.kind,
            scope: c.scope.clone(),
            tensor: cause.map(|p| p.tensor.clone()),
            rule: cause.map(|p| p.rules.clone()),
            count: 1,
            trip_count: done.report.trips(c),
            per: c.level,
            bytes: c.bytes,
            wire_bytes: c.wire_bytes,
            axes: c.axes.clone(),
            dtype: c.dtype.clone(),
            asynchronous: c.asynchronous,
            overlapped: c.overlapped,
            ms: done.report.predicted.map(|_| c.seconds * 1e3),
            role: cause.map(|p| p.role),
            reason: reason(c, cause, &done.placements, &done.notes).to_string(),
        };
        all.push((c, entry));
    }
    all.into_iter().map(|(_, entry)| entry).collect()
}

/// Describes the placement of a tensor, with its bytes per device.
fn placement(p: &ValuePlacement, done: &Compilation) -> TensorPlacement {
    let parts: usize = p.sharding.0.iter().flatten().filter_map(|a| done.mesh.size(a)).product();
    TensorPlacement {
        tensor: p.tensor.clone(),
        scope: p.scope.clone(),
        role: p.role,
        dtype: p.ty.dtype.name().into(),
        dims: p.ty.dims.clone(),
        axes: p.axes.iter().copied().map(Axis::name).collect(),
        sharding: p.sharding.0.clone(),
        bytes: p.ty.bytes() / parts.max(1),
        rules: p.rules.clone(),
    }
}
