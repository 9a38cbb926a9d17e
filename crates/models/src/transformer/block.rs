//! A transformer block of the video and audio streams.

use super::Isolation;
use super::config::{Stream, TransformerConfig};
use super::modulation::{Ada, StreamModulation, at_noise_level, block_norm, gated_add, modulate, rows, table};
use super::text::{LayerContext, keys_values};
use crate::av::Av;
use crate::feed_forward::feed_forward;
use ltx2_nn::{AttentionLayer, Axis, Params, Rope};
use ltx2_stablehlo::Value;

/// Inputs of one stream that are shared by all blocks.
pub struct StreamInputs {
    /// Modulation computed from the timestep.
    pub modulation: StreamModulation,
    /// Index of each token's noise level in the modulation, i32 `[b, n]`; `None` if there is a single level, or one per
    /// token.
    pub noise_level_index: Option<Value>,
    /// RoPE table of self-attention.
    pub rope: Rope,
    /// RoPE table of cross-modal attention.
    pub cross_rope: Rope,
    /// Bias on text attention scores, f32 `[b, 1, 1, t]`.
    pub text_mask: Option<Value>,
    /// Bias on self-attention scores, f32 `[b, 1, n, n]`.
    pub self_mask: Option<Value>,
    /// Bias on the scores of this stream's keys, f32 `[1, 1, 1, n]`, that masks padding tokens of the sequence.
    pub padding_mask: Option<Value>,
}

impl StreamInputs {
    /// Returns the modulation rows: the sum of the table and the timestep's modulation, at each token's noise level.
    fn rows(&self, table: &Value, timestep: &Value) -> Vec<Value> {
        rows(table, timestep).iter().map(|row| at_noise_level(row, self.noise_level_index.as_ref())).collect()
    }

    /// Returns the bias on self-attention scores: the sum of both masks.
    fn self_bias(&self) -> Option<Value> {
        add(self.self_mask.clone(), self.padding_mask.clone())
    }
}

/// Adds two optional biases.
pub(super) fn add(one: Option<Value>, other: Option<Value>) -> Option<Value> {
    match (one, other) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    }
}

/// Inputs of a block other than its hidden states.
pub struct BlockInputs<'a> {
    /// Inputs shared by all blocks; `None` for an absent stream.
    pub streams: Av<Option<&'a StreamInputs>>,
    /// Text context of this layer; `None` for an absent stream.
    pub context: Av<Option<&'a LayerContext>>,
    /// Mask of spatio-temporal guidance, f32 `[b, 1, 1, 1]`: 1 for batch entries that attend normally, 0 for perturbed
    /// ones. `None`: no batch entry is perturbed.
    pub stg_mask: Av<Option<&'a Value>>,
    /// Batch entries without cross-modal attention.
    pub isolation: &'a Isolation,
    /// Streams whose hidden states the block updates.
    pub updated: Av<bool>,
}

/// Runs a block on the hidden states of the present streams, each `[b, n, width]`.
pub fn block(p: &Params, c: &TransformerConfig, hidden: Av<Option<Value>>, inputs: &BlockInputs) -> Av<Option<Value>> {
    let streams = c.streams().zip(inputs.streams).zip(inputs.updated);
    let streams = streams.map(|((s, inputs), updated)| Some(StreamBlock::new(p, c, s, inputs?, updated)));
    let streams = streams.as_ref().map(Option::as_ref);
    let attended = streams.zip(hidden).zip(inputs.stg_mask);
    let hidden = attended.map(|((s, x), stg_mask)| Some(s?.update(x?, |s, x| s.self_attention(x, stg_mask))));
    let attended = streams.zip(hidden).zip(inputs.context);
    let hidden = attended.map(|((s, x), context)| {
        let context = context?;
        Some(s?.update(x?, |s, x| s.text_attention(x, context)))
    });
    let mask = match inputs.isolation {
        Isolation::Masked(mask) => Some(mask),
        Isolation::All | Isolation::None => None,
    };
    let hidden = match (streams, hidden) {
        (Av { video: Some(video), audio: Some(audio) }, Av { video: Some(x), audio: Some(y) })
            if !matches!(inputs.isolation, Isolation::All) =>
        {
            cross_modal(Av { video, audio }, Av { video: x, audio: y }, mask).map(Some)
        }
        (_, hidden) => hidden,
    };
    streams.zip(hidden).map(|(s, x)| Some(s?.update(x?, |s, x| s.feed_forward(x))))
}

/// The part of a block that processes one stream.
struct StreamBlock<'a> {
    p: &'a Params,
    c: &'a TransformerConfig,
    s: Stream,
    inputs: &'a StreamInputs,
    updated: bool,
    self_ada: Ada,
    ff_ada: Ada,
    text_ada: Option<Ada>,
}

impl<'a> StreamBlock<'a> {
    fn new(p: &'a Params, c: &'a TransformerConfig, s: Stream, inputs: &'a StreamInputs, updated: bool) -> Self {
        let table = table(p, &s.name("scale_shift_table"), s.modulation_rows(), s.width());
        let rows = inputs.rows(&table, &inputs.modulation.ada_params);
        let text_ada = s.text_modulation.then(|| Ada::nth(&rows, 2));
        StreamBlock { p, c, s, inputs, updated, self_ada: Ada::nth(&rows, 0), ff_ada: Ada::nth(&rows, 1), text_ada }
    }

