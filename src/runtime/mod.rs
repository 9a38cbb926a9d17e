//! From a program to numbers: platforms, compilation, upload, execution.

pub mod cache;
mod compile;
mod devices;
mod engine;
mod error;
mod executable;
pub mod flags;
mod gather;
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
mod stored;
mod target;
mod upload;

pub use compile::{EngineOptions, compile_options};
pub use engine::{Engine, Statistics};
pub use error::RuntimeError;
pub use executable::{Executable, ExecutableOrigin, Outputs};
pub use module_store::{CompileKey, CompileOutcome, ModuleStore, StoredModule};
pub use peak_matmul::{PeakMatmul, peak_matmul};
pub use random::{RandomProgram, random_programs, random_tensor};
pub use sealed::sha256_file;
pub use sharded_tensor::{Shard, ShardedTensor, shards};
pub use stored::{ParameterSource, StoredTensor};
pub use target::{Compiled, OpenTarget, Target, UnknownTarget};
pub use upload::{Parameters, device_bytes};
