use super::text::LANES;
use crate::hlo::DType;

/// Sizes of the attention operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    /// Size of the batch.
    pub(crate) rows: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) heads: usize,
    /// Number of key and value heads; each is shared by the same number of query heads.
    pub(crate) kv_heads: usize,
    pub(crate) dim: usize,
    /// Element type of queries, keys and values: bf16 or f32.
    pub(crate) dtype: DType,
    /// Number of rows of the bias; `None` without bias.
    pub(crate) bias: Option<usize>,
}

impl Shape {
    /// Returns the width of a block in lanes: that of one head, or of the heads that fill a register.
    pub(crate) fn lanes(&self) -> usize {
        self.dim.max(LANES)
    }

    /// Whether arrays are `[rows, heads, tokens, dim]`.
    pub(crate) fn is_heads_first(&self) -> bool {
        self.dim.is_multiple_of(LANES)
    }

    /// Number of heads in a block.
    pub(crate) fn together(&self) -> usize {
        self.lanes() / self.dim
    }
}
