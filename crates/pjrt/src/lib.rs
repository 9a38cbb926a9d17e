#![doc = include_str!("../README.md")]
//! A loaded plugin is never unloaded.

#![warn(missing_docs)]
#![allow(unsafe_code)] // Calls C.

#[allow(dead_code, unreachable_pub)] // Generated.
mod abi;
mod attributes;
mod buffer;
mod buffer_type;
mod client;
mod client_handle;
mod compile_log;
mod device;
pub mod discover;
mod error;
mod event;
mod executable;
mod exit;
mod heap;
mod host;
mod kv;
mod layout;
mod options;
mod plugin;
mod plugin_env;
mod profiler;
mod raw;
mod staging;
mod topology;
mod transfer;

pub use attributes::{AttributeValue, Attributes};
pub use buffer::Buffer;
pub use buffer_type::BufferType;
pub use client::{Client, CpuOptions, GpuOptions};
pub use device::{Device, DeviceDescription, DeviceMemory};
pub use error::{Code, PjrtError, Result, with_sources};
pub use event::Event;
pub use executable::{CompiledMemory, Executable, ExecuteOptions, LoadedExecutable, OptimizedProgram};
pub use exit::{end_process, exit_on_signals, on_abort, remove_signal_handlers, report_file_limits};
pub use heap::limit_heaps;
pub use host::{HostBuffer, HostUse, SharedBytes, SharedHostBuffer};
pub use kv::{KvError, KvStore, ProcessNode};
pub use layout::DeviceLayout;
pub use options::{CompileOptions, OptionValue};
pub use plugin::Plugin;
pub use plugin_env::{NO_HUGEPAGE_TEXT, TPUS_UNPREPARED, prepare_absent_tpus, prepend_libtpu_flags, quiet_plugins};
pub use profiler::{ProfileOptions, Profiler};
pub use staging::Staging;
pub use topology::Topology;
pub use transfer::{Transfer, TransferChunk, TransferShape};
