//! Errors of a request.

use crate::sampling::SamplingError;

/// A request that the model cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// A setting, with what to change.
    #[error("{0}")]
    Usage(String),
    /// Sizes and schedules.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
}
