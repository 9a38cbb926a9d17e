//! The Gemma 3 language model.

use super::config::{Gemma3Config, RopeBase};
use crate::Network;
use crate::connectors::ConnectorsConfig;
use crate::gemma::{AttentionMasks, DecoderLayer, LayerKind, LayerVisitor, ROOT, Stack, bias, keys_values};
use crate::text_encoder::TextEncoder;
use crate::tokenizer::{GEMMA, TokenizerRules};
use ltx2_nn::rope::{Pairing, rotate};
use ltx2_nn::{Attention, Axis, Build, Init, Params, RoundingPoints, project, rms};
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
                let h = layer(p, c, &state[0], &inputs.layer_inputs(i));
                [vec![h], carried].concat()
            },
        )
    };
    let stack = Stack { vocab_size: c.vocab_size, hidden_size: c.hidden_size, layers: c.layers.len() };
    stack.program(connectors, [batch, tokens], build, layers, |p, x| norm(p, c, x))
}

/// Inputs shared by all layers: RoPE tables and masks for both kinds of layers.
struct SharedInputs {
    /// Cosines, `[2, t, dim / 2]`: first for sliding-window layers, then for full-attention layers. `sin` has the same
    /// shape.
    cos: Value,
    sin: Value,
    /// i32 `[layers]`: 1 for full-attention layers, 0 for sliding-window layers.
    kinds: Value,
    visible: AttentionMasks,
    /// Sliding-window mask, `[t, t]`.
    near: Value,
}

/// RoPE tables and attention bias of one layer.
struct Gemma3LayerInputs {
    cos: Value,
    sin: Value,
    bias: Value,
}

impl SharedInputs {
    fn new(p: &Params, c: &Gemma3Config, mask: &Value) -> Self {
        let (b, dtype) = (p.builder(), p.dtype());
        let (t, half) = (mask.dim(1), c.heads.dim / 2);
        let inverse = |base: RopeBase| {
            // Every operation is rounded to f32, as in the reference.
            move |j: usize| {
                let exponent = (2 * j) as f32 / c.heads.dim as f32;
                (1.0 / (base.theta as f32 as f64).powf(f64::from(exponent)) as f32) / base.factor as f32
            }
        };
        let (local, global) = (inverse(c.local), inverse(c.global));
        let frequencies: Vec<f32> = (0..half).map(local).chain((0..half).map(global)).collect();
        let frequencies = b.constant(&[2, half], &frequencies).reshape(vec![2, 1, half]);
        let angles = b.iota(Type::new(DType::F32, vec![t, 1]), 0) * frequencies;
        let kinds: Vec<i32> = c.layers.iter().map(|k| i32::from(*k == LayerKind::FullAttention)).collect();
        let visible = AttentionMasks::new(p, mask);
        SharedInputs {
            cos: angles.cos().round_to(dtype),
            sin: angles.sin().round_to(dtype),
            kinds: b.vector_i32(&kinds),
            near: visible.near(c.sliding_window),
            visible,
        }
    }

    fn layer_inputs(&self, layer: &Value) -> Gemma3LayerInputs {
        let kind = self.kinds.index(layer);
        let table = |t: &Value| {
            let row = t.index(&kind);
            row.reshape(vec![1, row.dim(0), 1, row.dim(1)])
        };
        let full = kind.compare(Comparison::Ne, &kind.like(0.0));
        let seen = self.visible.earlier.and(&self.near.or(&full));
        Gemma3LayerInputs { cos: table(&self.cos), sin: table(&self.sin), bias: bias(&seen) }
    }
}

/// Applies RMS norm over the last dimension and multiplies by `1 + weight`.
fn norm(p: &Params, c: &Gemma3Config, x: &Value) -> Value {
    let weight = p.get("weight", &[x.dim(-1)], &[Axis::Replicated], Init::normal(0.02));
    (rms(x, c.rms_norm_eps) * (weight.to(DType::F32) + 1.0)).to(x.dtype())
}

fn layer(p: &Params, c: &Gemma3Config, h: &Value, inputs: &Gemma3LayerInputs) -> Value {
    let norm = |p: &Params, x: &Value| norm(p, c, x);
    let attention = |x: &Value| attention(&p.pp("self_attn"), c, x, inputs);
    DecoderLayer { norm, attention, intermediate_size: c.intermediate_size }.run(p, h)
}

fn attention(p: &Params, c: &Gemma3Config, x: &Value, inputs: &Gemma3LayerInputs) -> Value {
    let _scope = p.scope();
    let (heads, kv) = (c.heads, c.kv_heads());
    let rotated = |x: &Value| rotate(p, x, &inputs.cos, &inputs.sin, Pairing::Split, RoundingPoints::Default);
    let axes = [Axis::Heads, Axis::HeadDim];
    let q = project(&p.pp("q_proj"), x, &[heads.count, heads.dim], c.attention_bias, &axes, Axis::Embed);
    let kv = keys_values(p, kv, x, c.attention_bias);
    let q = rotated(&norm(&p.pp("q_norm"), c, &q));
    let k = rotated(&norm(&p.pp("k_norm"), c, &kv.at(2, 0)));
    let scale = c.query_pre_attn_scalar.powf(-0.5);
    let o =
        Attention { q: &q, k: &k, v: &kv.at(2, 1), bias: Some(&inputs.bias), scale, sequence: [Axis::TextSequence; 2] }
            .run(p);
    let joined = o.reshape(vec![x.dim(0), x.dim(1), heads.width()]);
    project(&p.pp("o_proj"), &joined, &[c.hidden_size], c.attention_bias, &[Axis::Embed], Axis::Heads)
}
