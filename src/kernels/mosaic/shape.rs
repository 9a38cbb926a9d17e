//! Sizes of an attention's operands.

use super::text::LANES;
use crate::hlo::DType;

/// Sizes of the operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    /// Size of the CFG batch.
    pub rows: usize,
    pub queries: usize,
    pub keys: usize,
    pub heads: usize,
    /// Heads of keys and values, of which each serves equally many queries' heads.
    pub kv_heads: usize,
    pub dim: usize,
    /// Element type of queries, keys and values: bf16 or f32.
    pub dtype: DType,
    /// Rows of the bias on keys, if there is one.
    pub bias: Option<usize>,
}

impl Shape {
    /// Width of a block: of one head, or of those that fill a register.
    pub fn lanes(&self) -> usize {
        self.dim.max(LANES)
    }

    /// Whether arrays are `[rows, heads, tokens, dim]`.
    pub fn is_heads_first(&self) -> bool {
        self.dim.is_multiple_of(LANES)
    }

    /// Heads of a block.
    pub fn together(&self) -> usize {
        self.lanes() / self.dim
    }
}
