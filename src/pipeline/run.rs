//! A batch of requests on its way.

use super::batch::{Batch, Dump, Noise};
use super::clock::Clock;
use super::options::RunOptions;
use super::phase::Watch;
use super::runner::Runner;

/// A batch of requests on its way: what its phases share.
pub struct Run<'a> {
    /// The model on its devices.
    pub runner: &'a mut Runner,
    pub batch: Batch<'a>,
    /// Noise that is still to be drawn.
    pub noise: Noise,
    /// Times of the phases.
    pub clock: Clock,
    /// Intermediate tensors.
    pub dump: Dump,
    /// How it is run.
    pub options: &'a RunOptions,
    /// Told of progress.
    pub watch: Watch<'a>,
}
