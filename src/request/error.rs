//! Errors of a request.

use crate::sampling::SamplingError;

/// Error of a request that is invalid or that the model cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Invalid option; the message says what to change.
    #[error("{0}")]
    Usage(String),
    /// Invalid size or noise schedule.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
}
