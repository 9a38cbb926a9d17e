//! Copies of whole stacks of layers: paid at every call, and as large as the model.

use std::collections::HashSet;

use super::module::Module;
use super::proto::{ComputationProto, InstructionProto};
use super::shape::{bytes, dtype_name, elements};
use super::walk::Phase;

/// Smaller stacks are not worth a word; they may live in the chip's own memory.
const SMALLEST: u64 = 1 << 20;

/// A copy, transpose or conversion of a whole stacked parameter.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct StackCopy {
    /// The instruction.
    pub name: String,
    /// Its opcode; of a fusion, `fusion`.
    pub opcode: String,
    /// Element type and dimensions of the result.
    pub shape: String,
    /// The name scope it was built under, if any.
    pub scope: String,
    /// Bytes of the result.
    pub bytes: f64,
    /// Where it happens.
    pub phase: Phase,
    /// Runs in one call, step or block.
    pub times: f64,
}

/// The stacked parameters of a program.
pub(super) struct Stacks {
    layers: i64,
    /// Elements of each.
    sizes: HashSet<u64>,
}

impl Stacks {
    /// The entry's parameters of at least 1 MiB whose leading dimension is `layers`.
    pub fn of(module: &Module, layers: usize) -> Self {
        let layers = layers as i64;
        let entry = module.computation(module.entry());
        let parameters = entry.iter().flat_map(|c| &c.instructions).filter(|i| i.opcode == "parameter");
        let shapes = parameters.filter_map(|p| p.shape.as_ref());
        let stacks = shapes.filter(|s| s.dimensions.first() == Some(&layers) && bytes(s) >= SMALLEST);
        Stacks { layers, sizes: stacks.map(elements).collect() }
    }

    /// The copy that an instruction makes of a stack.
    pub fn copy(&self, module: &Module, i: &InstructionProto, phase: Phase, times: f64) -> Option<StackCopy> {
        let shape = i.shape.as_ref()?;
        let shape = match i.opcode.as_str() {
            "copy" | "transpose" | "convert" => shape,
            // From one place to another of the same form is a prefetch.
            "copy-start" => shape.tuple_shapes.first().filter(|to| {
                let order = |s: &super::proto::ShapeProto| s.layout.as_ref().map(|l| l.minor_to_major.clone());
                shape.tuple_shapes.get(1).is_some_and(|from| order(from) != order(to))
            })?,
            "fusion" => module.called(i).filter(|c| moves_only(module, c)).map(|_| shape)?,
            _ => return None,
        };
        let whole = bytes(shape) >= SMALLEST
            && self.sizes.contains(&elements(shape))
            && shape.dimensions.contains(&self.layers);
        whole.then(|| StackCopy {
            name: i.name.clone(),
            opcode: i.opcode.clone(),
            shape: format!("{}{:?}", dtype_name(shape.element_type), shape.dimensions),
            scope: super::collective::trim(i.scope()),
            bytes: bytes(shape) as f64,
            phase,
            times,
        })
    }
}

/// Whether a fused computation only moves data.
fn moves_only(module: &Module, c: &ComputationProto) -> bool {
    c.instructions.iter().all(|i| match i.opcode.as_str() {
        "parameter" | "bitcast" | "copy" | "transpose" | "convert" | "reshape" | "constant" => true,
        "fusion" => module.called(i).is_some_and(|c| moves_only(module, c)),
        _ => false,
    })
}
