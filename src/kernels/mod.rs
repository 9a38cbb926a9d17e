//! Attention kernels. XLA's own operations serve every platform; some platforms have fused kernels too.

mod cudnn;
mod mosaic;
mod plain;
mod support;
#[cfg(test)]
mod tests;
mod triton;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::hlo::{DType, Type, Value};

pub use mosaic::Tpu;
pub(crate) use triton::{GridAxis, WindowAttention, window_reach};

/// Scores above this many elements are never materialized at once: queries are taken in chunks.
const LARGEST_SCORES: usize = 1 << 26;
/// Chunks are multiples of this many queries: the edge of a matrix unit.
const TILE: usize = 128;

/// Attention kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Kernel {
    /// XLA's own operations.
    #[default]
    Plain,
    /// cuDNN's fused kernel, on CUDA.
    Cudnn {
        /// Whether operands that it does not take are an error; else XLA's own operations take them, and a warning says why.
        required: bool,
    },
    /// A kernel of our own on a TPU; XLA's own operations where it does not take the operands.
    Mosaic(Tpu),
}

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKernel {
    /// The platform's own; XLA's operations where it does not take the operands.
    Auto,
    /// XLA's operations; queries go through in chunks where whole score matrices would be large.
    Plain,
    /// cuDNN, on CUDA; operands that it does not take are an error.
    Cudnn,
    /// Mosaic, on TPU.
    Mosaic,
}

impl AttentionKernel {
    /// The kernel, on a platform with `own`.
    ///
    /// # Errors
    /// Kernel of another platform, with that platform.
    pub(crate) fn kernel(self, own: Kernel) -> Result<Kernel, &'static str> {
        match (self, own) {
            (AttentionKernel::Auto, _) | (AttentionKernel::Mosaic, Kernel::Mosaic(_)) => Ok(own),
            (AttentionKernel::Cudnn, Kernel::Cudnn { .. }) => Ok(Kernel::Cudnn { required: true }),
            (AttentionKernel::Plain, _) => Ok(Kernel::Plain),
            (AttentionKernel::Cudnn, _) => Err("cudnn is CUDA's"),
            (AttentionKernel::Mosaic, _) => Err("mosaic is the TPU's"),
        }
    }
}

