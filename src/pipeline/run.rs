//! A batch of requests on its way.

use super::batch::{Batch, Dump, Noise};
use super::clip_ends::ClipEnds;
use super::clock::Clock;
use super::options::RunOptions;
use super::phase::Watch;
use super::runner::Runner;
use super::sound_encoder::GivenSound;
use crate::interrupts::Guard;

/// A batch of requests on its way: what its phases share.
pub(crate) struct Run<'a> {
    /// The model on its devices.
    pub(crate) runner: &'a mut Runner,
    pub(crate) batch: Batch<'a>,
    /// Noise that is still to be drawn.
    pub(crate) noise: Noise,
    /// Sound that is given.
    pub(crate) sound: Option<GivenSound>,
    /// Ends of the clip before, in whose place those of this one are put, of a video of several.
    pub(crate) clip_ends: Option<&'a mut ClipEnds>,
    /// Times of the phases.
    pub(crate) clock: Clock,
    /// Intermediate tensors.
    pub(crate) dump: Dump,
    /// How it is run.
    pub(crate) options: &'a RunOptions,
    /// Told of progress.
    pub(crate) watch: Watch<'a>,
    /// Steps of the first pass behind it, once that has ended.
    pub(crate) done: usize,
    /// Keeps the state after the last pass that ended, where the run is interrupted; a server waits for its files.
    pub(crate) guard: Option<Guard>,
}
