//! The text projection: normalizes every hidden state of the text encoder, multiplies each by its part of a weight
//! matrix, and sums the products. LTX-2.3 has two weight matrices, for video and audio, whose results are concatenated.

use super::config::{COMPONENT, ConnectorsConfig, TextMap};
use ltx2_nn::{Axis, Init, Params, PartView, linear_into, linear_nd};
use ltx2_stablehlo::{Comparison, DType, Type, Value};

/// Value added to divisors to avoid division by zero.
const EPS: f64 = 1e-6;
/// Size of the range to which [`HiddenStateNorm::PromptRange`] scales values.
const SCALE: f64 = 8.0;

/// The text projection, applied to one hidden state at a time.
pub(crate) struct Projection {
    p: Params,
    states: usize,
    maps: Vec<TextMap>,
    bias: bool,
    norm: HiddenStateNorm,
    /// Mask of the non-padding tokens, `[b, t, 1]`.
    valid: Value,
}

impl Projection {
    /// Creates the projection of `states` hidden states of width `hidden`, for prompts whose non-padding tokens are
    /// non-zero in `mask`, i32 `[b, t]`.
    pub(crate) fn new(p: &Params, c: &ConnectorsConfig, mask: &Value, states: usize, hidden: usize) -> Self {
        let p = p.for_component(COMPONENT);
        if c.text_proj_in_factor != states || c.caption_channels != hidden {
            let (factor, channels) = (c.text_proj_in_factor, c.caption_channels);
            p.builder().reject(
                "text_proj_in",
                format!(
                    "the text encoder has {states} hidden states of width {hidden}, but the connectors' config.json \
                     has text_proj_in_factor {factor} and caption_channels {channels}"
                ),
            );
        }
        let valid = mask.compare(Comparison::Ne, &mask.like(0.0)).unsqueeze(2);
        Projection { p, states, maps: c.text_maps(), bias: c.proj_bias, norm: HiddenStateNorm::from_config(c), valid }
    }

    /// Returns the initial sums, which are zero: one f32 `[b, t, width]` per projection.
    pub(crate) fn start(&self, batch: usize, tokens: usize) -> Vec<Value> {
        let empty = |m: &TextMap| self.p.builder().full(0.0, Type::new(DType::F32, vec![batch, tokens, m.width]));
        self.maps.iter().map(empty).collect()
    }

    /// Adds the projection of hidden state `index`, `[b, t, hidden]`, to the sums.
    pub(crate) fn add(&self, sums: &[Value], index: &Value, h: &Value) -> Vec<Value> {
        let _scope = self.p.builder().scope("text_proj_in");
        let y = self.norm.normalize_valid(h, &self.valid);
        // The checkpoint's weight is [out, hidden · states]; the index of the state varies fastest.
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

    /// Returns the projected text `[b, t, channels]`, concatenated over projections, in the weights' element type.
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

/// Normalization that brings the hidden states of all layers to a comparable scale.
#[derive(Clone, Copy)]
enum HiddenStateNorm {
    /// `8·(x - mean) / (max - min)`, over the tokens and channels of a prompt, separately for each state.
    PromptRange,
    /// `x / sqrt(mean(x²))`, over the channels, separately for each state and token.
    TokenRms,
}

impl HiddenStateNorm {
    fn from_config(c: &ConnectorsConfig) -> Self {
        if c.per_modality_projections { HiddenStateNorm::TokenRms } else { HiddenStateNorm::PromptRange }
    }

    /// Normalizes `x [b, t, hidden, …]` in f32 where `valid` is true; the result is zero elsewhere.
    fn normalize_valid(self, x: &Value, valid: &Value) -> Value {
        let x = x.to(DType::F32);
        let y = match self {
            HiddenStateNorm::PromptRange => {
                let keep = |other: f64| valid.select(&x, &x.like(other));
                let count = valid.to(DType::F32).sum_keep(&[1]) * x.dim(2) as f64 + EPS;
                let mean = keep(0.0).sum_keep(&[1, 2]) / count;
                let range = keep(f64::NEG_INFINITY).max_keep(&[1, 2]) - keep(f64::INFINITY).min_keep(&[1, 2]);
                (&x - mean) / (range + EPS) * SCALE
            }
            HiddenStateNorm::TokenRms => &x * (x.square().mean_keep(&[2]) + EPS).rsqrt(),
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

/// Projects all hidden states at once, as diffusers' connectors do. `stack` is `[b, t, hidden · states]`. The result
/// equals that of [`Projection::finish`].
pub(super) fn project_stack(p: &Params, c: &ConnectorsConfig, stack: &Value, mask: &Value) -> Value {
    let _scope = p.builder().scope("text_proj_in");
    let (b, t, width) = (stack.dim(0), stack.dim(1), stack.dim(2));
    let (hidden, states) = (c.caption_channels, width / c.caption_channels);
    let valid = mask.compare(Comparison::Ne, &mask.like(0.0)).reshape(vec![b, t, 1, 1]);
    let y = HiddenStateNorm::from_config(c)
        .normalize_valid(&stack.reshape(vec![b, t, hidden, states]), &valid)
        .reshape(vec![b, t, width]);
    let project = |m: &TextMap| {
        let p = p.pp(m.name);
        let init = Init::normal((width as f32).sqrt().recip());
        let weight = p.get("weight", &[m.width, width], &[Axis::Replicated, Axis::Embed], init);
        biased(&p, linear_nd(&p, &scaled(&y, m).to(p.dtype()), &weight), c.proj_bias)
    };
    side_by_side(&c.text_maps().iter().map(project).collect::<Vec<_>>())
}
