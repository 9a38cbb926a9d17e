//! The text context of the blocks: hidden states, or the keys and values of every layer, made once a request.

use super::config::{Stream, TransformerConfig};
use super::modulation::{modulate, rows, table};
use crate::av::Av;
use crate::hlo::{DType, Output, Type, Value};
use crate::nn::{Axis, KvStack, KvTensors, LayerTensor, Params, gelu_tanh_of_product, linear};

/// One stream's text context, for all layers.
#[derive(Clone)]
pub(crate) enum TextContext {
    /// Projected hidden states `[b, t, width]`.
    Projected(Value),
    /// Keys and values of every layer.
    KeysValues(KvStack),
}

/// One stream's text context, for one layer.
#[derive(Clone)]
pub enum LayerContext {
    /// Projected hidden states `[b, t, width]`; keys and values are made in the block.
    Projected(Value),
    /// Keys and values `[b, t, heads, dim]`, made once before the loop.
    KeysValues([Value; 2]),
}

impl TextContext {
    /// Declares the context of stream `label`, `[batch, tokens, width]`, as inputs.
    pub(crate) fn input(
        p: &Params,
        c: &TransformerConfig,
        s: &Stream,
        label: &str,
        [batch, tokens]: [usize; 2],
    ) -> Self {
        if c.has_prompt_adaln() {
            let width = if c.use_prompt_embeddings { s.width() } else { s.context };
            let ty = Type::new(p.dtype(), [batch, tokens, width]);
            return TextContext::Projected(p.input(&name_of(label), ty, &AXES));
        }
        let kv = KvTensors::new(p, &name_of(label), s.attention.heads, [batch, tokens]);
        TextContext::KeysValues(kv.input(p, c.num_layers))
    }

    /// Number of tokens, padding included.
    pub(crate) fn tokens(&self) -> usize {
        match self {
            TextContext::Projected(x) => x.dim(1),
            TextContext::KeysValues(kv) => kv.tokens(),
        }
    }

    /// The context of the layer at `p`.
    pub(super) fn of_layer(&self, p: &Params) -> LayerContext {
        match self {
            TextContext::Projected(x) => LayerContext::Projected(x.clone()),
            TextContext::KeysValues(kv) => LayerContext::KeysValues(kv.of_layer(p)),
        }
    }
}

/// The context of text embeddings `[b, t, channels]`: the caption projection where the model has one.
pub(crate) fn project_text(p: &Params, c: &TransformerConfig, s: &Stream, text_embeds: &Value) -> Value {
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

/// A layer's keys and values of the text context, modulated where the model does so.
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

/// The contexts of the streams that there are as results of a program, for [`TextContext::input`] of another: `text.<stream>.k` and
/// `.v`, or `text.<stream>` `[b, t, width]` where the noise level modulates the context.
pub(crate) fn context_outputs(
    p: &Params,
    c: &TransformerConfig,
    text_contexts: Av<Option<&Value>>,
) -> Vec<(Output, Value)> {
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
