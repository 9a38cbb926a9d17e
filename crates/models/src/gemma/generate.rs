//! Text generation: one program with a forward pass over the prompts, which fills a key/value cache, and a loop over
//! the new tokens.

use std::cell::RefCell;

use super::sampling::TokenChoice;
use super::{AttentionMasks, COMPONENT, GemmaNorm, NormInput, ROOT, Residual, Stack, bias};
use crate::Network;
use ltx2_nn::kernels::{RowAttended, RowAttention, RowRope, RowWeight};
use ltx2_nn::rope::{Pairing, rotate};
use ltx2_nn::{Attention, Axis, Build, Heads, Init, Params, RoundingPoints, linear_into};
use ltx2_stablehlo::{Comparison, DType, Result, Type, Value};

/// Sizes and options of a program that generates text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GenerationSpec {
    /// Number of prompts.
    pub rows: usize,
    /// Number of tokens of each prompt, with padding on the left.
    pub prompt_tokens: usize,
    /// Maximum number of tokens to generate.
    pub new_tokens: usize,
    /// Number of tokens that end a text.
    pub stop_tokens: usize,
    /// Whether tokens are drawn from the model's distribution. If not, each token is the most probable one.
    pub sampled: bool,
    /// Length of the token sequences that must not occur twice in a prompt and its text; 0: no restriction.
    pub no_repeat_ngram_size: usize,
}

/// Operands of the attention of one layer.
pub(crate) struct LayerAttention<'a> {
    /// Number of the layer.
    pub(crate) layer: &'a Value,
    /// Queries `[rows, tokens, heads, dim]`.
    pub(crate) q: &'a Value,
    /// Keys and values `[rows, tokens, kv_heads, dim]`.
    pub(crate) kv: [&'a Value; 2],
    /// Whether the layer sees all earlier tokens: a boolean scalar. If not, it sees those in the window.
    pub(crate) is_full: Value,
    pub(crate) scale: f64,
    /// Norms and RoPE of queries and keys; `None` if they have been applied.
    pub(crate) rope: Option<HeadRope<'a>>,
}

/// RMS norm of each head of queries and keys, and RoPE.
#[derive(Clone, Copy)]
pub(crate) struct HeadRope<'a> {
    pub(crate) norm: GemmaNorm,
    /// Cosines `[b or 1, t, 1, dim / 2]`; `sin` has the same shape.
    pub(crate) cos: &'a Value,
    pub(crate) sin: &'a Value,
}

impl HeadRope<'_> {
    /// Normalizes and rotates queries or keys. `p`: prefix of their norm.
    pub(crate) fn run(&self, p: &Params, x: &Value) -> Value {
        rotate(p, &self.norm.run(p, x), self.cos, self.sin, Pairing::Split, RoundingPoints::Default)
    }

    /// Normalizes and rotates queries and keys. `p`: prefix of the attention layer.
    pub(crate) fn heads(&self, p: &Params, q: &Value, k: &Value) -> [Value; 2] {
        [self.run(&p.pp("q_norm"), q), self.run(&p.pp("k_norm"), k)]
    }

    fn row(&self, p: &Params, dim: usize) -> RowRope<'_> {
        let [q_scale, k_scale] = ["q_norm", "k_norm"].map(|name| self.norm.scale(&p.pp(name), dim));
        RowRope { eps: self.norm.eps, q_scale, k_scale, cos: self.cos, sin: self.sin }
    }
}

impl LayerAttention<'_> {
    /// Calls `run` with the operands after norms and RoPE.
    fn rotated<T>(&self, p: &Params, run: impl FnOnce(&LayerAttention) -> T) -> T {
        let Some(rope) = &self.rope else { return run(self) };
        let [q, k] = rope.heads(p, self.q, self.kv[0]);
        let kv = [&k, self.kv[1]];
        run(&LayerAttention {
            q: &q,
            kv,
            rope: None,
            is_full: self.is_full.clone(),
            layer: self.layer,
            scale: self.scale,
        })
    }
}

/// Attention over the tokens of a forward pass and the cached tokens before them. Receives the prefix of the attention
/// layer and the caches, and returns `[rows, tokens, heads, dim]` and the updated caches.
pub(crate) type Attend<'a> = &'a dyn Fn(&Params, &LayerAttention, &[Value]) -> (Value, Vec<Value>);

/// Language model that generates text.
pub(crate) trait LanguageModel {
    fn stack(&self) -> Stack;

    /// Size of the sliding window in tokens, including the current token.
    fn window(&self) -> usize;

    /// Returns the shapes of keys and values, and for each layer the index of its shape.
    fn caches(&self) -> (Vec<Heads>, Vec<usize>);

