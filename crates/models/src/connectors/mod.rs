//! The text connectors: they transform the projected text into the contexts that the transformer's video and audio
//! streams attend to.

mod config;
mod projection;
#[cfg(test)]
mod tests;

use ndarray::Array3;

use config::Connector;
pub use config::{COMPONENT, ConnectorsConfig};
pub(crate) use projection::Projection;

use crate::Network;
use crate::av::Av;
use crate::feed_forward::{Activation, feed_forward};
use ltx2_nn::rope::table;
use ltx2_nn::{Axis, Build, Init, MASK_VALUE, Params, Rope, padding_mask, rms};
use ltx2_stablehlo::{Comparison, DType, Result, Type, Value};
use ltx2_weights::tensor::Tensor;

/// Epsilon of every norm.
const EPS: f64 = 1e-6;

/// Format of the program's text input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// `prompt_embeds [b, t, channels]`: normalized and projected text, either shared by both connectors or the video
    /// channels followed by the audio channels.
    PromptEmbeds,
    /// `text_encoder_hidden_states [b, t, channels · states]`: all hidden states of the text encoder, stacked.
    HiddenStates,
}

/// Builds the program of both connectors for `batch` prompts of `tokens` tokens. Inputs: the text (f32, see [`Input`]),
/// `attention_mask` (i32 `[b, t]`) and the RoPE tables of `host_inputs`. Outputs: f32 `video` and `audio` `[b, t,
/// width]`.
///
/// # Errors
/// Returns the first error recorded while building the graph, for example if `tokens` is not a multiple of the number
/// of registers.
pub fn program(c: &ConnectorsConfig, batch: usize, tokens: usize, input: Input, build: &Build) -> Result<Network> {
    let p = Params::new("connectors", COMPONENT, build);
    let axes = [Axis::CfgBatch, Axis::TextSequence, Axis::Replicated];
    let mask = p.input("attention_mask", Type::new(DType::I32, vec![batch, tokens]), &axes[..2]);
    let text = |name: &str, width: usize| {
        p.input(name, Type::new(DType::F32, vec![batch, tokens, width]), &axes).to(build.dtype)
    };
    let projected = match input {
        Input::PromptEmbeds => text("prompt_embeds", c.text_width()),
        Input::HiddenStates => {
            let stack = text("text_encoder_hidden_states", c.caption_channels * c.text_proj_in_factor);
            projection::project_stack(&p, c, &stack, &mask)
        }
    };
    let text_contexts = c.connectors().map(|k| {
        let projected = match (c.per_modality_projections, k.stream) {
            (false, _) => projected.clone(),
            (true, "video") => projected.slice(2, 0, c.video_hidden_dim),
            (true, _) => projected.slice(2, c.video_hidden_dim, c.text_width()),
        };
        let heads = k.attention.heads;
        let ty = Type::new(DType::F32, vec![1, tokens, heads.count, heads.dim / 2]);
        let axes = [Axis::Replicated, Axis::TextSequence, Axis::Heads, Axis::Replicated];
        let part = |what: &str| p.input(&format!("rope.{}.{what}", k.stream), ty.clone(), &axes);
        let rope = Rope { cos: part("cos"), sin: part("sin") };
        connector(&p.pp(format!("{}_connector", k.stream)), &k, &projected, &mask, &rope, tokens)
    });
    let results = Av::NAMES
        .zip(text_contexts)
        .map(|(name, x)| p.output(name, &x.to(DType::F32), &axes, &[batch, tokens, x.dim(-1)]));
    Network::finish(&p, results.into_iter().collect())
}

/// Returns the RoPE tables of both connectors as named program inputs.
pub fn host_inputs(c: &ConnectorsConfig, tokens: usize) -> Vec<(String, Tensor)> {
    let positions =
        Array3::from_shape_fn((1, tokens, 1), |(_, t, _)| t as f32 / c.connector_rope_base_seq_len as f32 * 2.0 - 1.0);
    let table = |heads| table(positions.view(), heads, c.rope_theta, c.rope_double_precision);
    let connectors = c.connectors();
    let heads = connectors.map(|k| k.attention.heads);
    let video = table(heads.video);
    // In most models both connectors have the same heads.
    let audio = if heads.audio == heads.video { video.clone() } else { table(heads.audio) };
    connectors
        .zip(Av { video, audio })
        .into_iter()
        .flat_map(|(k, t)| {
            let name = |what: &str| format!("rope.{}.{what}", k.stream);
            [(name("cos"), Tensor::from(t.cos)), (name("sin"), Tensor::from(t.sin))]
        })
        .collect()
}

