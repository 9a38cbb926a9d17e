//! Text context of the blocks: either hidden states, or the keys and values of every layer, computed once per request.

use super::config::{Stream, TransformerConfig};
use super::modulation::{modulate, rows, table};
use crate::av::Av;
use ltx2_nn::{Axis, KvStack, KvTensors, LayerTensor, Params, gelu_tanh_of_product, linear};
use ltx2_stablehlo::{DType, ProgramOutput, Type, Value};

/// Text context of one stream for all layers.
#[derive(Clone)]
pub enum TextContext {
    /// Projected hidden states `[b, t, width]`.
    Projected(Value),
    /// Keys and values of every layer, optionally restricted to some rows of the CFG batch. Each layer selects the rows
    /// of its own keys and values, so that the stacked tensors of all layers are not copied.
    KeysValues(KvStack, Option<TextRows>),
}

/// Text context of one stream for one layer.
#[derive(Clone)]
pub enum LayerContext {
    /// Projected hidden states `[b, t, width]`; the block computes keys and values.
    Projected(Value),
    /// Keys and values `[b, t, heads, dim]`, computed in advance.
    KeysValues([Value; 2]),
}

/// Selection of guidance branches from the text context of a CFG batch, for a forward pass that has fewer branches.
#[derive(Clone)]
pub struct TextRows {
    /// Number of videos. The rows of the CFG batch are ordered by video, then by branch.
    pub videos: usize,
    /// Indices of the selected branches among the branches of a video.
    pub places: Vec<usize>,
}

impl TextRows {
    /// Selects the rows from `x [videos · branches, …]`; `axes` are the logical axes of the other dimensions.
    fn select(&self, p: &Params, x: &Value, axes: &[Axis]) -> Value {
        let rest = &x.dims()[1..];
        let branches = x.dim(0) / self.videos;
        let apart = [&[Axis::Batch, Axis::Branch], axes].concat();
        let each = p.place("text_branches", &x.reshape([&[self.videos, branches], rest].concat()), &apart);
        let each = p.place("text_branches", &each.index_select(1, &self.places), &apart);
        let rows = each.reshape([&[self.videos * self.places.len()], rest].concat());
        p.place("text_rows", &rows, &[&[Axis::CfgBatch], axes].concat())
    }
}

impl TextContext {
    /// Returns the context restricted to `rows`.
    pub fn of_rows(&self, p: &Params, rows: &TextRows) -> Self {
        match self {
            TextContext::Projected(x) => TextContext::Projected(rows.select(p, x, &AXES[1..])),
            TextContext::KeysValues(kv, _) => TextContext::KeysValues(kv.clone(), Some(rows.clone())),
        }
    }

    /// Declares the context `[batch, tokens, width]` of stream `label` as program inputs.
    pub fn input(p: &Params, c: &TransformerConfig, s: &Stream, label: &str, [batch, tokens]: [usize; 2]) -> Self {
        if c.has_prompt_adaln() {
            let width = if c.use_prompt_embeddings { s.width() } else { s.context };
            let ty = Type::new(p.dtype(), [batch, tokens, width]);
            return TextContext::Projected(p.input(&name_of(label), ty, &AXES));
        }
        let kv = KvTensors::new(p, &name_of(label), s.attention.heads, [batch, tokens]);
        TextContext::KeysValues(kv.input(p, c.num_layers), None)
    }

    /// Returns the number of tokens, including padding.
    pub fn tokens(&self) -> usize {
        match self {
            TextContext::Projected(x) => x.dim(1),
            TextContext::KeysValues(kv, _) => kv.tokens(),
        }
    }

    /// Returns the context of the layer at `p`.
    pub(super) fn of_layer(&self, p: &Params) -> LayerContext {
        match self {
            TextContext::Projected(x) => LayerContext::Projected(x.clone()),
            TextContext::KeysValues(kv, None) => LayerContext::KeysValues(kv.of_layer(p)),
            TextContext::KeysValues(kv, Some(rows)) => {
                let axes = [Axis::TextSequence, Axis::Heads, Axis::HeadDim];
                LayerContext::KeysValues(kv.of_layer(p).map(|x| rows.select(p, &x, &axes)))
            }
        }
    }
}

