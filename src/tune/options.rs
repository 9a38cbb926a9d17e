//! Options of an experiment.

use std::path::PathBuf;

use super::children::Variable;
use super::error::Result;
use crate::analysis::Chip;
use crate::runtime::Target;

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
    /// Chip to predict times with, and the flag's value that names it [default: each target's].
    pub chip: Option<(String, Chip)>,
}

impl Options {
    /// A target by name, with the chip that its times are predicted by.
    pub(super) fn target(&self, name: &str) -> Result<Target> {
        Ok(Target::of(name, self.chip.as_ref().map(|(_, chip)| chip))?)
    }

    /// Arguments of a child that compiles for the same chip.
    pub(super) fn chip_arguments(&self) -> Vec<String> {
        self.chip.iter().flat_map(|(name, _)| ["--chip".to_string(), name.clone()]).collect()
    }

    pub(super) fn workers(&self) -> Vec<Variable> {
        vec![None; self.jobs.max(1)]
    }
}
