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
    pub target: String,
    pub hash: String,
    pub layout: String,
    pub mesh: BTreeMap<String, usize>,
    /// Number of transformer blocks compiled.
    pub layers: usize,
    pub memory: Memory,
    /// Arguments and results with all blocks.
    pub needed: Needed,
    /// Floating-point operations per step.
    pub flops: f64,
    /// Bytes of device memory accessed per step.
    pub bytes_accessed: f64,
    #[serde(default)]
    pub per_layer: Block,
    pub chip: Option<ChipRates>,
    pub collectives: Collectives,
    /// Predicted milliseconds of a step of the compiled blocks, where the chip is known.
    pub predicted_ms: Option<Predicted>,
    /// Predicted milliseconds of a step with all blocks.
    #[serde(default)]
    pub predicted_all_ms: Option<Predicted>,
    pub tensors: Vec<TensorPlacement>,
    /// Notes on what the layout could not shard.
    pub notes: Vec<String>,
    pub compile_seconds: f64,
    /// Shortage of a program that does not fit; the report is then of fewer blocks.
    pub does_not_fit: Option<Value>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct Block {
    pub flops: f64,
    pub bytes_accessed: f64,
}

/// Size of arguments and results with all blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Needed {
    pub layers: usize,
    pub bytes: i64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ChipRates {
    pub name: String,
    pub peak: f64,
    pub bandwidth: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Collectives {
    pub per_layer_bytes: f64,
    pub per_layer_wire_bytes: f64,
    pub per_step_bytes: f64,
    pub per_step_wire_bytes: f64,
    /// Collectives, equal ones as one entry.
    pub list: Vec<CollectiveEntry>,
}

/// Equal collectives, counted.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct CollectiveEntry {
    /// XLA's name of the operation, e.g. `all-gather`.
    pub kind: String,
    pub scope: String,
    /// Tensor that is moved, where known.
    pub tensor: Option<String>,
    /// Layout rules that shard the tensor.
    pub rule: Option<Vec<String>>,
    /// `parameter`, `stored` or `activation`.
    pub role: Option<String>,
    pub reason: String,
    pub count: f64,
    /// Runs of each per step.
    pub trip_count: f64,
    /// Loop level: `layer`, `step` or `call`.
    pub per: String,
    /// Output bytes per run.
    pub bytes: f64,
    /// Received bytes per run.
    pub wire_bytes: f64,
    pub axes: Vec<String>,
    pub dtype: String,
    /// Whether it overlaps with compute.
    pub overlapped: bool,
    /// Predicted milliseconds per run.
    pub ms: Option<f64>,
}

impl CollectiveEntry {
    pub fn runs(&self) -> f64 {
        self.count * self.trip_count
    }

    /// Whether it belongs to context-parallel attention.
    pub fn is_attention(&self) -> bool {
        self.scope.split('/').any(|s| s == "sdpa")
    }

    pub fn step_bytes(&self) -> f64 {
        self.runs() * self.bytes
    }

    /// Milliseconds of all per step without overlap; received bytes where the chip is unknown.
    pub fn step_cost(&self) -> f64 {
        self.runs() * self.ms.unwrap_or(self.wire_bytes)
    }
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TensorPlacement {
    pub tensor: String,
    /// Name scope of its first use.
    pub scope: String,
    /// `parameter`, `stored` or `activation`.
    pub role: String,
    pub dtype: String,
    pub dims: Vec<usize>,
    /// Logical axis of each dimension.
    pub axes: Vec<String>,
    /// Mesh axes of each dimension.
    pub sharding: Vec<Vec<String>>,
    pub bytes: f64,
    /// Layout rules that shard the tensor.
    pub rules: Vec<String>,
}

impl TensorPlacement {
    /// Type with the mesh axes of sharded dimensions, e.g. `bf16[8{context}, 32, 64]`.
    pub fn text(&self) -> String {
        let dims = self.dims.iter().zip(&self.sharding).map(|(size, axes)| match axes.is_empty() {
            true => size.to_string(),
            false => format!("{size}{{{}}}", axes.join(",")),
        });
        format!("{}[{}]", self.dtype, dims.collect::<Vec<_>>().join(", "))
    }
}

impl CompileReport {
    /// Reads the JSON of `compile`; none for another form.
    pub fn of(json: &Value) -> Option<CompileReport> {
        CompileReport::deserialize(json).ok()
    }

    /// Predicted milliseconds of a step with all blocks.
    pub fn all_blocks(&self) -> Option<Predicted> {
        self.predicted_all_ms.or(self.predicted_ms)
    }

    /// Floating-point operations, and bytes of device memory, per step with all blocks.
    pub fn work(&self) -> (f64, f64) {
        let more = self.needed.layers as f64 - self.layers as f64;
        (self.flops + more * self.per_layer.flops, self.bytes_accessed + more * self.per_layer.bytes_accessed)
    }

    /// Cost of a step of the compiled blocks: predicted milliseconds; received bytes where the chip is unknown.
    pub fn cost(&self) -> f64 {
        self.predicted_ms.map_or(self.collectives.per_step_wire_bytes, |p| p.step)
    }

    /// Cost of a step with all blocks: predicted milliseconds; received bytes where the chip is unknown.
    pub fn whole_cost(&self) -> f64 {
        let more = self.needed.layers as f64 - self.layers as f64;
        let c = &self.collectives;
        self.all_blocks().map_or(c.per_step_wire_bytes + more * c.per_layer_wire_bytes, |p| p.step)
    }

    /// Bytes per device: arguments and results with all blocks, and temporaries of the compiled ones.
    pub fn device_bytes(&self) -> i64 {
        self.needed.bytes + self.memory.temporaries
    }

    /// Whether the program with all blocks fits into device memory.
    pub fn fits(&self) -> bool {
        self.does_not_fit.is_none() && self.memory.capacity.is_none_or(|capacity| self.device_bytes() <= capacity)
    }
}