/// Runs one connector on `text [b, t, width]`. The first `tokens` of the `t` positions belong to the prompt; the rest
/// are padding for sharding, and attention ignores them. If the connector has no registers, padding inside the prompt
/// is masked only in attention. The reference also multiplies the video result by a mask, but that mask is 1
/// everywhere.
fn connector(p: &Params, k: &Connector, text: &Value, mask: &Value, rope: &Rope, tokens: usize) -> Value {
    let _scope = p.scope();
    let (start, bias) = match k.registers {
        Some(registers) => {
            let hidden = padding_mask(p.builder(), text.dim(1), tokens);
            (with_registers(p, registers, text, mask, tokens), hidden)
        }
        // The mask is zero beyond the first `tokens` positions.
        None => {
            let bias = (mask.to(DType::F32) - 1.0) * -MASK_VALUE;
            (text.clone(), Some(bias.reshape(vec![mask.dim(0), 1, 1, mask.dim(1)])))
        }
    };
    // Quantized only if all blocks are.
    let done = p.each_layer_quantized(
        "transformer_blocks",
        k.layers,
        |_| false,
        &[start],
        |p, _, x| vec![block(p, k, &x[0], bias.as_ref(), rope)],
    );
    rms(&done[0], EPS).to(p.dtype())
}

fn block(p: &Params, k: &Connector, x: &Value, bias: Option<&Value>, rope: &Rope) -> Value {
    let attn = p.pp("attn1");
    let z = rms(x, EPS).to(p.dtype());
    let [q, key, v] = k.attention.qkv(&attn, &z, Some(rope));
    let x = x + k.attention.attend(&attn, [&q, &key, &v], &z, k.attention.heads.width(), bias, None);
    &x + feed_forward(&p.pp("ff"), &rms(&x, EPS).to(p.dtype()), Activation::GeluTanh, true, Axis::TextSequence)
}

/// Moves the valid tokens to the front, keeping their order, and fills the remaining positions with the learned
/// registers: position `i` gets register `i` modulo the number of registers. `tokens` is the number of positions
/// without the padding for sharding.
fn with_registers(p: &Params, registers: usize, text: &Value, mask: &Value, tokens: usize) -> Value {
    let b = p.builder();
    let (rows, t, width) = (text.dim(0), text.dim(1), text.dim(2));
    let axes = [Axis::Replicated, Axis::Embed];
    let learned = p.get("learnable_registers", &[registers, width], &axes, Init::normal(0.5));
    if !tokens.is_multiple_of(registers) {
        b.reject(
            "registers",
            format!(
                "the number of text tokens, {tokens}, must be a multiple of {registers} (the connector's register count)"
            ),
        );
        return text.clone();
    }
    let square = Type::new(DType::I32, vec![t, t]);
    let (row, column) = (b.iota(square.clone(), 0), b.iota(square, 1));
    // before[i] is the number of valid tokens up to and including i. The p-th valid token (from 0) is at the first i
    // with before[i] > p, and that i equals the number of positions with before[i] <= p.
    let up_to = column.compare(Comparison::Le, &row).to(DType::I32);
    let before = (mask.reshape(vec![rows, 1, t]) * up_to).sum(&[-1]);
    let source = before.reshape(vec![rows, 1, t]).compare(Comparison::Le, &row).to(DType::I32).sum(&[-1]);
    let count = mask.sum_keep(&[1]);
    let front = b.iota(Type::new(DType::I32, vec![1, t]), 1).compare(Comparison::Lt, &count).unsqueeze(2);
    let aligned = text.take_along(&source);
    let tiles = vec![&learned; t.div_ceil(registers)];
    front.select(&aligned, &b.concat(&tiles, 0).slice(0, 0, t))
}
