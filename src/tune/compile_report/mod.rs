//! The compile report: figures of a compiled program, written by `compile --json` and read by tuning, reports and
//! scripts. The report's keys are declared only here; `ltx2 schema --of compile` prints its JSON Schema.

mod build;

use std::sync::OnceLock;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::analysis::{CollectiveKind, LoopLevel, Predicted, ScopePrediction, StackCopy};
use crate::nn::Role;
use crate::pipeline::programs::compile::{Memory, Saved, Shortage};

pub(crate) const GIB: f64 = 1073741824.0;

/// Version of the report format; incremented when a key is renamed, removed or changes its meaning.
const VERSION: u32 = 1;

/// Report on a compiled program. Figures are per device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CompileReport {
    /// Version of the report format.
    pub(crate) version: u32,
    /// Devices that the program is compiled for.
    pub(crate) target: String,
    /// Chip for which times are predicted; null if unknown.
    pub(crate) chip: Option<ChipRates>,
    pub(crate) program: String,
    /// Hash of the program. A run of the same configuration on the same devices executes this program.
    pub(crate) hash: String,
    /// Folder or preset of the model.
    pub(crate) model: String,
    pub(crate) devices: usize,
    pub(crate) layout: String,
    /// Size of each mesh axis, outermost axis first.
    pub(crate) mesh: IndexMap<String, usize>,
    /// Number of transformer blocks that were compiled.
    pub(crate) layers: usize,
    pub(crate) memory: Memory,
    /// Bytes of arguments and results per device with all blocks of the model, not only the compiled ones.
    pub(crate) needed: Needed,
    /// Floating-point operations per step.
    pub flops: f64,
    /// Bytes read from and written to device memory per step.
    pub(crate) bytes_accessed: f64,
    /// Bytes copied between host memory and the device per step.
    #[serde(default)]
    pub(crate) host_bytes: f64,
    /// Floating-point operations and memory traffic of one transformer block.
    pub(crate) per_layer: Block,
    pub(crate) collectives: Collectives,
    pub(crate) tensors: Vec<TensorPlacement>,
    /// Operations that copy all layers of stacked weights.
    pub(crate) stack_copies: Vec<StackCopy>,
    /// Predicted milliseconds per step with only the compiled blocks; null if the chip is unknown.
    pub(crate) predicted_ms: Option<Predicted>,
    /// Predicted milliseconds per step with all blocks of the model; null if the chip is unknown.
    pub(crate) predicted_all_ms: Option<Predicted>,
    /// Predicted milliseconds per step by name scope and category, with only the compiled blocks and without overlap;
    /// empty if the chip is unknown.
    pub(crate) scopes: Vec<ScopePrediction>,
    /// Notes about tensors that the layout could not shard.
    pub(crate) notes: Vec<String>,
    pub(crate) compile_seconds: f64,
    /// Compile-cache entry written by `--save`.
    pub(crate) saved: Option<Saved>,
    /// Missing memory if the program does not fit into device memory; the report then covers fewer blocks.
    pub(crate) does_not_fit: Option<Shortage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Block {
    pub(crate) flops: f64,
    pub(crate) bytes_accessed: f64,
    /// Bytes copied between host memory and the device.
    #[serde(default)]
    pub(crate) host_bytes: f64,
}

/// Bytes of arguments and results per device with all blocks of the model, not only the compiled ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Needed {
    /// Number of transformer blocks of the model.
    pub(crate) layers: usize,
    pub(crate) bytes: i64,
}

/// Name of a chip, its peak FLOP/s in bf16 and its memory bandwidth in bytes per second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct ChipRates {
    pub(crate) name: String,
    pub(crate) peak: f64,
    pub(crate) bandwidth: f64,
}

/// Collectives of a program and their totals. `bytes` is the size of the output; `wire_bytes` is the number of bytes
/// that a device receives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Collectives {
    pub(crate) per_layer_bytes: f64,
    pub(crate) per_layer_wire_bytes: f64,
    pub(crate) per_layer_overlapped_bytes: f64,
    pub(crate) per_layer_count: f64,
    pub(crate) per_step_bytes: f64,
    pub(crate) per_step_wire_bytes: f64,
    /// All collectives; equal ones share an entry.
    pub(crate) list: Vec<CollectiveEntry>,
}

