//! Tests of the binary: commands as their user gives them, on the CPU plugin.

#![allow(clippy::unwrap_used)] // A test ends where something is not as it should be.
#![allow(unreachable_pub)] // Nobody uses a test binary as a library.

#[path = "../support/mod.rs"]
mod support;

mod bench;
mod cache;
mod chain;
mod compare;
mod compile;
mod compiler_crashes;
mod components;
mod concurrency;
mod crash_safety;
mod disk_failures;
mod examples;
mod generate;
mod given_video;
mod interrupts;
mod library;
mod ltx2_5;
mod memory;
mod models;
mod module_store;
mod nano_quality;
mod packages;
mod plugins;
mod pods;
mod profile;
mod references;
mod resume;
mod search;
mod seeds;
mod sounds;
mod tiling;
mod time_line;
mod tune;
mod upsampling;
mod verify;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
