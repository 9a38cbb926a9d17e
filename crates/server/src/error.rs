//! API errors: OpenAI's error object with an HTTP status.

use serde::Serialize;
use serde_json::{Value, json};

/// Error response to a request.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// Machine-readable error code.
    pub code: &'static str,
    /// One-line message; contains no path, host name or key.
    pub message: String,
    /// The invalid field, under the name that the client used.
    pub param: Option<String>,
    /// Seconds after which to retry (`Retry-After`).
    pub retry_after: Option<u32>,
    /// Whether clients should retry (`x-should-retry`). `None`: the header is not sent and clients apply their own
    /// rule.
    pub should_retry: Option<bool>,
}

impl ApiError {
    /// Returns an error that does not concern a particular field.
    pub fn new(status: u16, code: &'static str, message: impl Into<String>) -> Self {
        ApiError { status, code, message: message.into(), param: None, retry_after: None, should_retry: None }
    }

    /// Returns an error with status 400 about a field, under the name that the client used.
    pub fn field(code: &'static str, param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError { param: Some(param.into()), ..ApiError::new(400, code, message) }
    }

    /// Returns the error for a video that does not exist or belongs to another caller.
    pub fn video_not_found() -> Self {
        ApiError::new(404, "video_not_found", "video not found")
    }

    /// Sets the number of seconds after which clients should retry (`Retry-After`).
    #[must_use]
    pub fn retry_after(self, seconds: u32) -> Self {
        ApiError { retry_after: Some(seconds), ..self }
    }

    /// Sets whether clients should retry (`x-should-retry`).
    #[must_use]
    pub fn should_retry(self, may: bool) -> Self {
        ApiError { should_retry: Some(may), ..self }
    }

    /// Returns the response body, which is OpenAI's error object.
    pub fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": kind(self.status), "param": self.param, "code": self.code}})
    }
}

/// Returns OpenAI's `type` for errors with this status.
fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    }
}

/// Reason why a job failed, as reported to clients.
#[derive(Clone, Debug, PartialEq, Serialize, serde::Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// One of [`FAILURES`].
    pub code: String,
    /// One-line message for clients.
    pub message: String,
    /// Request field that caused the failure, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param: Option<String>,
}

/// Failure code of a job for which no file could be opened, because the process had no free file descriptor.
pub const OUT_OF_FILES: &str = "out_of_files";

/// Failure codes of jobs. Each has the HTTP status of a synchronous request whose job fails with the code.
pub const FAILURES: [(&str, u16); 14] = [
    ("cancelled", 409),
    ("too_large", 400),
    ("invalid_image", 400),
    ("invalid_video", 400),
    ("invalid_audio", 400),
    ("invalid_value", 400),
    ("unsupported_parameter", 400),
    ("enhancement_failed", 500),
    ("not_finite", 500),
    ("device_error", 500),
    ("crashed", 500),
    ("internal", 500),
    ("storage_full", 507),
    (OUT_OF_FILES, 503),
];

impl Failure {
    /// Returns a failure with a code from [`FAILURES`] and without a request field.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Failure { code: code.into(), message: message.into(), param: None }
    }

    /// Returns the failure of a job for which no file could be opened.
    pub fn out_of_files() -> Self {
        Failure::new(OUT_OF_FILES, "the server has too many files open")
    }

    /// Returns whether the failure is temporary: waiting for disk space or a file descriptor can resolve it.
    pub fn is_transient(&self) -> bool {
        self.code == "storage_full" || self.code == OUT_OF_FILES
    }

    /// Returns a failure that the request field `param` caused.
    pub fn field(code: &str, param: &str, message: impl Into<String>) -> Self {
        Failure { param: Some(param.into()), ..Failure::new(code, message) }
    }

    /// Returns the `error` object of a failed video.
    pub fn to_json(&self) -> Value {
        let own = FAILURES.iter().find(|(code, status)| *code == self.code && *status == 400);
        let kind = kind(own.map_or(500, |(_, status)| *status));
        json!({"code": self.code, "message": self.message, "param": self.param, "type": kind})
    }

    /// Returns the error response to a synchronous request whose job failed.
    pub fn to_error(&self) -> ApiError {
        let known = FAILURES.iter().find(|(code, _)| *code == self.code);
        let (code, status) = known.copied().unwrap_or(("video_failed", 500));
        ApiError { param: self.param.clone(), ..ApiError::new(status, code, self.message.clone()) }.should_retry(false)
    }
}
