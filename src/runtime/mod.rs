//! From a program to numbers: platforms, compilation, upload, execution.

mod engine;
pub mod platform;
pub mod plugins;
mod upload;

pub use engine::{Engine, EngineOptions, Executable, Outputs, RuntimeError, Statistics};
pub use upload::{ParameterSource, Parameters, StoredTensor};
