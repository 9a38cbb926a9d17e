//! The feed-forward layer of transformer blocks and connectors.

use serde::Deserialize;

use crate::hlo::Value;
use crate::nn::{Axis, Params, gelu_tanh, linear};

/// The function between the two linear maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize)]
pub enum Activation {
    /// GELU by its tanh approximation.
    #[default]
    #[serde(rename = "gelu-approximate")]
    GeluTanh,
}

impl Activation {
    fn apply(self, x: &Value) -> Value {
        match self {
            Activation::GeluTanh => gelu_tanh(x),
        }
    }
}

/// `net.2(activation(net.0.proj(x)))` with an inner width of four times `x`'s.
pub fn feed_forward(p: &Params, x: &Value, activation: Activation, bias: bool) -> Value {
    let _scope = p.scope();
    let width = x.dim(-1);
    let inner = linear(&p.pp("net.0.proj"), x, 4 * width, bias, [Axis::Embed, Axis::Mlp]);
    linear(&p.pp("net.2"), &activation.apply(&inner), width, bias, [Axis::Mlp, Axis::Embed])
}
