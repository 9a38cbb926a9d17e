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
        let kind = match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

/// Why a job failed, as clients are told.
#[derive(Clone, Debug, PartialEq, Serialize, serde::Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// One of `cancelled`, `not_finite`, `too_large`, `device_error`, `storage_full`, `invalid_image`, `crashed`, `internal`.
    pub code: String,
    pub message: String,
}

impl Failure {
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Failure { code: code.into(), message: message.into() }
    }
}