    /// Bound of the logits: they are mapped by `bound · tanh(x / bound)`. `None`: unchanged.
    fn final_logit_softcapping(&self) -> Option<f64>;

    /// Returns the norm of the last hidden state.
    fn final_norm(&self) -> GemmaNorm;

    /// Runs all layers on `state`, the residual stream `[rows, tokens, hidden]` followed by the caches. `positions`: the
    /// position of each token, f32 `[rows, tokens]`. Returns the residual stream and the caches.
    fn run_layers(&self, p: &Params, positions: &Value, state: &[Value], attend: Attend) -> (Residual, Vec<Value>);
}

/// Runs `layer` with an attention function that reads and updates the caches. `state`: the residual stream followed by
/// the caches; returns the updated state.
pub(crate) fn with_caches(
    state: &[Value],
    attend: Attend,
    layer: impl FnOnce(&dyn Fn(&Params, &LayerAttention) -> Value) -> Value,
) -> Vec<Value> {
    let caches = RefCell::new(state[1..].to_vec());
    let h = layer(&|p, attention| {
        let (attended, updated) = attend(p, attention, &caches.borrow());
        *caches.borrow_mut() = updated;
        attended
    });
    [vec![h], caches.into_inner()].concat()
}

/// Layout of the key/value caches: `[rows, kv_heads, tokens, dim]` for each layer. In a loop over layers, the caches of
/// all layers with the same shape are stacked.
struct Cache {
    shapes: Vec<Heads>,
    /// Index of each layer's shape.
    shape_of: Vec<usize>,
    unrolled: bool,
}

/// Axes of a layer's keys or values in the cache.
const CACHE_AXES: [Axis; 4] = [Axis::CfgBatch, Axis::KvHeads, Axis::Replicated, Axis::HeadDim];
/// Axes of a tensor with one number for each token.
const ROW_AXES: [Axis; 2] = [Axis::CfgBatch, Axis::Replicated];

impl Cache {
    /// Returns the empty caches: keys and values of each layer or of each stack.
    fn empty(&self, p: &Params, rows: usize, tokens: usize) -> Vec<Value> {
        let one = |heads: &Heads, layers: Option<usize>| {
            let dims = [rows, heads.count, tokens, heads.dim];
            let (dims, axes) = match layers {
                None => (dims.to_vec(), CACHE_AXES.to_vec()),
                Some(layers) => ([&[layers], &dims[..]].concat(), [&[Axis::Layers], &CACHE_AXES[..]].concat()),
            };
            let empty = p.builder().full(0.0, Type::new(p.dtype(), dims));
            let empty = p.place("cache", &empty, &axes);
            [empty.clone(), empty]
        };
        if self.unrolled {
            return self.shape_of.iter().flat_map(|&shape| one(&self.shapes[shape], None)).collect();
        }
        let layers = |shape: usize| self.shape_of.iter().filter(|of| **of == shape).count();
        self.shapes.iter().enumerate().flat_map(|(shape, heads)| one(heads, Some(layers(shape)))).collect()
    }

    /// Writes the keys and values `[rows, tokens, kv_heads, dim]` of one layer at position `at`. Returns the updated
    /// caches, and the layer's keys and values `[rows, kv_heads, tokens, dim]`.
    fn update(&self, p: &Params, operands: &LayerAttention, at: &Value, caches: &[Value]) -> (Vec<Value>, [Value; 2]) {
        let b = p.builder();
        let new = operands.kv.map(|x| x.transpose(&[0, 2, 1, 3]).to(p.dtype()));
        let mut updated = caches.to_vec();
        if let Some(layer) = p.fixed_layer().filter(|_| self.unrolled) {
            for (cache, new) in updated[2 * layer..].iter_mut().zip(&new) {
                *cache = p.place("cache", &cache.dynamic_update(2, at, new), &CACHE_AXES);
            }
            let own = [0, 1].map(|i| updated[2 * layer + i].clone());
            return (updated, own);
        }
        // Layers with the same number of heads and head dimension have the same shape; the loop's body runs for layers
        // of one shape.
        let heads = Heads { count: new[0].dim(1), dim: new[0].dim(3) };
        let shape = self.shapes.iter().position(|of| *of == heads).expect("a shape of each layer");
        let mut place = 0;
        let places: Vec<i32> = self
            .shape_of
            .iter()
            .map(|of| {
                place += i32::from(*of == shape);
                (place - 1).max(0)
            })
            .collect();
        let place = b.vector_i32(&places).index(operands.layer);
        let zero = b.scalar(0.0, DType::I32);
        let starts = [place.clone(), zero.clone(), zero.clone(), at.clone(), zero];
        for (cache, new) in updated[2 * shape..].iter_mut().zip(&new) {
            *cache = cache.update_slice(&starts, &new.unsqueeze(0));
        }
        let own = [0, 1].map(|i| updated[2 * shape + i].index(&place));
        (updated, own)
    }

