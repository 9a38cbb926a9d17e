use super::text::LANES;
use ltx2_stablehlo::DType;

/// Sizes of the attention operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AttentionShape {
    /// Size of the batch.
    pub rows: usize,
    pub queries: usize,
    pub keys: usize,
    pub heads: usize,
    /// Number of key and value heads; each is shared by the same number of query heads.
    pub kv_heads: usize,
    pub dim: usize,
    /// Element type of queries, keys and values: bf16 or f32.
    pub dtype: DType,
    /// Batch size of the bias: 1 (shared by the batch) or `rows`. `None`: no bias.
    pub bias: Option<usize>,
}

impl AttentionShape {
    /// Returns the width of a block in lanes: that of one head, or of the heads that fill a register.
    pub(crate) fn lanes(&self) -> usize {
        self.dim.max(LANES)
    }

    /// Returns whether arrays are `[batch, heads, tokens, dim]`, not `[batch, tokens, heads · dim]`.
    pub(crate) fn is_heads_first(&self) -> bool {
        self.dim.is_multiple_of(LANES)
    }

    /// Returns the number of heads in a block.
    pub(crate) fn together(&self) -> usize {
        self.lanes() / self.dim
    }
}
