//! Finds copies of stacked weights (one array with the weights of all layers). Such a copy can be as large as the model
//! and runs at every call.

use std::collections::HashSet;

use super::level::LoopLevel;
use super::module::Module;
use super::proto::{ComputationProto, InstructionProto};
use super::shape::{bytes, dtype_name, elements};

/// Minimum size in bytes of a reported stack. Smaller stacks may fit into on-chip memory.
const SMALLEST: u64 = 1 << 20;

/// An operation that copies, transposes or converts all layers of a stacked parameter.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct StackCopy {
    /// Name of the instruction.
    pub name: String,
    /// HLO opcode: `copy`, `copy-start`, `transpose`, `convert` or `fusion`.
    pub opcode: String,
    /// Element type and dimensions of the result.
    pub shape: String,
    /// Name scope; empty if unknown.
    pub scope: String,
    /// Size of the result in bytes.
    pub bytes: f64,
    /// Innermost loop that contains the operation.
    #[serde(rename = "phase")]
    pub level: LoopLevel,
    /// Number of runs of the operation per call, per step or per block, depending on the loop that contains it.
    pub times: f64,
}

/// The stacked parameters of a program: those that hold the weights of all layers.
pub(super) struct Stacks {
    /// Possible sizes of the leading dimension.
    layers: Vec<i64>,
    /// Number of elements of each stacked parameter.
    sizes: HashSet<u64>,
}

impl Stacks {
    /// Collects the program's parameters of at least 1 MiB whose leading dimension is one of `layers`.
    pub(crate) fn collect(module: &Module, layers: &[usize]) -> Self {
        let layers: Vec<i64> = layers.iter().map(|&n| n as i64).collect();
        let entry = module.computation(module.entry());
        let parameters = entry.iter().flat_map(|c| &c.instructions).filter(|i| i.opcode == "parameter");
        let shapes = parameters.filter_map(|p| p.shape.as_ref());
        let stacks =
            shapes.filter(|s| s.dimensions.first().is_some_and(|n| layers.contains(n)) && bytes(s) >= SMALLEST);
        let sizes = stacks.map(elements).collect();
        Stacks { layers, sizes }
    }

    /// Describes an instruction that copies a stacked parameter; `None` for other instructions.
    pub(crate) fn copy(
        &self,
        module: &Module,
        i: &InstructionProto,
        level: LoopLevel,
        times: f64,
    ) -> Option<StackCopy> {
        let shape = i.shape.as_ref()?;
        let shape = match i.opcode.as_str() {
            "copy" | "transpose" | "convert" => shape,
            // A copy to another memory space that keeps the layout is a prefetch and does not count.
            "copy-start" => shape.tuple_shapes.first().filter(|to| {
                let order = |s: &super::proto::ShapeProto| s.layout.as_ref().map(|l| l.minor_to_major.clone());
                shape.tuple_shapes.get(1).is_some_and(|from| order(from) != order(to))
            })?,
            "fusion" => module.called(i).filter(|c| moves_only(module, c)).map(|_| shape)?,
            _ => return None,
        };
        let whole = bytes(shape) >= SMALLEST
            && self.sizes.contains(&elements(shape))
            && self.layers.iter().any(|n| shape.dimensions.contains(n));
        whole.then(|| StackCopy {
            name: i.name.clone(),
            opcode: i.opcode.clone(),
            shape: format!("{}{:?}", dtype_name(shape.element_type), shape.dimensions),
            scope: super::collective::trim(i.scope()),
            bytes: bytes(shape) as f64,
            level,
            times,
        })
    }
}

/// Returns whether a fused computation only moves data.
fn moves_only(module: &Module, c: &ComputationProto) -> bool {
    c.instructions.iter().all(|i| match i.opcode.as_str() {
        "parameter" | "bitcast" | "copy" | "transpose" | "convert" | "reshape" | "constant" => true,
        "fusion" => module.called(i).is_some_and(|c| moves_only(module, c)),
        _ => false,
    })
}
