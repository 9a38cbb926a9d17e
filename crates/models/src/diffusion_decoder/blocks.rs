//! Layers of the diffusion decoder. Activations are `[b, frames, rows, columns, channels]`.

use super::neighborhood::{self, Windowed};
use ltx2_nn::rope::{Pairing, rotate};
use ltx2_nn::{Axis, Init, Params, SpatialShards, linear, rms, silu};
use ltx2_stablehlo::{DType, Type, Value};

const EPS: f64 = 1e-6;
const ROPE_BASE: f64 = 10_000.0;

/// Applies a linear layer with bias to the last dimension.
pub(super) fn affine(p: &Params, name: &str, x: &Value, out: usize) -> Value {
    linear(&p.pp(name), x, out, true, [Axis::Replicated; 2])
}

fn norm_weight(p: &Params, channels: usize) -> Value {
    p.get("weight", &[channels], &[Axis::Replicated], Init { mean: 1.0, std: 0.02 })
}

/// Applies an RMS norm with a learned weight; returns f32.
fn norm(p: &Params, name: &str, x: &Value) -> Value {
    let weight = norm_weight(&p.pp(name), x.dim(-1));
    rms(x, EPS) * weight.to(DType::F32)
}

pub(super) fn normed(p: &Params, name: &str, x: &Value) -> Value {
    norm(p, name, x).to(x.dtype())
}

/// 3D RoPE tables: cosines and sines, f32 `[1, cells, 1, head_dim / 2]`, where a cell is one position (frame, row,
/// column) of `x`. Of the feature pairs of a head, the first are rotated by frame position, the next by row and the
/// last by column.
#[derive(Clone)]
pub(super) struct Rope3d([Value; 2]);

impl Rope3d {
    /// Computes the tables for the cells of `x [b, frames, rows, columns, channels]`.
    pub(super) fn new(p: &Params, x: &Value, head_dim: usize, shards: &SpatialShards) -> Self {
        let b = p.builder();
        let pairs = pairs(head_dim);
        let grid = [1, 2, 3].map(|axis| x.dim(axis));
        let angles: [Value; 3] = [0, 1, 2].map(|axis| {
            let mut dims = vec![1; 4];
            dims[axis] = grid[axis];
            let position = b.iota(Type::new(DType::F32, dims), axis);
            let position = match shards.along(1 + axis) {
                Some(dim) => position + dim.first(grid[axis]).to(DType::F32),
                None => position,
            };
            position * b.constant(&[1, 1, 1, pairs[axis]], &frequencies(pairs[axis]))
        });
        let table = |f: fn(&Value) -> Value| {
            let over = |(axis, angle): (usize, &Value)| f(angle).broadcast_to(&[&grid[..], &[pairs[axis]]].concat());
            let axes: Vec<Value> = angles.iter().enumerate().filter(|(axis, _)| pairs[*axis] > 0).map(over).collect();
            let all = b.concat(&axes.iter().collect::<Vec<_>>(), 3);
            all.reshape(vec![1, grid.iter().product(), 1, head_dim / 2])
        };
        Rope3d([table(Value::cos), table(Value::sin)])
    }

    fn rotated(&self, p: &Params, x: &Value) -> Value {
        let cells = [1, 2, 3].iter().map(|axis| x.dim(*axis)).product();
        let flat = x.reshape(vec![x.dim(0), cells, x.dim(4), x.dim(5)]);
        let [cos, sin] = &self.0;
        rotate(p, &flat, cos, sin, Pairing::Interleaved, p.numerics()).reshape(x.dims().to_vec())
    }
}

/// Returns how many feature pairs of a head are rotated by frame, row and column position: about a quarter by frame,
/// and the rest split evenly between row and column.
pub(super) fn pairs(head_dim: usize) -> [usize; 3] {
    let even = head_dim / 4 / 2 * 2;
    let frames = if ((head_dim - even) / 2).is_multiple_of(2) { even } else { even - 2 };
    let rest = (head_dim - frames) / 4;
    [frames / 2, rest, rest]
}

fn frequencies(pairs: usize) -> Vec<f32> {
    (0..pairs).map(|i| ROPE_BASE.powf(-(i as f64) / pairs as f64) as f32).collect()
}

/// Settings shared by the blocks of one stage.
pub(super) struct StageLayers {
    pub(super) kernel: [usize; 3],
    pub(super) head_dim: usize,
    pub(super) rope: Rope3d,
    /// Sharding of the activations.
    pub(super) shards: SpatialShards,
}

