//! The Gemma 3 language model.

use std::cell::Cell;

use super::config::{Gemma3Config, RopeBase};
use crate::chat::{ChatFormat, GEMMA_3};
use crate::connectors::ConnectorsConfig;
use crate::gemma::COMPONENT;
use crate::gemma::{Attend, GenerationSpec, HeadRope, LanguageModel, LayerAttention, generator, untied, with_caches};
use crate::gemma::{AttentionMasks, DecoderLayer, GemmaNorm, LayerKind, LayerVisitor, ROOT, Stack, bias, keys_values};
use crate::gemma::{NormInput, Residual, token_projections};
use crate::text_encoder::TextEncoder;
use crate::tokenizer::{GEMMA, TokenizerRules};
use crate::{ComponentConfigError, Network, require};
use ltx2_nn::{Attention, Axis, Build, Heads, Params, project};
use ltx2_stablehlo::{Comparison, DType, Result, Type, Value};

impl TextEncoder for Gemma3Config {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn tokenizer(&self) -> &'static TokenizerRules {
        &GEMMA
    }

    fn chat(&self) -> &'static ChatFormat {
        &GEMMA_3
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
        let bound = self.final_logit_softcapping;
        let supported = "null for text generation";
        let is_bounded = require(bound.is_none(), COMPONENT, "final_logit_softcapping", bound, supported).err();
        (!self.is_tied).then(untied).or(is_bounded)
    }

    fn generator(&self, spec: &GenerationSpec, build: &Build) -> Result<Network> {
        generator(self, spec, build)
    }
}

impl LanguageModel for Gemma3Config {
    fn stack(&self) -> Stack {
        Stack { vocab_size: self.vocab_size, hidden_size: self.hidden_size, layers: self.layers.len() }
    }

    fn window(&self) -> usize {
        self.sliding_window
    }

    fn caches(&self) -> (Vec<Heads>, Vec<usize>) {
        (vec![self.kv_heads()], vec![0; self.layers.len()])
    }

    fn final_logit_softcapping(&self) -> Option<f64> {
        None
    }

    fn final_norm(&self) -> GemmaNorm {
        scaled_norm(self)
    }

    fn run_layers(&self, p: &Params, positions: &Value, state: &[Value], attend: Attend) -> (Residual, Vec<Value>) {
        let tables = RopeTables::at(p, self, positions);
        // Of unrolled layers, each adds the addend of the layer before it.
        let addend = Cell::new(None);
        let mut state = p.pp(ROOT).each_layer_quantized(
            "layers",
            self.layers.len(),
            |_| false,
            state,
            |p, layer, state| {
                let (kind, is_full) = tables.kind(layer);
                let rope = tables.of_kind(&kind);
                with_caches(state, attend, |attend| {
                    let attend = |p: &Params, q: &Value, k: &Value, v: &Value, rope: Option<HeadRope>| {
                        let scale = self.query_pre_attn_scalar.powf(-0.5);
                        attend(p, &LayerAttention { layer, q, kv: [k, v], is_full: is_full.clone(), scale, rope })
                    };
                    let residual = Residual { h: state[0].clone(), addend: addend.take() };
                    let residual = run_layer(p, self, residual, &rope, &attend);
                    if p.fixed_layer().is_none() {
                        return scaled_norm(self).sum(p, &residual);
                    }
                    addend.set(residual.addend);
                    residual.h
                })
            },
        );
        (Residual { h: state.remove(0), addend: addend.take() }, state)
    }
}

