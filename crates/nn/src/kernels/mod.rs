//! Attention kernels: plain XLA operations for every platform, and fused kernels for some.

mod cudnn;
mod mosaic;
mod plain;
mod support;
#[cfg(test)]
mod tests;
mod triton;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use ltx2_stablehlo::{DType, Type, Value};

pub use mosaic::Tpu;
pub(crate) use triton::RowRotation;
pub use triton::{GridAxis, WindowAttention, window_reach};
pub use triton::{RowAttended, RowAttention, RowNorm, RowProducts, RowRope, RowScale, RowWeight};

/// Maximum number of elements of a materialized score matrix. If all queries together have more scores, they are
/// processed in chunks.
const LARGEST_SCORES: usize = 1 << 26;
/// Number of queries of which chunk sizes are multiples: the size of a matrix unit.
const TILE: usize = 128;

/// Attention kernel that a program uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Kernel {
    /// Plain XLA operations.
    #[default]
    Plain,
    /// cuDNN's fused kernel, on CUDA.
    Cudnn {
        /// Whether operands that cuDNN does not support are an error. If not, attention falls back to plain XLA
        /// operations, with a warning.
        required: bool,
    },
    /// The Mosaic kernel of this crate, on TPU. Attention falls back to plain XLA operations for operands that the
    /// kernel does not support.
    Mosaic(Tpu),
}

/// Attention implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKernel {
    /// The platform's fused kernel, or plain XLA operations for operands that it does not support.
    Auto,
    /// Plain XLA operations; if the score matrix is large, queries are processed in chunks.
    Plain,
    /// cuDNN, on CUDA; operands that it does not support are an error.
    Cudnn,
    /// Mosaic, on TPU, or plain XLA operations for operands that it does not support.
    Mosaic,
}

impl AttentionKernel {
    /// Returns the kernel that this setting selects on a platform with default kernel `own`, or the reason why the
    /// platform does not support the setting.
    pub fn kernel(self, own: Kernel) -> Result<Kernel, &'static str> {
        match (self, own) {
            (AttentionKernel::Auto, _) | (AttentionKernel::Mosaic, Kernel::Mosaic(_)) => Ok(own),
            (AttentionKernel::Cudnn, Kernel::Cudnn { .. }) => Ok(Kernel::Cudnn { required: true }),
            (AttentionKernel::Plain, _) => Ok(Kernel::Plain),
            (AttentionKernel::Cudnn, _) => Err("cudnn requires CUDA and a GPU of compute capability 8.0 or newer"),
            (AttentionKernel::Mosaic, _) => Err("mosaic requires a TPU"),
        }
    }
}

/// Computes attention of queries `q [b, q, h, d]` over keys `k` and values `v`, both `[b, k, kv, d]`. The optional f32
/// bias `[b or 1, 1, q or 1, k]` is added to the scores of all heads. The result is `[b, q, h, d]` in the element type
/// of the queries.
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
    let v = &transpose_values(v);
    match chunk(q, k, bias) {
        None => plain::attention(q, k, v, bias, scale),
        Some(size) => {
            let attend = |q: &Value, bias: Option<&Value>| vec![plain::attention(q, k, v, bias, scale)];
            plain::chunked(q, bias, size, &[q.ty().clone()], attend).remove(0)
        }
    }
}

/// Returns whether a fused kernel supports window attention of `q [b, frames, rows, columns, heads, dim]` on a grid
/// with these axes. Only CUDA has such a kernel. It is not used if the configuration requires cuDNN or plain XLA
/// operations.
pub fn has_windows(kernel: Kernel, q: &Value, axes: [GridAxis; 3]) -> bool {
    kernel == Kernel::Cudnn { required: false } && kernel.supports_windows(q, triton::unsupported_reason(q, axes))
}

/// Online-softmax state of attention over a subset of the keys. The states of two subsets can be combined.
#[derive(Clone)]
pub struct PartialAttention {
    /// Weighted sum of values, not normalized, `[b, q, h, d]`, f32.
    pub(crate) acc: Value,
    /// Largest score of each query, `[b, q, h, 1]`, f32.
    pub max: Value,
    /// Sum of the weights of each query, `[b, q, h, 1]`, f32.
    pub denom: Value,
}