    /// Writes the keys and values of a single token at position `at` and computes its attention, with kernels. `bias`
    /// returns `[1, tokens]`, which is added to the scores. Returns the attention and the updated caches, or `None` if
    /// the program does not use kernels for single rows, or if they do not support the operands.
    fn attend(
        &self,
        p: &Params,
        operands: &LayerAttention,
        at: &Value,
        bias: impl FnOnce() -> Value,
        caches: &[Value],
    ) -> Option<(Value, Vec<Value>)> {
        let layer = p.fixed_layer().filter(|_| self.unrolled && p.has_row_kernels(operands.q))?;
        let (bias, [k, v], own) = (bias(), operands.kv, 2 * layer);
        let [keys, values] = [&caches[own], &caches[own + 1]];
        let (q, scale) = (operands.q, operands.scale);
        let rope = operands.rope.as_ref().map(|rope| rope.row(p, q.dim(-1)));
        let attention = RowAttention { q, k, v, keys, values, at, bias: &bias, scale, rope };
        let RowAttended { attended, keys, values } = attention.run(p)?;
        let mut updated = caches.to_vec();
        [updated[own], updated[own + 1]] = [keys, values];
        Some((attended, updated))
    }
}

/// Builds the text generation program; `TextEncoder::generator` describes its inputs and outputs.
pub(crate) fn program(model: &dyn LanguageModel, spec: &GenerationSpec, build: &Build) -> Result<Network> {
    let p = Params::new("prompt_enhancer", COMPONENT, build).generating();
    let generator = Generator::new(model, spec, &p);
    let (texts, lengths) = generator.run();
    let tokens = texts.slice(1, spec.prompt_tokens, spec.prompt_tokens + spec.new_tokens);
    let outputs = vec![
        p.output("tokens", &tokens, &ROW_AXES, &[spec.rows, spec.new_tokens]),
        p.output("lengths", &lengths, &[Axis::CfgBatch], &[spec.rows]),
    ];
    Network::finish(&p, outputs)
}

/// The inputs of a program that generates text, and the values that do not depend on the generated tokens.
struct Generator<'a> {
    model: &'a dyn LanguageModel,
    spec: &'a GenerationSpec,
    p: &'a Params,
    cache: Cache,
    ids: Value,
    mask: Value,
    /// Whether each token of prompt and text is a token, not padding, `[rows, tokens]`.
    is_token: Value,
    /// Number of padding tokens of each prompt, i32 `[rows, 1]`.
    padding: Value,
    stop_tokens: Option<Value>,
    limit: Value,
    choice: TokenChoice,
}

impl<'a> Generator<'a> {
    fn new(model: &'a dyn LanguageModel, spec: &'a GenerationSpec, p: &'a Params) -> Self {
        let b = p.builder();
        let ty = Type::new(DType::I32, [spec.rows, spec.prompt_tokens]);
        // Not sharded along the tokens, of which the loop has only one.
        let [ids, mask] = ["input_ids", "attention_mask"].map(|name| p.input(name, ty.clone(), &ROW_AXES));
        let stops = Type::new(DType::I32, [spec.stop_tokens]);
        let stop_tokens = (spec.stop_tokens > 0).then(|| p.input("stop_tokens", stops, &[Axis::Replicated]));
        let limit = p.input("limit", Type::scalar(DType::I32), &[]);
        let choice = TokenChoice::new(p, spec);
        let valid = mask.compare(Comparison::Ne, &mask.like(0.0));
        let new = b.full(1.0, Type::new(DType::Bool, [ids.dim(0), spec.new_tokens]));
        let is_token = p.place("is_token", &b.concat(&[&valid, &new], 1), &ROW_AXES);
        let padding = valid.not().to(DType::I32).sum_keep(&[-1]);
        let (shapes, shape_of) = model.caches();
        let cache = Cache { shapes, shape_of, unrolled: p.lowering().unroll_layers };
        Generator { model, spec, p, cache, ids, mask, is_token, padding, stop_tokens, limit, choice }
    }

