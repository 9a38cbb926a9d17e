//! One dual-stream block.

use super::Isolation;
use super::config::{Stream, TransformerConfig};
use super::modulation::{StreamModulation, block_norm, gated_add, modulate, of_level, rows, table};
use crate::hlo::Value;
use crate::models::attention::Rope;
use crate::models::feed_forward::feed_forward;
use crate::nn::{Axis, Params};

/// One stream's text, seen by one layer.
#[derive(Clone)]
pub enum Text {
    /// The context `[b, t, width]`; keys and values are made in the block.
    Context(Value),
    /// Keys and values `[b, t, heads, dim]`, made once before the loop.
    KeysValues([Value; 2]),
}

/// Everything of one stream that a block reads beside its state.
pub struct Reads {
    /// From the timestep.
    pub modulation: StreamModulation,
    /// Which of the modulation's levels each token has, `[b, n]`, i32; `None` where there is one, or each its own.
    pub level: Option<Value>,
    /// Self-attention's table.
    pub rope: Rope,
    /// Cross-modal attention's table.
    pub cross_rope: Rope,
    /// Added to text scores, `[b, 1, 1, t]`, f32.
    pub text_mask: Option<Value>,
    /// Added to self-attention scores, `[b, 1, n, n]`, f32.
    pub self_mask: Option<Value>,
    /// Added to the scores of this stream's keys, `[1, 1, 1, n]`, f32: hides tokens that only fill up the sequence.
    pub padding: Option<Value>,
}

impl Reads {
    /// `table + timestep part`, row by row, as each token reads it.
    fn rows(&self, table: &Value, timestep: &Value) -> Vec<Value> {
        rows(table, timestep).iter().map(|row| of_level(row, self.level.as_ref())).collect()
    }

    /// Added to self-attention scores.
    fn self_bias(&self) -> Option<Value> {
        add(self.self_mask.clone(), self.padding.clone())
    }
}

/// The sum of what there is.
pub(super) fn add(one: Option<Value>, other: Option<Value>) -> Option<Value> {
    match (one, other) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    }
}

/// A block: states `[video, audio]`, each `[b, n, width]`, to the next states. `keep` is 1 for rows that attend and 0
/// for perturbed ones (`[b, 1, 1, 1]`, f32).
pub fn block(
    p: &Params,
    c: &TransformerConfig,
    state: [Value; 2],
    text: [&Text; 2],
    reads: [&Reads; 2],
    keep: Option<&Value>,
    isolation: &Isolation,
) -> [Value; 2] {
    let streams = [c.video(), c.audio()];
    let each = |f: &dyn Fn(usize) -> Value| [f(0), f(1)];
    let main: [Vec<Value>; 2] = [0, 1].map(|i| {
        let s = &streams[i];
        reads[i]
            .rows(&table(p, &s.name("scale_shift_table"), s.modulation_rows(), s.width()), &reads[i].modulation.main)
    });
    let state = each(&|i| self_attention(p, c, &streams[i], &state[i], reads[i], &main[i], keep));
    let state = each(&|i| text_attention(p, c, &streams[i], &state[i], text[i], reads[i], &main[i]));
    let state = match isolation {
        Isolation::All => state,
        Isolation::None => cross_modal(p, c, state, reads, None),
        Isolation::Rows(joined) => cross_modal(p, c, state, reads, Some(joined)),
    };
    each(&|i| {
        let s = &streams[i];
        let [shift, scale, gate] = [3, 4, 5].map(|r| &main[i][r]);
        let x = modulate(&block_norm(p, c, &s.name("norm3"), &state[i]), scale, shift, p.dtype());
        let y = feed_forward(&p.pp(s.name("ff")), &x, c.activation_fn, s.ff_bias, s.sequence);
        p.place(&s.name("state"), &gated_add(&state[i], gate, &y), &[Axis::CfgBatch, s.sequence, Axis::Replicated])
    })
}

fn self_attention(
    p: &Params,
    c: &TransformerConfig,
    s: &Stream,
    x: &Value,
    reads: &Reads,
    main: &[Value],
    keep: Option<&Value>,
) -> Value {
    let p1 = p.pp(s.name("attn1"));
    let _scope = p1.scope();
    let z = modulate(&block_norm(p, c, &s.name("norm1"), x), &main[1], &main[0], p.dtype());
    let [q, k, v] = s.attention.qkv(&p1, &z, Some(&reads.rope));
    let y = s.attention.attend(&p1, [&q, &k, &v], &z, s.width(), reads.self_bias().as_ref(), keep);
    gated_add(x, &main[2], &y)
}

