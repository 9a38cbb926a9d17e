//! Performance measurement: benchmarks of programs, microbenchmarks of devices, and traces of denoising steps.

#![allow(missing_docs)] // The layer of the commands: what a name says is not said again.

pub(crate) mod bench;
mod bench_report;
pub(crate) mod micro;
pub(crate) mod profile;
mod synthetic;

pub(crate) use bench_report::BenchReport;
