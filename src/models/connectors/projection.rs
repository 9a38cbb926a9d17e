//! The text projection: every hidden state of the text encoder, normalised, times its own part of one matrix, and summed.
//! LTX-2.3 has two such matrices, whose results lie side by side.

use super::config::{COMPONENT, ConnectorsConfig, TextMap};
use crate::hlo::{Comparison, DType, Type, Value};
use crate::nn::{Axis, Init, Params, PartView, linear_into, linear_nd};

/// Keeps divisions finite.
const EPS: f64 = 1e-6;
/// The normalised range.
const SCALE: f64 = 8.0;

/// The projection, state by state.
pub(crate) struct Projection {
    p: Params,
    states: usize,
    maps: Vec<TextMap>,
    bias: bool,
    norm: Norm,
    /// `[b, t, 1]`.
    valid: Value,
}

impl Projection {
    /// The projection of prompts whose tokens `mask` marks (i32 `[b, t]`), for `states` hidden states of width `hidden`.
    pub(crate) fn new(p: &Params, c: &ConnectorsConfig, mask: &Value, states: usize, hidden: usize) -> Self {
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
        Projection { p, states, maps: c.text_maps(), bias: c.proj_bias, norm: Norm::of(c), valid }
    }

    /// The empty sums, one a map, `[b, t, width]`, f32.
    pub(crate) fn start(&self, batch: usize, tokens: usize) -> Vec<Value> {
        let empty = |m: &TextMap| self.p.builder().full(0.0, Type::new(DType::F32, vec![batch, tokens, m.width]));
        self.maps.iter().map(empty).collect()
    }

    /// Adds hidden state number `index`, `[b, t, hidden]`.
    pub(crate) fn add(&self, sums: &[Value], index: &Value, h: &Value) -> Vec<Value> {
        let _scope = self.p.builder().scope("text_proj_in");
        let y = self.norm.of_valid(h, &self.valid);
        // In the checkpoint the state's index is the fastest: [out, hidden · states].
        let (hidden, width) = (h.dim(-1), h.dim(-1) * self.states);
        let add = |(m, sum): (&TextMap, &Value)| {
            let weight = self.p.part(
                &format!("{}.weight", m.name),
                PartView { stored: &[m.width, width], strides: &[1, width, self.states], parts: self.states, index },
                &[m.width, hidden],
                &[Axis::Replicated, Axis::Embed],
                Init::normal((width as f32).sqrt().recip()),
            );
            sum + linear_into(&self.p, &scaled(&y, m).to(self.p.dtype()), &weight, DType::F32)
        };
        self.maps.iter().zip(sums).map(add).collect()
    }

    /// The projected text `[b, t, channels]`, the maps' side by side, in the weights' element type.
    pub(crate) fn finish(&self, sums: &[Value]) -> Value {
        let finished: Vec<Value> = self
            .maps
            .iter()
            .zip(sums)
            .map(|(m, sum)| biased(&self.p.pp(m.name), sum.to(self.p.dtype()), self.bias))
            .collect();
        side_by_side(&finished)
    }
}

/// Normalisation that makes the hidden states comparable.
#[derive(Clone, Copy)]
enum Norm {
    /// `8·(x - mean) / (max - min)` of each state over the tokens and channels of a prompt.
    PromptRange,
    /// `x / sqrt(mean(x²))` of each state and token over the channels.
    TokenRms,
}

impl Norm {
    fn of(c: &ConnectorsConfig) -> Self {
        if c.per_modality_projections { Norm::TokenRms } else { Norm::PromptRange }
    }

    /// The norm of `x [b, t, hidden, …]` at the positions that `valid` marks, in f32; zero elsewhere.
    fn of_valid(self, x: &Value, valid: &Value) -> Value {
        let x = x.to(DType::F32);
        let y = match self {
            Norm::PromptRange => {
                let keep = |other: f64| valid.select(&x, &x.like(other));
                let count = valid.to(DType::F32).sum_keep(&[1]) * x.dim(2) as f64 + EPS;
                let mean = keep(0.0).sum_keep(&[1, 2]) / count;
                let range = keep(f64::NEG_INFINITY).max_keep(&[1, 2]) - keep(f64::INFINITY).min_keep(&[1, 2]);
                (&x - mean) / (range + EPS) * SCALE
            }
            Norm::TokenRms => &x * (x.square().mean_keep(&[2]) + EPS).rsqrt(),
        };
        valid.select(&y, &y.like(0.0))
    }
}

fn scaled(y: &Value, m: &TextMap) -> Value {
    if m.scale == 1.0 { y.clone() } else { y * m.scale }
}

fn biased(p: &Params, y: Value, bias: bool) -> Value {
    if !bias {
        return y;
    }
    let width = y.dim(-1);
    y + p.get("bias", &[width], &[Axis::Replicated], Init::normal(0.02))
}

fn side_by_side(parts: &[Value]) -> Value {
    match parts {
        [one] => one.clone(),
        all => all[0].builder().concat(&all.iter().collect::<Vec<_>>(), 2),
    }
}

/// The projection of a whole stack `[b, t, hidden · states]`, as the reference's connectors take it: what
/// [`Projection::finish`] gives.
pub(super) fn project_stack(p: &Params, c: &ConnectorsConfig, stack: &Value, mask: &Value) -> Value {
    let _scope = p.builder().scope("text_proj_in");
    let (b, t, width) = (stack.dim(0), stack.dim(1), stack.dim(2));
    let (hidden, states) = (c.caption_channels, width / c.caption_channels);
    let valid = mask.compare(Comparison::Ne, &mask.like(0.0)).reshape(vec![b, t, 1, 1]);
    let y = Norm::of(c).of_valid(&stack.reshape(vec![b, t, hidden, states]), &valid).reshape(vec![b, t, width]);
    let project = |m: &TextMap| {
        let p = p.pp(m.name);
        let init = Init::normal((width as f32).sqrt().recip());
        let weight = p.get("weight", &[m.width, width], &[Axis::Replicated, Axis::Embed], init);
        biased(&p, linear_nd(&p, &scaled(&y, m).to(p.dtype()), &weight), c.proj_bias)
    };
    side_by_side(&c.text_maps().iter().map(project).collect::<Vec<_>>())
}
