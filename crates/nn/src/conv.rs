//! Convolutions of `[b, channels, …]` with checkpoint weights `[out, in, kernel…]` and biases `[out]`.
//!
//! Weights are replicated because they are small compared with the activations.

use super::build::Conv3dLowering;
use super::halo::{Padding, SpatialShards};
use super::layout::Axis;
use super::param::Init;
use super::params::Params;
use ltx2_stablehlo::{Conv, DType, Value};

/// A 3D convolution over time, height and width. With stride 1, the output has the size of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv3d {
    /// Kernel size in time, height and width.
    pub kernel: [usize; 3],
    /// Stride in time, height and width.
    pub stride: [usize; 3],
    /// Whether an output frame depends only on the current and earlier frames.
    pub causal: bool,
    /// Padding in height and width.
    pub padding: Padding,
    /// Padding before the first frame and, unless `causal`, after the last one.
    pub temporal_padding: Padding,
}

impl Conv3d {
    /// Applies the convolution with the parameters at `p` to `x [b, channels, frames, height, width]`. The result has
    /// `out` channels and the element type of `x`. If the video is sharded, the size of the local block must be
    /// divisible by the stride.
    pub fn apply(&self, p: &Params, x: &Value, out: usize, shards: &SpatialShards) -> Value {
        let _scope = p.scope();
        let (weight, bias) = parameters(p, out, x.dim(1), &self.kernel, true);
        self.convolve(p, x, &weight, bias, shards)
    }

    /// Convolves like [`Conv3d::apply`], but each frame separately, with a weight `[out, in, rows, columns]`.
    pub fn apply_to_frames(&self, p: &Params, x: &Value, out: usize, shards: &SpatialShards) -> Value {
        let _scope = p.scope();
        let [_, rows, columns] = self.kernel;
        let (weight, bias) = parameters(p, out, x.dim(1), &[rows, columns], true);
        let frames = Conv3d { kernel: [1, rows, columns], stride: [1, self.stride[1], self.stride[2]], ..*self };
        frames.convolve(p, x, &weight.unsqueeze(2), bias, shards)
    }

    fn convolve(&self, p: &Params, x: &Value, weight: &Value, bias: Option<Value>, shards: &SpatialShards) -> Value {
        let [time, rows, columns] = self.kernel.map(|k| k - 1);
        let (before, after) = if self.causal { (time, 0) } else { (time / 2, time / 2) };
        let reach = [rows / 2, columns / 2];
        let x = shards.extend(x, reach, self.padding);
        let lowering = p.lowering().conv3d;
        let (x, ends) = match self.temporal_padding {
            // As an attribute of the convolution, zero padding is free.
            Padding::Zeros if lowering == Conv3dLowering::Direct => (x, (before, after)),
            padding => (pad(p, &x, 2, before, after, padding), (0, 0)),
        };
        let [above, left] = [(3, reach[0]), (4, reach[1])].map(|(axis, n)| if shards.is_sharded(axis) { 0 } else { n });
        let (x, zeros) = match self.padding {
            Padding::Zeros => (x, [above, left]),
            padding => (pad(p, &pad(p, &x, 3, above, above, padding), 4, left, left, padding), [0, 0]),
        };
        match lowering {
            Conv3dLowering::Direct => {
                let padding = [ends, (zeros[0], zeros[0]), (zeros[1], zeros[1])];
                let window = Conv::new(3).stride(&self.stride).padding(&padding);
                add_bias(x.builder().convolution(&x, weight, &window), bias)
            }
            Conv3dLowering::Taps => self.taps(&x, weight, bias, zeros),
        }
    }

    /// Computes the 3D convolution as a sum of 2D convolutions, one per kernel frame, with frames moved into the batch.
    fn taps(&self, x: &Value, weight: &Value, bias: Option<Value>, zeros: [usize; 2]) -> Value {
        let window = Conv::new(2).stride(&self.stride[1..]).padding(&zeros.map(|n| (n, n)));
        let (batch, step) = (x.dim(0), self.stride[0]);
        let frames = x.dim(2).saturating_sub(self.kernel[0]) / step + 1;
        let x = x.swap(1, 2);
        let product = |t: usize| {
            let part = x.slice_step(1, t, t + (frames - 1) * step + 1, step);
            let images = part.reshape([&[batch * frames], &part.dims()[2..]].concat());
            // Convert operands to f32 to accumulate in f32; at default precision the dots still use 16-bit values.
            x.builder().convolution(&images.to(DType::F32), &weight.at(2, t).to(DType::F32), &window)
        };
        let sum = (1..self.kernel[0]).fold(product(0), |sum, t| sum + product(t));
        let sum = add_bias(sum, bias.map(|b| b.to(DType::F32))).to(x.dtype());
        sum.reshape([&[batch, frames], &sum.dims()[1..]].concat()).swap(1, 2)
    }
}

/// Enlarges time, height and width by the factors `st`, `sh` and `sw`, with elements from the channels, which are `(c,
/// st, sh, sw)`. Drops the first `st - 1` frames, because the first latent frame represents a single frame.
pub fn depth_to_space(x: &Value, [st, sh, sw]: [usize; 3]) -> Value {
    let [b, all, f, h, w] = [0, 1, 2, 3, 4].map(|a| x.dim(a));
    let c = all / (st * sh * sw);
    let y = x.reshape(vec![b, c, st, sh, sw, f, h, w]).transpose(&[0, 1, 5, 2, 6, 3, 7, 4]);
    y.reshape(vec![b, c, f * st, h * sh, w * sw]).slice(2, st - 1, f * st)
}

