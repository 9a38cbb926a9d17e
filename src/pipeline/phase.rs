//! Phases of a run, as progress and timings name them.

use std::ops::ControlFlow;

/// The phases of a run, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Prompt to embeddings.
    TextEncoder,
    /// Embeddings to the transformer's context.
    Connectors,
    /// Step-independent work and the loop.
    Denoise,
    /// Latents to twice their size.
    Upsampler,
    /// The second pass' loop.
    Refine,
    /// Latents to frames.
    VideoDecoder,
    /// Latents to mel spectrogram to samples.
    AudioDecoder,
}

impl Phase {
    /// As tables call it.
    pub fn name(self) -> &'static str {
        match self {
            Phase::TextEncoder => "text encoder",
            Phase::Connectors => "connectors",
            Phase::Denoise => "denoise",
            Phase::Upsampler => "upsampler",
            Phase::Refine => "refine",
            Phase::VideoDecoder => "video decoder",
            Phase::AudioDecoder => "audio decoder",
        }
    }
}

/// What a running request tells; the answer says whether to go on.
pub type Watch<'a> = &'a mut dyn FnMut(Phase, usize, usize) -> ControlFlow<()>;
