//! Errors of a request.

use crate::config::ConfigError;
use crate::sampling::SamplingError;

/// Error of a request that is invalid or that the model cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// A key that the model or the pipeline does not support.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Invalid size or noise schedule.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
}
