//! The phases of a run, for progress reports and timings.

use std::ops::ControlFlow;

/// A phase of a run. The variants are in the order in which a run executes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    PromptEnhancer,
    TextEncoder,
    Connectors,
    Denoise,
    /// Upsampling between two passes.
    Upsampler,
    /// The second pass.
    Refine,
    /// The temporal rounds of the pipeline `dfr`.
    Round,
    VideoDecoder,
    AudioDecoder,
}

impl Phase {
    /// All phases, in order.
    pub(crate) const ALL: [Phase; 9] = [
        Phase::PromptEnhancer,
        Phase::TextEncoder,
        Phase::Connectors,
        Phase::Denoise,
        Phase::Upsampler,
        Phase::Refine,
        Phase::Round,
        Phase::VideoDecoder,
        Phase::AudioDecoder,
    ];

    /// Returns the name that sidecars, reports and JSON use.
    pub fn name(self) -> &'static str {
        match self {
            Phase::PromptEnhancer => "prompt_enhancer",
            Phase::TextEncoder => "text_encoder",
            Phase::Connectors => "connectors",
            Phase::Denoise => "denoise",
            Phase::Upsampler => "upsampler",
            Phase::Refine => "refine",
            Phase::Round => "round",
            Phase::VideoDecoder => "video_decoder",
            Phase::AudioDecoder => "audio_decoder",
        }
    }

    /// Returns the name that printed tables use.
    pub(crate) fn label(self) -> String {
        self.name().replace('_', " ")
    }
}

/// Progress callback of a request, with the arguments (phase, finished steps, total steps). `Break` stops the request.
/// When a phase without steps begins, the callback reports 0 of 1 steps.
pub type Watch<'a> = &'a mut dyn FnMut(Phase, usize, usize) -> ControlFlow<()>;
