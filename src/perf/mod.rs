//! Performance measurement: benchmarks of programs, microbenchmarks of devices, and traces of denoising steps.

pub mod bench;
mod bench_report;
pub mod micro;
pub mod profile;
mod synthetic;

pub use bench_report::{BenchReport, HostDevice, OutputCheck, ProgramInfo, ProgramTiming, Regression};
