//! Errors that stop an experiment, a search or a diagnosis. If one case fails, the failure is recorded as its result
//! instead.

use std::path::PathBuf;

use crate::runtime::Target;

/// Error that stops an experiment, a search or a diagnosis.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    #[error("cannot access {}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Write(#[from] crate::atomic_file::FileError),
    #[error("cannot access the stored optimized modules: {0}")]
    Modules(crate::runtime::cache::CacheError),
    #[error("{}: another process is using this folder; wait until it ends, or use another folder", .0.display())]
    Busy(PathBuf),
    #[error("cannot start {}: {source}", path.display())]
    Start { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Target(#[from] crate::runtime::UnknownTarget),
    #[error(
        "--memory-fit: the device memory of '{0}' is unknown; remove the flag, or use a target of {chips}",
        chips = Target::platforms_with_chips()
    )]
    Capacity(String),
    #[error(transparent)]
    Pipeline(#[from] crate::pipeline::PipelineError),
    #[error("{0}")]
    Base(String),
}

pub(crate) type Result<T> = std::result::Result<T, TuneError>;

impl TuneError {
    pub(super) fn file(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> TuneError + '_ {
        move |source| TuneError::File { path: path.into(), source }
    }
}