/// Equal collectives of the program, with their number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct CollectiveEntry {
    /// XLA opcode, e.g. `all-gather`.
    pub(crate) kind: CollectiveKind,
    pub(crate) scope: String,
    /// Tensor that the collective moves; null if unknown.
    pub(crate) tensor: Option<String>,
    /// Layout rules that shard the tensor.
    pub(crate) rule: Option<Vec<String>>,
    pub(crate) count: usize,
    /// Number of times that each collective runs per step.
    pub(crate) trip_count: f64,
    /// Loop that contains the collective.
    pub(crate) per: LoopLevel,
    /// Size of the output in bytes, per run.
    pub(crate) bytes: f64,
    /// Bytes that a device receives per run.
    pub(crate) wire_bytes: f64,
    /// Mesh axes along which the collective communicates.
    pub(crate) axes: Vec<String>,
    pub(crate) dtype: String,
    /// Whether the collective is asynchronous: a start and a done operation.
    #[serde(rename = "async")]
    pub(crate) asynchronous: bool,
    /// Whether the collective overlaps with compute.
    pub(crate) overlapped: bool,
    /// Predicted milliseconds per run.
    pub(crate) ms: Option<f64>,
    /// Role of the tensor.
    pub(crate) role: Option<Role>,
    pub(crate) reason: String,
}

impl CollectiveEntry {
    pub(crate) fn runs(&self) -> f64 {
        self.count as f64 * self.trip_count
    }

    /// Returns whether the collective belongs to context-parallel attention.
    pub(crate) fn is_attention(&self) -> bool {
        self.scope.split('/').any(|s| s == "sdpa")
    }

    pub(crate) fn step_bytes(&self) -> f64 {
        self.runs() * self.bytes
    }

    /// Returns the milliseconds per step of all runs without overlap; received bytes if the chip is unknown.
    pub(crate) fn step_cost(&self) -> f64 {
        self.runs() * self.ms.unwrap_or(self.wire_bytes)
    }
}

/// Sharding of a tensor of the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct TensorPlacement {
    pub(crate) tensor: String,
    /// Name scope of the operation that uses the tensor first.
    pub(crate) scope: String,
    pub(crate) role: Role,
    pub(crate) dtype: String,
    pub(crate) dims: Vec<usize>,
    /// Logical axis of each dimension.
    pub(crate) axes: Vec<String>,
    /// Mesh axes that shard each dimension.
    pub(crate) sharding: Vec<Vec<String>>,
    /// Bytes per device.
    pub(crate) bytes: usize,
    /// Layout rules that shard the tensor.
    pub(crate) rules: Vec<String>,
}

impl TensorPlacement {
    /// Formats the type with the mesh axes of sharded dimensions, e.g. `bf16[8{context}, 32, 64]`.
    pub(crate) fn text(&self) -> String {
        let dims = self.dims.iter().zip(&self.sharding).map(|(size, axes)| match axes.is_empty() {
            true => size.to_string(),
            false => format!("{size}{{{}}}", axes.join(",")),
        });
        format!("{}[{}]", self.dtype, dims.collect::<Vec<_>>().join(", "))
    }
}

/// Returns the JSON name of an enum variant.
pub(crate) fn name(variant: impl Serialize) -> String {
    let value = serde_json::to_value(variant).expect("a variant serializes to JSON");
    value.as_str().map(String::from).unwrap_or_default()
}

/// Unit of a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CostUnit {
    /// Predicted milliseconds.
    Milliseconds,
    /// Bytes that a device receives, which replace the time if the chip is unknown.
    ReceivedBytes,
}

impl CostUnit {
    /// Formats a cost with its unit.
    pub(crate) fn text(self, cost: f64) -> String {
        match self {
            CostUnit::Milliseconds => format!("{cost:.2} ms"),
            CostUnit::ReceivedBytes => format!("{:.3} MB received", cost / 1e6),
        }
    }
}

/// Returns the JSON Schema of [`CompileReport`].
pub fn report_schema() -> &'static Value {
    static SCHEMA: OnceLock<Value> = OnceLock::new();
    SCHEMA.get_or_init(|| schemars::schema_for!(CompileReport).to_value())
}

impl CompileReport {
    /// Returns the predicted milliseconds per step with all blocks.
    pub(crate) fn all_blocks(&self) -> Option<Predicted> {
        self.predicted_all_ms.or(self.predicted_ms)
    }

    /// Returns the floating-point operations and the bytes of device memory accessed, both per step with all blocks.
    pub(crate) fn work(&self) -> (f64, f64) {
        let more = self.needed.layers as f64 - self.layers as f64;
        (self.flops + more * self.per_layer.flops, self.bytes_accessed + more * self.per_layer.bytes_accessed)
    }

    /// Returns the bytes copied between host memory and the device per step with all blocks.
    pub(crate) fn host_bytes(&self) -> f64 {
        self.host_bytes + (self.needed.layers as f64 - self.layers as f64) * self.per_layer.host_bytes
    }

