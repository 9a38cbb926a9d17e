//! Normalization layers. All compute in f32; the result is rounded once.

use super::halo::SpatialShards;
use super::layout::Axis;
use super::param::Init;
use super::params::Params;
use ltx2_stablehlo::{DType, Value};

/// Returns `x / sqrt(mean(x²) + eps)` over the last dimension, in f32.
pub fn rms(x: &Value, eps: f64) -> Value {
    rms_over(x, &[-1], eps)
}

/// Normalizes like [`rms`], but over several dimensions jointly.
fn rms_over(x: &Value, axes: &[isize], eps: f64) -> Value {
    let f = x.to(DType::F32);
    let scale = (f.square().mean_keep(axes) + eps).rsqrt();
    f * scale
}

/// Normalizes like [`rms`], but over the last `over` dimensions jointly. Multiplies the result by `weight`, which has
/// the shape of these dimensions (`None`: not multiplied), and converts it to the element type of `x`.
pub(crate) fn rms_norm(x: &Value, weight: Option<&Value>, over: usize, eps: f64) -> Value {
    let axes: Vec<isize> = (1..=over as isize).map(|i| -i).collect();
    let y = rms_over(x, &axes, eps);
    match weight {
        Some(w) => y * w.to(DType::F32),
        None => y,
    }
    .to(x.dtype())
}

/// Returns `(x - mean) / sqrt(var + eps)` over the last dimension, in f32, without weights.
pub fn layer_norm(x: &Value, eps: f64) -> Value {
    let f = x.to(DType::F32);
    let centred = &f - f.mean_keep(&[-1]);
    let scale = (centred.square().mean_keep(&[-1]) + eps).rsqrt();
    centred * scale
}

/// Returns `x / sqrt(mean(x²) + eps)` over the channels of `[b, channels, …]`, in the element type of `x`.
pub fn pixel_norm(x: &Value, eps: f64) -> Value {
    rms_over(x, &[1], eps).to(x.dtype())
}

/// Applies group norm to `x [b, channels, frames, height, width]` with the parameters at `p`, in f32: normalizes each
/// group of channels, over all frames or for each frame, then applies weight and bias per channel. If the video is
/// sharded, the statistics cover all blocks.
pub fn group_norm(p: &Params, x: &Value, groups: usize, eps: f64, each_frame: bool, shards: &SpatialShards) -> Value {
    let _scope = p.scope();
    let [b, c, f, h, w] = [0, 1, 2, 3, 4].map(|axis| x.dim(axis));
    if !c.is_multiple_of(groups) {
        p.builder().reject("group_norm", format!("{c} channels cannot be divided evenly into {groups} groups"));
        return x.to(DType::F32);
    }
    let axes: &[isize] = if each_frame { &[1, 3, 4] } else { &[1, 2, 3, 4] };
    // Merge groups into the batch, so that the indices of height and width do not change.
    let grouped = x.to(DType::F32).reshape(vec![b * groups, c / groups, f, h, w]);
    let count = [1, 2, 3, 4].into_iter().filter(|axis| axes.contains(axis));
    let count: usize = count.map(|axis| shards.global_size(&grouped, axis as usize)).product();
    let mean = |x: &Value| shards.sum_keep(x, axes) * (count as f64).recip();
    let centred = &grouped - mean(&grouped);
    let scale = (mean(&centred.square()) + eps).rsqrt();
    let normed = (centred * scale).reshape(vec![b, c, f, h, w]);
    let of_channel = |name: &str, init| p.get(name, &[c], &[Axis::Replicated], init).to(DType::F32);
    let weight = of_channel("weight", Init { mean: 1.0, std: 0.02 }).reshape(vec![1, c, 1, 1, 1]);
    normed * weight + of_channel("bias", Init::normal(0.02)).reshape(vec![1, c, 1, 1, 1])
}