    /// Generates the texts. Returns the tokens of prompts and texts, `[rows, prompt_tokens + new_tokens]`, and the
    /// lengths of the texts, `[rows]`.
    fn run(&self) -> (Value, Value) {
        let (p, b, spec) = (self.p, self.p.builder(), self.spec);
        let rows = self.ids.dim(0);
        let empty = b.full(0.0, Type::new(DType::I32, [rows, spec.new_tokens]));
        let texts = p.place("texts", &b.concat(&[&self.ids, &empty], 1), &ROW_AXES);
        let caches = self.cache.empty(p, rows, spec.prompt_tokens + spec.new_tokens);
        let (logits, caches) = self.prompts(&caches);
        // Rows without a token are padding of the batch.
        let is_empty = self.padding.compare(Comparison::Eq, &self.padding.like(spec.prompt_tokens as f64));
        let zero = b.scalar(0.0, DType::I32);
        let lengths = b.full(0.0, Type::new(DType::I32, [rows]));
        let start = self.append(&zero, &logits, [&texts, &lengths, &is_empty.reshape(vec![rows])]);
        let state = [start.to_vec(), caches].concat();
        let done = b.while_loop(
            &state,
            |state| {
                let is_active = state[3].not().to(DType::I32).sum(&[0]);
                let below = state[0].compare(Comparison::Lt, &self.limit);
                below.and(&is_active.compare(Comparison::Gt, &is_active.like(0.0)))
            },
            |state| {
                let (logits, caches) = self.next(&state[0], &state[1], &state[4..]);
                let next = self.append(&state[0], &logits, [&state[1], &state[2], &state[3]]);
                [next.to_vec(), caches].concat()
            },
        );
        (done[1].clone(), done[2].clone())
    }

    /// Chooses the token with number `step` of each text and appends it. Takes and returns the tokens, the lengths and
    /// whether each text has ended; also returns the next step, as the first value.
    fn append(&self, step: &Value, logits: &Value, state: [&Value; 3]) -> [Value; 4] {
        let [texts, lengths, is_done] = state;
        let rows = lengths.dim(0);
        let end = step + self.spec.prompt_tokens as f64;
        let chosen = self.choice.choose(logits, texts, &self.is_token, step, &end);
        let chosen = is_done.select(&chosen.like(0.0), &chosen);
        let texts = self.p.place("texts", &texts.dynamic_update(1, &end, &chosen.reshape(vec![rows, 1])), &ROW_AXES);
        let lengths = lengths + is_done.not().to(DType::I32);
        let is_done = match &self.stop_tokens {
            Some(stops) => {
                let stops = chosen.reshape(vec![rows, 1]).compare(Comparison::Eq, &stops.unsqueeze(0));
                is_done.or(&stops.max_keep(&[-1]).reshape(vec![rows]))
            }
            None => is_done.clone(),
        };
        [step + 1.0, texts, lengths, is_done]
    }

    /// Runs the model on the prompts. Returns the logits after the last token of each, and the filled caches.
    fn prompts(&self, caches: &[Value]) -> (Value, Vec<Value>) {
        let (p, b, tokens) = (self.p, self.p.builder(), self.spec.prompt_tokens);
        let masks = AttentionMasks::new(p, &self.mask);
        let near = masks.near(self.model.window());
        let zero = b.scalar(0.0, DType::I32);
        let h = self.model.stack().embed(p, &self.ids, Axis::Replicated);
        let positions = (b.iota(Type::new(DType::I32, [1, tokens]), 1) - &self.padding).to(DType::F32);
        let attend = |p: &Params, operands: &LayerAttention, caches: &[Value]| {
            operands.rotated(p, |operands| {
                let (caches, _) = self.cache.update(p, operands, &zero, caches);
                let bias = bias(&masks.earlier.and(&near.or(&operands.is_full)));
                let (q, [k, v], scale) = (operands.q, operands.kv, operands.scale);
                let attention = Attention { q, k, v, bias: Some(&bias), scale, sequence: [Axis::Replicated; 2] };
                (attention.run(p), caches)
            })
        };
        let (residual, caches) = self.model.run_layers(p, &positions, &[&[h], caches].concat(), &attend);
        let h = self.model.final_norm().sum(p, &residual);
        (self.logits(Residual::from(h.slice(1, tokens - 1, tokens))), caches)
    }

