//! Errors of the runtime.

use std::fmt;

use super::cache::CacheError;
use super::processes::GroupError;
use ltx2_weights::tensor::TensorError;

/// An error from compiling, loading, uploading or running programs.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error(transparent)]
    Plugin(#[from] ltx2_pjrt::Error),
    /// A device ran out of memory for a program or for parameters.
    #[error("{during} {name}: out of device memory: {source}")]
    OutOfMemory { during: During, name: String, source: ltx2_pjrt::Error },
    /// A libtpu release rejects a default option that it was tested with. For untested releases, the compile is retried
    /// without the option instead.
    #[error(
        "libtpu {release} rejects the option {option}: {source}; this is a bug, please report it together with the command line"
    )]
    Option { release: &'static str, option: String, source: ltx2_pjrt::Error },
    /// A plugin rejects a default option that results depend on.
    #[error(
        "the plugin rejects the option {option}, which results depend on; run `ltx2 plugin install cpu|cuda|tpu` for a plugin that \
         accepts it ({source})"
    )]
    Needed { option: String, source: ltx2_pjrt::Error },
    /// A plugin rejects an XLA flag that the configuration sets.
    #[error("runtime.xla_flags.{option}: {source}; correct or remove the flag")]
    Flag { option: String, source: ltx2_pjrt::Error },
    #[error(transparent)]
    Program(#[from] ltx2_stablehlo::Error),
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error("compile cache: {0}")]
    Cache(#[from] CacheError),
    /// An error of multi-process coordination.
    #[error(transparent)]
    Processes(#[from] GroupError),
    /// Loading was cancelled because its result is not needed.
    #[error("loading was cancelled")]
    Stopped,
    /// A parameter could not be read or uploaded.
    #[error("{0}")]
    Parameter(String),
    #[error("program '{program}': tensor '{name}' is missing ({ty})")]
    Missing { program: String, name: String, ty: String },
    #[error("argument '{name}' must be {want}, got {got}")]
    Mismatch { name: String, want: String, got: String },
    /// The plugin loaded a program onto devices other than those that the program was compiled for. Device ids are in
    /// mesh order (`wanted`) and in the plugin's order (`got`).
    #[error("program '{program}' was loaded onto devices {got:?} of this process, expected {wanted:?}")]
    Placed { program: String, wanted: Vec<i32>, got: Vec<i32> },
    /// The program needs more devices than the platform has.
    #[error("program '{program}' needs {want} devices, but the platform has {have}")]
    Devices { program: String, want: usize, have: usize },
}

/// Phase in which device memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum During {
    Compile,
    /// Uploading parameters.
    Load,
    /// Uploading inputs.
    Upload,
    /// Executing a program, or downloading its results.
    Run,
}

impl fmt::Display for During {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            During::Compile => "compiling",
            During::Load => "loading",
            During::Upload => "uploading inputs of",
            During::Run => "running",
        })
    }
}

impl RuntimeError {
    /// Adds the phase and the name of the program or component to an out-of-memory error. Returns other errors
    /// unchanged.
    #[must_use]
    pub fn during(self, during: During, name: &str) -> Self {
        match self {
            RuntimeError::Plugin(source) if source.is_out_of_memory() => {
                RuntimeError::OutOfMemory { during, name: name.into(), source }
            }
            RuntimeError::OutOfMemory { source, .. } => RuntimeError::OutOfMemory { during, name: name.into(), source },
            other => other,
        }
    }
}
