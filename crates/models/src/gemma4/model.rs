//! The Gemma 4 language model.

use super::config::{AttentionConfig, Gemma4Config};
use crate::Network;
use crate::connectors::ConnectorsConfig;
use crate::gemma::{AttentionMasks, DecoderLayer, LayerKind, LayerVisitor, ROOT, Stack, bias, keys_values};
use crate::text_encoder::TextEncoder;
use crate::tokenizer::{GEMMA, TokenizerRules};
use ltx2_nn::rope::{Pairing, rotate};
use ltx2_nn::{Attention, Axis, Build, Init, KindLayer, Params, RoundingPoints, project, rms};
use ltx2_stablehlo::{DType, Result, Value};

impl TextEncoder for Gemma4Config {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn stacks(&self) -> Vec<usize> {
        let of = |kind: LayerKind| self.layers.iter().filter(|layer| **layer == kind).count();
        let kinds = [LayerKind::SlidingAttention, LayerKind::FullAttention].map(of);
        [self.layers()].into_iter().chain(kinds.into_iter().filter(|n| *n > 0 && *n < self.layers())).collect()
    }

    fn tokenizer(&self) -> &'static TokenizerRules {
        &GEMMA
    }

    fn program(
        &self,
        connectors: Option<&ConnectorsConfig>,
        rows: usize,
        tokens: usize,
        build: &Build,
    ) -> Result<Network> {
        program(self, connectors, rows, tokens, build)
    }
}

/// Builds the text encoder program that `TextEncoder::program` describes.
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes.
pub fn program(
    c: &Gemma4Config,
    connectors: Option<&ConnectorsConfig>,
    batch: usize,
    tokens: usize,
    build: &Build,
) -> Result<Network> {
    let layers = |p: &Params, mask: &Value, state: &[Value], visit: LayerVisitor| {
        let visible = AttentionMasks::new(p, mask);
        let sliding = Gemma4LayerInputs::new(p, &c.sliding, &visible.earlier.and(&visible.near(c.sliding_window)));
        let full = Gemma4LayerInputs::new(p, &c.full, &visible.earlier);
        p.pp(ROOT).each_layer_by_kind("layers", &c.layers, state, |place, state| {
            let carried = visit(&place.index, &state[0], &state[1..]);
            let inputs = match place.kind {
                LayerKind::SlidingAttention => &sliding,
                LayerKind::FullAttention => &full,
            };
            [vec![layer(place, c, &state[0], inputs)], carried].concat()
        })
    };
    let stack = Stack { vocab_size: c.vocab_size, hidden_size: c.hidden_size, layers: c.layers.len() };
    stack.program(connectors, [batch, tokens], build, layers, |p, x| norm(p, c, x))
}

/// RoPE tables and mask of one kind of layer.
struct Gemma4LayerInputs {
    /// Cosines, `[1, t, 1, dim / 2]`; `sin` has the same shape.
    cos: Value,
    sin: Value,
    /// Attention mask, `[b, 1, t, t]`.
    seen: Value,
}

impl Gemma4LayerInputs {
    fn new(p: &Params, c: &AttentionConfig, seen: &Value) -> Self {
        let [cos, sin] = c.rope.tables(p, seen.dim(-1), c.heads.dim);
        Gemma4LayerInputs { cos, sin, seen: seen.clone() }
    }
}

/// Applies RMS norm over the last dimension and multiplies by `weight`.
fn norm(p: &Params, c: &Gemma4Config, x: &Value) -> Value {
    let weight = p.get("weight", &[x.dim(-1)], &[Axis::Replicated], Init { mean: 1.0, std: 0.02 });
    (rms(x, c.rms_norm_eps) * weight.to(DType::F32)).to(x.dtype())
}

/// Runs one layer. The layer's scalar multiplies the residual stream after the layer, not only the layer's contribution
/// to it.
fn layer(place: &KindLayer<LayerKind>, c: &Gemma4Config, h: &Value, inputs: &Gemma4LayerInputs) -> Value {
    let norm = |p: &Params, x: &Value| norm(p, c, x);
    let attention = |x: &Value| attention(&place.own.pp("self_attn"), c, c.attention(place.kind), x, inputs);
    let h = DecoderLayer { norm, attention, intermediate_size: c.intermediate_size }.run(&place.common, h);
    let scalar = place.common.get("layer_scalar", &[1], &[Axis::Replicated], Init { mean: 1.0, std: 0.02 });
    &h * scalar.reshape(vec![1, 1, 1])
}

fn attention(p: &Params, c: &Gemma4Config, a: &AttentionConfig, x: &Value, inputs: &Gemma4LayerInputs) -> Value {
    let _scope = p.scope();
    let rotated = |x: &Value| rotate(p, x, &inputs.cos, &inputs.sin, Pairing::Split, RoundingPoints::Default);
    let heads = [a.heads.count, a.heads.dim];
    let q = project(&p.pp("q_proj"), x, &heads, c.attention_bias, &[Axis::Heads, Axis::HeadDim], Axis::Embed);
    let [k, v] = match a.k_eq_v {
        true => {
            let heads = [a.kv_heads.count, a.kv_heads.dim];
            let k = project(&p.pp("k_proj"), x, &heads, c.attention_bias, &[Axis::KvHeads, Axis::HeadDim], Axis::Embed);
            [k.clone(), k]
        }
        false => {
            let kv = keys_values(p, a.kv_heads, x, c.attention_bias);
            [kv.at(2, 0), kv.at(2, 1)]
        }
    };
    let q = rotated(&norm(&p.pp("q_norm"), c, &q));
    let k = rotated(&norm(&p.pp("k_norm"), c, &k));
    let v = rms(&v, c.rms_norm_eps).to(v.dtype());
    // The norms of queries and keys have learned scales, so scores are not scaled.
    let (bias, sequence) = (bias(&inputs.seen), [Axis::TextSequence; 2]);
    let o = Attention { q: &q, k: &k, v: &v, bias: Some(&bias), scale: 1.0, sequence }.run(p);
    let joined = o.reshape(vec![x.dim(0), x.dim(1), a.heads.width()]);
    project(&p.pp("o_proj"), &joined, &[c.hidden_size], c.attention_bias, &[Axis::Embed], Axis::Heads)
}
