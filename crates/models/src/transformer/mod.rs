//! The dual-stream diffusion transformer: predicts the flow velocity from noisy latents, text and noise levels.

mod block;
mod config;
mod modulation;
mod program;
pub mod tables;
#[cfg(test)]
mod tests;
mod text;

pub use block::{BlockInputs, StreamInputs, block};
pub use config::TransformerConfig;
pub use config::{COMPONENT, Stream};
pub use modulation::{CrossModalTimestep, Levels, StreamModulation, adaln};
pub use modulation::{at_noise_level, modulation};
pub use program::{ForwardShape, program};
pub use text::LayerContext;
pub use text::{TextContext, TextRows, context_outputs, project_text};

use modulation::{marked, modulate, table};

use crate::av::Av;
use ltx2_nn::{Axis, Params, layer_norm, linear};
use ltx2_stablehlo::{Builder, DType, Value};

/// Spatio-temporal guidance: in some layers, the self-attention output of the perturbed batch entries is replaced by
/// the attention values of the same tokens.
pub struct Perturbation {
    /// f32 `[b, 1, 1, 1]`: 1 for batch entries that attend normally, 0 for perturbed ones.
    pub stg_mask: Value,
    /// Indices of each stream's perturbed layers.
    pub layers: Av<Vec<usize>>,
}

impl Perturbation {
    /// Returns f32 `[layers]` per stream: 1 for perturbed layers, 0 for others; `None` if the stream has no perturbed
    /// layers.
    fn flags(&self, b: &Builder, layers: usize) -> Av<Option<Value>> {
        let flags = |perturbed: &[usize]| {
            let flags: Vec<i32> = (0..layers).map(|l| i32::from(perturbed.contains(&l))).collect();
            (!perturbed.is_empty()).then(|| b.vector_i32(&flags).to(DType::F32))
        };
        let video = flags(&self.layers.video);
        Av { audio: if self.alike() { video.clone() } else { flags(&self.layers.audio) }, video }
    }

    /// Returns each stream's attention mask in layer `i`: 0 for perturbed batch entries if the layer is perturbed,
    /// otherwise 1.
    fn masks(&self, flags: &Av<Option<Value>>, i: &Value) -> Av<Option<Value>> {
        let mask = |flags: &Option<Value>| {
            let here = flags.as_ref()?.index(i);
            Some((&self.stg_mask - 1.0) * here + 1.0)
        };
        let video = mask(&flags.video);
        Av { audio: if self.alike() { video.clone() } else { mask(&flags.audio) }, video }
    }

    /// Returns whether both streams perturb the same layers and can share masks.
    fn alike(&self) -> bool {
        self.layers.video == self.layers.audio
    }
}

/// Batch entries without cross-modal attention.
pub enum Isolation {
    /// No batch entry.
    None,
    /// All batch entries; cross-modal attention is omitted from the program.
    All,
    /// Cross-modal mask, f32 `[b, 1, 1]`: 1 for batch entries with cross-modal attention, 0 for isolated ones.
    Masked(Value),
}

/// Inputs of one stream for a forward pass.
#[derive(Clone, Copy)]
pub struct StreamForward<'a> {
    /// Noisy tokens `[b, n, channels]`, in the weights' element type.
    pub tokens: &'a Value,
    /// Text context of all layers.
    pub context: &'a TextContext,
    /// Inputs shared by all blocks.
    pub inputs: &'a StreamInputs,
}

/// Inputs of a forward pass.
pub struct ForwardInputs<'a> {
    /// The streams to compute; `None` omits a stream.
    pub streams: Av<Option<StreamForward<'a>>>,
    /// Keyframe mask, f32 `[b or 1, n]`: 1 for video tokens of single-frame latents. `None`: there are no keyframes.
    pub keyframes: Option<&'a Value>,
    /// Layers and batch entries that spatio-temporal guidance perturbs. `None`: nothing is perturbed.
    pub perturbation: Option<&'a Perturbation>,
    /// Batch entries without cross-modal attention.
    pub isolation: &'a Isolation,
    /// Streams whose hidden states the blocks update. A stream that is not updated only provides keys and values for
    /// cross-modal attention; its velocity is meaningless.
    pub updated: Av<bool>,
}

/// Predicts the velocities `[b, n, channels]` of noisy tokens, in the weights' element type.
pub fn forward(p: &Params, c: &TransformerConfig, inputs: &ForwardInputs) -> Av<Option<Value>> {
    let b = p.builder();
    let &ForwardInputs { streams, keyframes, perturbation, isolation, updated } = inputs;
    let start = c.streams().zip(streams).zip(Av { video: keyframes, audio: None }).map(|((s, own), keyframes)| {
        let x = linear(&p.pp(s.name("proj_in")), own?.tokens, s.width(), true, [Axis::Replicated, Axis::Embed]);
        let x = keyframes.map_or(x.clone(), |mask| marked(p, &x, mask));
        Some(p.place(&s.name("state"), &x, &[Axis::CfgBatch, s.sequence, Axis::Replicated]))
    });
    let perturbed = perturbation.map(|s| s.flags(b, c.num_layers));
    let hidden = {
        let _scope = b.scope("blocks");
        let (quantizes, start) = (|block| c.quantizes(block), Vec::from_iter(start.into_iter().flatten()));
        p.each_layer_quantized("transformer_blocks", c.num_layers, quantizes, &start, |p, i, hidden| {
            let context = streams.map(|own| own.map(|own| own.context.of_layer(p)));
            let stg_mask = perturbation.zip(perturbed.as_ref()).map(|(s, flags)| s.masks(flags, i)).unwrap_or_default();
            let stg_mask = stg_mask.as_ref().map(Option::as_ref);
            let (own, context) = (streams.map(|own| own.map(|own| own.inputs)), context.as_ref().map(Option::as_ref));
            let inputs = BlockInputs { streams: own, context, stg_mask, isolation, updated };
            block(p, c, streams.replace_present(hidden.iter().cloned()), &inputs).into_iter().flatten().collect()
        })
    };
    let hidden = streams.replace_present(hidden.iter());
    c.streams().zip(hidden).zip(streams).map(|((s, x), own)| Some(velocity(p, &s, x?, own?.inputs)))
}

/// Computes a stream's velocity from the hidden states after the last block.
fn velocity(p: &Params, s: &Stream, x: &Value, inputs: &StreamInputs) -> Value {
    let table = table(p, &s.name("scale_shift_table"), 2, s.width()).to(DType::F32);
    let embedded = inputs.modulation.embedded.to(DType::F32);
    let index = inputs.noise_level_index.as_ref();
    let [shift, scale] = [0, 1].map(|r| at_noise_level(&(&embedded + table.at(0, r)), index));
    let y = modulate(&layer_norm(x, 1e-6), &scale, &shift, p.dtype());
    let y = linear(&p.pp(s.name("proj_out")), &y, s.out_channels, true, [Axis::Embed, Axis::Replicated]);
    p.place(&s.name("velocity"), &y, &[Axis::CfgBatch, s.sequence, Axis::Replicated])
}
