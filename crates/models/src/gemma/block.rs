//! Decoder layer shared by Gemma 3 and Gemma 4: attention and MLP, each with a norm before and after it.

use ltx2_nn::{Axis, Heads, Init, Params, affine, gelu_tanh, project};
use ltx2_stablehlo::Value;

/// A decoder layer: its norm, its attention and the width of its MLP.
pub(crate) struct DecoderLayer<N, A> {
    pub(crate) norm: N,
    pub(crate) attention: A,
    pub(crate) intermediate_size: usize,
}

impl<N, A> DecoderLayer<N, A>
where
    N: Fn(&Params, &Value) -> Value,
    A: Fn(&Value) -> Value,
{
    /// Runs the layer with weights at `p` on the residual stream `h [b, t, hidden]`.
    pub(crate) fn run(&self, p: &Params, h: &Value) -> Value {
        let norm = |name: &str, x: &Value| (self.norm)(&p.pp(name), x);
        let attended = (self.attention)(&norm("input_layernorm", h));
        let h = h + norm("post_attention_layernorm", &attended);
        let inner = mlp(&p.pp("mlp"), self.intermediate_size, &norm("pre_feedforward_layernorm", &h));
        &h + norm("post_feedforward_layernorm", &inner)
    }
}

/// Computes keys and values with one matrix multiplication. Returns `[b, t, 2, heads, dim]`.
pub fn keys_values(p: &Params, heads: Heads, x: &Value, bias: bool) -> Value {
    let (dims, axes) = ([heads.count, heads.dim], [Axis::Replicated, Axis::KvHeads, Axis::HeadDim]);
    let weight = [&axes[1..], &[Axis::Embed]].concat();
    let weight = p.weight(&["k_proj.weight", "v_proj.weight"], &[&dims[..], &[x.dim(-1)]].concat(), &weight);
    let init = Init::normal(0.02);
    let bias = bias.then(|| p.fused(&["k_proj.bias", "v_proj.bias"], &dims, &[heads.width()], &axes[1..], init));
    affine(p, x, &weight, bias.as_ref(), &axes)
}

/// Returns `down_proj(gelu(gate_proj(x)) · up_proj(x))`.
fn mlp(p: &Params, intermediate_size: usize, x: &Value) -> Value {
    let _scope = p.scope();
    let hidden_size = x.dim(-1);
    let names = ["gate_proj.weight", "up_proj.weight"];
    let weight = p.weight(&names, &[intermediate_size, hidden_size], &[Axis::Mlp, Axis::Embed]);
    let both = affine(p, x, &weight, None, &[Axis::Replicated, Axis::Mlp]);
    let inner = gelu_tanh(&both.at(2, 0)) * both.at(2, 1);
    project(&p.pp("down_proj"), &inner, &[hidden_size], false, &[Axis::Embed], Axis::Mlp)
}
