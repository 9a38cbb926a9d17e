//! Performance measurement: benchmarks of programs, microbenchmarks of devices, and traces of denoising steps.

#![allow(missing_docs)] // The layer of the commands: what a name says is not said again.

pub mod bench;
mod bench_report;
pub mod micro;
pub mod profile;
mod synthetic;

pub use bench_report::{BenchReport, HostDevice, OutputCheck, ProgramInfo, ProgramTiming, Regression};
