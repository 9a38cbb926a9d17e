//! Interface of the model: converts requests into jobs and describes what requests may contain. A
//! [`Device`](super::device::JobDevice) runs the jobs.

use std::path::Path;

use serde_json::Value;

use super::device::JobBatch;
use super::error::ApiError;
use super::form::Form;
use super::id::{Ids, VideoId};
use super::job::AcceptedJob;
use super::jobs::Caller;

/// Converts requests into jobs for one model. All methods may be called from several threads.
pub trait Generator: Send + Sync {
    /// Returns the names and the platform of the model.
    fn model(&self) -> ModelInfo;

    /// Returns the pipelines, defaults and limits of requests as a JSON object, which `/v1/models` shows for each name of
    /// the model.
    fn card(&self) -> Value;

    /// Returns the JSON Schema of the fields of a request, for the OpenAPI document.
    fn request_schema(&self) -> Value;

    /// Returns whether a form field with this name, which may end with brackets, can contain a file.
    fn takes_file(&self, name: &str) -> bool;

    /// Returns the id of the finished job whose video an edit or extension uses; `None` if the request uploads a video.
    ///
    /// # Errors
    /// Returns `video_not_found` if the field contains an invalid id.
    fn source_video(&self, form: &Form) -> Result<Option<VideoId>, ApiError>;

    /// Converts a request into a job with a new id from `ids`. Reads and writes files, which blocks: do not call it
    /// from async code.
    ///
    /// # Errors
    /// Returns an error that contains the name of the invalid field as the client wrote it.
    fn accept(&self, form: Form, endpoint: Endpoint, caller: &Caller, ids: &Ids) -> Result<AcceptedJob, ApiError>;

    /// Returns the batches that the device runs before the server is ready. Each compiles the programs for a shape.
    ///
    /// # Errors
    /// Returns an error if no request can have one of the configured shapes.
    fn warm_up(&self, ids: &Ids) -> Result<Vec<JobBatch>, String>;
}

/// Description of the served model.
#[derive(Clone, Debug, Default)]
pub struct ModelInfo {
    /// Names by which clients may refer to the model. The first is the default.
    pub names: Vec<String>,
    /// Name of the model's preset.
    pub preset: String,
    /// Default pipeline of requests.
    pub pipeline: String,
    /// Platform of the devices, such as `cuda`. Clients see it, so it contains no path.
    pub platform: String,
    /// Names of the LoRAs that requests may select.
    pub loras: Vec<String>,
}

/// Endpoint to which a request was sent.
#[derive(Clone, Copy, Debug)]
pub enum Endpoint<'a> {
    /// `POST /v1/videos` and `/v1/videos/sync`.
    Create,
    /// `POST /v1/videos/{id}/remix`, with the finished job that it repeats.
    Remix(&'a AcceptedJob),
    /// `POST /v1/videos/edits`: a retake of the video of a finished job or of an uploaded video.
    Edit(Option<SourceVideo<'a>>),
    /// `POST /v1/videos/extensions`, which extends the video of a finished job or an uploaded video.
    Extend(Option<SourceVideo<'a>>),
}

impl Endpoint<'_> {
    /// Returns the id of the job from which the request is derived.
    pub fn origin(&self) -> Option<&VideoId> {
        match self {
            Endpoint::Create => None,
            Endpoint::Remix(accepted) => Some(&accepted.id),
            Endpoint::Edit(source) | Endpoint::Extend(source) => source.map(|source| &source.accepted.id),
        }
    }
}

/// Finished job whose video an edit or extension uses as input.
#[derive(Clone, Copy, Debug)]
pub struct SourceVideo<'a> {
    /// The job.
    pub accepted: &'a AcceptedJob,
    /// Path of the job's MP4.
    pub video: &'a Path,
}
