//! Layers of the encoder and the decoder. Activations are `[b, channels, frames, height, width]`.

use crate::timestep::timestep_embedding;
use ltx2_nn::{Axis, Conv3d, Init, Padding, Params, SpatialShards, depth_to_space, pixel_norm, silu};
use ltx2_stablehlo::{DType, Value};

/// Epsilon of the norms inside blocks; not configurable.
const PIXEL_NORM_EPS: f64 = 1e-8;

/// Settings shared by all blocks of a network.
pub(crate) struct Layers {
    conv: Conv3d,
    shortcut_eps: f64,
    shards: SpatialShards,
}

impl Layers {
    /// Creates the settings for 3x3x3 kernels and for video that is sharded as described by `shards`.
    pub(crate) fn new(causal: bool, padding: Padding, shortcut_eps: f64, shards: SpatialShards) -> Self {
        Layers {
            conv: Conv3d { kernel: [3; 3], stride: [1; 3], causal, padding, temporal_padding: Padding::Replicate },
            shortcut_eps,
            shards,
        }
    }

    pub(crate) fn conv(&self, p: &Params, name: &str, x: &Value, out: usize) -> Value {
        let p = p.pp(name);
        let _scope = p.scope();
        self.conv.apply(&p.pp("conv"), x, out, &self.shards)
    }

    /// Applies `count` identical blocks `resnets.0`, `resnets.1` …; `temb [b, 4·channels]` is the stage's timestep
    /// embedding.
    pub(crate) fn res_blocks(&self, p: &Params, count: usize, x: &Value, temb: Option<&Value>) -> Value {
        let channels = x.dim(1);
        match count {
            0 => x.clone(),
            1 => self.res_block(&p.pp("resnets.0"), x, channels, temb),
            _ => {
                let body = |p: &Params, _: &Value, state: &[Value]| vec![self.res_block(p, &state[0], channels, temb)];
                p.each_layer("resnets", count, std::slice::from_ref(x), body).remove(0)
            }
        }
    }

    /// Returns `x + conv2(act(conv1(act(x))))`, where `act` is a norm, the scale and shift of the timestep embedding,
    /// and SiLU.
    pub(crate) fn res_block(&self, p: &Params, x: &Value, out: usize, temb: Option<&Value>) -> Value {
        let _scope = p.builder().scope("res_block");
        let rows = temb.map(|t| modulation(p, t, 4, x.dim(1)));
        let row = |i: usize| rows.as_ref().map(|r| [&r[i], &r[i + 1]]);
        let h = self.conv(p, "conv1", &activated(x, row(0)), out);
        let h = self.conv(p, "conv2", &activated(&h, row(2)), out);
        h + self.shortcut(p, x, out)
    }

    /// Returns `x` or, if the number of channels changes, the result of a layer norm and a 1x1x1 convolution of `x`.
    fn shortcut(&self, p: &Params, x: &Value, out: usize) -> Value {
        if x.dim(1) == out {
            return x.clone();
        }
        let pn = p.pp("norm3");
        let of_channel = |name: &str, init| {
            pn.get(name, &[x.dim(1)], &[Axis::Replicated], init).to(DType::F32).reshape(vec![1, x.dim(1), 1, 1, 1])
        };
        let f = x.to(DType::F32);
        let centred = &f - f.mean_keep(&[1]);
        let scale = (centred.square().mean_keep(&[1]) + self.shortcut_eps).rsqrt();
        let weight = of_channel("weight", Init { mean: 1.0, std: 0.02 });
        let normed = centred * scale * weight + of_channel("bias", Init::normal(0.02));
        let conv = Conv3d { kernel: [1; 3], ..self.conv };
        conv.apply(&p.pp("conv_shortcut"), &normed.to(x.dtype()), out, &self.shards)
    }

    /// Upsamples by `stride`: a convolution to `volume / factor` times the channels, then depth-to-space; `volume` is
    /// the product of the strides. With `residual`, depth-to-space of the input, repeated to match the channels, is
    /// added.
    pub(crate) fn upsample(&self, p: &Params, x: &Value, stride: [usize; 3], factor: usize, residual: bool) -> Value {
        let _scope = p.builder().scope("upsample");
        let volume: usize = stride.iter().product();
        let y = depth_to_space(&self.conv(p, "conv", x, x.dim(1) * volume / factor), stride);
        if !residual {
            return y;
        }
        let input = depth_to_space(x, stride);
        y + p.builder().concat(&vec![&input; volume / factor], 1)
    }