/// Pads a dimension by `low` elements at the start and `high` elements at the end.
fn pad(p: &Params, x: &Value, axis: isize, low: usize, high: usize, padding: Padding) -> Value {
    let n = x.dim(axis);
    if low == 0 && high == 0 {
        return x.clone();
    }
    match padding {
        Padding::Zeros => x.pad(axis, low, high, 0.0),
        Padding::Reflect if low >= n || high >= n || !p.lowering().pads_by_index => x.pad_reflect(axis, low, high),
        Padding::Replicate if !p.lowering().pads_by_index => x.pad_edge(axis, low, high),
        Padding::Reflect => {
            let places = (1..=low).rev().chain(0..n).chain((n - 1 - high..n - 1).rev());
            x.index_select(axis, &places.collect::<Vec<_>>())
        }
        Padding::Replicate => {
            let places = std::iter::repeat_n(0, low).chain(0..n).chain(std::iter::repeat_n(n - 1, high));
            x.index_select(axis, &places.collect::<Vec<_>>())
        }
    }
}

/// Convolves `x [b, channels, height, width]` with the parameters at `p`: a square kernel of side `kernel`, and `out`
/// output channels.
pub fn conv2d(p: &Params, x: &Value, out: usize, kernel: usize, window: &Conv) -> Value {
    let _scope = p.scope();
    let (weight, bias) = parameters(p, out, x.dim(1), &[kernel; 2], true);
    add_bias(x.builder().convolution(x, &weight, window), bias)
}

/// Convolves `x [b, channels, samples]` with the parameters at `p` and keeps the length: pads with `(kernel - 1) ·
/// dilation` zeros, half at each end. If their number is odd, the end gets one more.
pub fn conv1d(p: &Params, x: &Value, out: usize, kernel: usize, dilation: usize, bias: bool) -> Value {
    let _scope = p.scope();
    let (weight, bias) = parameters(p, out, x.dim(1), &[kernel], bias);
    let total = (kernel - 1) * dilation;
    let window = Conv::new(1).padding(&[(total / 2, total - total / 2)]).dilation(&[dilation]);
    add_bias(x.builder().convolution(x, &weight, &window), bias)
}

/// Applies the transposed convolution with the parameters at `p` (weight `[in, out, kernel]`) to `x [b, channels,
/// samples]`. Removes `crop` samples at both ends of the result.
pub fn conv_transpose1d_at(p: &Params, x: &Value, out: usize, kernel: usize, stride: usize, crop: usize) -> Value {
    let _scope = p.scope();
    let inner = x.dim(1);
    // Each output sample sums kernel / stride taps of each channel.
    let deviation = (inner as f32 * kernel as f32 / stride as f32).sqrt().recip();
    let weight = p.get("weight", &[inner, out, kernel], &[Axis::Replicated; 3], Init::normal(deviation));
    let bias = p.get("bias", &[out], &[Axis::Replicated], Init::normal(0.02));
    add_bias(conv_transpose1d(x, &weight, stride, crop), Some(bias))
}

/// Applies the transposed convolution with `weight [channels, out, kernel]` to `x [b, channels, samples]`. Removes
/// `crop` samples at both ends of the result.
///
/// The function uses one dense convolution that computes `stride` adjacent output samples as channels, which are then
/// interleaved, because compilers have no fast implementation of input-dilated convolutions.
pub fn conv_transpose1d(x: &Value, weight: &Value, stride: usize, crop: usize) -> Value {
    let (rows, samples) = (x.dim(0), x.dim(2));
    let (inner, out, kernel) = (weight.dim(0), weight.dim(1), weight.dim(2));
    let taps = kernel.div_ceil(stride);
    let phases = weight.pad(2, 0, taps * stride - kernel, 0.0).reshape(vec![inner, out, taps, stride]).reverse(2);
    let phases = phases.transpose(&[3, 1, 0, 2]).reshape(vec![stride * out, inner, taps]);
    let y = x.builder().convolution(x, &phases, &Conv::new(1).padding(&[(taps - 1, taps - 1)]));
    let turns = y.reshape(vec![rows, stride, out, y.dim(2)]).transpose(&[0, 2, 3, 1]);
    let y = turns.reshape(vec![rows, out, stride * y.dim(2)]);
    y.slice(2, crop, ((samples - 1) * stride + kernel).saturating_sub(crop))
}

fn parameters(p: &Params, out: usize, inner: usize, kernel: &[usize], bias: bool) -> (Value, Option<Value>) {
    let shape = [&[out, inner], kernel].concat();
    let fan_in: usize = shape[1..].iter().product();
    let init = Init::normal((fan_in as f32).sqrt().recip());
    let weight = p.get("weight", &shape, &vec![Axis::Replicated; shape.len()], init);
    (weight, bias.then(|| p.get("bias", &[out], &[Axis::Replicated], Init::normal(0.02))))
}

fn add_bias(y: Value, bias: Option<Value>) -> Value {
    let Some(bias) = bias else { return y };
    let mut dims = vec![1; y.rank()];
    dims[1] = bias.dim(0);
    y + bias.reshape(dims)
}
