//! A kernel as a module: a function that runs at every place of a grid, and which blocks of the arrays it sees there.

use super::text::{Block, Code, grid_axis};
use crate::hlo::DType;

/// Whether places along an axis of the grid may run in any order, on several cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Any,
    InTurn,
}

/// Index of a block along a dimension of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum At {
    First,
    /// As the place along an axis of the grid.
    Axis(usize),
    /// One for so many places along an axis.
    Shared(usize, usize),
}

/// The part of an array that a place of the grid sees. What lies beyond the array's edge is read as anything and not
/// written.
pub(super) struct Window {
    pub(crate) dtype: DType,
    pub(crate) block: Vec<usize>,
    pub(crate) at: Vec<At>,
}

/// A kernel's frame.
pub(super) struct Frame {
    pub(crate) grid: Vec<(usize, Order)>,
    /// Windows of operands, then of results.
    pub(crate) windows: Vec<Window>,
    /// Shapes of arrays that stay from one place of the grid to the next, f32.
    pub(crate) scratch: Vec<[usize; 2]>,
}

impl Frame {
    /// The module whose function `body` writes, given the blocks of operands, results and scratch.
    pub(crate) fn module(&self, name: &str, body: impl FnOnce(&Code, &[Block])) -> String {
        let windows = self.windows.iter().map(|w| (w.dtype, w.block.clone()));
        let scratch = self.scratch.iter().map(|dims| (DType::F32, dims.to_vec()));
        let blocks: Vec<Block> =
            windows.chain(scratch).enumerate().map(|(n, (dtype, dims))| Block::new(n, dtype, dims)).collect();
        let code = Code::default();
        body(&code, &blocks);
        let axes = self.axes();
        let arguments: Vec<String> = blocks.iter().map(Block::argument).collect();
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

fn semantics(order: Order) -> &'static str {
    match order {
        Order::Any => "#tpu.dimension_semantics<parallel>",
        Order::InTurn => "#tpu.dimension_semantics<arbitrary>",
    }
}

impl Window {
    fn parameters(&self, n: usize) -> String {
        let bounds: Vec<String> = self.block.iter().map(ToString::to_string).collect();
        format!("{{transform_indices = @window{n}, window_bounds = array<i64: {}>}}", bounds.join(", "))
    }

    /// The function from a place of the grid to the block's place.
    fn map(&self, n: usize, axes: &str) -> String {
        let mut lines = vec!["    %zero = arith.constant 0 : i32\n".to_string()];
        let mut places = Vec::new();
        for (dimension, at) in self.at.iter().enumerate() {
            places.push(match *at {
                At::First => "%zero".to_string(),
                At::Axis(axis) => grid_axis(axis),
                At::Shared(axis, by) => {
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
