//! Decoder layer shared by Gemma 3 and Gemma 4: attention and MLP, each with a norm before and after it.

use ltx2_nn::{Axis, Heads, Init, Params, gelu_tanh, linear_nd, project};
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
    let (shape, width) = ([heads.count, heads.dim, x.dim(-1)], heads.width());
    let axes = [Axis::KvHeads, Axis::HeadDim, Axis::Embed];
    let init = Init::normal((x.dim(-1) as f32).sqrt().recip());
    let weight = p.fused(&["k_proj.weight", "v_proj.weight"], &shape, &[width, x.dim(-1)], &axes, init);
    let y = linear_nd(p, x, &weight);
    if !bias {
        return y;
    }
    y + p.fused(&["k_proj.bias", "v_proj.bias"], &shape[..2], &[width], &axes[..2], Init::normal(0.02))
}

/// Returns `down_proj(gelu(gate_proj(x)) · up_proj(x))`.
fn mlp(p: &Params, intermediate_size: usize, x: &Value) -> Value {
    let _scope = p.scope();
    let hidden_size = x.dim(-1);
    let shape = [intermediate_size, hidden_size];
    let init = Init::normal((hidden_size as f32).sqrt().recip());
    let weight = p.fused(&["gate_proj.weight", "up_proj.weight"], &shape, &shape, &[Axis::Mlp, Axis::Embed], init);
    let both = linear_nd(p, x, &weight);
    let inner = gelu_tanh(&both.at(2, 0)) * both.at(2, 1);
    project(&p.pp("down_proj"), &inner, &[hidden_size], false, &[Axis::Embed], Axis::Mlp)
}
