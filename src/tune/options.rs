use std::path::PathBuf;

use super::children::EnvVariable;
use super::error::Result;
use crate::analysis::Chip;
use crate::runtime::Target;

/// Options of an experiment or a search, from command-line flags.
#[derive(Clone, Debug)]
pub struct TuneOptions {
    pub binary: PathBuf,
    pub folder: PathBuf,
    /// Folder of the stored optimized modules; `None`: the subfolder `modules` of `folder`.
    pub modules: Option<PathBuf>,
    pub jobs: usize,
    pub measure: bool,
    pub retry: bool,
    /// Name and performance figures of the chip for which times are predicted; `None`: each target's chip.
    pub chip: Option<(String, Chip)>,
}

impl TuneOptions {
    /// Returns a target by name, together with the chip for which its times are predicted.
    pub(super) fn target(&self, name: &str) -> Result<Target> {
        Ok(Target::parse(name, self.chip.as_ref().map(|(_, chip)| chip))?)
    }

    /// Returns the arguments that make a child process use the same chip.
    pub(super) fn chip_arguments(&self) -> Vec<String> {
        self.chip.iter().flat_map(|(name, _)| ["--chip".to_string(), name.clone()]).collect()
    }

    pub(super) fn workers(&self) -> Vec<EnvVariable> {
        vec![None; self.jobs.max(1)]
    }
}
