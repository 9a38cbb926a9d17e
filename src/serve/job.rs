//! A job: what was asked, kept as `request.json`, and how far it is, kept as `job.json`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::Failure;
use super::id::VideoId;
use crate::config::Config;
use crate::pipeline::Phase;

/// A request that was accepted; it never changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accepted {
    pub id: VideoId,
    /// Seconds since 1970.
    pub created_at: u64,
    /// Name of the key that asked; empty on a server without keys.
    pub owner: String,
    /// Name that the client gave the model, or the server's first.
    pub model: String,
    /// The run: one prompt, one seed, files by their names in the store.
    pub config: Config,
    /// The finished video, where no prediction decides; absent of requests that an earlier release kept.
    #[serde(default)]
    pub expected: Option<Expected>,
    /// The request's fields, as its remix takes them: unfolded, without files' contents.
    pub fields: Map<String, Value>,
    /// Length as the client wrote it.
    pub seconds: Option<String>,
    pub user: Option<String>,
    pub metadata: Map<String, Value>,
    /// What the client should know, such as an alias of a size.
    pub warnings: Vec<String>,
    pub remixed_from: Option<VideoId>,
    /// Given files in the store, by name.
    pub inputs: Vec<String>,
    /// Of the body, for `Idempotency-Key`.
    pub body_sha256: String,
    pub idempotency_key: Option<String>,
    /// W3C trace context.
    pub traceparent: Option<String>,
    /// Requests of one shape run the same programs.
    pub shape: String,
    /// Requests of one batch key differ in prompt and seed only.
    pub batch_key: String,
}

impl Accepted {
    /// The prompt; a request has one.
    pub fn prompt(&self) -> &str {
        self.config.request.prompt.as_deref().unwrap_or_default()
    }

    /// Frames of the finished video, where they are not predicted.
    pub fn num_frames(&self) -> Option<usize> {
        self.expected.map(|video| video.num_frames).or_else(|| self.config.request.num_frames.count())
    }
}

/// Size, length and rate of a video before it is made.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Expected {
    pub width: usize,
    pub height: usize,
    pub num_frames: usize,
    /// Frames a second.
    pub fps: f64,
}

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Queued,
    InProgress,
    Completed,
    Failed,
}

impl State {
    /// Whether it stays so.
    pub fn is_terminal(self) -> bool {
        matches!(self, State::Completed | State::Failed)
    }

    /// OpenAI's word.
    pub fn name(self) -> &'static str {
        match self {
            State::Queued => "queued",
            State::InProgress => "in_progress",
            State::Completed => "completed",
            State::Failed => "failed",
        }
    }
}

/// How far a job is, as far as it is kept on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub state: State,
    pub started_at: Option<u64>,
    pub completed_at: Option<u64>,
    /// When record and files go.
    pub expires_at: Option<u64>,
    /// Why it failed.
    pub failure: Option<Failure>,
    /// Times that it was begun.
    pub attempts: u32,
    /// Videos made together with it, itself included.
    pub batch: usize,
    /// The files that were made.
    pub produced: Option<Produced>,
}

impl Record {
    /// Of a job that waits.
    pub fn queued() -> Self {
        Record {
            state: State::Queued,
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

/// A finished video, as its files are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Produced {
    pub width: usize,
    pub height: usize,
    pub num_frames: usize,
    /// Frames a second.
    pub fps: f64,
    /// Bytes of all its files.
    pub bytes: u64,
    /// SHA-256 of the raw frames.
    pub frames_sha256: String,
    /// SHA-256 of the raw samples.
    pub samples_sha256: String,
    /// Phases, as the sidecar has them.
    pub timings: Value,
    pub warnings: Vec<String>,
}

/// Part of a run that a job is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobPhase {
    #[default]
    Queued,
    /// Too little room on the disk.
    WaitingForDisk,
    Compiling,
    Loading,
    TextEncoder,
    Denoise,
    Upsampler,
    Refine,
    VideoDecoder,
    AudioDecoder,
    /// The files are written.
    Encoding,
}

impl JobPhase {
    /// The stage that a phase of the pipeline belongs to.
    pub fn of(phase: Phase) -> Self {
        match phase.name() {
            "text_encoder" | "connectors" => JobPhase::TextEncoder,
            "upsampler" | "frame_upsampler" | "keyframe_upsampler" => JobPhase::Upsampler,
            "refine" | "round" => JobPhase::Refine,
            "video_decoder" | "diffusion_decoder" => JobPhase::VideoDecoder,
            "audio_decoder" | "vocoder" => JobPhase::AudioDecoder,
            _ => JobPhase::Denoise,
        }
    }
}

/// How far a running job is. Nothing of it is kept on disk.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    pub stage: JobPhase,
    /// Steps behind it, of this stage.
    pub step: usize,
    pub steps: usize,
    /// 0 to 99; 100 once the files are there.
    pub percent: u8,
    /// Seconds that are left, where they can be told.
    pub eta_s: Option<f64>,
}

/// A job at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub accepted: Arc<Accepted>,
    pub record: Arc<Record>,
    pub progress: Progress,
    /// Jobs before it.
    pub queue_position: Option<usize>,
}
