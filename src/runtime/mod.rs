//! From a program to numbers: platforms, compilation, upload, execution.

pub mod cache;
mod ceiling;
mod devices;
mod distributed;
mod engine;
pub mod flags;
pub mod gather;
pub mod micro;
mod module_store;
pub mod noise;
pub mod platform;
pub mod plugins;
pub mod processes;
mod quantize;
mod random;
mod sealed;
mod target;
mod upload;

pub use ceiling::{Ceiling, matmul_ceiling};
pub use distributed::{Distributed, Part, parts};
pub use engine::{Engine, EngineOptions, Executable, Origin, Outputs, RuntimeError, Statistics, compile_options};
pub use module_store::{CompileKey, CompileOutcome, ModuleStore, StoredModule};
pub use random::{RandomProgram, random_programs};
pub use target::{Compiled, OpenTarget, Target, UnknownTarget};
pub use upload::{ParameterSource, Parameters, StoredTensor, device_bytes};
