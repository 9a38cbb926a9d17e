//! Decoder layer shared by Gemma 3 and Gemma 4: attention and MLP, each with a norm before and after it.

use ltx2_nn::kernels::{RowNorm, RowProducts, RowScale, RowWeight};
use ltx2_nn::{Axis, Heads, Init, Params, Weight, affine, gelu_tanh, project, rms};
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
        self.scaled(x, &row.scale)
    }

    fn scaled(self, x: &Value, scale: &RowScale) -> Value {
        let normalized = rms(x, self.eps);
        let weight = scale.weight.to(DType::F32);
        (normalized * if self.offset == 0.0 { weight } else { weight + self.offset }).to(x.dtype())
    }

    /// Returns the scale with the weight at `p`, which has `n` elements.
    pub(crate) fn scale(self, p: &Params, n: usize) -> RowScale {
        let init = Init { mean: (1.0 - self.offset) as f32, std: 0.02 };
        RowScale { weight: p.get("weight", &[n], &[Axis::Replicated], init), offset: self.offset }
    }

    /// Adds `x`, normalized with the weight at `p`, to the residual stream `h`. With kernels for single rows, the result
    /// has an addend, which the next kernel adds.
    fn add(self, p: &Params, h: Value, x: Value) -> Residual {
        if p.has_row_kernels(&h) && h.ty().elements() == h.dim(-1) {
            let scale = self.scale(p, h.dim(-1));
            return Residual { h, addend: Some(Addend { x, scale }) };
        }
        Residual::from(h + self.run(p, &x))
    }

    /// Returns the sum of the residual stream and its addend.
    pub(crate) fn sum(self, p: &Params, residual: &Residual) -> Value {
        let Residual { h, addend } = residual;
        let Some(Addend { x, scale }) = addend else { return h.clone() };
        let row = RowNorm { x, eps: self.eps, scale: scale.clone(), residual: Some(h), next: None };
        row.run(p).map_or_else(|| h + self.scaled(x, scale), |mut rows| rows.remove(0))
    }
}

/// Residual stream `[b, t, hidden]`.
pub(crate) struct Residual {
    pub(crate) h: Value,
    /// Values that are not added yet.
    pub(crate) addend: Option<Addend>,
}

/// Row that has to be normalized and added to the residual stream.
pub(crate) struct Addend {
    x: Value,
    scale: RowScale,
}

impl From<Value> for Residual {
    fn from(h: Value) -> Self {
        Residual { h, addend: None }
    }
}

/// Input of a block or of the output head: the norm of the residual stream, with the weight at `p`.
pub(crate) struct NormInput<'a> {
    pub(crate) norm: GemmaNorm,
    pub(crate) p: &'a Params,
    pub(crate) residual: Residual,
}

impl NormInput<'_> {
    /// Returns the size of the residual stream.
    fn width(&self) -> usize {
        self.residual.h.dim(-1)
    }

    /// Returns whether kernels for single rows may support [`Self::products`].
    pub(crate) fn is_row(&self) -> bool {
        let h = &self.residual.h;
        self.p.has_row_kernels(h) && h.ty().elements() == self.width()
    }

    /// Returns the sum of the residual stream and its addend, and the norm of the sum.
    pub(crate) fn values(&self) -> [Value; 2] {
        let Residual { h, addend } = &self.residual;
        if let Some(Addend { x, scale }) = addend {
            let next = Some(self.norm.scale(self.p, self.width()));
            let row = RowNorm { x, eps: self.norm.eps, scale: scale.clone(), residual: Some(h), next };
            if let Some(rows) = row.run(self.p).and_then(|rows| rows.try_into().ok()) {
                return rows;
            }
        }
        let h = self.norm.sum(self.p, &self.residual);
        let x = self.norm.run(self.p, &h);
        [h, x]
    }

    /// Returns the sum of the residual stream and its addend, and the products of its norm, a single row, and `weights`,
    /// in the element type `dtype`. Returns `None` if the kernel does not support them. `is_gated`: see [`RowProducts`].
    pub(crate) fn products(
        &self,
        weights: Vec<RowWeight>,
        dtype: DType,
        is_gated: bool,
    ) -> Option<(Value, Vec<Value>)> {
        let [h, x] = self.values();
        Some((h, RowProducts { x: &x, weights, dtype, is_gated }.run(self.p)?))
    }
}