    /// Returns the unit of [`Self::whole_cost`].
    pub(crate) fn cost_unit(&self) -> CostUnit {
        if self.predicted_ms.is_some() { CostUnit::Milliseconds } else { CostUnit::ReceivedBytes }
    }

    /// Returns the cost of a step with all blocks: predicted milliseconds, or received bytes if the chip is unknown.
    pub(crate) fn whole_cost(&self) -> f64 {
        let more = self.needed.layers as f64 - self.layers as f64;
        let c = &self.collectives;
        self.all_blocks().map_or(c.per_step_wire_bytes + more * c.per_layer_wire_bytes, |p| p.step)
    }

    /// Returns the bytes that the program needs per device: arguments and results with all blocks, and temporaries of
    /// the compiled blocks.
    pub(crate) fn device_bytes(&self) -> i64 {
        self.needed.bytes + self.memory.temporaries
    }

    /// Returns whether the program with all blocks fits into device memory.
    pub(crate) fn fits(&self) -> bool {
        let needed = self.device_bytes();
        self.does_not_fit.is_none() && self.memory.capacity.is_none_or(|capacity| needed <= capacity)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the report on a program of one block on two devices, without collectives and tensors.
    pub(crate) fn report(target: &str) -> CompileReport {
        CompileReport {
            version: VERSION,
            target: target.into(),
            chip: None,
            program: "denoise".into(),
            hash: "h".into(),
            model: "m".into(),
            devices: 2,
            layout: "l".into(),
            mesh: [("context".to_string(), 2)].into(),
            layers: 1,
            memory: Memory {
                arguments: 1,
                host_arguments: 0,
                outputs: 1,
                temporaries: 1,
                generated_code: 0,
                aliased: 0,
                total: 3,
                capacity: Some(100),
            },
            needed: Needed { layers: 1, bytes: 2 },
            flops: 1e12,
            bytes_accessed: 1e9,
            host_bytes: 0.0,
            per_layer: Block { flops: 1e12, bytes_accessed: 1e9, host_bytes: 0.0 },
            collectives: Collectives {
                per_layer_bytes: 1.0,
                per_layer_wire_bytes: 1.0,
                per_layer_overlapped_bytes: 0.0,
                per_layer_count: 1.0,
                per_step_bytes: 1.0,
                per_step_wire_bytes: 1.0,
                list: Vec::new(),
            },
            tensors: Vec::new(),
            stack_copies: Vec::new(),
            predicted_ms: None,
            predicted_all_ms: None,
            scopes: Vec::new(),
            notes: Vec::new(),
            compile_seconds: 1.0,
            saved: None,
            does_not_fit: None,
        }
    }

    /// Returns an all-gather along the axis `context` that runs once in the block.
    pub(crate) fn gather(scope: &str, tensor: Option<&str>, ms: f64) -> CollectiveEntry {
        CollectiveEntry {
            kind: CollectiveKind::AllGather,
            scope: scope.into(),
            tensor: tensor.map(String::from),
            rule: None,
            count: 1,
            trip_count: 1.0,
            per: LoopLevel::Block,
            bytes: 1.0,
            wire_bytes: 1.0,
            axes: vec!["context".into()],
            dtype: "bf16".into(),
            asynchronous: true,
            overlapped: true,
            ms: Some(ms),
            role: None,
            reason: String::new(),
        }
    }

    /// Returns a bf16 matrix whose second dimension is sharded over the mesh axis `context`.
    pub(in crate::tune) fn placed(tensor: &str, role: Role, axes: [&str; 2]) -> TensorPlacement {
        TensorPlacement {
            tensor: tensor.into(),
            scope: String::new(),
            role,
            dtype: "bf16".into(),
            dims: vec![8, 8],
            axes: axes.map(String::from).into(),
            sharding: vec![Vec::new(), vec!["context".into()]],
            bytes: 10,
            rules: Vec::new(),
        }
    }

    #[test]
    fn compile_report_round_trips_and_rejects_unknown_fields() {
        let mut one = report("cpu:2");
        one.collectives.list.push(gather("blocks/ff", None, 0.5));
        one.tensors.push(placed("t", Role::FsdpSharded, ["mlp", "embed"]));
        let text = serde_json::to_string(&one).unwrap();
        assert_eq!(serde_json::from_str::<CompileReport>(&text).unwrap(), one);
        let other = text.replacen("\"notes\"", "\"note\"", 1);
        assert!(
            serde_json::from_str::<CompileReport>(&other).unwrap_err().to_string().contains("unknown field `note`")
        );
    }
}
