//! The text projection: every hidden state of the text encoder, normalised over a prompt's tokens, times its own part
//! of one matrix, and summed.

use super::config::{COMPONENT, ConnectorsConfig};
use crate::dtype::DType;
use crate::hlo::{Comparison, Type, Value};
use crate::nn::{Axis, Init, Params, linear_into, linear_nd};

/// Keeps divisions finite.
const EPS: f64 = 1e-6;
/// The normalised range.
const SCALE: f64 = 8.0;

/// The projection, state by state.
pub struct Projection {
    p: Params,
    states: usize,
    channels: usize,
    bias: bool,
    /// `[b, t, 1]`.
    valid: Value,
}

impl Projection {
    /// Of the prompts whose tokens `mask` marks (i32 `[b, t]`), for `states` hidden states of width `hidden`.
    pub fn new(p: &Params, c: &ConnectorsConfig, mask: &Value, states: usize, hidden: usize) -> Self {
        let p = p.of(COMPONENT);
        if c.text_proj_in_factor != states || c.caption_channels != hidden {
            let (factor, channels) = (c.text_proj_in_factor, c.caption_channels);
            p.builder().reject(
                "text_proj_in",
                format!(
                    "the text encoder has {states} hidden states of width {hidden}, the connectors' configuration says \
                     text_proj_in_factor {factor} and caption_channels {channels}"
                ),
            );
        }
        let valid = mask.compare(Comparison::Ne, &mask.like(0.0)).unsqueeze(2);
        Projection { p, states, channels: c.caption_channels, bias: c.proj_bias, valid }
    }

    /// The empty sum, `[b, t, channels]`, f32.
    pub fn start(&self, batch: usize, tokens: usize) -> Value {
        self.p.builder().full(0.0, Type::new(DType::F32, vec![batch, tokens, self.channels]))
    }

    /// Adds hidden state number `index`, `[b, t, hidden]`.
    pub fn add(&self, sum: &Value, index: &Value, h: &Value) -> Value {
        let _scope = self.p.builder().scope("text_proj_in");
        let y = normalised(h, &self.valid, &[1, 2]).to(self.p.dtype());
        // In the checkpoint the state's index is the fastest: [out, hidden · states].
        let (hidden, width) = (h.dim(-1), h.dim(-1) * self.states);
        let weight = self.p.part(
            "text_proj_in.weight",
            &[self.channels, width],
            &[1, width, self.states],
            (self.states, index),
            &[self.channels, hidden],
            &[Axis::Whole, Axis::Embed],
            Init::Normal((width as f32).sqrt().recip()),
        );
        sum + linear_into(&self.p, &y, &weight, DType::F32)
    }

    /// The projected text, in the weights' element type.
    pub fn finish(&self, sum: &Value) -> Value {
        let y = sum.to(self.p.dtype());
        if !self.bias {
            return y;
        }
        y + self.p.pp("text_proj_in").get("bias", &[self.channels], &[Axis::Whole], Init::Normal(0.02))
    }
}

/// `8·(x - mean) / (max - min)` over `axes` of the valid positions, zero elsewhere, in f32.
fn normalised(x: &Value, valid: &Value, axes: &[isize]) -> Value {
    let x = x.to(DType::F32);
    let keep = |other: f64| valid.select(&x, &x.like(other));
    // Valid positions times the channels they have.
    let channels: usize = axes.iter().skip(1).map(|&a| x.dim(a)).product();
    let count = valid.to(DType::F32).sum_keep(&[1]) * channels as f64 + EPS;
    let mean = keep(0.0).sum_keep(axes) / count;
    let range = keep(f64::NEG_INFINITY).max_keep(axes) - keep(f64::INFINITY).min_keep(axes);
    let y = (&x - mean) / (range + EPS) * SCALE;
    valid.select(&y, &y.like(0.0))
}

/// The projection of a whole stack `[b, t, hidden · states]`, as the reference's connectors take it.
pub(super) fn project_stack(p: &Params, c: &ConnectorsConfig, stack: &Value, mask: &Value) -> Value {
    let _scope = p.builder().scope("text_proj_in");
    let (b, t, width) = (stack.dim(0), stack.dim(1), stack.dim(2));
    let (hidden, states) = (c.caption_channels, width / c.caption_channels);
    let valid = mask.compare(Comparison::Ne, &mask.like(0.0)).reshape(vec![b, t, 1, 1]);
    let split = stack.reshape(vec![b, t, hidden, states]);
    let y = normalised(&split, &valid, &[1, 2]).to(p.dtype()).reshape(vec![b, t, width]);
    let p = p.pp("text_proj_in");
    let init = Init::Normal((width as f32).sqrt().recip());
    let weight = p.get("weight", &[c.caption_channels, width], &[Axis::Whole, Axis::Embed], init);
    let projected = linear_nd(&p, &y, &weight);
    if !c.proj_bias {
        return projected;
    }
    projected + p.get("bias", &[c.caption_channels], &[Axis::Whole], Init::Normal(0.02))
}
