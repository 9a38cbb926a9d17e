//! The dual-stream diffusion transformer: from noisy latents, text and noise levels to the flow velocity.

mod block;
mod config;
mod modulation;
mod program;
pub mod tables;
#[cfg(test)]
mod tests;

pub use block::{Reads, Text, block};
pub use config::{COMPONENT, Stream, TransformerConfig};
pub use modulation::{CrossTimestep, Levels, StreamModulation, adaln, modulation};
pub use program::{ForwardShape, program};

use block::text_keys_values;
use modulation::{modulate, table};

use crate::dtype::DType;
use crate::hlo::{Type, Value};
use crate::nn::{Axis, Heads, Params, StackOrder, gelu_tanh, layer_norm, linear};

/// One stream's text, for all layers.
#[derive(Clone)]
pub enum TextSource {
    /// The projected context `[b, t, width]`.
    Context(Value),
    /// Keys and values of every layer, in the order of [`stacked`].
    KeysValues([Value; 2]),
}

/// Rows whose self-attention is replaced by their own values in some layers.
pub struct Perturbation {
    /// 1 for rows that attend, 0 for perturbed ones: `[b, 1, 1, 1]`, f32.
    pub keep: Value,
    /// The perturbed layers.
    pub layers: Vec<usize>,
}

/// Rows whose streams do not attend to each other.
pub enum Isolation {
    /// No row.
    None,
    /// Every row: the attention between the streams is left out of the program.
    All,
    /// 1 for rows whose streams attend to each other, 0 for isolated ones: `[b, 1, 1]`, f32.
    Rows(Value),
}

/// How the text keys (`which` = 0) or values (1) of all layers are stacked behind `[layers, b]`, with their axes: in the
/// order in which attention reads them, so that no compiler reorders the stack.
pub fn stacked(p: &Params, h: Heads, which: usize, tokens: usize) -> ([usize; 3], [Axis; 5]) {
    let [_, a, b, c] = stack_order(p, h, which);
    let sizes = [0, tokens, h.count, h.dim];
    let axes = [Axis::Rows, Axis::TextSequence, Axis::Heads, Axis::HeadDim];
    ([sizes[a], sizes[b], sizes[c]], [Axis::Layers, Axis::Rows, axes[a], axes[b], axes[c]])
}

/// `[b, t, heads, dim]` to a layer of the stack.
fn stack_order(p: &Params, h: Heads, which: usize) -> [usize; 4] {
    match p.lowering().text_stacks {
        StackOrder::TokensHeads => [0, 1, 2, 3],
        StackOrder::ValuesTokensLast if which == 1 || !h.dim.is_multiple_of(128) => [0, 2, 3, 1],
        StackOrder::HeadsTokens | StackOrder::ValuesTokensLast => [0, 2, 1, 3],
    }
}

/// A layer of the stack to `[b, t, heads, dim]`.
fn layer_order(p: &Params, h: Heads, which: usize) -> [usize; 4] {
    let mut back = [0; 4];
    for (to, from) in stack_order(p, h, which).into_iter().enumerate() {
        back[from] = to;
    }
    back
}

/// The text context as the blocks read it: the caption projection where the model has one.
pub fn project_text(p: &Params, c: &TransformerConfig, s: &Stream, text: &Value) -> Value {
    if !c.use_prompt_embeddings {
        return text.clone();
    }
    let p = p.pp(s.name("caption_projection"));
    let _scope = p.scope();
    let inner = linear(&p.pp("linear_1"), text, s.width(), true, [Axis::Embed, Axis::Mlp]);
    let inner = p.place("hidden", &inner, &[Axis::Rows, Axis::TextSequence, Axis::Mlp]);
    let y = linear(&p.pp("linear_2"), &gelu_tanh(&inner), s.width(), true, [Axis::Mlp, Axis::Embed]);
    p.place("out", &y, &[Axis::Rows, Axis::TextSequence, Axis::Whole])
}

