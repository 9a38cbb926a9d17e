//! Devices that run jobs: a model on those of a plugin, or a script of tests.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::error::Failure;
use super::job::{Accepted, JobPhase, Produced};

/// Jobs that are made together: they differ in prompt and seed only.
#[derive(Clone, Debug)]
pub struct Order {
    pub jobs: Vec<Arc<Accepted>>,
    /// Where the steps behind them are kept; none keeps no steps.
    pub steps: Option<PathBuf>,
    /// Whether such a file of an ended run is gone on from.
    pub resume: bool,
}

/// Moment of a run: a stage, steps behind it and in all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moment {
    pub stage: JobPhase,
    pub step: usize,
    pub steps: usize,
}

/// Why a run is to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Nobody wants its videos any more: nothing is kept.
    Cancelled,
    /// The server ends: steps are kept.
    Draining,
}

/// Told of a run's moments; its answer says whether to go on.
pub type Watch<'a> = &'a mut dyn FnMut(Moment) -> ControlFlow<Stop>;

/// Why an order brought no videos.
#[derive(Debug)]
pub enum RunError {
    /// The watch said so.
    Stopped(Stop),
    /// Its own fault: other jobs go on.
    Job(Failure),
    /// The device's fault: nothing runs on it any more.
    Device(String),
}

/// Counts, times and memory of a device, since it was last asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// Programs that it holds.
    pub programs: usize,
    /// Programs that were compiled.
    pub compiled: u64,
    /// Programs that came from the compile cache.
    pub cached: u64,
    /// Times that steps were kept.
    pub checkpoints: u64,
    /// Orders that went on from kept steps.
    pub resumed: u64,
    /// Time of each change of the LoRAs.
    pub lora_switches: Vec<Duration>,
    /// Bytes by device and kind.
    pub memory: Vec<(String, &'static str, u64)>,
}

/// A device with a model, owned by one thread.
pub trait Device {
    /// Compiles, loads and runs once what a warm shape needs.
    ///
    /// # Errors
    /// A shape that does not fit, with the memory plan's text; errors of the device.
    fn warm(&mut self, order: &Order) -> Result<(), RunError>;

    /// Makes the videos of an order, one for each job in turn.
    ///
    /// # Errors
    /// See [`RunError`].
    fn run(&mut self, order: &Order, watch: Watch) -> Result<Vec<Box<dyn Made>>, RunError>;

    /// Drops the programs of a shape.
    fn evict(&mut self, shape: &str);

    /// Figures since the last call.
    fn figures(&mut self) -> Figures;
}

/// A video that is made and not written. It belongs to no device any more.
pub trait Made: Send {
    /// Writes `video.mp4`, `video.json`, `thumb.jpg`, `sprite.jpg` and, where there is a sound track, `audio.wav` into a folder,
    /// each under a temporary name first. It may be called again after a failure.
    ///
    /// # Errors
    /// A full disk as `storage_full`; whatever else as `internal`.
    fn write(&mut self, folder: &Path) -> Result<Produced, Failure>;

    /// Keeps frames, samples and latents of a video that cannot be written as one of [`KEPT`](super::store::KEPT) in its folder, and
    /// logs where.
    fn keep(&mut self, folder: &Path);
}
