//! The dual-stream diffusion transformer: from noisy latents, text and noise levels to the flow velocity.

mod block;
mod config;
mod modulation;
mod program;
pub(crate) mod tables;
#[cfg(test)]
mod tests;
mod text;

pub use block::{BlockInputs, StreamInputs, block};
pub use config::TransformerConfig;
pub(crate) use config::{COMPONENT, Stream};
pub use modulation::{Ada, CrossTimestep, Levels, StreamModulation, adaln};
pub(crate) use modulation::{at_noise_level, modulation};
pub use program::{ForwardShape, program};
pub use text::LayerContext;
pub(crate) use text::{TextContext, context_outputs, project_text};

use modulation::{marked, modulate, table};

use crate::av::Av;
use crate::hlo::{Builder, DType, Value};
use crate::nn::{Axis, Params, layer_norm, linear};

/// Batch entries whose self-attention is replaced by their own values in some layers (spatio-temporal guidance).
pub(crate) struct Perturbation {
    /// 1 for batch entries that attend, 0 for perturbed ones: `[b, 1, 1, 1]`, f32.
    pub(crate) stg_mask: Value,
    /// Perturbed layers of each stream.
    pub(crate) layers: Av<Vec<usize>>,
}

impl Perturbation {
    /// Each stream's perturbed layers as 1 in `[layers]`, f32; `None` where it has none.
    fn flags(&self, b: &Builder, layers: usize) -> Av<Option<Value>> {
        let flags = |perturbed: &[usize]| {
            let flags: Vec<i32> = (0..layers).map(|l| i32::from(perturbed.contains(&l))).collect();
            (!perturbed.is_empty()).then(|| b.vector_i32(&flags).to(DType::F32))
        };
        let video = flags(&self.layers.video);
        Av { audio: if self.alike() { video.clone() } else { flags(&self.layers.audio) }, video }
    }

    /// Each stream's mask in layer `i`: a batch entry attends unless the layer is perturbed and the mask says so.
    fn masks(&self, flags: &Av<Option<Value>>, i: &Value) -> Av<Option<Value>> {
        let mask = |flags: &Option<Value>| {
            let here = flags.as_ref()?.index(i);
            Some((&self.stg_mask - 1.0) * here + 1.0)
        };
        let video = mask(&flags.video);
        Av { audio: if self.alike() { video.clone() } else { mask(&flags.audio) }, video }
    }

    /// Whether both streams share masks.
    fn alike(&self) -> bool {
        self.layers.video == self.layers.audio
    }
}

/// Batch entries whose streams do not attend to each other.
pub enum Isolation {
    /// None of them.
    None,
    /// All of them: the attention between the streams is left out of the program.
    All,
    /// The cross-modal mask: 1 for batch entries whose streams attend to each other, 0 for isolated ones, `[b, 1, 1]`, f32.
    Masked(Value),
}

/// Inputs of one stream's forward pass.
#[derive(Clone, Copy)]
pub(crate) struct StreamForward<'a> {
    /// Noisy tokens `[b, n, channels]`, in the weights' element type.
    pub(crate) tokens: &'a Value,
    pub(crate) context: &'a TextContext,
    /// Inputs that all blocks share.
    pub(crate) inputs: &'a StreamInputs,
}

/// Inputs of a forward pass.
pub(crate) struct ForwardInputs<'a> {
    /// The streams that there are: of another, nothing is computed.
    pub(crate) streams: Av<Option<StreamForward<'a>>>,
    /// 1 for video tokens that stand for a single frame, 0 for others, `[b or 1, n]`, f32; `None` where none is marked.
    pub(crate) keyframes: Option<&'a Value>,
    pub(crate) perturbation: Option<&'a Perturbation>,
    /// Batch entries whose streams do not attend to each other.
    pub(crate) isolation: &'a Isolation,
}

/// The velocities `[b, n, channels]` of noisy tokens, in the weights' element type.
pub(crate) fn forward(p: &Params, c: &TransformerConfig, inputs: &ForwardInputs) -> Av<Option<Value>> {
    let b = p.builder();
    let &ForwardInputs { streams, keyframes, perturbation, isolation } = inputs;
    let start = c.streams().zip(streams).zip(Av { video: keyframes, audio: None }).map(|((s, own), keyframes)| {
        let x = linear(&p.pp(s.name("proj_in")), own?.tokens, s.width(), true, [Axis::Replicated, Axis::Embed]);
        let x = keyframes.map_or(x.clone(), |mask| marked(p, &x, mask));
        Some(p.place(&s.name("state"), &x, &[Axis::CfgBatch, s.sequence, Axis::Replicated]))
    });
    let perturbed = perturbation.map(|s| s.flags(b, c.num_layers));
    let hidden = {
        let _scope = b.scope("blocks");
        let (narrow, start) = (|block| c.quantizes(block), Vec::from_iter(start.into_iter().flatten()));
        p.each_layer_quantized("transformer_blocks", c.num_layers, narrow, &start, |p, i, hidden| {
            let context = streams.map(|own| own.map(|own| own.context.of_layer(p)));
            let stg_mask = perturbation.zip(perturbed.as_ref()).map(|(s, flags)| s.masks(flags, i)).unwrap_or_default();
            let stg_mask = stg_mask.as_ref().map(Option::as_ref);
            let (own, context) = (streams.map(|own| own.map(|own| own.inputs)), context.as_ref().map(Option::as_ref));
            let inputs = BlockInputs { streams: own, context, stg_mask, isolation };
            block(p, c, streams.in_place_of(hidden.iter().cloned()), &inputs).into_iter().flatten().collect()
        })
    };
    let hidden = streams.in_place_of(hidden.iter());
    c.streams().zip(hidden).zip(streams).map(|((s, x), own)| Some(velocity(p, &s, x?, own?.inputs)))
}

/// A stream's velocity from its last hidden states.
fn velocity(p: &Params, s: &Stream, x: &Value, inputs: &StreamInputs) -> Value {
    let table = table(p, &s.name("scale_shift_table"), 2, s.width()).to(DType::F32);
    let embedded = inputs.modulation.embedded.to(DType::F32);
    let index = inputs.noise_level_index.as_ref();
    let [shift, scale] = [0, 1].map(|r| at_noise_level(&(&embedded + table.at(0, r)), index));
    let y = modulate(&layer_norm(x, 1e-6), &scale, &shift, p.dtype());
    let y = linear(&p.pp(s.name("proj_out")), &y, s.out_channels, true, [Axis::Embed, Axis::Replicated]);
    p.place(&s.name("velocity"), &y, &[Axis::CfgBatch, s.sequence, Axis::Replicated])
}