/// Attention of `q [b, q, h, d]` with `k`, `v` `[b, k, kv, d]` and an optional f32 bias `[b or 1, 1, q or 1,
/// k]`, the same for all heads; the result is `[b, q, h, d]` in the queries' element type.
pub fn attention(kernel: Kernel, q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> Value {
    match kernel {
        Kernel::Cudnn { .. } if kernel.supports(q, k, cudnn::unsupported_reason(q, k, bias)) => {
            q.builder().count_attention(q, k, v);
            return cudnn::attention(q, k, v, bias, scale);
        }
        Kernel::Mosaic(tpu) if kernel.supports(q, k, mosaic::unsupported_reason(q, k, v, bias)) => {
            q.builder().count_attention(q, k, v);
            return mosaic::attention(q, k, v, bias, scale, tpu);
        }
        _ => {}
    }
    let v = &values_as_read(v);
    match chunk(q, k, bias) {
        None => plain::attention(q, k, v, bias, scale),
        Some(size) => {
            let attend = |q: &Value, bias: Option<&Value>| vec![plain::attention(q, k, v, bias, scale)];
            plain::chunked(q, bias, size, &[q.ty().clone()], attend).remove(0)
        }
    }
}

/// Whether attention of `q [b, frames, rows, columns, heads, dim]` within windows of such a grid has a fused kernel: on CUDA, unless
/// cuDNN was asked for.
pub(crate) fn has_windows(kernel: Kernel, q: &Value, axes: [GridAxis; 3]) -> bool {
    kernel == Kernel::Cudnn { required: false } && kernel.supports_windows(q, triton::unsupported_reason(q, axes))
}

/// Attention over a part of the keys, as online softmax keeps it: enough to join it with the other parts.
#[derive(Clone)]
pub struct Partial {
    /// Weighted values, not yet divided: `[b, q, h, d]`, f32.
    pub(crate) acc: Value,
    /// Largest score of each query, `[b, q, h, 1]`, f32.
    pub(crate) max: Value,
    /// Sum of the weights, `[b, q, h, 1]`, f32.
    pub(crate) denom: Value,
}

impl Partial {
    /// Attention over some of the keys; operands as for [`attention`].
    pub fn of(kernel: Kernel, q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> Self {
        match kernel {
            Kernel::Cudnn { .. } if kernel.supports(q, k, cudnn::partial_unsupported_reason(q, k, bias)) => {
                q.builder().count_attention(q, k, v);
                let [values, log_sum] = cudnn::partial(q, k, v, bias, scale);
                return Partial::of_normalized(&values, log_sum);
            }
            Kernel::Mosaic(tpu) if kernel.supports(q, k, mosaic::unsupported_reason(q, k, v, bias)) => {
                q.builder().count_attention(q, k, v);
                return Partial::from_values(&mosaic::partial(q, k, v, bias, scale, tpu));
            }
            _ => {}
        }
        let v = &values_as_read(v);
        let Some(size) = chunk(q, k, bias) else {
            return Partial::from_values(&plain::partial(q, k, v, bias, scale));
        };
        let wide = Type::new(DType::F32, q.dims());
        let narrow = Type::new(DType::F32, [&q.dims()[..3], &[1]].concat());
        let types = [wide, narrow.clone(), narrow];
        let attend = |q: &Value, bias: Option<&Value>| plain::partial(q, k, v, bias, scale).to_vec();
        Partial::from_values(&plain::chunked(q, bias, size, &types, attend))
    }

    /// From values that are divided already, and the logarithm of the sum of the exponentials of each query's scores
    /// `[b, q, h, 1]`, f32: relative to that in the place of the largest score, the weights sum to one.
    fn of_normalized(values: &Value, log_sum: Value) -> Self {
        let denom = log_sum.builder().full(1.0, log_sum.ty().clone());
        Partial { acc: values.to(DType::F32), max: log_sum, denom }
    }

    /// From `[acc, max, denom]`, as a loop carries them.
    pub(crate) fn from_values(values: &[Value]) -> Self {
        Partial { acc: values[0].clone(), max: values[1].clone(), denom: values[2].clone() }
    }

    /// As `[acc, max, denom]`.
    pub fn into_values(self) -> [Value; 3] {
        [self.acc, self.max, self.denom]
    }

    /// The same with a larger bound in the place of the largest score.
    pub(crate) fn rescaled(&self, max: &Value) -> Self {
        let factor = (&self.max - max).exp();
        Partial { acc: &self.acc * &factor, denom: &self.denom * &factor, max: max.clone() }
    }

    /// Attention over both sets of keys.
    pub(crate) fn join(&self, other: &Self) -> Self {
        let max = self.max.maximum(&other.max);
        let (a, b) = (self.rescaled(&max), other.rescaled(&max));
        Partial { acc: a.acc + b.acc, denom: a.denom + b.denom, max }
    }

    /// The attended values, when every key has been seen.
    pub(crate) fn finish(&self, dtype: DType) -> Value {
        (&self.acc / &self.denom).to(dtype)
    }
}

/// `[b, k, kv, d]` to `[b, kv, d, k]`. Here, outside of a loop over chunks: what a loop reads has an order of its own,
/// into which a compiler would copy the whole stack that the values come from.
fn values_as_read(v: &Value) -> Value {
    v.transpose(&[0, 2, 3, 1])
}

/// Queries that are taken at a time, if not all.
fn chunk(q: &Value, k: &Value, bias: Option<&Value>) -> Option<usize> {
    // Blocks with a bias of rows each are many and short: what is long is a sequence.
    let entries = if bias.is_some_and(|bias| bias.dim(-2) != 1) { 1 } else { q.dim(0) };
    let row = entries * q.dim(2) * k.dim(1);
    if row * q.dim(1) <= LARGEST_SCORES {
        return None;
    }
    // Chunks of equal size: the padding of the last is computed for nothing.
    let least = (row * q.dim(1)).div_ceil(LARGEST_SCORES);
    let sizes = (least..2 * least).map(|n| q.dim(1).div_ceil(n).next_multiple_of(TILE));
    sizes.min_by_key(|&size| (q.dim(1).next_multiple_of(size), std::cmp::Reverse(size)))
}
