//! Options of an experiment.

use std::path::PathBuf;

use super::children::Variable;

/// Options of an experiment or a search, as its flags give them.
#[derive(Clone, Debug)]
pub struct Options {
    pub binary: PathBuf,
    pub folder: PathBuf,
    /// Folder of optimized modules [default: `modules` in the folder of results].
    pub modules: Option<PathBuf>,
    pub jobs: usize,
    pub measure: bool,
    pub retry: bool,
}

impl Options {
    pub(super) fn workers(&self) -> Vec<Variable> {
        vec![None; self.jobs.max(1)]
    }
}
