//! Errors of the runtime.

use std::fmt;

use super::cache::CacheError;
use super::processes::GroupError;
use crate::tensor::TensorError;

/// Errors of compiling and running programs.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error(transparent)]
    Plugin(#[from] crate::pjrt::Error),
    /// A device has too little memory for a program, or for parameters.
    #[error("{during} {name}: too little memory on a device: {source}")]
    OutOfMemory { during: During, name: String, source: crate::pjrt::Error },
    /// A release of libtpu refuses an option of ours that it was tested with: on others it is left out.
    #[error("libtpu {release} refuses the option {option}: {source}; this is a bug, please report it with the command")]
    Option { release: &'static str, option: String, source: crate::pjrt::Error },
    /// A plugin refuses an option of ours without which it computes other numbers.
    #[error(
        "the plugin does not take the option {option}, which the numbers rest on: `ltx2 plugin install cpu|cuda|tpu` fetches one \
         that does ({source})"
    )]
    Needed { option: String, source: crate::pjrt::Error },
    /// A plugin refuses an XLA flag of the configuration.
    #[error("runtime.xla_flags.{option}: {source}; correct or remove the flag")]
    Flag { option: String, source: crate::pjrt::Error },
    #[error(transparent)]
    Program(#[from] crate::hlo::Error),
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error("compile cache: {0}")]
    Cache(#[from] CacheError),
    /// The other processes of the run.
    #[error(transparent)]
    Processes(#[from] GroupError),
    /// Loading that nobody waits for any more.
    #[error("loading was stopped")]
    Stopped,
    /// A parameter could not be read.
    #[error("{0}")]
    Parameter(String),
    #[error("program '{program}' needs '{name}' of type {ty}")]
    Missing { program: String, name: String, ty: String },
    #[error("'{name}' must be {want}, got {got}")]
    Mismatch { name: String, want: String, got: String },
    /// The plugin put a program onto other devices than it was compiled for: ids, in the orders of the mesh and of the
    /// plugin.
    #[error("program '{program}' was loaded onto devices {got:?} of this process, not {wanted:?}")]
    Placed { program: String, wanted: Vec<i32>, got: Vec<i32> },
    /// The program runs on more devices than there are.
    #[error("program '{program}' is partitioned over {want} devices, the platform has {have}")]
    Devices { program: String, want: usize, have: usize },
}

/// Work that takes memory on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum During {
    Compile,
    /// Parameters on their way to devices.
    Load,
    /// Inputs on their way to devices.
    Upload,
    /// Execution, or its results on their way to the host.
    Run,
}

impl fmt::Display for During {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            During::Compile => "compiling",
            During::Load => "loading",
            During::Upload => "inputs of",
            During::Run => "running",
        })
    }
}

impl RuntimeError {
    /// The same error; where memory was too little, with what it was for.
    #[must_use]
    pub(crate) fn during(self, during: During, name: &str) -> Self {
        match self {
            RuntimeError::Plugin(source) if source.is_out_of_memory() => {
                RuntimeError::OutOfMemory { during, name: name.into(), source }
            }
            RuntimeError::OutOfMemory { source, .. } => RuntimeError::OutOfMemory { during, name: name.into(), source },
            other => other,
        }
    }
}
