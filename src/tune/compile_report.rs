//! What the laboratory reads of `compile --json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A compiled program's figures, on one device.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct CompileReport {
    /// Devices it was compiled for.
    pub target: String,
    /// Its hash.
    pub hash: String,
    /// The layout's name or path.
    pub layout: String,
    /// Sizes of the mesh.
    pub mesh: BTreeMap<String, usize>,
    /// Blocks that were compiled.
    pub layers: usize,
    /// Bytes.
    pub memory: Memory,
    /// Bytes of arguments and results with all blocks.
    pub needed: Needed,
    /// Of a step.
    pub flops: f64,
    /// Of a step.
    pub bytes_accessed: f64,
    /// Of one block.
    #[serde(default)]
    pub per_layer: Block,
    /// The chip's figures, where they are known.
    pub chip: Option<Chip>,
    /// Exchanges.
    pub collectives: Collectives,
    /// Time of a step, where the chip is known.
    pub predicted_ms: Option<Predicted>,
    /// The same with all blocks.
    #[serde(default)]
    pub predicted_all_ms: Option<Predicted>,
    /// Where every tensor lies.
    pub tensors: Vec<TensorPlacement>,
    /// What the layout could not split.
    pub notes: Vec<String>,
    /// Seconds the compiler took.
    pub compile_seconds: f64,
    /// Why it does not fit; the figures are then of fewer blocks.
    pub does_not_fit: Option<Value>,
}

/// Work of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct Block {
    /// Operations of products.
    pub flops: f64,
    /// Bytes of memory.
    pub bytes_accessed: f64,
}

/// Bytes on a device.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Memory {
    /// Arguments.
    pub arguments: i64,
    /// Results.
    pub outputs: i64,
    /// Everything between.
    pub temporaries: i64,
    /// What a run needs at once.
    pub total: i64,
    /// What the device has.
    pub capacity: Option<i64>,
}

/// Arguments and results of the program with all blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Needed {
    /// All blocks.
    pub layers: usize,
    /// Bytes a device.
    pub bytes: i64,
}

/// What a chip can do.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Chip {
    /// As targets name it.
    pub name: String,
    /// Floating-point operations a second.
    pub peak: f64,
    /// Bytes a second.
    pub bandwidth: f64,
}

/// Exchanges of a program.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Collectives {
    /// Output bytes of one block.
    pub per_layer_bytes: f64,
    /// Received bytes of one block.
    pub per_layer_wire_bytes: f64,
    /// Output bytes of one step.
    pub per_step_bytes: f64,
    /// Received bytes of one step.
    pub per_step_wire_bytes: f64,
    /// Each kind, place and size.
    pub list: Vec<CollectiveEntry>,
}

/// Equal collectives.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct CollectiveEntry {
    /// XLA's name.
    pub kind: String,
    /// Place in the model.
    pub scope: String,
    /// The tensor it serves.
    pub tensor: Option<String>,
    /// The lines of the layout that split it.
    pub rule: Option<Vec<String>>,
    /// parameter, stored or activation.
    pub role: Option<String>,
    /// Why it is there.
    pub reason: String,
    /// How many of them.
    pub count: f64,
    /// Runs of one in a step.
    pub trip_count: f64,
    /// layer, step or call.
    pub per: String,
    /// Output bytes of a run.
    pub bytes: f64,
    /// Received bytes of a run.
    pub wire_bytes: f64,
    /// Mesh axes.
    pub axes: Vec<String>,
    /// Element types.
    pub dtype: String,
    /// Whether other work runs meanwhile.
    pub overlapped: bool,
    /// Predicted milliseconds of a run.
    pub ms: Option<f64>,
}

impl CollectiveEntry {
    /// Runs in a step.
    pub fn runs(&self) -> f64 {
        self.count * self.trip_count
    }

    /// Whether it is attention's own, of a sequence that is split.
    pub fn is_attention(&self) -> bool {
        self.scope.split('/').any(|s| s == "sdpa")
    }

    /// Output bytes in a step.
    pub fn step_bytes(&self) -> f64 {
        self.runs() * self.bytes
    }

    /// Milliseconds in a step, were nothing beside it; where the chip is unknown, received bytes stand for them.
    pub fn step_cost(&self) -> f64 {
        self.runs() * self.ms.unwrap_or(self.wire_bytes)
    }
}

/// Milliseconds of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    /// Products alone.
    pub compute: f64,
    /// Memory alone.
    pub memory: f64,
    /// Starts of kernels alone.
    #[serde(default)]
    pub launch: f64,
    /// Links alone.
    pub collective: f64,
    /// All together.
    pub step: f64,
}

/// Where a tensor lies.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TensorPlacement {
    /// Its name.
    pub tensor: String,
    /// Place of its first use.
    pub scope: String,
    /// parameter, stored or activation.
    pub role: String,
    /// Element type.
    pub dtype: String,
    /// Sizes.
    pub dims: Vec<usize>,
    /// What each dimension is.
    pub axes: Vec<String>,
    /// Mesh axes of each dimension.
    pub sharding: Vec<Vec<String>>,
    /// Bytes on a device.
    pub bytes: f64,
    /// The lines of the layout that split it.
    pub rules: Vec<String>,
}

impl TensorPlacement {
    /// `[8{context}, 32, 64]`: sizes with the mesh axes that split them.
    pub fn text(&self) -> String {
        let dims = self.dims.iter().zip(&self.sharding).map(|(size, axes)| match axes.is_empty() {
            true => size.to_string(),
            false => format!("{size}{{{}}}", axes.join(",")),
        });
        format!("{}[{}]", self.dtype, dims.collect::<Vec<_>>().join(", "))
    }
}

impl CompileReport {
    /// Of the JSON that `compile` printed.
    pub fn of(json: &Value) -> Option<CompileReport> {
        CompileReport::deserialize(json).ok()
    }

    /// Predicted milliseconds of a step with all blocks.
    pub fn all_blocks(&self) -> Option<Predicted> {
        self.predicted_all_ms.or(self.predicted_ms)
    }

    /// Operations of products, and bytes of memory, of a step with all blocks.
    pub fn work(&self) -> (f64, f64) {
        let more = self.needed.layers as f64 - self.layers as f64;
        (self.flops + more * self.per_layer.flops, self.bytes_accessed + more * self.per_layer.bytes_accessed)
    }

    /// What changes are weighed by: predicted milliseconds of a step of the blocks that were compiled; where the chip is unknown, bytes received in one.
    pub fn cost(&self) -> f64 {
        self.predicted_ms.map_or(self.collectives.per_step_wire_bytes, |p| p.step)
    }

    /// What layouts are ranked by: predicted milliseconds of a step with all blocks; where the chip is unknown, bytes
    /// received in one.
    pub fn whole_cost(&self) -> f64 {
        let more = self.needed.layers as f64 - self.layers as f64;
        let c = &self.collectives;
        self.all_blocks().map_or(c.per_step_wire_bytes + more * c.per_layer_wire_bytes, |p| p.step)
    }

    /// Whether the program with all blocks has room: its arguments and results, and the temporaries of this one.
    pub fn fits(&self) -> bool {
        let all = self.needed.bytes + self.memory.temporaries;
        self.does_not_fit.is_none() && self.memory.capacity.is_none_or(|capacity| all <= capacity)
    }
}
