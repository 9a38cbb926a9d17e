//! Attention in XLA's own operations: matmuls accumulate in f32, softmax in f32, weights rounded to the values' type.
//! Values come as `[b, kv, d, k]`, the order in which their product reads them.

use crate::hlo::{DType, Type, Value};

/// Scores `[b, kv, q, group, k]`, f32. Query heads that share a key head form one more dimension of the product.
fn scores(q: &Value, k: &Value, bias: Option<&Value>, scale: f64) -> Value {
    let (kv, d) = (k.dim(2), q.dim(3));
    let grouped = q.reshape(vec![q.dim(0), q.dim(1), kv, q.dim(2) / kv.max(1), d]);
    let scores = q.builder().einsum("bqkgd,bskd->bkqgs", &grouped, k, DType::F32) * scale;
    match bias {
        Some(bias) => scores + bias.reshape(vec![bias.dim(0), 1, bias.dim(2), 1, bias.dim(3)]),
        None => scores,
    }
}

/// `weights [b, kv, q, group, k]` times values `[b, kv, d, k]`, in the queries' order `[b, q, h, d]`.
fn weighted(weights: &Value, v: &Value, q: &Value, dtype: DType) -> Value {
    q.builder().einsum("bkqgs,bkds->bqkgd", &weights.to(v.dtype()), v, dtype).reshape(q.dims().to_vec())
}

pub(super) fn attention(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> Value {
    let scores = scores(q, k, bias, scale);
    let weights = (&scores - scores.max_keep(&[-1])).exp();
    weighted(&(&weights / weights.sum_keep(&[-1])), v, q, q.dtype())
}

/// Values before the division, the largest score and the sum of the weights, each in the queries' order.
pub(super) fn partial(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> [Value; 3] {
    let scores = scores(q, k, bias, scale);
    let largest = scores.max_keep(&[-1]);
    let weights = (&scores - &largest).exp();
    // [b, kv, q, group, 1] to [b, q, h, 1].
    let column = |x: &Value| x.transpose(&[0, 2, 1, 3, 4]).reshape(vec![q.dim(0), q.dim(1), q.dim(2), 1]);
    [weighted(&weights, v, q, DType::F32), column(&largest), column(&weights.sum_keep(&[-1]))]
}

/// `chunk` queries at a time, with their rows of a bias that has such: each query's row is computed exactly as in one piece.
/// `results` are the types for all queries.
pub(super) fn chunked(
    q: &Value,
    bias: Option<&Value>,
    chunk: usize,
    results: &[Type],
    f: impl Fn(&Value, Option<&Value>) -> Vec<Value>,
) -> Vec<Value> {
    let b = q.builder();
    let n = q.dim(1);
    let chunks = n.div_ceil(chunk);
    let length = chunks * chunk;
    let padded = q.pad(1, 0, length - n, 0.0);
    let rows = bias.filter(|bias| bias.dim(2) != 1).map(|bias| bias.pad(2, 0, length - n, 0.0));
    let empty: Vec<Value> = results
        .iter()
        .map(|ty| {
            let mut ty = ty.clone();
            ty.dims[1] = length;
            b.full(0.0, ty)
        })
        .collect();
    let done = b.repeat(chunks, &empty, |i, carried| {
        let start = i * chunk as f64;
        let own = rows.as_ref().map(|rows| rows.dynamic_slice(2, &start, chunk));
        let parts = f(&padded.dynamic_slice(1, &start, chunk), own.as_ref().or(bias));
        parts.iter().zip(carried).map(|(part, all)| all.dynamic_update(1, &start, part)).collect()
    });
    done.iter().map(|all| all.slice(1, 0, n)).collect()
}
