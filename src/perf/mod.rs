//! Timing: the programs of a run, small programs, and denoising steps under the plugin's profiler.

pub mod bench;
mod bench_report;
pub mod micro;
pub mod profile;
mod synthetic;

pub use bench_report::{BenchReport, HostDevice, OutputCheck, ProgramInfo, ProgramTiming, Regression};
