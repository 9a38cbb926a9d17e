//! The tokens that a token sees.

use crate::hlo::{Comparison, DType, Type, Value};
use crate::nn::{Axis, MASK_VALUE, Params};

/// Which tokens of a batch of prompts may be attended to.
pub(crate) struct Visible {
    /// Earlier tokens that are not padding, `[b, 1, t, t]`.
    pub(crate) earlier: Value,
    /// Tokens between a query and a key, `[t, t]`.
    distance: Value,
}

impl Visible {
    /// Of prompts whose tokens `mask` marks (i32 `[b, t]`).
    pub(crate) fn new(p: &Params, mask: &Value) -> Self {
        let (b, rows, t) = (p.builder(), mask.dim(0), mask.dim(1));
        let square = Type::new(DType::I32, vec![t, t]);
        let distance = b.iota(square.clone(), 0) - b.iota(square, 1);
        let causal = distance.compare(Comparison::Ge, &distance.like(0.0));
        let valid = mask.compare(Comparison::Ne, &mask.like(0.0)).reshape(vec![rows, 1, 1, t]);
        // Whole: a piece of it would be gathered in every layer.
        let earlier = p.place(
            "visible",
            &valid.and(&causal),
            &[Axis::CfgBatch, Axis::Replicated, Axis::Replicated, Axis::Replicated],
        );
        Visible { earlier, distance }
    }

    /// Tokens inside a window, `[t, t]`.
    pub(crate) fn near(&self, window: usize) -> Value {
        let window = i32::try_from(window).unwrap_or(i32::MAX);
        self.distance.compare(Comparison::Lt, &self.distance.like(f64::from(window)))
    }
}

/// The bias on the scores of tokens that are seen, and of those that are not: f32.
pub(crate) fn bias(seen: &Value) -> Value {
    let scalar = |v: f64| seen.builder().scalar(v, DType::F32);
    seen.select(&scalar(0.0), &scalar(MASK_VALUE))
}
