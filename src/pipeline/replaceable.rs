//! Files that a run may replace, decided before it starts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files and folders of frames that a run may replace; others of the same names stay, and are an error.
#[derive(Clone, Debug)]
pub(crate) struct Replaceable {
    all: bool,
    paths: Arc<[PathBuf]>,
}

impl Replaceable {
    /// Whatever is there.
    pub(crate) fn everything() -> Self {
        Replaceable { all: true, paths: Arc::new([]) }
    }

    /// These files and folders.
    pub(super) fn these(paths: Vec<PathBuf>) -> Self {
        Replaceable { all: false, paths: paths.into() }
    }

    /// Whether a file of this name is replaced.
    pub(crate) fn has(&self, path: &Path) -> bool {
        self.all || self.paths.iter().any(|known| known == path)
    }
}
