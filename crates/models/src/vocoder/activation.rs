//! Periodic activations and their anti-aliasing filters. Activations are `[b, channels, samples]`.

use super::resample::{each_channel, raised};
use ltx2_nn::{Axis, Init, Params};
use ltx2_stablehlo::{Conv, DType, Value};

/// Value added to a learned divisor to avoid division by zero.
const SNAKE_EPS: f64 = 1e-9;

/// Returns `x` where positive, `slope · x` elsewhere.
pub(crate) fn leaky_relu(x: &Value, slope: f64) -> Value {
    x.compare(ltx2_stablehlo::Comparison::Gt, &x.like(0.0)).select(x, &(x * slope))
}

/// Returns `x + sin²(αx) / β`, computed in f32 and rounded once. `α` and `β` are stored as logarithms; without `beta`,
/// `β` is `α`.
pub(crate) fn snake(p: &Params, x: &Value, beta: bool) -> Value {
    let _scope = p.scope();
    let channels = x.dim(1);
    let learned = |name: &str| {
        let log = p.get(name, &[channels], &[Axis::Replicated], Init::normal(0.02));
        log.to(DType::F32).exp().reshape(vec![1, channels, 1])
    };
    let alpha = learned("alpha");
    let amplitude = if beta { learned("beta") } else { alpha.clone() };
    let f = x.to(DType::F32);
    let wave = (&f * alpha).sin().square();
    (&f + wave / (amplitude + SNAKE_EPS)).to(x.dtype())
}

/// Anti-aliasing of an activation: upsamples by `ratio`, applies the activation, and downsamples, with low-pass
/// filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AntiAlias {
    pub ratio: usize,
    /// Length of the filters, whose taps are in the checkpoint.
    pub kernel: usize,
}

impl AntiAlias {
    /// Returns `down(f(up(x)))` with the filters at `p`.
    pub(crate) fn around(self, p: &Params, x: &Value, f: impl FnOnce(&Value) -> Value) -> Value {
        let up = self.up(&p.pp("upsample"), x);
        self.down(&p.pp("downsample"), &f(&up))
    }

    fn taps(self, p: &Params) -> Value {
        // With random initialization, the taps sum to 1, like those of a low-pass filter.
        p.get("filter", &[1, 1, self.kernel], &[Axis::Replicated; 3], Init { mean: 1.0 / self.kernel as f32, std: 0.0 })
    }

    fn up(self, p: &Params, x: &Value) -> Value {
        let (ratio, k) = (self.ratio, self.kernel);
        let pad = k / ratio - 1;
        let (left, right) = (pad * ratio + (k - ratio) / 2, pad * ratio + (k - ratio).div_ceil(2));
        raised(x, &self.taps(p), ratio, pad, [left, right])
    }

    fn down(self, p: &Params, x: &Value) -> Value {
        let (left, right) = (self.kernel.div_ceil(2) - 1, self.kernel / 2);
        each_channel(&x.pad_edge(2, left, right), |x| {
            x.builder().convolution(x, &self.taps(p), &Conv::new(1).stride(&[self.ratio]))
        })
    }
}
