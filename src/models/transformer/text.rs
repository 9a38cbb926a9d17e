//! The text as the blocks read it: a context, or the keys and values of every layer, made once a request.

use super::block::{self, Text};
use super::config::{Stream, TransformerConfig};
use crate::hlo::{Type, Value};
use crate::nn::{Axis, LayerTensor, Params, PerLayer, StackOrder, gelu_tanh_of_product, linear};

/// One stream's text, for all layers.
#[derive(Clone)]
pub enum TextSource {
    /// The projected context `[b, t, width]`.
    Context(Value),
    /// Keys and values of every layer, as [`text_keys_values`] describes them.
    KeysValues([PerLayer; 2]),
}

impl TextSource {
    /// Tokens, with what fills them up.
    pub fn tokens(&self, p: &Params, s: &Stream) -> usize {
        match self {
            TextSource::Context(x) => x.dim(1),
            TextSource::KeysValues([k, _]) => {
                order(p, s, 0).iter().zip(k.dims()).find(|(d, _)| **d == 1).map_or(0, |(_, n)| *n)
            }
        }
    }

    /// What a layer at `p` reads.
    pub(super) fn of_layer(&self, p: &Params, s: &Stream) -> Text {
        match self {
            TextSource::Context(x) => Text::Context(x.clone()),
            TextSource::KeysValues(kv) => Text::KeysValues([0, 1].map(|i| {
                let mut back = [0; 4];
                for (to, from) in order(p, s, i).into_iter().enumerate() {
                    back[from] = to;
                }
                p.of_layer(&kv[i]).transpose(&back)
            })),
        }
    }
}

/// The order in which `[b, t, heads, dim]` keys (`which` = 0) or values (1) are kept.
fn order(p: &Params, s: &Stream, which: usize) -> [usize; 4] {
    let is_narrow = !s.attention.heads.dim.is_multiple_of(128);
    match p.lowering().text_stacks {
        StackOrder::TokensHeads => [0, 1, 2, 3],
        StackOrder::ValuesTokensLast if which == 1 || is_narrow => [0, 2, 3, 1],
        StackOrder::NarrowTokensLast if is_narrow => [0, 2, 3, 1],
        StackOrder::HeadsTokens | StackOrder::ValuesTokensLast | StackOrder::NarrowTokensLast => [0, 2, 1, 3],
    }
}

/// One stream's keys and values of every layer, `text.<stream>.k` and `.v`: in the order in which attention reads them,
/// so that no compiler reorders a stack.
pub fn text_keys_values(p: &Params, s: &Stream, stream: &str, rows: usize, tokens: usize) -> [LayerTensor; 2] {
    let h = s.attention.heads;
    let (sizes, axes) =
        ([rows, tokens, h.count, h.dim], [Axis::CfgBatch, Axis::TextSequence, Axis::Heads, Axis::HeadDim]);
    [0, 1].map(|i| {
        let order = order(p, s, i);
        LayerTensor {
            name: format!("text.{stream}.{}", ["k", "v"][i]),
            ty: Type::new(p.dtype(), order.map(|d| sizes[d])),
            axes: order.map(|d| axes[d]).to_vec(),
        }
    })
}

/// The text context as the blocks read it: the caption projection where the model has one.
pub fn project_text(p: &Params, c: &TransformerConfig, s: &Stream, text: &Value) -> Value {
    if !c.use_prompt_embeddings {
        return text.clone();
    }
    let p = p.pp(s.name("caption_projection"));
    let _scope = p.scope();
    let inner = linear(&p.pp("linear_1"), text, s.width(), true, [Axis::Embed, Axis::Mlp]);
    let inner = p.place("hidden", &inner, &[Axis::CfgBatch, Axis::TextSequence, Axis::Mlp]);
    let y = linear(&p.pp("linear_2"), &gelu_tanh_of_product(&p, &inner), s.width(), true, [Axis::Mlp, Axis::Embed]);
    p.place("out", &y, &[Axis::CfgBatch, Axis::TextSequence, Axis::Replicated])
}

/// The keys and values `kept` of both streams and all layers, from their projected contexts. Only for models whose text
/// context does not depend on the noise level.
pub fn all_text_keys_values(
    p: &Params,
    c: &TransformerConfig,
    contexts: &[Value; 2],
    kept: &[LayerTensor],
) -> Vec<PerLayer> {
    let streams = [c.video(), c.audio()];
    let _scope = p.builder().scope("text_keys_values");
    p.per_layer("transformer_blocks", c.num_layers, kept, |p| {
        let p = &p.quantized(|block| c.quantizes(block));
        let both = streams.iter().zip(contexts).flat_map(|(s, x)| {
            let kv = block::text_keys_values(p, c, s, x, None);
            [0, 1].map(|i| kv[i].transpose(&order(p, s, i)))
        });
        both.collect()
    })
}
