//! The files that a run may replace, determined before the run starts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files and folders for frames that a run may replace. Any other existing output is an error.
#[derive(Clone, Debug)]
pub(crate) struct Replaceable {
    all: bool,
    paths: Arc<[PathBuf]>,
}

impl Replaceable {
    /// Returns a value that allows every existing file to be replaced.
    pub(crate) fn everything() -> Self {
        Replaceable { all: true, paths: Arc::new([]) }
    }

    /// Returns a value that allows these files and folders to be replaced.
    pub(in crate::pipeline) fn these(paths: Vec<PathBuf>) -> Self {
        Replaceable { all: false, paths: paths.into() }
    }

    /// Returns whether `path` may be replaced.
    pub(crate) fn has(&self, path: &Path) -> bool {
        self.all || self.paths.iter().any(|known| known == path)
    }
}
