//! Options of an experiment.

use std::path::PathBuf;

use super::children::Variable;

/// Options of an experiment.
#[derive(Clone, Debug)]
pub struct Options {
    /// Path of this binary.
    pub binary: PathBuf,
    /// Folder of results.
    pub folder: PathBuf,
    /// Folder of optimized modules [default: `modules` in the folder of results].
    pub modules: Option<PathBuf>,
    /// Number of concurrent compilations.
    pub jobs: usize,
    /// Whether cases are measured on devices that are present.
    pub measure: bool,
    /// Whether failed jobs are repeated.
    pub retry: bool,
}

impl Options {
    /// Workers of ahead-of-time compilations.
    pub(super) fn workers(&self) -> Vec<Variable> {
        vec![None; self.jobs.max(1)]
    }
}