    /// Downsamples to `out` channels. Adds two parts: space-to-depth of a convolution to `out / volume` channels, and
    /// space-to-depth of the input with channels averaged in groups; `volume` is the product of the strides. If time is
    /// downsampled, the first frame is duplicated beforehand.
    pub(crate) fn downsample(&self, p: &Params, x: &Value, stride: [usize; 3], out: usize) -> Value {
        let _scope = p.builder().scope("downsample");
        let volume: usize = stride.iter().product();
        let x = x.pad_edge(2, stride[0] - 1, 0);
        let input = self.space_to_depth(&x, stride).to(DType::F32);
        let [b, all, f, h, w] = [0, 1, 2, 3, 4].map(|a| input.dim(a));
        let means = input.reshape(vec![b, out, all / out, f, h, w]).mean_keep(&[2]).reshape(vec![b, out, f, h, w]);
        let y = self.space_to_depth(&self.conv(p, "conv", &x, out / volume), stride).to(DType::F32);
        (y + means).to(x.dtype())
    }

    /// Downsamples by a convolution with stride 2.
    pub(crate) fn strided(&self, p: &Params, x: &Value) -> Value {
        Conv3d { stride: [2; 3], ..self.conv }.apply(p, x, x.dim(1), &self.shards)
    }

    /// Moves blocks of time, height and width into channels, in the order `(c, t, i, j)`.
    fn space_to_depth(&self, x: &Value, stride: [usize; 3]) -> Value {
        let [b, c] = [x.dim(0), x.dim(1)];
        let ([f, h, w], [st, sh, sw]) = (self.divided(x, stride), stride);
        let y = x.reshape(vec![b, c, f, st, h, sh, w, sw]).transpose(&[0, 1, 3, 5, 7, 2, 4, 6]);
        y.reshape(vec![b, c * st * sh * sw, f, h, w])
    }

    /// Moves squares of `patch` pixels into channels, in the order `(c, column, row)`.
    pub(crate) fn patchify(&self, x: &Value, patch: usize) -> Value {
        let [b, c] = [x.dim(0), x.dim(1)];
        let [f, h, w] = self.divided(x, [1, patch, patch]);
        let y = x.reshape(vec![b, c, f, h, patch, w, patch]).transpose(&[0, 1, 6, 4, 2, 3, 5]);
        y.reshape(vec![b, c * patch * patch, f, h, w])
    }

    /// Returns frames, rows and columns divided by `stride`. Divisibility is checked for the complete video, not only
    /// for the shards.
    fn divided(&self, x: &Value, stride: [usize; 3]) -> [usize; 3] {
        let sizes = [2, 3, 4].map(|axis| self.shards.global_size(x, axis));
        if sizes.iter().zip(stride).any(|(size, s)| !size.is_multiple_of(s)) {
            let message = format!("{sizes:?} frames, rows and columns are not divisible by {stride:?}");
            x.builder().reject("space_to_depth", message);
        }
        [0, 1, 2].map(|i| x.dim(i as isize + 2) / stride[i])
    }
}

/// Returns `silu(norm(x)·(1 + scale) + shift)` for rows `[shift, scale]`, computed in f32 and rounded once.
pub(crate) fn activated(x: &Value, rows: Option<[&Value; 2]>) -> Value {
    let normed = pixel_norm(&x.to(DType::F32), PIXEL_NORM_EPS);
    let modulated = match rows {
        Some([shift, scale]) => normed * (scale + 1.0) + shift,
        None => normed,
    };
    silu(&modulated).to(x.dtype())
}

/// Adds the timestep embedding `[b, rows·channels]` to the scale-shift table at `p`; returns one f32 `[b, channels, 1,
/// 1, 1]` per row.
pub(crate) fn modulation(p: &Params, temb: &Value, rows: usize, channels: usize) -> Vec<Value> {
    let init = Init::normal((channels as f32).sqrt().recip());
    let table = p.get("scale_shift_table", &[rows, channels], &[Axis::Replicated; 2], init).to(DType::F32);
    let sum = temb.to(DType::F32).reshape(vec![temb.dim(0), rows, channels]) + table;
    (0..rows).map(|r| sum.at(1, r).reshape(vec![temb.dim(0), channels, 1, 1, 1])).collect()
}

/// Applies the timestep embedder at `p` to timesteps `[b]`: `[b, width]`.
pub(crate) fn embedded(p: &Params, temb: &Value, width: usize) -> Value {
    timestep_embedding(&p.pp("time_embedder.timestep_embedder"), temb, width)
}

/// Moves channels `(c, column, row)` to squares of `patch` pixels, the inverse of [`Layers::patchify`].
pub(crate) fn unpatchify(x: &Value, patch: usize) -> Value {
    let [b, all, f, h, w] = [0, 1, 2, 3, 4].map(|a| x.dim(a));
    let c = all / (patch * patch);
    let y = x.reshape(vec![b, c, patch, patch, f, h, w]).transpose(&[0, 1, 4, 5, 3, 6, 2]);
    y.reshape(vec![b, c, f, h * patch, w * patch])
}
