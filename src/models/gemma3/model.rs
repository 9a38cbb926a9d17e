//! The Gemma-3 text stack with the text projection of LTX-2 inside its loop.

use super::config::{COMPONENT, Gemma3Config, LayerKind, RopeBase};
use crate::hlo::{Comparison, DType, Result, Type, Value};
use crate::models::Network;
use crate::models::connectors::{self, ConnectorsConfig};
use crate::models::text_encoder::TextEncoder;
use crate::models::tokenizer::TokenizerRules;
use crate::nn::rope::{Pairing, rotate};
use crate::nn::{
    Attention, Axis, Build, Heads, Init, MASK_VALUE, Numerics, Params, gelu_tanh, linear_nd, project, rms,
};

/// Prefix of the text stack in the checkpoint.
const ROOT: &str = "language_model.model";

/// Gemma's special tokens; BOS in front unless the tokenizer's configuration says otherwise.
pub const TOKENIZER: TokenizerRules = TokenizerRules { bos: "<bos>", eos: "<eos>", pad: "<pad>", prepends_bos: true };

impl TextEncoder for Gemma3Config {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn tokenizer(&self) -> &'static TokenizerRules {
        &TOKENIZER
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

/// Program of the text encoder, see `TextEncoder::program`.
///
/// # Errors
/// The first mistake made while building, with op, scope and shapes.
pub fn program(
    c: &Gemma3Config,
    connectors: Option<&ConnectorsConfig>,
    batch: usize,
    tokens: usize,
    build: &Build,
) -> Result<Network> {
    let p = Params::new("text_encoder", COMPONENT, build);
    let ty = Type::new(DType::I32, vec![batch, tokens]);
    let axes = [Axis::CfgBatch, Axis::TextSequence];
    let ids = p.input("input_ids", ty.clone(), &axes);
    // Every device needs to know which tokens are none.
    let mask = p.filled_input("attention_mask", ids.ty().clone(), &ty.dims, &[Axis::CfgBatch, Axis::Replicated]);
    let embeds = match connectors {
        Some(connectors) => {
            let projection = connectors::Projection::new(&p, connectors, &mask, c.hidden_states(), c.hidden_size);
            let sums = projection.start(ids.dim(0), ids.dim(1));
            projection.finish(&encode(&p, c, &ids, &mask, &sums, |i, h, sums| projection.add(sums, i, h)))
        }
        None => {
            let [rows, tokens] = [ids.dim(0), ids.dim(1)];
            let stack = Type::new(build.dtype, vec![c.hidden_states(), rows, tokens, c.hidden_size]);
            let empty = p.builder().full(0.0, stack);
            let write = |i: &Value, h: &Value, stack: &[Value]| vec![stack[0].dynamic_update(0, i, &h.unsqueeze(0))];
            let stack = encode(&p, c, &ids, &mask, &[empty], write);
            stack[0].transpose(&[1, 2, 3, 0]).reshape(vec![rows, tokens, c.hidden_size * c.hidden_states()])
        }
    };
    let content = [batch, tokens, embeds.dim(-1)];
    let axes = [Axis::CfgBatch, Axis::TextSequence, Axis::Replicated];
    Network::finish(&p, vec![p.output("prompt_embeds", &embeds.to(DType::F32), &axes, &content)])
}

/// Runs the stack and gives every hidden state, with its index, to `visit`, which carries values along: the scaled
/// embeddings, each layer's result, the last of them after the final norm.
fn encode(
    p: &Params,
    c: &Gemma3Config,
    ids: &Value,
    mask: &Value,
    carried: &[Value],
    visit: impl Fn(&Value, &Value, &[Value]) -> Vec<Value>,
) -> Vec<Value> {
    let b = p.builder();
    let root = p.pp(ROOT);
    let init = Init::normal((c.hidden_size as f32).sqrt().recip());
    let (shape, axes) = ([c.vocab_size, c.hidden_size], [Axis::Vocab, Axis::Embed]);
    let h = root.pp("embed_tokens").lookup("weight", &shape, &axes, init, ids);
    let h = p.place("embeddings", &h, &[Axis::CfgBatch, Axis::TextSequence, Axis::Replicated]);
    // The factor is rounded to the weights' type before it multiplies, as the reference keeps it.
    let h = h * (c.hidden_size as f64).sqrt();
    let inputs = SharedInputs::new(p, c, mask);
    let layers = c.layers.len();
    let done = root.each_layer("layers", layers, &[&[h], carried].concat(), |p, i, state| {
        let carried = visit(i, &state[0], &state[1..]);
        let h = layer(p, c, &state[0], &inputs.of(i));
        [vec![h], carried].concat()
    });
    let last = norm(&root.pp("norm"), c, &done[0]);
    visit(&b.scalar(layers as f64, DType::I32), &last, &done[1..])
}

/// Inputs of every layer: positions and masks of both kinds of layer.
struct SharedInputs {
    /// `[2, t, dim / 2]`: sliding, full.
    cos: Value,
    sin: Value,
    /// 1 for full layers, `[layers]`, i32.
    kinds: Value,
    /// Earlier tokens that are not padding, `[b, 1, t, t]`.
    visible: Value,
    /// Tokens inside the window, `[t, t]`.
    near: Value,
}

/// Positions and mask of one layer.
struct LayerInputs {
    cos: Value,
    sin: Value,
    bias: Value,
}

impl SharedInputs {
    fn new(p: &Params, c: &Gemma3Config, mask: &Value) -> Self {
        let (b, dtype) = (p.builder(), p.dtype());
        let (rows, t, half) = (mask.dim(0), mask.dim(1), c.heads.dim / 2);
        let inverse = |base: RopeBase| {
            // In f32 throughout, as the reference computes it.
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
        let square = Type::new(DType::I32, vec![t, t]);
        let distance = b.iota(square.clone(), 0) - b.iota(square, 1);
        let causal = distance.compare(Comparison::Ge, &distance.like(0.0));
        let valid = mask.compare(Comparison::Ne, &mask.like(0.0)).reshape(vec![rows, 1, 1, t]);
        // Whole: a piece of it would be gathered in every layer.
        let visible = p.place(
            "visible",
            &valid.and(&causal),
            &[Axis::CfgBatch, Axis::Replicated, Axis::Replicated, Axis::Replicated],
        );
        let window = i32::try_from(c.sliding_window).unwrap_or(i32::MAX);
        SharedInputs {
            cos: angles.cos().round_to(dtype),
            sin: angles.sin().round_to(dtype),
            kinds: b.vector_i32(&kinds),
            visible,
            near: distance.compare(Comparison::Lt, &distance.like(f64::from(window))),
        }
    }

    fn of(&self, layer: &Value) -> LayerInputs {
        let kind = self.kinds.index(layer);
        let table = |t: &Value| {
            let row = t.index(&kind);
            row.reshape(vec![1, row.dim(0), 1, row.dim(1)])
        };
        let full = kind.compare(Comparison::Ne, &kind.like(0.0));
        let seen = self.visible.and(&self.near.or(&full));
        let scalar = |v: f64| self.cos.builder().scalar(v, DType::F32);
        LayerInputs {
            cos: table(&self.cos),
            sin: table(&self.sin),
            bias: seen.select(&scalar(0.0), &scalar(MASK_VALUE)),
        }
    }
}

/// RMS norm with the weight's distance from one, over the last dimension.
fn norm(p: &Params, c: &Gemma3Config, x: &Value) -> Value {
    let weight = p.get("weight", &[x.dim(-1)], &[Axis::Replicated], Init::normal(0.02));
    (rms(x, c.rms_norm_eps) * (weight.to(DType::F32) + 1.0)).to(x.dtype())
}

fn layer(p: &Params, c: &Gemma3Config, h: &Value, inputs: &LayerInputs) -> Value {
    let attended = attention(&p.pp("self_attn"), c, &norm(&p.pp("input_layernorm"), c, h), inputs);
    let h = h + norm(&p.pp("post_attention_layernorm"), c, &attended);
    let inner = mlp(&p.pp("mlp"), c, &norm(&p.pp("pre_feedforward_layernorm"), c, &h));
    &h + norm(&p.pp("post_feedforward_layernorm"), c, &inner)
}

fn attention(p: &Params, c: &Gemma3Config, x: &Value, inputs: &LayerInputs) -> Value {
    let _scope = p.scope();
    let (heads, kv) = (c.heads, c.kv_heads());
    let rotated = |x: &Value| rotate(p, x, &inputs.cos, &inputs.sin, Pairing::Split, Numerics::Default);
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

/// Keys and values in one product: `[b, t, 2, heads, dim]`.
fn keys_values(p: &Params, heads: Heads, x: &Value, bias: bool) -> Value {
    let (shape, width) = ([heads.count, heads.dim, x.dim(-1)], heads.width());
    let axes = [Axis::KvHeads, Axis::HeadDim, Axis::Embed];
    let init = Init::normal((x.dim(-1) as f32).sqrt().recip());
    let weight = p.fused(&["k_proj.weight", "v_proj.weight"], &shape, &[width, x.dim(-1)], &axes, init);
    let y = linear_nd(p, x, &weight);
    if !bias {
        return y;
    }
    y + p.fused(&["k_proj.bias", "v_proj.bias"], &shape[..2], &[width], &axes[..2], Init::normal(0.02))
}

fn mlp(p: &Params, c: &Gemma3Config, x: &Value) -> Value {
    let _scope = p.scope();
    let shape = [c.intermediate_size, c.hidden_size];
    let init = Init::normal((c.hidden_size as f32).sqrt().recip());
    let weight = p.fused(&["gate_proj.weight", "up_proj.weight"], &shape, &shape, &[Axis::Mlp, Axis::Embed], init);
    let both = linear_nd(p, x, &weight);
    let inner = gelu_tanh(&both.at(2, 0)) * both.at(2, 1);
    project(&p.pp("down_proj"), &inner, &[c.hidden_size], false, &[Axis::Embed], Axis::Mlp)
}
