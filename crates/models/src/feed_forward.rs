//! The feed-forward layer of transformer blocks and connectors.

use serde::Deserialize;

use ltx2_nn::{Axis, Params, gelu, gelu_tanh_of_product, linear, silu};
use ltx2_stablehlo::{DType, Value};

/// Activation between the two linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize)]
pub enum Activation {
    /// GELU, tanh approximation.
    #[default]
    #[serde(rename = "gelu-approximate")]
    GeluTanh,
    /// Exact GELU.
    #[serde(rename = "gelu")]
    Gelu,
    /// One half of the input multiplied by the exact GELU of the other half.
    #[serde(rename = "geglu")]
    Geglu,
    /// `x · sigmoid(1.702 x)`.
    #[serde(rename = "geglu-approximate")]
    GeluSigmoid,
    /// One half of the input multiplied by the SiLU of the other half.
    #[serde(rename = "swiglu")]
    Swiglu,
    /// `x · sigmoid(x)`.
    #[serde(rename = "linear-silu")]
    Silu,
}

impl Activation {
    /// Returns the ratio of the activation's input width to its output width.
    fn fan(self) -> usize {
        if matches!(self, Activation::Geglu | Activation::Swiglu) { 2 } else { 1 }
    }

    fn apply(self, p: &Params, x: &Value) -> Value {
        let gated = |f: fn(&Value) -> Value| {
            let halves = x.split(-1, 2);
            &halves[0] * f(&halves[1])
        };
        match self {
            Activation::GeluTanh => gelu_tanh_of_product(p, x),
            Activation::Gelu => gelu(x),
            Activation::Geglu => gated(gelu),
            Activation::GeluSigmoid => {
                let f = x.to(DType::F32);
                (&f * (&f * 1.702).logistic()).to(x.dtype())
            }
            Activation::Swiglu => gated(silu),
            Activation::Silu => silu(x),
        }
    }
}

/// Returns `net.2(activation(net.0.proj(x)))` for `x [b, tokens, width]`; the hidden width is `4 * width`.
pub fn feed_forward(p: &Params, x: &Value, activation: Activation, bias: bool, sequence: Axis) -> Value {
    let _scope = p.scope();
    let width = x.dim(-1);
    let inner = linear(&p.pp("net.0.proj"), x, 4 * width * activation.fan(), bias, [Axis::Embed, Axis::Mlp]);
    let inner = p.place("hidden", &inner, &[Axis::CfgBatch, sequence, Axis::Mlp]);
    let y = linear(&p.pp("net.2"), &activation.apply(p, &inner), width, bias, [Axis::Mlp, Axis::Embed]);
    p.place("out", &y, &[Axis::CfgBatch, sequence, Axis::Replicated])
}
