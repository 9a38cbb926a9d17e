//! The dual-stream diffusion transformer: from noisy latents, text and noise levels to the flow velocity.

mod block;
mod config;
mod modulation;
mod program;
pub mod tables;
#[cfg(test)]
mod tests;
mod text;

pub use block::{Reads, Text, block};
pub use config::{COMPONENT, Stream, TransformerConfig};
pub use modulation::{CrossTimestep, Levels, StreamModulation, adaln, modulation, of_level};
pub use program::{ForwardShape, program};
pub use text::{TextSource, all_text_keys_values, project_text, text_keys_values};

use modulation::{modulate, table};

use crate::hlo::{DType, Value};
use crate::nn::{Axis, Params, layer_norm, linear};

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
        let x = linear(
            &p.pp(streams[i].name("proj_in")),
            tokens[i],
            streams[i].width(),
            true,
            [Axis::Replicated, Axis::Embed],
        );
        p.place(&streams[i].name("state"), &x, &[Axis::CfgBatch, streams[i].sequence, Axis::Replicated])
    });
    let perturbed = perturbation.map(|s| {
        let flags: Vec<i32> = (0..c.num_layers).map(|l| i32::from(s.layers.contains(&l))).collect();
        b.vector_i32(&flags).to(DType::F32)
    });
    let state = {
        let _scope = b.scope("blocks");
        p.each_layer("transformer_blocks", c.num_layers, &start, |p, i, state| {
            let p = &p.quantized(|block| c.quantizes(block));
            let layer_text = [0, 1].map(|m| text[m].of_layer(p, &streams[m]));
            // A row attends unless the layer is perturbed and the row's mask says so.
            let keep = perturbation.zip(perturbed.as_ref()).map(|(s, flags)| {
                let here = flags.index(i);
                (&s.keep - 1.0) * here + 1.0
            });
            let state = [state[0].clone(), state[1].clone()];
            block(p, c, state, [&layer_text[0], &layer_text[1]], reads, keep.as_ref(), isolation).to_vec()
        })
    };
    [0, 1].map(|i| {
        let s = &streams[i];
        let table = table(p, &s.name("scale_shift_table"), 2, s.width()).to(DType::F32);
        let embedded = reads[i].modulation.embedded.to(DType::F32);
        let level = reads[i].level.as_ref();
        let [shift, scale] = [0, 1].map(|r| of_level(&(&embedded + table.at(0, r)), level));
        let y = modulate(&layer_norm(&state[i], 1e-6), &scale, &shift, p.dtype());
        let y = linear(&p.pp(s.name("proj_out")), &y, s.out_channels, true, [Axis::Embed, Axis::Replicated]);
        p.place(&s.name("velocity"), &y, &[Axis::CfgBatch, s.sequence, Axis::Replicated])
    })
}