fn text_attention(
    p: &Params,
    c: &TransformerConfig,
    s: &Stream,
    x: &Value,
    text: &Text,
    reads: &Reads,
    main: &[Value],
) -> Value {
    let p2 = p.pp(s.name("attn2"));
    let _scope = p2.scope();
    let normed = block_norm(p, c, &s.name("norm2"), x);
    let z = if s.text_modulation { modulate(&normed, &main[7], &main[6], p.dtype()) } else { normed.to(p.dtype()) };
    let layer = s.text_attention();
    let q = layer.queries(&p2, &z, None);
    let [k, v] = match text {
        Text::KeysValues(kv) => kv.clone(),
        Text::Context(context) => text_keys_values(p, c, s, context, reads.modulation.prompt.as_ref()),
    };
    let y = layer.attend(&p2, [&q, &k, &v], &z, s.width(), reads.text_mask.as_ref(), None);
    if s.text_modulation { gated_add(x, &main[8], &y) } else { x + y }
}

/// A layer's keys and values of the text context, modulated where the model does so.
pub fn text_keys_values(
    p: &Params,
    c: &TransformerConfig,
    s: &Stream,
    context: &Value,
    prompt: Option<&Value>,
) -> [Value; 2] {
    let p2 = p.pp(s.name("attn2"));
    if !c.prompt_modulation() {
        return s.text_attention().keys_values(&p2, context, None);
    }
    let fixed = table(p, &s.name("prompt_scale_shift_table"), 2, s.width());
    let parts = match prompt {
        Some(t) => rows(&fixed, t),
        None => (0..2).map(|i| fixed.at(0, i).to(crate::hlo::DType::F32)).collect(),
    };
    let modulated = modulate(&context.to(crate::hlo::DType::F32), &parts[1], &parts[0], p.dtype());
    s.text_attention().keys_values(&p2, &modulated, None)
}

/// Audio to video and video to audio. Both read the states from before either update. `joined` is 0 for rows that
/// keep their state (`[b, 1, 1]`, f32).
fn cross_modal(
    p: &Params,
    c: &TransformerConfig,
    state: [Value; 2],
    reads: [&Reads; 2],
    joined: Option<&Value>,
) -> [Value; 2] {
    let tables = ["video_a2v_cross_attn_scale_shift_table", "audio_a2v_cross_attn_scale_shift_table"];
    let norms = ["audio_to_video_norm", "video_to_audio_norm"];
    let layers = ["audio_to_video_attn", "video_to_audio_attn"];
    let parts = [0, 1].map(|i| {
        let t = table(p, tables[i], 5, state[i].dim(-1));
        let m = &reads[i].modulation;
        let gate = reads[i].rows(&t.slice(0, 4, 5), &m.gate).remove(0);
        (block_norm(p, c, norms[i], &state[i]), reads[i].rows(&t.slice(0, 0, 4), &m.cross), gate)
    });
    [0, 1].map(|queries| {
        let pc = p.pp(layers[queries]);
        let _scope = pc.scope();
        let layer = c.cross(queries == 0);
        // Rows: scale and shift of the a2v attention, then of the v2a attention, on both sides.
        let input = |i: usize| {
            let (normed, r, _) = &parts[i];
            modulate(normed, &r[2 * queries], &r[2 * queries + 1], p.dtype())
        };
        let (own, other) = (input(queries), input(1 - queries));
        let q = layer.queries(&pc, &own, Some(&reads[queries].cross_rope));
        let [k, v] = layer.keys_values(&pc, &other, Some(&reads[1 - queries].cross_rope));
        let padding = reads[1 - queries].padding.as_ref();
        let y = layer.attend(&pc, [&q, &k, &v], &own, state[queries].dim(-1), padding, None);
        let gate = &parts[queries].2;
        let gate = joined.map_or_else(|| gate.clone(), |rows| gate * rows);
        gated_add(&state[queries], &gate, &y)
    })
}