/// Builds the text encoder program that `TextEncoder::program` describes.
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes.
pub fn program(
    c: &Gemma3Config,
    connectors: Option<&ConnectorsConfig>,
    batch: usize,
    tokens: usize,
    build: &Build,
) -> Result<Network> {
    let layers = |p: &Params, mask: &Value, state: &[Value], visit: LayerVisitor| {
        let inputs = SharedInputs::new(p, c, mask);
        // Layers are quantized only with int8-convrot.
        p.pp(ROOT).each_layer_quantized(
            "layers",
            c.layers.len(),
            |_| false,
            state,
            |p, i, state| {
                let carried = visit(i, &state[0], &state[1..]);
                let (rope, bias) = inputs.layer_inputs(i);
                let sdpa = |p: &Params, q: &Value, k: &Value, v: &Value, head_rope: Option<HeadRope>| {
                    let [q, k] = head_rope.map_or_else(|| [q.clone(), k.clone()], |rope| rope.heads(p, q, k));
                    let (scale, sequence) = (c.query_pre_attn_scalar.powf(-0.5), [Axis::TextSequence; 2]);
                    Attention { q: &q, k: &k, v, bias: Some(&bias), scale, sequence }.run(p)
                };
                let residual = run_layer(p, c, Residual::from(state[0].clone()), &rope, &sdpa);
                [vec![scaled_norm(c).sum(p, &residual)], carried].concat()
            },
        )
    };
    c.stack().program(connectors, [batch, tokens], build, layers, |p, x| norm(p, c, x))
}

/// Inputs shared by all layers: RoPE tables and masks for both kinds of layers.
struct SharedInputs {
    tables: RopeTables,
    visible: AttentionMasks,
    /// Sliding-window mask, `[t, t]`.
    near: Value,
}

/// RoPE tables of both kinds of layers.
struct RopeTables {
    /// Cosines, `[2, t, dim / 2]` or `[2, b, t, dim / 2]`: first for sliding-window layers, then for full-attention
    /// layers. `sin` has the same shape.
    cos: Value,
    sin: Value,
    /// i32 `[layers]`: 1 for full-attention layers, 0 for sliding-window layers.
    kinds: Value,
}

/// RoPE tables of one layer, `[b or 1, t, 1, dim / 2]`.
struct LayerRope {
    cos: Value,
    sin: Value,
}

impl SharedInputs {
    fn new(p: &Params, c: &Gemma3Config, mask: &Value) -> Self {
        let frequencies = frequencies(p, c);
        let angles = p.builder().iota(Type::new(DType::F32, vec![mask.dim(1), 1]), 0) * frequencies;
        let visible = AttentionMasks::new(p, mask);
        SharedInputs { tables: RopeTables::new(p, c, &angles), near: visible.near(c.sliding_window), visible }
    }

    /// Returns the RoPE tables and the attention bias of one layer.
    fn layer_inputs(&self, layer: &Value) -> (LayerRope, Value) {
        let (kind, is_full) = self.tables.kind(layer);
        let seen = self.visible.earlier.and(&self.near.or(&is_full));
        (self.tables.of_kind(&kind), bias(&seen))
    }
}

/// Returns the frequencies of both kinds of layers, `[2, 1, dim / 2]`.
fn frequencies(p: &Params, c: &Gemma3Config) -> Value {
    let half = c.heads.dim / 2;
    let inverse = |base: RopeBase| {
        // Every operation is rounded to f32, as in the reference.
        move |j: usize| {
            let exponent = (2 * j) as f32 / c.heads.dim as f32;
            (1.0 / (base.theta as f32 as f64).powf(f64::from(exponent)) as f32) / base.factor as f32
        }
    };
    let (local, global) = (inverse(c.local), inverse(c.global));
    let frequencies: Vec<f32> = (0..half).map(local).chain((0..half).map(global)).collect();
    p.builder().constant(&[2, half], &frequencies).reshape(vec![2, 1, half])
}

impl RopeTables {
    fn new(p: &Params, c: &Gemma3Config, angles: &Value) -> Self {
        let kinds: Vec<i32> = c.layers.iter().map(|k| i32::from(*k == LayerKind::FullAttention)).collect();
        RopeTables {
            cos: angles.cos().round_to(p.dtype()),
            sin: angles.sin().round_to(p.dtype()),
            kinds: p.builder().vector_i32(&kinds),
        }
    }

