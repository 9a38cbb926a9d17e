//! Performance measurement: benchmarks of programs, microbenchmarks of devices, and traces of denoising steps.

pub(crate) mod bench;
mod bench_report;
pub(crate) mod cache_quality;
pub(crate) mod micro;
pub(crate) mod profile;
mod synthetic;

pub(crate) use bench_report::BenchReport;
