//! Errors of a request.

use crate::sampling::SamplingError;

/// Error of a request that is invalid or that the model cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// A key that the model or the pipeline does not support.
    #[error("{}", key_fault(key, value.as_deref(), why))]
    Key {
        key: &'static str,
        /// Value of the key. `None`: `why` quotes it.
        value: Option<String>,
        /// What is wrong and what to change.
        why: String,
    },
    /// Invalid size or noise schedule.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
}

impl RequestError {
    /// Returns an error about a key; `why` quotes its value.
    pub(crate) fn key(key: &'static str, why: impl Into<String>) -> Self {
        RequestError::Key { key, value: None, why: why.into() }
    }

    /// Returns an error about the value of a key.
    pub(crate) fn value(key: &'static str, value: impl ToString, why: impl Into<String>) -> Self {
        RequestError::Key { key, value: Some(value.to_string()), why: why.into() }
    }
}

/// Returns the error message about a key or a request field with this name.
pub(crate) fn key_fault(name: &str, value: Option<&str>, why: &str) -> String {
    value.map_or_else(|| format!("{name}: {why}"), |value| format!("{name} = {value}: {why}"))
}
