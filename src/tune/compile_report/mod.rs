//! Compile report: the figures of a compiled program, as `compile --json` writes them and as tuning, reports and scripts read
//! them. The one declaration of its keys; `ltx2 schema --of compile` prints it.

mod of;

use std::sync::OnceLock;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::analysis::{CollectiveKind, LoopLevel, Predicted, ScopePrediction, StackCopy};
use crate::nn::Role;
use crate::pipeline::compile::{Memory, Saved, Shortage};

pub(crate) const GIB: f64 = 1073741824.0;

/// Version of the report's form; it grows when a key is renamed, removed or given another meaning.
const VERSION: u32 = 1;

/// Report of a compiled program, per device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CompileReport {
    /// Version of this form.
    pub(crate) version: u32,
    /// Devices that it is compiled for.
    pub(crate) target: String,
    /// Chip that times are predicted with, where it is known.
    pub(crate) chip: Option<ChipRates>,
    pub(crate) program: String,
    /// Hash of the program: a run of the same configuration on the same devices executes it.
    pub(crate) hash: String,
    /// Folder or preset of the model.
    pub(crate) model: String,
    pub(crate) devices: usize,
    pub(crate) layout: String,
    /// Size of each mesh axis, outer first.
    pub(crate) mesh: IndexMap<String, usize>,
    /// Number of transformer blocks compiled.
    pub(crate) layers: usize,
    pub(crate) memory: Memory,
    /// Arguments and results with all blocks.
    pub(crate) needed: Needed,
    /// Floating-point operations per step.
    pub flops: f64,
    /// Bytes of device memory accessed per step.
    pub(crate) bytes_accessed: f64,
    /// One block.
    pub(crate) per_layer: Block,
    pub(crate) collectives: Collectives,
    pub(crate) tensors: Vec<TensorPlacement>,
    /// Copies of whole stacks of layers.
    pub(crate) stack_copies: Vec<StackCopy>,
    /// Predicted milliseconds of a step of the compiled blocks, where the chip is known.
    pub(crate) predicted_ms: Option<Predicted>,
    /// Predicted milliseconds of a step with all blocks.
    pub(crate) predicted_all_ms: Option<Predicted>,
    /// Predicted milliseconds of a step of the compiled blocks by name scope and category, without overlap; empty where the
    /// chip is unknown.
    pub(crate) scopes: Vec<ScopePrediction>,
    /// Notes on what the layout could not shard.
    pub(crate) notes: Vec<String>,
    pub(crate) compile_seconds: f64,
    /// Entry of the compile cache, with `--save`.
    pub(crate) saved: Option<Saved>,
    /// Shortage of a program that does not fit; the report is then of fewer blocks.
    pub(crate) does_not_fit: Option<Shortage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Block {
    pub(crate) flops: f64,
    pub(crate) bytes_accessed: f64,
}

/// Size of arguments and results with all blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Needed {
    pub(crate) layers: usize,
    pub(crate) bytes: i64,
}

/// Chip by name, with its FLOP/s in bf16 and bytes of memory a second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct ChipRates {
    pub(crate) name: String,
    pub(crate) peak: f64,
    pub(crate) bandwidth: f64,
}

/// Collectives, summed up and listed. Bytes are of outputs, wire bytes those that a device receives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Collectives {
    pub(crate) per_layer_bytes: f64,
    pub(crate) per_layer_wire_bytes: f64,
    pub(crate) per_layer_overlapped_bytes: f64,
    pub(crate) per_layer_count: f64,
    pub(crate) per_step_bytes: f64,
    pub(crate) per_step_wire_bytes: f64,
    /// Collectives, equal ones as one entry.
    pub(crate) list: Vec<CollectiveEntry>,
}