/// Keys and values of all layers from the projected contexts `[video, audio]`, as [`TextSource::KeysValues`] has them.
/// Only for models whose text context does not depend on the noise level.
pub fn all_text_keys_values(p: &Params, c: &TransformerConfig, contexts: &[Value; 2]) -> [[Value; 2]; 2] {
    let b = p.builder();
    let streams = [c.video(), c.audio()];
    let mut empty = Vec::new();
    for (s, context) in streams.iter().zip(contexts) {
        let h = s.attention.heads;
        for (i, part) in ["text.k", "text.v"].into_iter().enumerate() {
            let (sizes, axes) = stacked(p, h, i, context.dim(1));
            let ty = Type::new(p.dtype(), [&[c.num_layers, context.dim(0)], &sizes[..]].concat());
            empty.push(p.place(&s.name(part), &b.full(0.0, ty), &axes));
        }
    }
    let _scope = b.scope("text_keys_values");
    let filled = b.repeat(c.num_layers, &empty, |i, stacks| {
        let p = p.layers("transformer_blocks", c.num_layers, i);
        let parts = streams.iter().zip(contexts).flat_map(|(s, x)| text_keys_values(&p, c, s, x, None));
        let ordered = parts
            .enumerate()
            .map(|(n, part)| part.transpose(&stack_order(&p, streams[n / 2].attention.heads, n % 2)).unsqueeze(0));
        ordered.zip(stacks).map(|(part, stack)| stack.dynamic_update(0, i, &part)).collect()
    });
    [[filled[0].clone(), filled[1].clone()], [filled[2].clone(), filled[3].clone()]]
}

/// The velocities `[video, audio]` of noisy tokens `[b, n, channels]` in the weights' element type.
pub fn forward(
    p: &Params,
    c: &TransformerConfig,
    tokens: [&Value; 2],
    text: &[TextSource; 2],
    reads: [&Reads; 2],
    perturbation: Option<&Perturbation>,
    isolation: &Isolation,
) -> [Value; 2] {
    let b = p.builder();
    let streams = [c.video(), c.audio()];
    let start = [0, 1].map(|i| {
        let x =
            linear(&p.pp(streams[i].name("proj_in")), tokens[i], streams[i].width(), true, [Axis::Whole, Axis::Embed]);
        p.place(&streams[i].name("state"), &x, &[Axis::Rows, streams[i].sequence, Axis::Whole])
    });
    let perturbed = perturbation.map(|s| {
        let flags: Vec<i32> = (0..c.num_layers).map(|l| i32::from(s.layers.contains(&l))).collect();
        b.vector_i32(&flags).to(DType::F32)
    });
    let state = {
        let _scope = b.scope("blocks");
        b.repeat(c.num_layers, &start, |i, state| {
            let p = p.layers("transformer_blocks", c.num_layers, i);
            let layer_text = [0, 1].map(|m| match &text[m] {
                TextSource::Context(x) => Text::Context(x.clone()),
                TextSource::KeysValues(kv) => {
                    let h = streams[m].attention.heads;
                    Text::KeysValues([0, 1].map(|n| kv[n].index(i).transpose(&layer_order(&p, h, n))))
                }
            });
            // A row attends unless the layer is perturbed and the row's mask says so.
            let keep = perturbation.zip(perturbed.as_ref()).map(|(s, flags)| {
                let here = flags.index(i);
                (&s.keep - 1.0) * here + 1.0
            });
            let state = [state[0].clone(), state[1].clone()];
            block(&p, c, state, [&layer_text[0], &layer_text[1]], reads, keep.as_ref(), isolation).to_vec()
        })
    };
    [0, 1].map(|i| {
        let s = &streams[i];
        let table = table(p, &s.name("scale_shift_table"), 2, s.width()).to(DType::F32);
        let embedded = reads[i].modulation.embedded.to(DType::F32);
        let [shift, scale] = [0, 1].map(|r| &embedded + table.at(0, r));
        let y = modulate(&layer_norm(&state[i], 1e-6), &scale, &shift, p.dtype());
        let y = linear(&p.pp(s.name("proj_out")), &y, s.out_channels, true, [Axis::Embed, Axis::Whole]);
        p.place(&s.name("velocity"), &y, &[Axis::Rows, s.sequence, Axis::Whole])
    })
}
