//! From a program to numbers: platforms, compilation, upload, execution.

pub mod cache;
mod devices;
mod engine;
pub mod flags;
pub mod gather;
pub mod micro;
mod module_store;
pub mod noise;
mod peak_matmul;
pub mod platform;
pub mod plugins;
pub mod processes;
mod quantize;
mod random;
mod sealed;
mod sharded_tensor;
mod target;
mod upload;

pub use engine::{
    Engine, EngineOptions, Executable, ExecutableOrigin, Outputs, RuntimeError, Statistics, compile_options,
};
pub use module_store::{CompileKey, CompileOutcome, ModuleStore, StoredModule};
pub use peak_matmul::{PeakMatmul, peak_matmul};
pub use random::{RandomProgram, random_programs, random_tensor};
pub use sharded_tensor::{Shard, ShardedTensor, shards};
pub use target::{Compiled, OpenTarget, Target, UnknownTarget};
pub use upload::{ParameterSource, Parameters, StoredTensor, device_bytes};