/// Equal collectives, counted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct CollectiveEntry {
    /// XLA's name of the operation, e.g. `all-gather`.
    pub(crate) kind: CollectiveKind,
    pub(crate) scope: String,
    /// Tensor that is moved, where known.
    pub(crate) tensor: Option<String>,
    /// Layout rules that shard the tensor.
    pub(crate) rule: Option<Vec<String>>,
    pub(crate) count: usize,
    /// Runs of each per step.
    pub(crate) trip_count: f64,
    /// Loop that it runs in.
    pub(crate) per: LoopLevel,
    /// Output bytes per run.
    pub(crate) bytes: f64,
    /// Received bytes per run.
    pub(crate) wire_bytes: f64,
    /// Mesh axes that it goes along.
    pub(crate) axes: Vec<String>,
    pub(crate) dtype: String,
    /// Whether it has a start and an end of its own.
    #[serde(rename = "async")]
    pub(crate) asynchronous: bool,
    /// Whether it overlaps with compute.
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

/// Placement of a tensor of the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct TensorPlacement {
    pub(crate) tensor: String,
    /// Name scope of its first use.
    pub(crate) scope: String,
    pub(crate) role: Role,
    pub(crate) dtype: String,
    pub(crate) dims: Vec<usize>,
    /// Logical axis of each dimension.
    pub(crate) axes: Vec<String>,
    /// Mesh axes of each dimension.
    pub(crate) sharding: Vec<Vec<String>>,
    /// Bytes per device.
    pub(crate) bytes: usize,
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

/// Name of a variant, as JSON has it.
pub(crate) fn name(variant: impl Serialize) -> String {
    let value = serde_json::to_value(variant).expect("a variant has a JSON form");
    value.as_str().map(String::from).unwrap_or_default()
}

/// Unit of a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CostUnit {
    /// Predicted milliseconds.
    Milliseconds,
    /// Bytes that a device receives: the chip is unknown.
    ReceivedBytes,
}

impl CostUnit {
    /// A cost with its unit, to be read.
    pub(crate) fn text(self, cost: f64) -> String {
        match self {
            CostUnit::Milliseconds => format!("{cost:.2} ms"),
            CostUnit::ReceivedBytes => format!("{:.3} MB received", cost / 1e6),
        }
    }
}

/// JSON Schema of [`CompileReport`].
pub fn report_schema() -> &'static Value {
    static SCHEMA: OnceLock<Value> = OnceLock::new();
    SCHEMA.get_or_init(|| schemars::schema_for!(CompileReport).to_value())
}

impl CompileReport {
    /// Predicted milliseconds of a step with all blocks.
    pub(crate) fn all_blocks(&self) -> Option<Predicted> {
        self.predicted_all_ms.or(self.predicted_ms)
    }

    /// Floating-point operations, and bytes of device memory, per step with all blocks.
    pub(crate) fn work(&self) -> (f64, f64) {
        let more = self.needed.layers as f64 - self.layers as f64;
        (self.flops + more * self.per_layer.flops, self.bytes_accessed + more * self.per_layer.bytes_accessed)
    }

    /// Unit of [`Self::whole_cost`].
    pub(crate) fn cost_unit(&self) -> CostUnit {
        if self.predicted_ms.is_some() { CostUnit::Milliseconds } else { CostUnit::ReceivedBytes }
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
        let needed = self.device_bytes();
        self.does_not_fit.is_none() && self.memory.capacity.is_none_or(|capacity| needed <= capacity)
    }
}

#[cfg(test)]
pub(in crate::tune) mod tests {
    use super::*;

    /// Report of a program of one block on two devices, without collectives and tensors.
    pub(in crate::tune) fn report(target: &str) -> CompileReport {
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
            per_layer: Block { flops: 1e12, bytes_accessed: 1e9 },
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

    /// All-gather along `context`, once in the block.
    pub(in crate::tune) fn gather(scope: &str, tensor: Option<&str>, ms: f64) -> CollectiveEntry {
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

    /// Matrix of bf16, sharded over `context` along its second axis.
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
    fn a_report_is_read_as_it_was_written_and_another_form_is_not() {
        let mut one = report("cpu:2");
        one.collectives.list.push(gather("blocks/ff", None, 0.5));
        one.tensors.push(placed("t", Role::Stored, ["mlp", "embed"]));
        let text = serde_json::to_string(&one).unwrap();
        assert_eq!(serde_json::from_str::<CompileReport>(&text).unwrap(), one);
        let other = text.replacen("\"notes\"", "\"note\"", 1);
        assert!(
            serde_json::from_str::<CompileReport>(&other).unwrap_err().to_string().contains("unknown field `note`")
        );
    }
}