    /// Applies `part` to the hidden states if the stream is updated, otherwise returns them unchanged.
    fn update(&self, x: Value, part: impl FnOnce(&Self, &Value) -> Value) -> Value {
        if self.updated { part(self, &x) } else { x }
    }

    fn norm(&self, name: &str, x: &Value) -> Value {
        block_norm(self.p, self.c, name, x)
    }

    fn self_attention(&self, x: &Value, stg_mask: Option<&Value>) -> Value {
        let (s, p) = (&self.s, self.p.pp(self.s.name("attn1")));
        let _scope = p.scope();
        let z = self.self_ada.modulate(&self.norm(&s.name("norm1"), x), p.dtype());
        let [q, k, v] = s.attention.qkv(&p, &z, Some(&self.inputs.rope));
        let y = s.attention.attend(&p, [&q, &k, &v], &z, s.width(), self.inputs.self_bias().as_ref(), stg_mask);
        self.self_ada.add(x, &y)
    }

    fn text_attention(&self, x: &Value, context: &LayerContext) -> Value {
        let (s, p) = (&self.s, self.p.pp(self.s.name("attn2")));
        let _scope = p.scope();
        let normed = self.norm(&s.name("norm2"), x);
        let z = self.text_ada.as_ref().map_or_else(|| normed.to(p.dtype()), |ada| ada.modulate(&normed, p.dtype()));
        let layer = s.text_attention();
        let q = layer.queries(&p, &z, None);
        let [k, v] = match context {
            LayerContext::KeysValues(kv) => kv.clone(),
            LayerContext::Projected(context) => {
                keys_values(self.p, self.c, s, context, self.inputs.modulation.prompt.as_ref())
            }
        };
        let y = layer.attend(&p, [&q, &k, &v], &z, s.width(), self.inputs.text_mask.as_ref(), None);
        self.text_ada.as_ref().map_or_else(|| x + &y, |ada| ada.add(x, &y))
    }

    fn feed_forward(&self, x: &Value) -> Value {
        let (s, p) = (&self.s, self.p);
        let z = self.ff_ada.modulate(&self.norm(&s.name("norm3"), x), p.dtype());
        let y = feed_forward(&p.pp(s.name("ff")), &z, self.c.activation_fn, s.ff_bias, s.sequence);
        p.place(&s.name("state"), &self.ff_ada.add(x, &y), &[Axis::CfgBatch, s.sequence, Axis::Replicated])
    }

    fn cross_side(&'a self, label: &str, hidden: &'a Value) -> CrossSide<'a> {
        let (p, modulation) = (self.p, &self.inputs.modulation);
        let table = table(p, &format!("{label}_a2v_cross_attn_scale_shift_table"), 5, self.s.width());
        let gate = self.inputs.rows(&table.slice(0, 4, 5), &modulation.gate).remove(0);
        let normed = self.norm(&format!("{}_norm", self.s.cross_name), hidden);
        let rows = self.inputs.rows(&table.slice(0, 0, 4), &modulation.cross);
        CrossSide { block: self, hidden, normed, rows, gate }
    }
}

/// Applies audio-to-video and video-to-audio attention. Both directions read the hidden states as they are before
/// either update. `mask`, f32 `[b, 1, 1]`, is 0 for batch entries that skip the update.
fn cross_modal(streams: Av<&StreamBlock>, hidden: Av<Value>, mask: Option<&Value>) -> Av<Value> {
    let sides = streams.zip(Av::NAMES).zip(hidden.as_ref()).map(|((s, label), x)| s.cross_side(label, x));
    let Av { video, audio } = &sides;
    let c = streams.video.c;
    let attend = |own: &CrossSide, other: &CrossSide, layer, direction| match own.block.updated {
        true => own.attend(other, layer, direction, mask),
        false => own.hidden.clone(),
    };
    Av { video: attend(video, audio, c.a2v(), A2V), audio: attend(audio, video, c.v2a(), V2A) }
}

/// Row index of the scale of each direction; the shift is in the next row.
const A2V: usize = 0;
const V2A: usize = 2;

/// One stream in the cross-modal attention.
struct CrossSide<'a> {
    block: &'a StreamBlock<'a>,
    hidden: &'a Value,
    normed: Value,
    /// Scale and shift for audio-to-video, then for video-to-audio attention, each f32 `[b, s, width]`.
    rows: Vec<Value>,
    /// Gate of the attention in which this stream provides the queries, f32 `[b, s, width]`.
    gate: Value,
}

impl CrossSide<'_> {
    fn modulated(&self, direction: usize) -> Value {
        modulate(&self.normed, &self.rows[direction], &self.rows[direction + 1], self.block.p.dtype())
    }

    /// Returns this stream's hidden states after attending to the keys of `other`.
    fn attend(&self, other: &Self, layer: AttentionLayer, direction: usize, mask: Option<&Value>) -> Value {
        let p = self.block.p.pp(format!("{}_attn", self.block.s.cross_name));
        let _scope = p.scope();
        let (own, context) = (self.modulated(direction), other.modulated(direction));
        let q = layer.queries(&p, &own, Some(&self.block.inputs.cross_rope));
        let [k, v] = layer.keys_values(&p, &context, Some(&other.block.inputs.cross_rope));
        let padding = other.block.inputs.padding_mask.as_ref();
        let y = layer.attend(&p, [&q, &k, &v], &own, self.block.s.width(), padding, None);
        let gate = mask.map_or_else(|| self.gate.clone(), |mask| &self.gate * mask);
        gated_add(self.hidden, &gate, &y)
    }
}