/// A decoder layer: its norm, its attention and the width of its MLP. `attention` returns the sum of the
/// residual stream and its addend, and the result of the attention.
pub(crate) struct DecoderLayer<A> {
    pub(crate) norm: GemmaNorm,
    pub(crate) attention: A,
    pub(crate) intermediate_size: usize,
}

impl<A> DecoderLayer<A>
where
    A: Fn(&NormInput) -> (Value, Value),
{
    /// Runs the layer with weights at `p`.
    pub(crate) fn run(&self, p: &Params, residual: Residual) -> Residual {
        let norm = self.norm;
        let (h, attended) = (self.attention)(&NormInput { norm, p: &p.pp("input_layernorm"), residual });
        let residual = norm.add(&p.pp("post_attention_layernorm"), h, attended);
        let input = NormInput { norm, p: &p.pp("pre_feedforward_layernorm"), residual };
        let (h, inner) = mlp(&p.pp("mlp"), self.intermediate_size, &input);
        norm.add(&p.pp("post_feedforward_layernorm"), h, inner)
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

/// Computes the queries, keys and values of a single token with one kernel, each `[1, 1, heads, dim]`. Also returns the
/// residual stream. Returns `None` if the program does not use kernels for single rows, or if the kernel does not support
/// the weights.
pub(crate) fn token_projections(p: &Params, q: Heads, kv: Heads, input: &NormInput) -> Option<(Value, [Value; 3])> {
    if !input.is_row() {
        return None;
    }
    let axes = [Axis::Heads, Axis::HeadDim, Axis::Embed];
    let weight = p.pp("q_proj").weight(&["weight"], &[q.count, q.dim, input.width()], &axes);
    let pair = keys_values_weight(p, kv, input.width());
    let (Weight::Plain(weight), Weight::Plain(pair)) = (&weight, &pair) else { return None };
    let weights = vec![RowWeight { weight, parts: 1 }, RowWeight { weight: pair, parts: 2 }];
    let (h, products) = input.products(weights, weight.dtype(), false)?;
    Some((h, products.try_into().ok()?))
}

/// Returns the residual stream and `down_proj(gelu(gate_proj(x)) · up_proj(x))` of its norm `x`.
fn mlp(p: &Params, intermediate_size: usize, input: &NormInput) -> (Value, Value) {
    let hidden_size = input.width();
    let weight = || {
        let names = ["gate_proj.weight", "up_proj.weight"];
        p.weight(&names, &[intermediate_size, hidden_size], &[Axis::Mlp, Axis::Embed])
    };
    let (h, inner) = gated_row(p, input, weight).unwrap_or_else(|| {
        let [h, x] = input.values();
        let _scope = p.scope();
        let both = affine(p, &x, &weight(), None, &[Axis::Replicated, Axis::Mlp]);
        (h, gelu_tanh(&both.at(2, 0)) * both.at(2, 1))
    });
    let _scope = p.scope();
    (h, project(&p.pp("down_proj"), &inner, &[hidden_size], false, &[Axis::Embed], Axis::Mlp))
}

/// Returns the residual stream and `gelu(gate · x) · (values · x)` of its norm `x`, computed by a kernel. Returns `None` if
/// the program does not use kernels for single rows, or if the kernel does not support the weight.
fn gated_row(p: &Params, input: &NormInput, weight: impl FnOnce() -> Weight) -> Option<(Value, Value)> {
    let _scope = input.is_row().then(|| p.scope())?;
    let Weight::Plain(weight) = weight() else { return None };
    let (h, mut products) = input.products(vec![RowWeight { weight: &weight, parts: 2 }], weight.dtype(), true)?;
    Some((h, products.remove(0)))
}
