//! Errors of tuning as a whole; a case that fails is a result.

use std::path::PathBuf;

/// Error that ends an experiment, a search or a diagnosis.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Write(#[from] crate::media::Error),
    #[error("optimized modules: {0}")]
    Modules(crate::runtime::cache::CacheError),
    #[error("{}: another run writes into this folder", .0.display())]
    Busy(PathBuf),
    #[error("cannot start {}: {source}", path.display())]
    Start { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Target(#[from] crate::runtime::UnknownTarget),
    #[error("--memory-fit: the device memory of '{0}' is unknown; leave it out, or use a TPU or CUDA target")]
    Capacity(String),
    #[error(transparent)]
    Pipeline(#[from] crate::pipeline::PipelineError),
    #[error("{0}")]
    Base(String),
}

/// Result of tuning.
pub(crate) type Result<T> = std::result::Result<T, TuneError>;

impl TuneError {
    pub(super) fn file(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> TuneError + '_ {
        move |source| TuneError::File { path: path.into(), source }
    }
}
