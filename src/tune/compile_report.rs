//! Compile report: the JSON of `compile --json`, as far as tuning reads it.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::analysis::Predicted;
use crate::pipeline::compile::Memory;

pub(super) const GIB: f64 = 1073741824.0;

/// Report of a compiled program, per device.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct CompileReport {
    pub(crate) target: String,
    pub(crate) hash: String,
    pub(crate) layout: String,
    pub(crate) mesh: BTreeMap<String, usize>,
    /// Number of transformer blocks compiled.
    pub(crate) layers: usize,
    pub(crate) memory: Memory,
    /// Arguments and results with all blocks.
    pub(crate) needed: Needed,
    /// Floating-point operations per step.
    pub flops: f64,
    /// Bytes of device memory accessed per step.
    pub(crate) bytes_accessed: f64,
    #[serde(default)]
    pub(crate) per_layer: Block,
    pub(crate) chip: Option<ChipRates>,
    pub(crate) collectives: Collectives,
    /// Predicted milliseconds of a step of the compiled blocks, where the chip is known.
    pub(crate) predicted_ms: Option<Predicted>,
    /// Predicted milliseconds of a step with all blocks.
    #[serde(default)]
    pub(crate) predicted_all_ms: Option<Predicted>,
    pub(crate) tensors: Vec<TensorPlacement>,
    /// Notes on what the layout could not shard.
    pub(crate) notes: Vec<String>,
    pub(crate) compile_seconds: f64,
    /// Shortage of a program that does not fit; the report is then of fewer blocks.
    pub(crate) does_not_fit: Option<Value>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Block {
    pub flops: f64,
    pub(crate) bytes_accessed: f64,
}

/// Size of arguments and results with all blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Needed {
    pub(crate) layers: usize,
    pub(crate) bytes: i64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct ChipRates {
    pub(crate) name: String,
    pub(crate) peak: f64,
    pub(crate) bandwidth: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Collectives {
    pub(crate) per_layer_bytes: f64,
    pub(crate) per_layer_wire_bytes: f64,
    pub(crate) per_step_bytes: f64,
    pub(crate) per_step_wire_bytes: f64,
    /// Collectives, equal ones as one entry.
    pub(crate) list: Vec<CollectiveEntry>,
}

/// Equal collectives, counted.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct CollectiveEntry {
    /// XLA's name of the operation, e.g. `all-gather`.
    pub(crate) kind: String,
    pub(crate) scope: String,
    /// Tensor that is moved, where known.
    pub(crate) tensor: Option<String>,
    /// Layout rules that shard the tensor.
    pub(crate) rule: Option<Vec<String>>,
    /// `parameter`, `stored` or `activation`.
    pub(crate) role: Option<String>,
    pub(crate) reason: String,
    pub(crate) count: f64,
    /// Runs of each per step.
    pub(crate) trip_count: f64,
    /// Loop level: `layer`, `step` or `call`.
    pub(crate) per: String,
    /// Output bytes per run.
    pub(crate) bytes: f64,
    /// Received bytes per run.
    pub(crate) wire_bytes: f64,
    pub(crate) axes: Vec<String>,
    pub(crate) dtype: String,
    /// Whether it overlaps with compute.
    pub(crate) overlapped: bool,
    /// Predicted milliseconds per run.
    pub(crate) ms: Option<f64>,
}

impl CollectiveEntry {
    pub(crate) fn runs(&self) -> f64 {
        self.count * self.trip_count
    }

    /// Whether it belongs to context-parallel attention.
    pub(crate) fn is_attention(&self) -> bool {
        self.scope.split('/').any(|s| s == "sdpa")
    }

    pub(crate) fn step_bytes(&self) -> f64 {
        self.runs() * self.bytes
    }

    /// Milliseconds of all per step without overlap; received bytes where the chip is unknown.
    pub(crate) fn step_cost(&self) -> f64 {
        self.runs() * self.ms.unwrap_or(self.wire_bytes)
    }
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct TensorPlacement {
    pub(crate) tensor: String,
    /// Name scope of its first use.
    pub(crate) scope: String,
    /// `parameter`, `stored` or `activation`.
    pub(crate) role: String,
    pub(crate) dtype: String,
    pub(crate) dims: Vec<usize>,
    /// Logical axis of each dimension.
    pub(crate) axes: Vec<String>,
    /// Mesh axes of each dimension.
    pub(crate) sharding: Vec<Vec<String>>,
    pub(crate) bytes: f64,
    /// Layout rules that shard the tensor.
    pub(crate) rules: Vec<String>,
}

impl TensorPlacement {
    /// Type with the mesh axes of sharded dimensions, e.g. `bf16[8{context}, 32, 64]`.
    pub(crate) fn text(&self) -> String {
        let dims = self.dims.iter().zip(&self.sharding).map(|(size, axes)| match axes.is_empty() {
            true => size.to_string(),
            false => format!("{size}{{{}}}", axes.join(",")),
        });
        format!("{}[{}]", self.dtype, dims.collect::<Vec<_>>().join(", "))
    }
}

impl CompileReport {
    /// Reads the JSON of `compile`; none for another form.
    pub(crate) fn of(json: &Value) -> Option<CompileReport> {
        CompileReport::deserialize(json).ok()
    }

    /// Predicted milliseconds of a step with all blocks.
    pub(crate) fn all_blocks(&self) -> Option<Predicted> {
        self.predicted_all_ms.or(self.predicted_ms)
    }

    /// Floating-point operations, and bytes of device memory, per step with all blocks.
    pub(crate) fn work(&self) -> (f64, f64) {
        let more = self.needed.layers as f64 - self.layers as f64;
        (self.flops + more * self.per_layer.flops, self.bytes_accessed + more * self.per_layer.bytes_accessed)
    }

    /// Cost of a step of the compiled blocks: predicted milliseconds; received bytes where the chip is unknown.
    pub(crate) fn cost(&self) -> f64 {
        self.predicted_ms.map_or(self.collectives.per_step_wire_bytes, |p| p.step)
    }

    /// Cost of a step with all blocks: predicted milliseconds; received bytes where the chip is unknown.
    pub(crate) fn whole_cost(&self) -> f64 {
        let more = self.needed.layers as f64 - self.layers as f64;
        let c = &self.collectives;
        self.all_blocks().map_or(c.per_step_wire_bytes + more * c.per_layer_wire_bytes, |p| p.step)
    }

    /// Bytes per device: arguments and results with all blocks, and temporaries of the compiled ones.
    pub(crate) fn device_bytes(&self) -> i64 {
        self.needed.bytes + self.memory.temporaries
    }

    /// Whether the program with all blocks fits into device memory.
    pub(crate) fn fits(&self) -> bool {
        self.fits_beside(0)
    }

    /// The same beside so many bytes of other programs' parameters.
    pub(crate) fn fits_beside(&self, bytes: i64) -> bool {
        let needed = self.device_bytes() + bytes;
        self.does_not_fit.is_none() && self.memory.capacity.is_none_or(|capacity| needed <= capacity)
    }
}
