//! Decoder layer shared by Gemma 3 and Gemma 4: attention and MLP, each with a norm before and after it.

use ltx2_nn::kernels::{RowNorm, RowScale};
use ltx2_nn::{Axis, Heads, Init, Params, Weight, affine, gelu_tanh, project, rms, row_gated_gelu, row_products};
use ltx2_stablehlo::{DType, Value};

/// RMS norm over the last dimension, multiplied by `weight + offset`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmaNorm {
    pub(crate) eps: f64,
    pub(crate) offset: f64,
}

impl GemmaNorm {
    /// Normalizes `x` with the weight at `p`.
    pub(crate) fn run(self, p: &Params, x: &Value) -> Value {
        let scale = self.scale(p, x.dim(-1));
        let row = RowNorm { x, eps: self.eps, scale, residual: None, next: None };
        if let Some(mut rows) = row.run(p) {
            return rows.remove(0);
        }
        let normalized = rms(x, self.eps);
        let weight = row.scale.weight.to(DType::F32);
        (normalized * if self.offset == 0.0 { weight } else { weight + self.offset }).to(x.dtype())
    }

    /// Returns the scale with the weight at `p`, which has `n` elements.
    pub(crate) fn scale(self, p: &Params, n: usize) -> RowScale {
        let init = Init { mean: (1.0 - self.offset) as f32, std: 0.02 };
        RowScale { weight: p.get("weight", &[n], &[Axis::Replicated], init), offset: self.offset }
    }
}

/// A decoder layer: its norm, its attention and the width of its MLP.
pub(crate) struct DecoderLayer<A> {
    pub(crate) norm: GemmaNorm,
    pub(crate) attention: A,
    pub(crate) intermediate_size: usize,
}

impl<A> DecoderLayer<A>
where
    A: Fn(&Value) -> Value,
{
    /// Runs the layer with weights at `p` on the residual stream `h [b, t, hidden]`.
    pub(crate) fn run(&self, p: &Params, h: &Value) -> Value {
        let norm = |name: &str, x: &Value| self.norm.run(&p.pp(name), x);
        let attended = (self.attention)(&norm("input_layernorm", h));
        let [h, x] = self.add_attention(p, h, &attended).unwrap_or_else(|| {
            let h = h + norm("post_attention_layernorm", &attended);
            [h.clone(), norm("pre_feedforward_layernorm", &h)]
        });
        let inner = mlp(&p.pp("mlp"), self.intermediate_size, &x);
        self.add_mlp(p, &h, &inner).unwrap_or_else(|| &h + norm("post_feedforward_layernorm", &inner))
    }

    /// Adds the normalized attention to the residual stream. Returns the sum and the input of the MLP, or `None` if no
    /// kernel supports the operands.
    fn add_attention(&self, p: &Params, h: &Value, attended: &Value) -> Option<[Value; 2]> {
        let scale = |name: &str| p.has_row_kernels(h).then(|| self.norm.scale(&p.pp(name), h.dim(-1)));
        let (scale, next) = (scale("post_attention_layernorm")?, scale("pre_feedforward_layernorm"));
        let row = RowNorm { x: attended, eps: self.norm.eps, scale, residual: Some(h), next };
        row.run(p).and_then(|rows| rows.try_into().ok())
    }

    /// Adds the normalized result of the MLP to the residual stream. Returns the sum, or `None` if no kernel supports the
    /// operands.
    fn add_mlp(&self, p: &Params, h: &Value, inner: &Value) -> Option<Value> {
        let scale = || self.norm.scale(&p.pp("post_feedforward_layernorm"), h.dim(-1));
        let scale = p.has_row_kernels(h).then(scale)?;
        let row = RowNorm { x: inner, eps: self.norm.eps, scale, residual: Some(h), next: None };
        row.run(p).map(|mut rows| rows.remove(0))
    }
}

/// Computes keys and values with one matrix multiplication. Returns `[b, t, 2, heads, dim]`.
pub fn keys_values(p: &Params, heads: Heads, x: &Value, bias: bool) -> Value {
    let (dims, axes) = ([heads.count, heads.dim], [Axis::Replicated, Axis::KvHeads, Axis::HeadDim]);
    let weight = keys_values_weight(p, heads, x.dim(-1));
    let init = Init::normal(0.02);
    let bias = bias.then(|| p.fused(&["k_proj.bias", "v_proj.bias"], &dims, &[heads.width()], &axes[1..], init));
    affine(p, x, &weight, bias.as_ref(), &axes)
}

fn keys_values_weight(p: &Params, heads: Heads, inputs: usize) -> Weight {
    let names = ["k_proj.weight", "v_proj.weight"];
    p.weight(&names, &[heads.count, heads.dim, inputs], &[Axis::KvHeads, Axis::HeadDim, Axis::Embed])
}

/// Computes the queries, keys and values of a single token with one kernel, each `[1, 1, heads, dim]`. Returns `None` if
/// the program does not use kernels for single rows, or if the kernel does not support the weights.
pub(crate) fn token_projections(p: &Params, q: Heads, kv: Heads, x: &Value) -> Option<[Value; 3]> {
    if !p.has_row_kernels(x) || x.ty().elements() != x.dim(-1) {
        return None;
    }
    let axes = [Axis::Heads, Axis::HeadDim, Axis::Embed];
    let weight = p.pp("q_proj").weight(&["weight"], &[q.count, q.dim, x.dim(-1)], &axes);
    row_products(p, x, &weight, &keys_values_weight(p, kv, x.dim(-1)))
}

/// Returns `down_proj(gelu(gate_proj(x)) · up_proj(x))`.
fn mlp(p: &Params, intermediate_size: usize, x: &Value) -> Value {
    let _scope = p.scope();
    let hidden_size = x.dim(-1);
    let names = ["gate_proj.weight", "up_proj.weight"];
    let weight = p.weight(&names, &[intermediate_size, hidden_size], &[Axis::Mlp, Axis::Embed]);
    let inner = row_gated_gelu(p, x, &weight).unwrap_or_else(|| {
        let both = affine(p, x, &weight, None, &[Axis::Replicated, Axis::Mlp]);
        gelu_tanh(&both.at(2, 0)) * both.at(2, 1)
    });
    project(&p.pp("down_proj"), &inner, &[hidden_size], false, &[Axis::Embed], Axis::Mlp)
}
