//! Attention masks of the text encoders.

use ltx2_nn::{Axis, MASK_VALUE, Params};
use ltx2_stablehlo::{Comparison, DType, Type, Value};

/// Attention masks of a batch of prompts.
pub(crate) struct AttentionMasks {
    /// Causal mask, `[b, 1, t, t]`, that also masks padding tokens.
    pub earlier: Value,
    /// Query position minus key position, `[t, t]`.
    distance: Value,
}

impl AttentionMasks {
    /// Computes the masks from the i32 attention mask `[b, t]`, which is 0 for padding.
    pub(crate) fn new(p: &Params, mask: &Value) -> Self {
        let (b, rows, t) = (p.builder(), mask.dim(0), mask.dim(1));
        let square = Type::new(DType::I32, vec![t, t]);
        let distance = b.iota(square.clone(), 0) - b.iota(square, 1);
        let causal = distance.compare(Comparison::Ge, &distance.like(0.0));
        let valid = mask.compare(Comparison::Ne, &mask.like(0.0)).reshape(vec![rows, 1, 1, t]);
        // Unsharded along the tokens: a shard would be all-gathered in every layer.
        let earlier = p.place(
            "visible",
            &valid.and(&causal),
            &[Axis::CfgBatch, Axis::Replicated, Axis::Replicated, Axis::Replicated],
        );
        AttentionMasks { earlier, distance }
    }

    /// Returns the sliding-window mask, `[t, t]`, which excludes keys `window` or more tokens before the query. It does
    /// not exclude later keys.
    pub(crate) fn near(&self, window: usize) -> Value {
        let window = i32::try_from(window).unwrap_or(i32::MAX);
        self.distance.compare(Comparison::Lt, &self.distance.like(f64::from(window)))
    }
}

/// Converts a mask to an f32 bias on the attention scores: 0 where set, [`MASK_VALUE`] elsewhere.
pub(crate) fn bias(seen: &Value) -> Value {
    let scalar = |v: f64| seen.builder().scalar(v, DType::F32);
    seen.select(&scalar(0.0), &scalar(MASK_VALUE))
}
