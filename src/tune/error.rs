//! Errors of tuning as a whole; a case that fails is a result.

use std::path::PathBuf;

/// Error that ends an experiment, a search or a diagnosis.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// Invalid configuration, layout or experiment.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// File of results that cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// Output file that cannot be written.
    #[error(transparent)]
    Write(#[from] crate::media::Error),
    /// Store of optimized modules.
    #[error("optimized modules: {0}")]
    Modules(crate::runtime::cache::CacheError),
    /// Another process writes into the folder.
    #[error("{}: another run writes into this folder", .0.display())]
    Busy(PathBuf),
    /// This binary cannot be started.
    #[error("cannot start {}: {source}", path.display())]
    Start {
        /// Path of the binary that did not start.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// Unknown target.
    #[error(transparent)]
    Target(#[from] crate::runtime::UnknownTarget),
    /// `--memory-fit` for a target of unknown memory.
    #[error("--memory-fit: the device memory of '{0}' is unknown; leave it out, or use a TPU or CUDA target")]
    Capacity(String),
    /// Failure of the baseline program, or of an argument.
    #[error("{0}")]
    Base(String),
}

/// Result of this layer.
pub type Result<T> = std::result::Result<T, TuneError>;

impl TuneError {
    /// Error of a file that cannot be read or written.
    pub(super) fn file(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> TuneError + '_ {
        move |source| TuneError::File { path: path.into(), source }
    }
}
