//! Tests within the process: programs, numbers and runs on the CPU plugin.

#![allow(clippy::unwrap_used)] // A test ends where something is not as it should be.

#[path = "../support/mod.rs"]
mod support;

mod batches;
mod cache;
mod exchanges;
mod forms;
mod fp8;
mod gather;
mod halos;
mod inputs;
mod kernels;
mod layouts;
mod layouts_differ;
mod lora;
mod media;
mod mosaic;
mod noise;
mod parity;
mod parts;
mod pipeline;
mod pjrt;
mod processes;
mod programs;
mod seeds;
mod spmd;
mod stages;
mod stores;
mod tiles;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
