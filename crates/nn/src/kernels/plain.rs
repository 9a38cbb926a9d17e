//! Attention in plain XLA operations: matmuls accumulate in f32, softmax is computed in f32, and weights are rounded to
//! the element type of the values. Values are `[b, kv, d, k]`, the dimension order in which the matmul reads them.

use ltx2_stablehlo::{DType, Type, Value};

/// Returns scores `[b, kv, q, group, k]`, f32. Query heads that share a key head form the `group` dimension.
fn scores(q: &Value, k: &Value, bias: Option<&Value>, scale: f64) -> Value {
    let (kv, d) = (k.dim(2), q.dim(3));
    let grouped = q.reshape(vec![q.dim(0), q.dim(1), kv, q.dim(2) / kv.max(1), d]);
    let scores = q.builder().einsum("bqkgd,bskd->bkqgs", &grouped, k, DType::F32) * scale;
    match bias {
        Some(bias) => scores + bias.reshape(vec![bias.dim(0), 1, bias.dim(2), 1, bias.dim(3)]),
        None => scores,
    }
}

/// Returns the product of `weights [b, kv, q, group, k]` and values `v [b, kv, d, k]`, as `[b, q, h, d]`.
fn weighted(weights: &Value, v: &Value, q: &Value, dtype: DType) -> Value {
    q.builder().einsum("bkqgs,bkds->bqkgd", &weights.to(v.dtype()), v, dtype).reshape(q.dims().to_vec())
}

pub(super) fn attention(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> Value {
    let scores = scores(q, k, bias, scale);
    let weights = (&scores - scores.max_keep(&[-1])).exp();
    weighted(&(&weights / weights.sum_keep(&[-1])), v, q, q.dtype())
}

/// Computes attention without normalization. Returns, in f32, the weighted sums of values `[b, q, h, d]`, and the
/// largest score and the sum of weights of each query and head, both `[b, q, h, 1]`.
pub(super) fn partial(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> [Value; 3] {
    let scores = scores(q, k, bias, scale);
    let largest = scores.max_keep(&[-1]);
    let weights = (&scores - &largest).exp();
    // [b, kv, q, group, 1] to [b, q, h, 1].
    let column = |x: &Value| x.transpose(&[0, 2, 1, 3, 4]).reshape(vec![q.dim(0), q.dim(1), q.dim(2), 1]);
    [weighted(&weights, v, q, DType::F32), column(&largest), column(&weights.sum_keep(&[-1]))]
}

/// Runs `f` on chunks of `chunk` queries and concatenates its results. `f` also receives the bias, restricted to the
/// rows of the chunk if the bias has one row per query. The result of each query is bitwise the same as without chunks.
/// `results` are the types of the concatenated results.
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