/// Projects text embeddings `[b, t, channels]` to the context; without a caption projection, returns them unchanged.
pub fn project_text(p: &Params, c: &TransformerConfig, s: &Stream, text_embeds: &Value) -> Value {
    if !c.use_prompt_embeddings {
        return text_embeds.clone();
    }
    let p = p.pp(s.name("caption_projection"));
    let _scope = p.scope();
    let inner = linear(&p.pp("linear_1"), text_embeds, s.width(), true, [Axis::Embed, Axis::Mlp]);
    let inner = p.place("hidden", &inner, &[Axis::CfgBatch, Axis::TextSequence, Axis::Mlp]);
    let y = linear(&p.pp("linear_2"), &gelu_tanh_of_product(&p, &inner), s.width(), true, [Axis::Mlp, Axis::Embed]);
    p.place("out", &y, &[Axis::CfgBatch, Axis::TextSequence, Axis::Replicated])
}

/// Computes a layer's keys and values of the text context, modulated if the model has prompt modulation.
pub(super) fn keys_values(
    p: &Params,
    c: &TransformerConfig,
    s: &Stream,
    context: &Value,
    prompt: Option<&Value>,
) -> [Value; 2] {
    let attn = p.pp(s.name("attn2"));
    if !c.prompt_modulation() {
        return s.text_attention().keys_values(&attn, context, None);
    }
    let fixed = table(p, &s.name("prompt_scale_shift_table"), 2, s.width());
    let parts = match prompt {
        Some(t) => rows(&fixed, t),
        None => (0..2).map(|i| fixed.at(0, i).to(DType::F32)).collect(),
    };
    let modulated = modulate(&context.to(DType::F32), &parts[1], &parts[0], p.dtype());
    s.text_attention().keys_values(&attn, &modulated, None)
}

/// Returns the text contexts of the present streams as program outputs, which another program declares as inputs with
/// [`TextContext::input`]: `text.<stream>.k` and `.v`, or `text.<stream>` `[b, t, width]` if the noise level modulates
/// the context.
pub fn context_outputs(
    p: &Params,
    c: &TransformerConfig,
    text_contexts: Av<Option<&Value>>,
) -> Vec<(ProgramOutput, Value)> {
    if c.has_prompt_adaln() {
        let output = |(label, x): (&str, Option<&Value>)| x.map(|x| p.output(&name_of(label), x, &AXES, x.dims()));
        return Av::NAMES.zip(text_contexts).map(output).into_iter().flatten().collect();
    }
    let streams = c.streams().zip(Av::NAMES).zip(text_contexts).map(|((s, label), x)| {
        let x = x?;
        let kv = KvTensors::new(p, &name_of(label), s.attention.heads, [x.dim(0), x.dim(1)]);
        Some((s, x, kv))
    });
    let present = || streams.as_ref().into_iter().flatten();
    let tensors: Vec<LayerTensor> = present().flat_map(|(_, _, kv)| kv.tensors.clone()).collect();
    let made = {
        let _scope = p.builder().scope("text_keys_values");
        p.per_layer(
            "transformer_blocks",
            c.num_layers,
            |block| c.quantizes(block),
            &tensors,
            |p| present().flat_map(|(s, x, kv)| kv.arrange(&keys_values(p, c, s, x, None))).collect(),
        )
    };
    tensors.iter().zip(&made).flat_map(|(tensor, layers)| p.layer_outputs(tensor, layers)).collect()
}

const AXES: [Axis; 3] = [Axis::CfgBatch, Axis::TextSequence, Axis::Replicated];

fn name_of(label: &str) -> String {
    format!("text.{label}")
}