    /// Returns the tables for positions `[b, t]`.
    fn at(p: &Params, c: &Gemma3Config, positions: &Value) -> Self {
        let [b, t] = [positions.dim(0), positions.dim(1)];
        let frequencies = frequencies(p, c).reshape(vec![2, 1, 1, c.heads.dim / 2]);
        RopeTables::new(p, c, &(positions.reshape(vec![1, b, t, 1]) * frequencies))
    }

    /// Returns the kind of a layer as an index into the tables, and whether it is full attention, a boolean scalar.
    fn kind(&self, layer: &Value) -> (Value, Value) {
        let kind = self.kinds.index(layer);
        let is_full = kind.compare(Comparison::Ne, &kind.like(0.0));
        (kind, is_full)
    }

    /// Returns the tables of one kind of layer.
    fn of_kind(&self, kind: &Value) -> LayerRope {
        let table = |t: &Value| {
            let own = t.index(kind);
            let rows = if own.rank() == 3 { own.dim(0) } else { 1 };
            own.reshape(vec![rows, own.dim(-2), 1, own.dim(-1)])
        };
        LayerRope { cos: table(&self.cos), sin: table(&self.sin) }
    }
}

/// Applies RMS norm over the last dimension and multiplies by `1 + weight`.
fn norm(p: &Params, c: &Gemma3Config, x: &Value) -> Value {
    scaled_norm(c).run(p, x)
}

fn scaled_norm(c: &Gemma3Config) -> GemmaNorm {
    GemmaNorm { eps: c.rms_norm_eps, offset: 1.0 }
}

/// Attention of one layer: receives the prefix of the attention layer, queries `[b, t, heads, dim]`, keys and values
/// `[b, t, kv_heads, dim]`, and the norms and RoPE of queries and keys if they have not been applied.
type Sdpa<'a> = &'a dyn Fn(&Params, &Value, &Value, &Value, Option<HeadRope>) -> Value;

fn run_layer(p: &Params, c: &Gemma3Config, residual: Residual, rope: &LayerRope, sdpa: Sdpa) -> Residual {
    let attention = |input: &NormInput| attention(&p.pp("self_attn"), c, input, rope, sdpa);
    DecoderLayer { norm: scaled_norm(c), attention, intermediate_size: c.intermediate_size }.run(p, residual)
}

/// Returns the residual stream and the attention of its norm.
fn attention(p: &Params, c: &Gemma3Config, input: &NormInput, rope: &LayerRope, sdpa: Sdpa) -> (Value, Value) {
    let (heads, rope) = (c.heads, HeadRope { norm: scaled_norm(c), cos: &rope.cos, sin: &rope.sin });
    let token = (!c.attention_bias).then(|| {
        let _scope = p.scope();
        let (h, [q, k, v]) = token_projections(p, heads, c.kv_heads(), input)?;
        Some((h, sdpa(p, &q, &k, &v, Some(rope))))
    });
    let (h, o) = token.flatten().unwrap_or_else(|| {
        let [h, x] = input.values();
        let _scope = p.scope();
        let axes = [Axis::Heads, Axis::HeadDim];
        let q = project(&p.pp("q_proj"), &x, &[heads.count, heads.dim], c.attention_bias, &axes, Axis::Embed);
        let kv = keys_values(p, c.kv_heads(), &x, c.attention_bias);
        let q = rope.run(&p.pp("q_norm"), &q);
        let k = rope.run(&p.pp("k_norm"), &kv.at(2, 0));
        (h, sdpa(p, &q, &k, &kv.at(2, 1), None))
    });
    let _scope = p.scope();
    let joined = o.reshape(vec![h.dim(0), h.dim(1), heads.width()]);
    let o = project(&p.pp("o_proj"), &joined, &[c.hidden_size], c.attention_bias, &[Axis::Embed], Axis::Heads);
    (h, o)
}
