//! The duration head: learned queries attend to the video and audio text tokens, and an MLP predicts the logarithm of
//! the duration.

use super::COMPONENT;
use super::config::DurationHeadConfig;
use crate::Network;
use crate::av::Av;
use ltx2_nn::{Axis, Build, Init, Params, gelu_tanh, linear, project};
use ltx2_stablehlo::{DType, Result, Type, Value};

const WHOLE: [Axis; 2] = [Axis::Replicated; 2];

/// Builds the program for `batch` prompts of `tokens` tokens. Inputs: f32 `video_tokens` and `audio_tokens` `[b, t,
/// width]`, the outputs of the connectors. Output: f32 `seconds [b]`. Nothing is sharded: every device computes the
/// complete result.
///
/// # Errors
/// Returns the first error recorded while building the graph.
pub fn program(c: &DurationHeadConfig, batch: usize, tokens: Av<usize>, build: &Build) -> Result<Network> {
    let p = Params::new("duration_head", COMPONENT, build);
    let width = c.heads.width();
    let streams = Av::NAMES.zip(tokens).zip(c.text).map(|((name, tokens), text)| {
        let ty = Type::new(DType::F32, vec![batch, tokens, text]);
        let x = p.input(&format!("{name}_tokens"), ty, &[Axis::Replicated; 3]).to(build.dtype);
        let projected = linear(&p.pp(format!("{name}_input_proj")), &x, width, true, WHOLE);
        projected + p.get(&format!("{name}_modality_emb"), &[width], &WHOLE[..1], Init::normal(0.02))
    });
    let all = p.builder().concat(&[&streams.video, &streams.audio], 1);
    let pooled = pool(&p.pp("attention_pooler"), c, &all).reshape(vec![batch, c.queries * width]);
    let hidden = gelu_tanh(&linear(&p.pp("mlp_hidden"), &pooled, c.mlp, true, WHOLE));
    let log = linear(&p.pp("mlp_out"), &hidden, 1, true, WHOLE).reshape(vec![batch]);
    let result = p.output("seconds", &log.exp().to(DType::F32), &WHOLE[..1], &[batch]);
    Network::finish(&p, vec![result])
}

/// Pools tokens `[b, n, width]`, none of which is padding, by attention of the learned queries. Returns `[b, q,
/// width]`.
fn pool(p: &Params, c: &DurationHeadConfig, tokens: &Value) -> Value {
    let _scope = p.scope();
    let (b, width) = (p.builder(), c.heads.width());
    let heads = [c.heads.count, c.heads.dim];
    let queries = p.get("query_tokens", &[c.queries, width], &WHOLE, Init::normal(0.02));
    let each = |name: &str, x: &Value| project(&p.pp(name), x, &heads, true, &WHOLE, Axis::Replicated);
    let (q, k, v) = (each("to_q", &queries), each("to_k", tokens), each("to_v", tokens));
    let scores = b.einsum("qhd,bnhd->hqbn", &q, &k, DType::F32) * (c.heads.dim as f64).sqrt().recip();
    let weights = (&scores - scores.max_keep(&[-1])).exp();
    let weights = (&weights / weights.sum_keep(&[-1])).to(v.dtype());
    let found = b.einsum("hqbn,bnhd->bqhd", &weights, &v, v.dtype());
    linear(&p.pp("to_out"), &found.reshape(vec![tokens.dim(0), c.queries, width]), width, true, WHOLE)
}
