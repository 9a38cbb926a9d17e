//! Attention in XLA's own operations: products accumulate in f32, softmax in f32, weights rounded to the values' type.

use crate::dtype::DType;
use crate::hlo::{Type, Value};

/// Softmax over the last dimension, in f32.
fn softmax(scores: &Value) -> Value {
    let shifted = (scores - scores.max_keep(&[-1])).exp();
    &shifted / shifted.sum_keep(&[-1])
}

pub(super) fn attention(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> Value {
    let b = q.builder();
    let (kv, d) = (k.dim(2), q.dim(3));
    let group = q.dim(2) / kv;
    // Query heads that share a key head form one more dimension of the product, in the product's own order.
    let grouped = q.reshape(vec![q.dim(0), q.dim(1), kv, group, d]);
    let mut scores = b.einsum("bqkgd,bskd->bkqgs", &grouped, k, DType::F32) * scale;
    if let Some(bias) = bias {
        scores = scores + bias.reshape(vec![bias.dim(0), 1, bias.dim(2), 1, bias.dim(3)]);
    }
    let weights = softmax(&scores).to(v.dtype());
    b.einsum("bkqgs,bskd->bqkgd", &weights, v, q.dtype()).reshape(q.dims().to_vec())
}

/// The same, `chunk` queries at a time: each query's row is computed exactly as in one piece.
pub(super) fn chunked(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64, chunk: usize) -> Value {
    let b = q.builder();
    let n = q.dim(1);
    let chunks = n.div_ceil(chunk);
    let padded = q.pad(1, 0, chunks * chunk - n, 0.0);
    let out = b.full(0.0, Type::new(q.dtype(), padded.dims().to_vec()));
    let done = b.repeat(chunks, &[out], |i, carried| {
        let start = i * chunk as f64;
        let part = attention(&padded.dynamic_slice(1, &start, chunk), k, v, bias, scale);
        vec![carried[0].dynamic_update(1, &start, &part)]
    });
    done[0].slice(1, 0, n)
}
