//! Interface of the devices that run jobs. A device is either a model on PJRT devices or a scripted device for tests.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::error::Failure;
use super::id::VideoId;
use super::job::{AcceptedJob, JobPhase, VideoProperties};

/// A batch of jobs for a device. The jobs differ only in prompt and seed.
#[derive(Clone, Debug)]
pub struct JobBatch {
    /// Jobs of the batch, in the order of the videos.
    pub jobs: Vec<Arc<AcceptedJob>>,
    /// Path of the step checkpoint. `None`: no checkpoint is written.
    pub steps: Option<PathBuf>,
    /// Whether to resume from the checkpoint that an interrupted run left.
    pub resume: bool,
}

/// Progress of a run: its stage, completed steps and total steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepProgress {
    /// Current stage.
    pub stage: JobPhase,
    /// Number of finished steps of the stage.
    pub step: usize,
    /// Number of steps of the stage.
    pub steps: usize,
}

/// Reason why a run is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// All jobs of the batch are cancelled. The device discards the checkpoint.
    Cancelled,
    /// The server is shutting down. The device keeps a checkpoint.
    Draining,
}

/// Preview of a running video: frames of the current prediction in one JPEG file.
#[derive(Clone, Debug, PartialEq)]
pub struct PreviewImage {
    /// The file. All frames have the same size; they are in rows, the first in the upper left corner.
    pub jpeg: Vec<u8>,
    /// Number of frames.
    pub frames: usize,
    /// Number of frames per row.
    pub columns: usize,
    /// Width of a frame in pixels.
    pub width: u32,
    /// Height of a frame in pixels.
    pub height: u32,
    /// Frames per second.
    pub fps: f64,
    /// The denoising pass, with its number of finished steps and of all steps.
    pub at: StepProgress,
}

/// Callback that receives the previews of running jobs. It may be called on any thread and does not block.
pub type PreviewSink = Arc<dyn Fn(&VideoId, PreviewImage) + Send + Sync>;

/// Progress callback. It returns whether the run continues.
pub type BatchWatch<'a> = &'a mut dyn FnMut(StepProgress) -> ControlFlow<Stop>;

/// Reason why a run produced no videos.
#[derive(Debug)]
pub enum RunError {
    /// The progress callback stopped the run.
    Stopped(Stop),
    /// The job failed; other jobs can run.
    Job(Failure),
    /// The device failed and cannot run other jobs.
    Device(String),
}

/// Measurements of a device. Counts and durations start at the previous call of [`JobDevice::figures`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// Number of programs that are loaded now.
    pub programs: usize,
    /// Number of programs compiled.
    pub compiled: u64,
    /// Number of programs loaded from the compile cache.
    pub cached: u64,
    /// Number of step checkpoints written.
    pub checkpoints: u64,
    /// Number of runs resumed from a checkpoint.
    pub resumed: u64,
    /// Duration of each LoRA switch, which replaces the LoRAs that are merged into the weights.
    pub lora_switches: Vec<Duration>,
    /// Memory measurements: name of the device, kind of measurement, and value in bytes.
    pub memory: Vec<(String, &'static str, u64)>,
}

/// Work on queued jobs that needs no device, such as a request to a chat server. It runs on other threads than the device,
/// so that other jobs run meanwhile.
pub trait Preparer: Send + Sync {
    /// Prepares a job, and keeps the result or the error for [`JobDevice::run`]. `steps`: path of the checkpoint that an
    /// interrupted run may have left. Returns early when `is_wanted` returns false.
    fn prepare(&self, job: &AcceptedJob, steps: &Path, is_wanted: &dyn Fn() -> bool);
}

/// A device with a loaded model. One thread owns it.
pub trait JobDevice {
    /// Compiles and loads the programs for the shape of a batch, and runs them at least once.
    ///
    /// # Errors
    /// Returns an error if the shape does not fit in memory (the message describes the memory plan), or if the device
    /// fails.
    fn warm(&mut self, order: &JobBatch) -> Result<(), RunError>;

    /// Generates the videos of a batch, in the order of its jobs. Reports progress to `watch`.
    ///
    /// # Errors
    /// See [`RunError`].
    fn run(&mut self, order: &JobBatch, watch: BatchWatch) -> Result<Vec<Box<dyn GeneratedVideo>>, RunError>;

    /// Sets the receiver of the previews of jobs that request some. Called once, before the first batch. The default
    /// is for devices without previews.
    fn send_previews(&mut self, _sink: PreviewSink) {}

    /// Returns the preparation that jobs with [`Summary::asks_endpoint`](super::job_config::Summary::asks_endpoint) need
    /// before they run. Called once, before the first batch. `None`: none.
    fn preparer(&mut self) -> Option<Arc<dyn Preparer>> {
        None
    }

    /// Unloads the programs of a shape.
    fn evict(&mut self, shape: &str);

    /// Returns the device's measurements; counts and durations start at the previous call.
    fn figures(&mut self) -> Figures;
}

/// A generated video that has not been written. It uses no device memory.
pub trait GeneratedVideo: Send {
    /// Writes `video.mp4`, `video.json`, `thumb.jpg`, `sprite.jpg`, `audio.wav` if the video has audio, and
    /// `video_hdr.mp4` and `video_exr.zip` if it is HDR video, to a folder. Each file is written under a temporary name and then renamed. Can be called again after a failure.
    ///
    /// # Errors
    /// Returns `storage_full` if the disk is full, `out_of_files` if the process is out of file descriptors, and
    /// `internal` otherwise.
    fn write(&mut self, folder: &Path) -> Result<VideoProperties, Failure>;

    /// Saves the results of a video that cannot be written (frames, audio samples and latents) in `folder`, under one
    /// of the names in [`KEPT`](super::store::KEPT), and logs the path.
    fn keep(&mut self, folder: &Path);
}