impl PartialAttention {
    /// Computes attention over a subset of the keys. The parameters are those of [`attention`].
    pub fn compute(kernel: Kernel, q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> Self {
        match kernel {
            Kernel::Cudnn { .. } if kernel.supports(q, k, cudnn::partial_unsupported_reason(q, k, bias)) => {
                q.builder().count_attention(q, k, v);
                let [values, log_sum] = cudnn::partial(q, k, v, bias, scale);
                return PartialAttention::from_normalized(&values, log_sum);
            }
            Kernel::Mosaic(tpu) if kernel.supports(q, k, mosaic::unsupported_reason(q, k, v, bias)) => {
                q.builder().count_attention(q, k, v);
                return PartialAttention::from_values(&mosaic::partial(q, k, v, bias, scale, tpu));
            }
            _ => {}
        }
        let v = &transpose_values(v);
        let Some(size) = chunk(q, k, bias) else {
            return PartialAttention::from_values(&plain::partial(q, k, v, bias, scale));
        };
        let wide = Type::new(DType::F32, q.dims());
        let narrow = Type::new(DType::F32, [&q.dims()[..3], &[1]].concat());
        let types = [wide, narrow.clone(), narrow];
        let attend = |q: &Value, bias: Option<&Value>| plain::partial(q, k, v, bias, scale).to_vec();
        PartialAttention::from_values(&plain::chunked(q, bias, size, &types, attend))
    }

    /// Creates the state from normalized values and the log-sum-exp of each query's scores `[b, q, h, 1]`, f32. The
    /// log-sum-exp serves as the maximum, because the weights then sum to 1.
    fn from_normalized(values: &Value, log_sum: Value) -> Self {
        let denom = log_sum.builder().full(1.0, log_sum.ty().clone());
        PartialAttention { acc: values.to(DType::F32), max: log_sum, denom }
    }

    /// Creates the state from the loop-carried values `[acc, max, denom]`.
    pub(crate) fn from_values(values: &[Value]) -> Self {
        PartialAttention { acc: values[0].clone(), max: values[1].clone(), denom: values[2].clone() }
    }

    /// Converts the state to the loop-carried values `[acc, max, denom]`.
    pub fn into_values(self) -> [Value; 3] {
        [self.acc, self.max, self.denom]
    }

    /// Returns the state rescaled to the maximum `max`, which must not be smaller than the current one.
    pub fn rescaled(&self, max: &Value) -> Self {
        let factor = (&self.max - max).exp();
        PartialAttention { acc: &self.acc * &factor, denom: &self.denom * &factor, max: max.clone() }
    }

    /// Combines the states of two subsets of keys.
    pub fn join(&self, other: &Self) -> Self {
        let max = self.max.maximum(&other.max);
        let (a, b) = (self.rescaled(&max), other.rescaled(&max));
        PartialAttention { acc: a.acc + b.acc, denom: a.denom + b.denom, max }
    }

    /// Returns the normalized attention result.
    pub fn finish(&self, dtype: DType) -> Value {
        (&self.acc / &self.denom).to(dtype)
    }
}

/// Transposes `[b, k, kv, d]` to `[b, kv, d, k]`. This must happen outside of the loop over chunks. Otherwise the
/// compiler chooses this dimension order for the loop operand and copies the entire stacked tensor (the values of all
/// layers) of which `v` is a slice.
fn transpose_values(v: &Value) -> Value {
    v.transpose(&[0, 2, 3, 1])
}

/// Returns the number of queries per chunk; `None`: all queries in one chunk.
fn chunk(q: &Value, k: &Value, bias: Option<&Value>) -> Option<usize> {
    // A bias per query occurs in window attention, where the batch consists of many short blocks of queries. These need
    // no chunks, so the decision then depends on the score matrices of a single batch entry.
    let entries = if bias.is_some_and(|bias| bias.dim(-2) != 1) { 1 } else { q.dim(0) };
    let row = entries * q.dim(2) * k.dim(1);
    if row * q.dim(1) <= LARGEST_SCORES {
        return None;
    }
    // Choose the chunk size that pads the last chunk least, because padding is wasted computation.
    let least = (row * q.dim(1)).div_ceil(LARGEST_SCORES);
    let sizes = (least..2 * least).map(|n| q.dim(1).div_ceil(n).next_multiple_of(TILE));
    sizes.min_by_key(|&size| (q.dim(1).next_multiple_of(size), std::cmp::Reverse(size)))
}