    /// Runs the model on the latest token of each text. Returns the logits for token `step`, and the updated caches.
    fn next(&self, step: &Value, texts: &Value, caches: &[Value]) -> (Value, Vec<Value>) {
        let (p, b) = (self.p, self.p.builder());
        let at = step + (self.spec.prompt_tokens as f64 - 1.0);
        let ids = texts.dynamic_slice(1, &at, 1);
        let h = self.model.stack().embed(p, &ids, Axis::Replicated);
        let positions = (&at - &self.padding).to(DType::F32);
        let keys = b.iota(Type::new(DType::I32, [1, texts.dim(1)]), 1);
        let distance = &at - &keys;
        let window = i32::try_from(self.model.window()).unwrap_or(i32::MAX);
        let near = distance.compare(Comparison::Lt, &distance.like(f64::from(window)));
        let earlier = self.is_token.and(&distance.compare(Comparison::Ge, &distance.like(0.0)));
        let attend = |p: &Params, operands: &LayerAttention, caches: &[Value]| {
            let seen = || bias(&earlier.and(&near.or(&operands.is_full)));
            if let Some(done) = self.cache.attend(p, operands, &at, seen, caches) {
                return done;
            }
            operands.rotated(p, |operands| {
                let (caches, kv) = self.cache.update(p, operands, &at, caches);
                let bias = seen();
                (cached_attention(p, operands, kv.each_ref(), &bias), caches)
            })
        };
        let (residual, caches) = self.model.run_layers(p, &positions, &[&[h], caches].concat(), &attend);
        (self.logits(residual), caches)
    }

    /// Returns the logits `[rows, vocabulary]`, f32, of hidden states `[rows, 1, hidden]`. The embedding table is the
    /// output head.
    fn logits(&self, residual: Residual) -> Value {
        let (p, stack) = (self.p.pp(ROOT), self.model.stack());
        let rows = residual.h.dim(0);
        let input = NormInput { norm: self.model.final_norm(), p: &p.pp("norm"), residual };
        let p = p.pp("embed_tokens");
        let table = || {
            let init = Init::normal((stack.hidden_size as f32).sqrt().recip());
            p.get("weight", &[stack.vocab_size, stack.hidden_size], &[Axis::Vocab, Axis::Embed], init)
        };
        let by_kernel = || {
            let _scope = p.scope();
            let products = input.products(vec![RowWeight { weight: &table(), parts: 1 }], DType::F32, false);
            products.map(|(_, mut logits)| logits.remove(0))
        };
        let logits = input.is_row().then(by_kernel).flatten().unwrap_or_else(|| {
            let [_, h] = input.values();
            let _scope = p.scope();
            linear_into(&p, &h, &table(), DType::F32)
        });
        let _scope = p.scope();
        let logits = logits.reshape(vec![rows, stack.vocab_size]);
        // Each device chooses the same token from all logits.
        let logits = p.place("logits", &logits, &ROW_AXES);
        match self.model.final_logit_softcapping() {
            Some(bound) => (logits / bound).tanh() * bound,
            None => logits,
        }
    }
}

/// Computes the attention of a single query per row over the cached keys and values `[rows, kv_heads, tokens, dim]`.
/// `bias`: `[rows, tokens]`, added to the scores. Returns `[rows, 1, heads, dim]`.
fn cached_attention(p: &Params, operands: &LayerAttention, kv: [&Value; 2], bias: &Value) -> Value {
    let (b, q, [k, v]) = (p.builder(), operands.q, kv);
    let _scope = b.scope("sdpa");
    let [rows, heads, dim] = [q.dim(0), q.dim(2), q.dim(3)];
    let grouped = q.reshape(vec![rows, k.dim(1), heads / k.dim(1).max(1), dim]);
    let scores = b.einsum("bkgd,bksd->bkgs", &grouped, k, DType::F32) * operands.scale;
    let scores = scores + bias.reshape(vec![rows, 1, 1, k.dim(2)]);
    let weights = (&scores - scores.max_keep(&[-1])).exp();
    let weights = (&weights / weights.sum_keep(&[-1])).to(v.dtype());
    b.einsum("bkgs,bksd->bkgd", &weights, v, q.dtype()).reshape(q.dims().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_tokens_and_draws_are_inputs_only_if_used() {
        let names = |stop_tokens, sampled| {
            let json = crate::testing::published("ltx2", COMPONENT);
            let mut config = crate::gemma3::Gemma3Config::from_json(&json).expect("reads");
            config.layers.truncate(2);
            let spec = GenerationSpec {
                rows: 1,
                prompt_tokens: 8,
                new_tokens: 4,
                stop_tokens,
                sampled,
                no_repeat_ngram_size: 0,
            };
            let network = program(&config, &spec, &Build::new(DType::BF16)).expect("builds");
            let names = network.program.arguments.into_iter().map(|a| a.name);
            names.filter(|name| !name.contains('.')).collect::<Vec<_>>()
        };
        assert_eq!(names(0, false), ["input_ids", "attention_mask", "limit"]);
        let all = ["input_ids", "attention_mask", "stop_tokens", "limit", "temperature", "top_k", "top_p", "uniforms"];
        assert_eq!(names(2, true), all);
    }
}
