//! Sizes of an attention's operands.

use super::text::LANES;
use crate::hlo::DType;

/// Sizes of the operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    /// Size of the CFG batch.
    pub(crate) rows: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) heads: usize,
    /// Heads of keys and values, of which each serves equally many queries' heads.
    pub(crate) kv_heads: usize,
    pub(crate) dim: usize,
    /// Element type of queries, keys and values: bf16 or f32.
    pub(crate) dtype: DType,
    /// Rows of the bias on keys, if there is one.
    pub(crate) bias: Option<usize>,
}

impl Shape {
    /// Width of a block: of one head, or of those that fill a register.
    pub(crate) fn lanes(&self) -> usize {
        self.dim.max(LANES)
    }

    /// Whether arrays are `[rows, heads, tokens, dim]`.
    pub(crate) fn is_heads_first(&self) -> bool {
        self.dim.is_multiple_of(LANES)
    }

    /// Heads of a block.
    pub(crate) fn together(&self) -> usize {
        self.lanes() / self.dim
    }
}
