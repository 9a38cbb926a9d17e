//! Layers of the encoder and the decoder. Activations are `[b, channels, time, mel]`.

use super::config::{AudioVaeConfig, Causality, GROUPS, Norm};
use ltx2_nn::{Attention, Axis, Init, Params, conv2d, layer_norm, pixel_norm, silu};
use ltx2_stablehlo::{Conv, DType, Value};

/// Epsilon of every norm; not configurable.
const EPS: f64 = 1e-6;

/// Applies the convolution `name`, padded to be causal along the configured axis and centred along the other axis.
pub(crate) fn conv(p: &Params, c: &AudioVaeConfig, name: &str, x: &Value, out: usize, kernel: usize) -> Value {
    let reach = kernel - 1;
    let (both, past) = ((reach / 2, reach - reach / 2), (reach, 0));
    let padding = match c.causality_axis {
        Causality::None => [both, both],
        Causality::Width | Causality::WidthCompatibility => [both, past],
        Causality::Height => [past, both],
    };
    let p = p.pp(name);
    let _scope = p.scope();
    conv2d(&p.pp("conv"), x, out, kernel, &Conv::new(2).padding(&padding))
}

/// Applies the norm `name`; returns f32.
fn norm(p: &Params, c: &AudioVaeConfig, name: &str, x: &Value) -> Value {
    let f = x.to(DType::F32);
    if c.norm_type == Norm::Pixel {
        return pixel_norm(&f, EPS);
    }
    let (b, channels) = (x.dim(0), x.dim(1));
    let rest = x.ty().elements() / (b * GROUPS);
    let normed = layer_norm(&f.reshape(vec![b, GROUPS, rest]), EPS).reshape(x.dims().to_vec());
    let of_channel = |part: &str, init| {
        p.pp(name).get(part, &[channels], &[Axis::Replicated], init).to(DType::F32).reshape(vec![1, channels, 1, 1])
    };
    normed * of_channel("weight", Init { mean: 1.0, std: 0.02 }) + of_channel("bias", Init::normal(0.02))
}

/// Returns `silu(norm(x))`, computed in f32 and rounded once.
pub(crate) fn activated(p: &Params, c: &AudioVaeConfig, name: &str, x: &Value) -> Value {
    silu(&norm(p, c, name, x)).to(x.dtype())
}

/// Returns `conv2(act(conv1(act(x))))` plus the shortcut: `x`, or a 1x1 convolution of it if the number of channels
/// changes.
pub(crate) fn res_block(p: &Params, c: &AudioVaeConfig, x: &Value, out: usize) -> Value {
    let _scope = p.builder().scope("res_block");
    let h = conv(p, c, "conv1", &activated(p, c, "norm1", x), out, 3);
    let h = conv(p, c, "conv2", &activated(p, c, "norm2", &h), out, 3);
    let shortcut = if x.dim(1) == out { x.clone() } else { conv(p, c, "nin_shortcut", x, out, 1) };
    shortcut + h
}

/// Returns `x` plus single-head self-attention over all positions.
pub(crate) fn attention(p: &Params, c: &AudioVaeConfig, x: &Value) -> Value {
    let _scope = p.builder().scope("attention");
    let [b, channels, time, mel] = [0, 1, 2, 3].map(|a| x.dim(a));
    let point = |name: &str, x: &Value| conv2d(&p.pp(name), x, channels, 1, &Conv::new(2));
    let normed = norm(p, c, "norm", x).to(x.dtype());
    let tokens = ["q", "k", "v"].map(|name| {
        let y = point(name, &normed).reshape(vec![b, channels, time * mel]);
        y.swap(1, 2).unsqueeze(2)
    });
    let [q, k, v] = &tokens;
    let scale = (channels as f64).sqrt().recip();
    let y = Attention { q, k, v, bias: None, scale, sequence: [Axis::Replicated; 2] }.run(p);
    let y = y.reshape(vec![b, time * mel, channels]).swap(1, 2).reshape(vec![b, channels, time, mel]);
    x + point("proj_out", &y)
}

/// Applies the middle blocks: two residual blocks, with attention between them if configured.
pub(crate) fn middle(p: &Params, c: &AudioVaeConfig, x: &Value) -> Value {
    let channels = x.dim(1);
    let mut x = res_block(&p.pp("block_1"), c, x, channels);
    if c.mid_block_add_attention {
        x = attention(&p.pp("attn_1"), c, &x);
    }
    res_block(&p.pp("block_2"), c, &x, channels)
}

/// Downsamples by a convolution with stride 2 along both axes, causal along the configured axis.
pub(crate) fn downsample(p: &Params, c: &AudioVaeConfig, x: &Value) -> Value {
    let _scope = p.scope();
    let (past, future) = ((2, 0), (0, 1));
    let padding = match c.causality_axis {
        Causality::None => [future, future],
        Causality::Width => [future, past],
        Causality::WidthCompatibility => [future, (1, 0)],
        Causality::Height => [past, future],
    };
    conv2d(&p.pp("conv"), x, x.dim(1), 3, &Conv::new(2).stride(&[2, 2]).padding(&padding))
}

/// Doubles both axes by nearest-neighbour upsampling, then applies a convolution. Along the causal axis, the first
/// output element is dropped, because no element precedes the first input element (except with `WidthCompatibility`).
pub(crate) fn upsample(p: &Params, c: &AudioVaeConfig, x: &Value) -> Value {
    let _scope = p.scope();
    let [b, channels, time, mel] = [0, 1, 2, 3].map(|a| x.dim(a));
    let twice = x.reshape(vec![b, channels, time, 1, mel, 1]).broadcast_to(&[b, channels, time, 2, mel, 2]);
    let y = conv(p, c, "conv", &twice.reshape(vec![b, channels, 2 * time, 2 * mel]), channels, 3);
    match c.causality_axis {
        Causality::Height => y.slice(2, 1, 2 * time),
        Causality::Width => y.slice(3, 1, 2 * mel),
        Causality::None | Causality::WidthCompatibility => y,
    }
}
