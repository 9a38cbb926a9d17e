//! Errors that clients are told: OpenAI's object, with the status that it is sent with.

use serde::Serialize;
use serde_json::{Value, json};

/// An error of a request.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// Word that programs tell errors apart by.
    pub code: &'static str,
    /// One line for people. No path, host name or key is in it.
    pub message: String,
    /// The client's own name of the field.
    pub param: Option<String>,
    /// Seconds after which to try again.
    pub retry_after: Option<u32>,
    /// Whether clients may try again, where their own rule would be wrong.
    pub should_retry: Option<bool>,
}

impl ApiError {
    /// An error without a field.
    pub fn new(status: u16, code: &'static str, message: impl Into<String>) -> Self {
        ApiError { status, code, message: message.into(), param: None, retry_after: None, should_retry: None }
    }

    /// An error of a field, as the client names it.
    pub fn field(code: &'static str, param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError { param: Some(param.into()), ..ApiError::new(400, code, message) }
    }

    /// A video that is not there, or not the caller's.
    pub fn video_not_found() -> Self {
        ApiError::new(404, "video_not_found", "there is no such video")
    }

    /// The same, to be tried again later.
    #[must_use]
    pub fn retry_after(self, seconds: u32) -> Self {
        ApiError { retry_after: Some(seconds), ..self }
    }

    /// The same, with whether it may be tried again.
    #[must_use]
    pub fn should_retry(self, may: bool) -> Self {
        ApiError { should_retry: Some(may), ..self }
    }

    /// The body that is sent, with OpenAI's keys.
    pub fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": kind(self.status), "param": self.param, "code": self.code}})
    }
}

/// OpenAI's type of an error.
fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    }
}

/// Why a job failed, as clients are told.
#[derive(Clone, Debug, PartialEq, Serialize, serde::Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// One of [`FAILURES`].
    pub code: String,
    pub message: String,
    /// The field that is to be mended, where it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param: Option<String>,
}

/// Code of a job that found no open file, after it waited for one.
pub const OUT_OF_FILES: &str = "out_of_files";

/// Codes of failed jobs, each with the status of a request that waited for its job.
pub const FAILURES: [(&str, u16); 11] = [
    ("cancelled", 409),
    ("too_large", 400),
    ("invalid_image", 400),
    ("invalid_video", 400),
    ("invalid_audio", 400),
    ("not_finite", 500),
    ("device_error", 500),
    ("crashed", 500),
    ("internal", 500),
    ("storage_full", 507),
    (OUT_OF_FILES, 503),
];

impl Failure {
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Failure { code: code.into(), message: message.into(), param: None }
    }

    /// No file could be opened: too many are open.
    pub fn out_of_files() -> Self {
        Failure::new(OUT_OF_FILES, "the server has too many files open")
    }

    /// Whether it may end by itself: waiting for room on the disk, or for an open file, is worth it.
    pub fn is_passing(&self) -> bool {
        self.code == "storage_full" || self.code == OUT_OF_FILES
    }

    /// A failure that a field of the request caused.
    pub fn field(code: &str, param: &str, message: impl Into<String>) -> Self {
        Failure { param: Some(param.into()), ..Failure::new(code, message) }
    }

    /// The error of a failed video's object.
    pub fn to_json(&self) -> Value {
        let own = FAILURES.iter().find(|(code, status)| *code == self.code && *status == 400);
        let kind = kind(own.map_or(500, |(_, status)| *status));
        json!({"code": self.code, "message": self.message, "param": self.param, "type": kind})
    }

    /// The same as the answer to a request that waited.
    pub fn to_error(&self) -> ApiError {
        let known = FAILURES.iter().find(|(code, _)| *code == self.code);
        let (code, status) = known.copied().unwrap_or(("video_failed", 500));
        ApiError { param: self.param.clone(), ..ApiError::new(status, code, self.message.clone()) }.should_retry(false)
    }
}
