//! The Gemma 4 language model.

use super::config::{AttentionConfig, Gemma4Config};
use crate::chat::{ChatFormat, GEMMA_4};
use crate::connectors::ConnectorsConfig;
use crate::gemma::{Attend, GenerationSpec, LanguageModel, LayerAttention, generator, untied, with_caches};
use crate::gemma::{AttentionMasks, DecoderLayer, GemmaNorm, LayerKind, LayerVisitor, ROOT, Stack, bias, keys_values};
use crate::gemma::{NormInput, Residual};
use crate::text_encoder::TextEncoder;
use crate::tokenizer::{GEMMA, TokenizerRules};
use crate::{ComponentConfigError, Network};
use ltx2_nn::rope::{Pairing, rotate};
use ltx2_nn::{Attention, Axis, Build, Heads, Init, KindLayer, Params, RoundingPoints, project, rms};
use ltx2_stablehlo::{DType, Result, Type, Value};

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

    fn chat(&self) -> &'static ChatFormat {
        &GEMMA_4
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

    fn generation_error(&self) -> Option<ComponentConfigError> {
        (!self.is_tied).then(untied)
    }

    fn generator(&self, spec: &GenerationSpec, build: &Build) -> Result<Network> {
        generator(self, spec, build)
    }
}

impl LanguageModel for Gemma4Config {
    fn stack(&self) -> Stack {
        Stack { vocab_size: self.vocab_size, hidden_size: self.hidden_size, layers: self.layers.len() }
    }

    fn window(&self) -> usize {
        self.sliding_window
    }

    fn caches(&self) -> (Vec<Heads>, Vec<usize>) {
        let mut shapes: Vec<Heads> = Vec::new();
        let place = |kind: &LayerKind| {
            let heads = self.attention(*kind).kv_heads;
            shapes.iter().position(|shape| *shape == heads).unwrap_or_else(|| {
                shapes.push(heads);
                shapes.len() - 1
            })
        };
        let shape_of = self.layers.iter().map(place).collect();
        (shapes, shape_of)
    }

    fn final_logit_softcapping(&self) -> Option<f64> {
        self.final_logit_softcapping
    }

    fn final_norm(&self) -> GemmaNorm {
        scaled_norm(self)
    }

    fn run_layers(&self, p: &Params, positions: &Value, state: &[Value], attend: Attend) -> (Residual, Vec<Value>) {
        let [sliding, full] = [&self.sliding, &self.full].map(|a| LayerRope::at(p, a, positions));
        let mut state = p.pp(ROOT).each_layer_by_kind("layers", &self.layers, state, |place, state| {
            let is_full = place.kind == LayerKind::FullAttention;
            let rope = if is_full { &full } else { &sliding };
            let is_full = p.builder().full(f64::from(u8::from(is_full)), Type::scalar(DType::Bool));
            with_caches(state, attend, |attend| {
                let attend = |p: &Params, q: &Value, k: &Value, v: &Value| {
                    let (layer, is_full) = (&place.index, is_full.clone());
                    attend(p, &LayerAttention { layer, q, kv: [k, v], is_full, scale: SCALE, rope: None })
                };
                run_layer(place, self, &state[0], rope, &attend)
            })
        });
        (Residual::from(state.remove(0)), state)
    }
}

/// Factor of the scores. The norms of queries and keys have learned scales, so scores are not scaled.
const SCALE: f64 = 1.0;

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
        let inputs = |a: &AttentionConfig, seen: &Value| (LayerRope::new(p, a, seen.dim(-1)), seen.clone());
        let sliding = inputs(&c.sliding, &visible.earlier.and(&visible.near(c.sliding_window)));
        let full = inputs(&c.full, &visible.earlier);
        p.pp(ROOT).each_layer_by_kind("layers", &c.layers, state, |place, state| {
            let carried = visit(&place.index, &state[0], &state[1..]);
            let (rope, seen) = match place.kind {
                LayerKind::SlidingAttention => &sliding,
                LayerKind::FullAttention => &full,
            };
            let sdpa = |p: &Params, q: &Value, k: &Value, v: &Value| {
                let (bias, sequence) = (bias(seen), [Axis::TextSequence; 2]);
                Attention { q, k, v, bias: Some(&bias), scale: SCALE, sequence }.run(p)
            };
            [vec![run_layer(place, c, &state[0], rope, &sdpa)], carried].concat()
        })
    };
    c.stack().program(connectors, [batch, tokens], build, layers, |p, x| norm(p, c, x))
}

/// RoPE tables of one kind of layer.
struct LayerRope {
    /// Cosines, `[b or 1, t, 1, dim / 2]`; `sin` has the same shape.
    cos: Value,
    sin: Value,
}

impl LayerRope {
    /// Returns the tables for the positions `0..tokens`.
    fn new(p: &Params, a: &AttentionConfig, tokens: usize) -> Self {
        let [cos, sin] = a.rope.tables(p, tokens, a.heads.dim);
        LayerRope { cos, sin }
    }

    /// Returns the tables for positions `[b, t]`.
    fn at(p: &Params, a: &AttentionConfig, positions: &Value) -> Self {
        let [cos, sin] = a.rope.tables_at(p, positions, a.heads.dim);
        LayerRope { cos, sin }
    }
}

/// Attention of one layer: receives the prefix of the attention layer, queries `[b, t, heads, dim]`, and keys and
/// values `[b, t, kv_heads, dim]`.
type Sdpa<'a> = &'a dyn Fn(&Params, &Value, &Value, &Value) -> Value;

/// Applies RMS norm over the last dimension and multiplies by `weight`.
fn norm(p: &Params, c: &Gemma4Config, x: &Value) -> Value {
    scaled_norm(c).run(p, x)
}

fn scaled_norm(c: &Gemma4Config) -> GemmaNorm {
    GemmaNorm { eps: c.rms_norm_eps, offset: 0.0 }
}

/// Runs one layer. The layer's scalar multiplies the residual stream after the layer, not only the layer's contribution
/// to it.
fn run_layer(place: &KindLayer<LayerKind>, c: &Gemma4Config, h: &Value, rope: &LayerRope, sdpa: Sdpa) -> Value {
    let attention = |input: &NormInput| {
        let [h, x] = input.values();
        (h, attention(&place.own.pp("self_attn"), c, place.kind, &x, rope, sdpa))
    };
    let layer = DecoderLayer { norm: scaled_norm(c), attention, intermediate_size: c.intermediate_size };
    let h = layer.norm.sum(&place.common, &layer.run(&place.common, Residual::from(h.clone())));
    let scalar = place.common.get("layer_scalar", &[1], &[Axis::Replicated], Init { mean: 1.0, std: 0.02 });
    &h * scalar.reshape(vec![1, 1, 1])
}

fn attention(p: &Params, c: &Gemma4Config, kind: LayerKind, x: &Value, rope: &LayerRope, sdpa: Sdpa) -> Value {
    let _scope = p.scope();
    let a = c.attention(kind);
    let rotated = |x: &Value| rotate(p, x, &rope.cos, &rope.sin, Pairing::Split, RoundingPoints::Default);
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
    let o = sdpa(p, &q, &k, &v);
    let joined = o.reshape(vec![x.dim(0), x.dim(1), a.heads.width()]);
    project(&p.pp("o_proj"), &joined, &[c.hidden_size], c.attention_bias, &[Axis::Embed], Axis::Heads)
}
