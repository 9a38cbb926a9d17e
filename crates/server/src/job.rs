//! A job: its request, stored as `request.json`, and its state, stored as `job.json`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::device::PreviewImage;
use super::error::Failure;
use super::id::VideoId;
use super::job_config::JobConfig;

/// An accepted request, which never changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AcceptedJob {
    /// Id of the video.
    pub id: VideoId,
    /// Creation time, as Unix time in seconds.
    pub created_at: u64,
    /// Name of the API key with which the request was sent; empty on a server without keys.
    pub owner: String,
    /// Model name that the client sent, or the server's default name.
    pub model: String,
    /// Configuration of the run, with one prompt and one seed. It refers to input files by their names in the store.
    pub config: JobConfig,
    /// Size of the finished video; `None` if the model predicts its length, and in requests that an earlier release
    /// stored.
    #[serde(default)]
    pub expected: Option<ExpectedVideo>,
    /// Normalised request fields without file contents. A remix inherits them.
    pub fields: Map<String, Value>,
    /// Duration in the client's own notation; `None` if the request set none.
    pub seconds: Option<String>,
    /// Field `user` of the request.
    pub user: Option<String>,
    /// Field `metadata` of the request.
    pub metadata: Map<String, Value>,
    /// Warnings for the client, for example that the size is an alias of another one.
    pub warnings: Vec<String>,
    /// Id of the video that the request repeats, edits or extends.
    pub remixed_from: Option<VideoId>,
    /// Names of the job's input files in the store.
    pub inputs: Vec<String>,
    /// SHA-256 of the request body. Requests with the same `Idempotency-Key` must have the same body.
    pub body_sha256: String,
    /// Header `Idempotency-Key` of the request.
    pub idempotency_key: Option<String>,
    /// W3C trace context of the request.
    pub traceparent: Option<String>,
    /// Shape key: requests with equal keys run the same programs.
    pub shape: String,
    /// Batch key: requests with equal keys differ only in prompt and seed and can run in one batch.
    pub batch_key: String,
}

impl AcceptedJob {
    /// Returns the prompt.
    pub fn prompt(&self) -> &str {
        &self.config.summary().prompt
    }

    /// Returns the number of frames of the finished video; `None` if the model predicts it.
    pub fn num_frames(&self) -> Option<usize> {
        self.expected.map(|video| video.num_frames).or(self.config.summary().num_frames)
    }
}

/// Size, number of frames and frame rate that a video will have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpectedVideo {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Number of frames.
    pub num_frames: usize,
    /// Frames per second.
    pub fps: f64,
}

/// State of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// The job waits for the device.
    Queued,
    /// The job runs, or its files are being written.
    InProgress,
    /// The video is stored.
    Completed,
    /// The job failed or was cancelled.
    Failed,
}

impl JobState {
    /// Returns whether the job has ended, so that its state cannot change again.
    pub fn is_terminal(self) -> bool {
        matches!(self, JobState::Completed | JobState::Failed)
    }

    /// Returns the name of the state in OpenAI's API.
    pub fn name(self) -> &'static str {
        match self {
            JobState::Queued => "queued",
            JobState::InProgress => "in_progress",
            JobState::Completed => "completed",
            JobState::Failed => "failed",
        }
    }
}

/// State of a job, as stored on disk. All times are Unix times in seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// State.
    pub state: JobState,
    /// Time at which the job was started. `None`: not started yet.
    pub started_at: Option<u64>,
    /// Time at which the job ended. `None`: not ended yet.
    pub completed_at: Option<u64>,
    /// Time at which the job and its files will be removed; `None` until the job has ended.
    pub expires_at: Option<u64>,
    /// Reason why the job failed; `None` if it has not failed.
    pub failure: Option<Failure>,
    /// Number of times that the job has been started.
    pub attempts: u32,
    /// Number of videos in the batch of the job, including its own.
    pub batch: usize,
    /// The finished video.
    pub produced: Option<VideoProperties>,
}

impl Record {
    /// Returns the state of a new job.
    pub fn queued() -> Self {
        Record {
            state: JobState::Queued,
            started_at: None,
            completed_at: None,
            expires_at: None,
            failure: None,
            attempts: 0,
            batch: 1,
            produced: None,
        }
    }
}

/// Properties of a finished video.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VideoProperties {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Number of frames.
    pub num_frames: usize,
    /// Frames per second.
    pub fps: f64,
    /// Total size of the video's files, in bytes.
    pub bytes: u64,
    /// SHA-256 of the decoded frames.
    pub frames_sha256: String,
    /// SHA-256 of the decoded audio samples.
    pub samples_sha256: String,
    /// Durations of the phases, in the format of the sidecar.
    pub timings: Value,
    /// Prompt that a language model made from the request's prompt; `None` if the prompt was not enhanced.
    #[serde(default)]
    pub enhanced_prompt: Option<String>,
    /// Warnings of the run.
    pub warnings: Vec<String>,
}

/// Stage of a run, as reported to clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobPhase {
    /// The job waits for the device.
    #[default]
    Queued,
    /// The job is queued because the disk has too little free space.
    WaitingForDisk,
    /// Programs are being compiled.
    Compiling,
    /// Weights are being loaded.
    Loading,
    /// A language model is rewriting the prompt.
    PromptEnhancer,
    /// The prompt is being encoded.
    TextEncoder,
    /// First denoising pass.
    Denoise,
    /// Latents are being upsampled between two passes.
    Upsampler,
    /// Later denoising passes.
    Refine,
    /// Frames are being decoded.
    VideoDecoder,
    /// Sound is being decoded.
    AudioDecoder,
    /// The video's files are being written.
    Encoding,
}

/// Progress of a running job. It is not stored on disk.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// Current stage.
    pub stage: JobPhase,
    /// Number of finished steps of the current stage.
    pub step: usize,
    /// Number of steps of the current stage.
    pub steps: usize,
    /// Progress of the job in percent: 0 to 99 until the files are written, then 100.
    pub percent: u8,
    /// Estimated remaining time in seconds; `None` if unknown.
    pub eta_s: Option<f64>,
}

/// State of a job at one point in time.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The request.
    pub accepted: Arc<AcceptedJob>,
    /// The state.
    pub record: Arc<Record>,
    /// The progress.
    pub progress: Progress,
    /// Number of jobs ahead of this one in the queue; `None` if it is not queued.
    pub queue_position: Option<usize>,
    /// Latest preview of the running job; `None` if there is none.
    pub preview: Option<Arc<PreviewImage>>,
}
