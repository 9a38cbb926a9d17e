//! Errors of the runtime.

use std::fmt;

use super::cache::CacheError;
use super::processes::GroupError;
use ltx2_pjrt::discover::Platform;
use ltx2_weights::tensor::TensorError;

/// An error from compiling, loading, uploading or running programs.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// Any other error of the plugin or of its PJRT interface.
    #[error(transparent)]
    Plugin(#[from] ltx2_pjrt::PjrtError),
    /// Device memory or pinned host memory ran out for a program or for parameters.
    #[error("{during} {name}: out of {} memory: {source}", if *.is_host { "pinned host" } else { "device" })]
    OutOfMemory {
        /// Phase in which memory ran out.
        during: MemoryPhase,
        /// Name of the program, or of the components whose parameters were loaded.
        name: String,
        /// Whether pinned memory of the host ran out instead of device memory.
        is_host: bool,
        /// Error of the plugin.
        source: ltx2_pjrt::PjrtError,
    },
    /// A libtpu release rejects a default option that it was tested with. For untested releases, the compile is retried
    /// without the option instead.
    #[error(
        "libtpu {release} rejects the option {option}: {source}; this is a bug, please report it together with the command line"
    )]
    Option {
        /// Release of libtpu, for example `0.0.52`.
        release: &'static str,
        /// Name of the option.
        option: String,
        /// Error of the plugin.
        source: ltx2_pjrt::PjrtError,
    },
    /// A plugin rejects a default option that results depend on.
    #[error(
        "the plugin rejects the option {option}, which results depend on; run `{}` for a plugin that accepts it ({source})",
        Platform::install_command()
    )]
    Needed {
        /// Name of the option.
        option: String,
        /// Error of the plugin.
        source: ltx2_pjrt::PjrtError,
    },
    /// A plugin rejects an XLA flag that the configuration sets.
    #[error("runtime.xla_flags.{option}: {source}; correct or remove the flag")]
    Flag {
        /// Name of the flag, a key of `runtime.xla_flags`.
        option: String,
        /// Error of the plugin.
        source: ltx2_pjrt::PjrtError,
    },
    /// A program that the runtime needs could not be built, for example the one that gathers a tensor.
    #[error(transparent)]
    Program(#[from] ltx2_stablehlo::BuildError),
    /// A host tensor has an unsupported element type or a wrong size.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// An entry of the compile cache or of the module store could not be read or written.
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
    /// A program has no argument or result with this name, or the caller did not pass the argument.
    #[error("program '{program}': tensor '{name}' is missing ({ty})")]
    Missing {
        /// Name of the program, or `outputs` if a result is missing.
        program: String,
        /// Name of the argument or result.
        name: String,
        /// Type of the argument that was not passed, or the reason why the tensor is missing.
        ty: String,
    },
    /// A tensor differs in type or sharding from the program argument for which it was passed.
    #[error("argument '{name}' must be {want}, got {got}")]
    Mismatch {
        /// Name of the argument.
        name: String,
        /// Type of the argument; for a tensor on the devices, also its shards.
        want: String,
        /// Type of the tensor; for a tensor on the devices, also its shards.
        got: String,
    },
    /// The plugin loaded a program onto devices other than those that the program was compiled for. Device ids are in
    /// mesh order (`wanted`) and in the plugin's order (`got`).
    #[error("program '{program}' was loaded onto devices {got:?} of this process, expected {wanted:?}")]
    Placed {
        /// Name of the program.
        program: String,
        /// Expected device ids of this process.
        wanted: Vec<i32>,
        /// Actual device ids of this process.
        got: Vec<i32>,
    },
    /// The program needs more devices than the platform has.
    #[error("program '{program}' needs {want} devices, but the platform has {have}")]
    Devices {
        /// Name of the program.
        program: String,
        /// Number of devices that the program needs.
        want: usize,
        /// Number of devices of all processes.
        have: usize,
    },
}

/// Phase in which memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPhase {
    /// Compiling a program.
    Compile,
    /// Uploading parameters.
    Load,
    /// Uploading inputs.
    Upload,
    /// Executing a program, or downloading its results.
    Run,
}

impl fmt::Display for MemoryPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryPhase::Compile => "compiling",
            MemoryPhase::Load => "loading",
            MemoryPhase::Upload => "uploading inputs of",
            MemoryPhase::Run => "running",
        })
    }
}

impl RuntimeError {
    /// Returns whether device memory ran out.
    pub fn is_out_of_device_memory(&self) -> bool {
        matches!(self, RuntimeError::OutOfMemory { is_host: false, .. })
    }

    /// Adds the phase and the name of the program or component to an out-of-memory error. Returns other errors
    /// unchanged.
    #[must_use]
    pub fn during(self, during: MemoryPhase, name: &str) -> Self {
        match self {
            RuntimeError::Plugin(source) if source.is_out_of_memory() => {
                let is_host = source.is_out_of_host_memory();
                RuntimeError::OutOfMemory { during, name: name.into(), is_host, source }
            }
            RuntimeError::OutOfMemory { is_host, source, .. } => {
                RuntimeError::OutOfMemory { during, name: name.into(), is_host, source }
            }
            other => other,
        }
    }
}
