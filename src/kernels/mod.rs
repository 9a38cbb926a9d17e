//! Attention kernels. XLA's own operations serve every platform; fused kernels of a platform stand beside them.

mod plain;

use crate::hlo::Value;

/// Scores above this many elements are never held whole: queries are taken in chunks.
const LARGEST_SCORES: usize = 1 << 26;

/// Attention of `q [b, q, h, d]` with `k`, `v` `[b, k, kv, d]` and an optional f32 bias `[b or 1, 1, q or 1,
/// k]`, the same for all heads; the result is `[b, q, h, d]` in the queries' element type.
pub fn attention(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> Value {
    let row = q.dim(0) * q.dim(2) * k.dim(1);
    let whole = row * q.dim(1) <= LARGEST_SCORES;
    // A bias with a row for each query would have to be sliced along; no long sequence carries one.
    if whole || bias.is_some_and(|b| b.dim(-2) != 1) {
        return plain::attention(q, k, v, bias, scale);
    }
    let chunk = (LARGEST_SCORES / row).max(1).next_power_of_two().min(q.dim(1));
    plain::chunked(q, k, v, bias, scale, chunk)
}
