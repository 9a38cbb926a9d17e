//! Compiles programs, uploads parameters and executes programs on a platform's devices.

#![warn(missing_docs)]

pub mod cache;
mod checkpoint_tensor;
mod checksummed_file;
mod compile;
mod devices;
mod engine;
mod error;
mod executable;
pub mod flags;
mod gather;
mod kernel_log;
mod loader;
pub mod micro;
mod module_store;
pub mod noise;
mod peak_matmul;
pub mod platform;
pub mod platforms;
mod plugin_flags;
mod process_locks;
pub mod processes;
mod random;
mod sharded_tensor;
mod target;
mod thread_locks;
pub mod timeline;
pub mod trial;
mod upload;
mod watch;
pub mod watchdog;

pub use checkpoint_tensor::ParameterSource;
pub use checkpoint_tensor::{FileTensor, QuantizedTensor, StoredTensor};
pub use checksummed_file::sha256_file;
pub use compile::{EngineOptions, compile_options};
pub use engine::{Engine, ProgramStatistics};
pub use error::{MemoryPhase, RuntimeError};
pub use executable::{CompiledProgram, ExecutableOrigin, Outputs};
pub use flags::Toolchain;
pub use loader::LoadLimits;
pub use module_store::CompileKey;
pub use module_store::{CompileOutcome, ModuleStore, StoredModule};
pub use peak_matmul::PeakMatmul;
pub use peak_matmul::peak_matmul;
pub use random::fill as fill_random;
pub use random::{RandomProgram, random_programs};
pub use sharded_tensor::{Shard, ShardedTensor, shards};
pub use target::Compiled;
pub use target::{OpenTarget, Target, UnknownTarget};
pub use timeline::{Span, SpanKind, Timeline};
pub use upload::{Footprint, LoadedParameters, device_bytes};
pub use watchdog::{DeviceWatchdog, ExitReport, WaitLimit};
