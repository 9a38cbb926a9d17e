//! The feed-forward layer of transformer blocks and connectors.

use serde::Deserialize;

use crate::hlo::{DType, Value};
use crate::nn::{Axis, Params, gelu, gelu_tanh_of_product, linear, silu};

/// The function between the two linear maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize)]
pub enum Activation {
    /// GELU by its tanh approximation.
    #[default]
    #[serde(rename = "gelu-approximate")]
    GeluTanh,
    /// GELU by the error function.
    #[serde(rename = "gelu")]
    Gelu,
    /// One half gated by the exact GELU of the other.
    #[serde(rename = "geglu")]
    Geglu,
    /// `x · sigmoid(1.702 x)`.
    #[serde(rename = "geglu-approximate")]
    GeluSigmoid,
    /// One half gated by the SiLU of the other.
    #[serde(rename = "swiglu")]
    Swiglu,
    /// `x · sigmoid(x)`.
    #[serde(rename = "linear-silu")]
    Silu,
}

impl Activation {
    /// Ratio of the widths of the activation's input and result.
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

/// `net.2(activation(net.0.proj(x)))` of `x [rows, tokens, width]` with an inner width of four times `x`'s.
pub(crate) fn feed_forward(p: &Params, x: &Value, activation: Activation, bias: bool, sequence: Axis) -> Value {
    let _scope = p.scope();
    let width = x.dim(-1);
    let inner = linear(&p.pp("net.0.proj"), x, 4 * width * activation.fan(), bias, [Axis::Embed, Axis::Mlp]);
    let inner = p.place("hidden", &inner, &[Axis::CfgBatch, sequence, Axis::Mlp]);
    let y = linear(&p.pp("net.2"), &activation.apply(p, &inner), width, bias, [Axis::Mlp, Axis::Embed]);
    p.place("out", &y, &[Axis::CfgBatch, sequence, Axis::Replicated])
}
