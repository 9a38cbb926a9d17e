//! State of a batch of requests while it runs.

use ndarray::Array3;

use super::batch::{Batch, BatchNoise, Dump};
use super::clip_ends::ClipEnds;
use super::clock::Clock;
use super::denoising::SkippedSteps;
use super::previews::Previews;
use super::sound_encoder::GivenSound;
use crate::interrupts::InterruptGuard;
use crate::pipeline::phase::Watch;
use crate::pipeline::plan::options::RunOptions;
use crate::pipeline::runner::Runner;

/// A batch of requests that is running, with the state that all phases share.
pub(crate) struct Run<'a> {
    pub(crate) runner: &'a mut Runner,
    pub(crate) batch: Batch<'a>,
    /// Noise generators, from which all passes draw.
    pub(crate) noise: BatchNoise,
    /// Input audio. `None`: the request has no input audio.
    pub(crate) sound: Option<GivenSound>,
    /// Audio tokens `[b, n, c]` of the first pass. `None`: the first pass is not finished.
    pub(crate) previous_sound: Option<Array3<f32>>,
    /// For chained videos: the final tokens of the previous clip. The run replaces them with the final tokens of this
    /// clip.
    pub(crate) clip_ends: Option<&'a mut ClipEnds>,
    pub(crate) clock: Clock,
    pub(crate) dump: Dump,
    pub(crate) options: &'a RunOptions,
    pub(crate) watch: Watch<'a>,
    /// Previews of the current predictions. `None`: none are shown.
    pub(crate) previews: Option<Previews>,
    /// Number of steps of the first pass; 0 until this pass is finished.
    pub(crate) done: usize,
    /// Number of steps of the first pass that this run has computed.
    pub(crate) computed_steps: usize,
    /// Steps that the step cache skipped in the finished passes.
    pub(crate) skipped: Vec<SkippedSteps>,
    /// Guard that saves the state after the last finished pass if the run is interrupted. In a server, it delays an
    /// interrupt until the files are written.
    pub(crate) guard: Option<InterruptGuard>,
}
