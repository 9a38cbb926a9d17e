//! Errors of the runtime.

use super::cache::CacheError;
use super::processes::GroupError;
use crate::tensor::TensorError;

/// Errors of compiling and running programs.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error(transparent)]
    Plugin(#[from] crate::pjrt::Error),
    #[error(transparent)]
    Program(#[from] crate::hlo::Error),
    /// A host tensor.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The compile cache.
    #[error("compile cache: {0}")]
    Cache(#[from] CacheError),
    /// The other processes of the run.
    #[error(transparent)]
    Processes(#[from] GroupError),
    /// A parameter could not be read.
    #[error("{0}")]
    Parameter(String),
    /// An argument was not given.
    #[error("program '{program}' needs '{name}' of type {ty}")]
    Missing { program: String, name: String, ty: String },
    /// An argument has the wrong type.
    #[error("'{name}' must be {want}, got {got}")]
    Mismatch {
        name: String,
        /// Declared type.
        want: String,
        /// Given type.
        got: String,
    },
    /// The plugin put a program onto other devices than it was compiled for.
    #[error("program '{program}' was loaded onto devices {got:?} of this process, not {wanted:?}")]
    Placed {
        program: String,
        /// Ids, in the order of the mesh.
        wanted: Vec<i32>,
        /// Ids, in the plugin's order.
        got: Vec<i32>,
    },
    /// The program runs on more devices than there are.
    #[error("program '{program}' is partitioned over {want} devices, the platform has {have}")]
    Devices {
        program: String,
        /// Devices it needs.
        want: usize,
        /// Devices there are.
        have: usize,
    },
}