impl StageLayers {
    /// Returns `h + mlp(norm2(h))` with `h = x + attn(norm1(x))`.
    pub(super) fn block(&self, p: &Params, x: &Value) -> Value {
        let _scope = p.builder().scope("block");
        let x = x + self.attention(&p.pp("attn"), &normed(p, "norm1", x));
        &x + mlp(&p.pp("mlp"), &normed(p, "norm2", &x))
    }

    /// Adds the projected context to `x`, then applies [`StageLayers::block`] with modulated norms. The timestep's
    /// `rows`, f32 `[1, 7, channels]`, are the scale, shift and gate of attention, the scale, shift and gate of the
    /// MLP, and the gate of the context. The gates are not used, because the published weights include them.
    pub(super) fn modulated(&self, p: &Params, x: &Value, context: &Value, rows: &Value) -> Value {
        let _scope = p.builder().scope("block");
        let channels = x.dim(-1);
        let table = p.get("scale_shift_table", &[7, channels], &[Axis::Replicated; 2], Init::normal(0.02));
        let rows = rows + table.to(DType::F32);
        let row = |i: usize| rows.at(1, i).reshape(vec![1, 1, 1, 1, channels]);
        let modulated = |name: &str, x: &Value, [scale, shift]: [usize; 2]| {
            (norm(p, name, x) * (row(scale) + 1.0) + row(shift)).to(x.dtype())
        };
        // In this order, XLA's CUDA compiler initializes the accumulators of the matrix product with `x`.
        let x = affine(p, "context_proj", context, channels) + x;
        let x = &x + self.attention(&p.pp("attn"), &modulated("norm1", &x, [0, 1]));
        &x + mlp(&p.pp("mlp"), &modulated("norm2", &x, [3, 4]))
    }

    fn attention(&self, p: &Params, x: &Value) -> Value {
        let _scope = p.scope();
        let channels = x.dim(-1);
        let heads = [&x.dims()[..4], &[channels / self.head_dim, self.head_dim]].concat();
        let [q, k, v] = ["to_q", "to_k", "to_v"].map(|name| affine(p, name, x, channels).reshape(heads.clone()));
        let q = self.rope.rotated(p, &normed(p, "norm_q", &q));
        let k = self.rope.rotated(p, &normed(p, "norm_k", &k));
        let scale = (self.head_dim as f64).sqrt().recip();
        let bound = || self.score_bound(p);
        let windowed = Windowed { q: &q, k: &k, v: &v, kernel: self.kernel, scale, bound: &bound };
        let o = neighborhood::attention(p, &windowed, &self.shards);
        affine(p, "to_out.0", &o.reshape(x.dims().to_vec()), channels)
    }

    /// Returns an upper bound of `|q · k|`, f32 `[1]`. After an RMS norm, the features of a head have a norm of at most
    /// `sqrt(head_dim)` times the largest weight, and RoPE preserves norms. 5 % covers rounding.
    fn score_bound(&self, p: &Params) -> Value {
        let largest = |name: &str| {
            let weight = norm_weight(&p.pp(name), self.head_dim).to(DType::F32);
            weight.maximum(&(&weight * -1.0)).max_keep(&[0])
        };
        largest("norm_q") * largest("norm_k") * (1.05 * self.head_dim as f64)
    }
}

/// Returns `w_down(silu(w_gate(x)) · w_up(x))`.
fn mlp(p: &Params, x: &Value) -> Value {
    let _scope = p.scope();
    let map = |name: &str, x: &Value, out: usize| linear(&p.pp(name), x, out, false, [Axis::Replicated; 2]);
    let hidden = (4 * x.dim(-1)).next_multiple_of(16);
    map("w_down", &(silu(&map("w_gate", x, hidden)) * map("w_up", x, hidden)), x.dim(-1))
}

/// Upsamples by `stride`: a linear layer, then depth-to-space of channels `(c, t, h, w)`. If frames are doubled and `x`
/// starts with the video's first frame (`is_first`), drops the first output frame, because the first latent covers only
/// a single frame.
pub(super) fn upsample(p: &Params, x: &Value, stride: [usize; 3], reduction: usize, is_first: bool) -> Value {
    let _scope = p.scope();
    let ([st, sh, sw], [b, t, h, w, c]) = (stride, [0, 1, 2, 3, 4].map(|axis| x.dim(axis)));
    let out = st * sh * sw * c / reduction / (st * sh * sw);
    let y = affine(p, "proj", x, st * sh * sw * out);
    let y = y.reshape(vec![b, t, h, w, out, st, sh, sw]).transpose(&[0, 1, 5, 2, 6, 3, 7, 4]);
    let y = y.reshape(vec![b, t * st, h * sh, w * sw, out]);
    if st == 2 && is_first { y.slice(1, 1, t * st) } else { y }
}
