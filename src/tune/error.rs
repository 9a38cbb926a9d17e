//! What can go wrong between cases; what goes wrong inside of one is that case's row.

use std::path::PathBuf;

/// What ends an experiment.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// The configuration, a layout or the experiment itself.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// A file of results.
    #[error("{}: {source}", path.display())]
    File {
        /// File.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Writing a result.
    #[error(transparent)]
    Write(#[from] crate::media::Error),
    /// The optimized modules.
    #[error("optimized modules: {0}")]
    Modules(crate::runtime::cache::CacheError),
    /// Another process writes into the folder.
    #[error("{}: another run writes into this folder", .0.display())]
    Busy(PathBuf),
    /// This binary cannot be started.
    #[error("cannot start {}: {source}", path.display())]
    Start {
        /// Binary.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A target that does not exist.
    #[error(transparent)]
    Target(#[from] crate::runtime::UnknownTarget),
    /// A limit of memory where there is none.
    #[error("--memory-fit: '{0}' states no memory of a device; leave it out, or take a TPU or cuda target")]
    Capacity(String),
    /// The program that all else is compared with.
    #[error("{0}")]
    Base(String),
}

/// The result of this layer.
pub type Result<T> = std::result::Result<T, TuneError>;

impl TuneError {
    /// A file that cannot be read or written.
    pub(super) fn file(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> TuneError + '_ {
        move |source| TuneError::File { path: path.into(), source }
    }
}
