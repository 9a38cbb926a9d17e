//! Normalisations. All compute in f32; the callers round the result once.

use crate::dtype::DType;
use crate::hlo::Value;

/// `x / sqrt(mean(x²) + eps)` over the last dimension, in f32.
pub fn rms(x: &Value, eps: f64) -> Value {
    rms_over(x, &[-1], eps)
}

/// [`rms`] over several dimensions together.
fn rms_over(x: &Value, axes: &[isize], eps: f64) -> Value {
    let f = x.to(DType::F32);
    let scale = (f.square().mean_keep(axes) + eps).rsqrt();
    f * scale
}

/// [`rms`] over the last `weight.rank()` dimensions times a weight of their shape; in `x`'s element type.
pub fn rms_norm(x: &Value, weight: Option<&Value>, over: usize, eps: f64) -> Value {
    let axes: Vec<isize> = (1..=over as isize).map(|i| -i).collect();
    let y = rms_over(x, &axes, eps);
    match weight {
        Some(w) => y * w.to(DType::F32),
        None => y,
    }
    .to(x.dtype())
}

/// `(x - mean) / sqrt(var + eps)` over the last dimension, in f32, without weights.
pub fn layer_norm(x: &Value, eps: f64) -> Value {
    let f = x.to(DType::F32);
    let centred = &f - f.mean_keep(&[-1]);
    let scale = (centred.square().mean_keep(&[-1]) + eps).rsqrt();
    centred * scale
}

/// `x / sqrt(mean(x²) + eps)` over the channels of `[b, channels, …]`, in `x`'s element type.
pub fn pixel_norm(x: &Value, eps: f64) -> Value {
    rms_over(x, &[1], eps).to(x.dtype())
}
