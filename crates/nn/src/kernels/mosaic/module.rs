//! Mosaic modules: a kernel function that runs once per grid position, and windows, which define the block of each
//! array that the function accesses at a grid position.

use super::text::{MosaicCode, VmemBlock, grid_axis};
use ltx2_stablehlo::DType;

/// Execution order of the positions along a grid axis: in any order, possibly on several cores (`Any`), or in sequence
/// (`InTurn`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GridOrder {
    Any,
    InTurn,
}

/// Block index along a dimension of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockIndex {
    First,
    /// The grid position along an axis.
    Axis(usize),
    /// `Shared(axis, n)`: the grid position along an axis, divided by `n`.
    Shared(usize, usize),
}

/// The block of an array that the kernel accesses at a grid position. Elements beyond the edge of the array have
/// arbitrary values when they are read, and are not written.
pub(super) struct Window {
    pub dtype: DType,
    pub block: Vec<usize>,
    pub at: Vec<BlockIndex>,
}

/// Grid, windows and scratch memory of a kernel.
pub(super) struct Frame {
    pub grid: Vec<(usize, GridOrder)>,
    /// Windows of the operands, then of the results.
    pub windows: Vec<Window>,
    /// Shapes of f32 arrays that persist across grid positions.
    pub scratch: Vec<[usize; 2]>,
}

impl Frame {
    /// Returns the module as MLIR text. `body` writes the function; its second argument contains the blocks of
    /// operands, results and scratch arrays, in this order.
    pub(crate) fn module(&self, name: &str, body: impl FnOnce(&MosaicCode, &[VmemBlock])) -> String {
        let windows = self.windows.iter().map(|w| (w.dtype, w.block.clone()));
        let scratch = self.scratch.iter().map(|dims| (DType::F32, dims.to_vec()));
        let blocks: Vec<VmemBlock> =
            windows.chain(scratch).enumerate().map(|(n, (dtype, dims))| VmemBlock::new(n, dtype, dims)).collect();
        let code = MosaicCode::default();
        body(&code, &blocks);
        let axes = self.axes();
        let arguments: Vec<String> = blocks.iter().map(VmemBlock::argument).collect();
        let semantics: Vec<&str> = self.grid.iter().map(|(_, order)| semantics(*order)).collect();
        let bounds: Vec<String> = self.grid.iter().map(|(n, _)| n.to_string()).collect();
        let windows: Vec<String> = self.windows.iter().enumerate().map(|(n, w)| w.parameters(n)).collect();
        let maps: String = self.windows.iter().enumerate().map(|(n, w)| w.map(n, &axes)).collect();
        format!(
            "module {{\n  func.func @{name}({axes}, {}) attributes {{dimension_semantics = [{}], \
             iteration_bounds = array<i64: {}>, scalar_prefetch = 0 : i64, scratch_operands = {} : i64, \
             tpu.core_type = #tpu.core_type<tc>, window_params = [{}]}} {{\n{}    return\n  }}\n{maps}}}\n",
            arguments.join(", "),
            semantics.join(", "),
            bounds.join(", "),
            self.scratch.len(),
            windows.join(", "),
            code.text(),
        )
    }

    fn axes(&self) -> String {
        let names: Vec<String> = (0..self.grid.len()).map(|axis| format!("{}: i32", grid_axis(axis))).collect();
        names.join(", ")
    }
}

fn semantics(order: GridOrder) -> &'static str {
    match order {
        GridOrder::Any => "#tpu.dimension_semantics<parallel>",
        GridOrder::InTurn => "#tpu.dimension_semantics<arbitrary>",
    }
}

impl Window {
    fn parameters(&self, n: usize) -> String {
        let bounds: Vec<String> = self.block.iter().map(ToString::to_string).collect();
        format!("{{transform_indices = @window{n}, window_bounds = array<i64: {}>}}", bounds.join(", "))
    }

    /// Returns the text of the function that maps grid positions to block indices.
    fn map(&self, n: usize, axes: &str) -> String {
        let mut lines = vec!["    %zero = arith.constant 0 : i32\n".to_string()];
        let mut places = Vec::new();
        for (dimension, at) in self.at.iter().enumerate() {
            places.push(match *at {
                BlockIndex::First => "%zero".to_string(),
                BlockIndex::Axis(axis) => grid_axis(axis),
                BlockIndex::Shared(axis, by) => {
                    let (axis, by_name, place) =
                        (grid_axis(axis), format!("%by{dimension}"), format!("%at{dimension}"));
                    lines.push(format!("    {by_name} = arith.constant {by} : i32\n"));
                    lines.push(format!("    {place} = arith.divsi {axis}, {by_name} : i32\n"));
                    place
                }
            });
        }
        let types = vec!["i32"; places.len()].join(", ");
        format!(
            "  func.func @window{n}({axes}) -> ({types}) {{\n{}    return {} : {types}\n  }}\n",
            lines.concat(),
            places.join(", ")
        )
    }
}
