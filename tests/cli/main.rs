//! Tests of the binary: commands as their user gives them, on the CPU plugin.

#![allow(clippy::unwrap_used)] // A test ends where something is not as it should be.

#[path = "../support/mod.rs"]
mod support;

mod bench;
mod cache;
mod compare;
mod compile;
mod components;
mod concurrency;
mod crashes;
mod disks;
mod examples;
mod generate;
mod interrupts;
mod kills;
mod lab;
mod meaning;
mod memory;
mod models;
mod module_store;
mod plugins;
mod profile;
mod resume;
mod search;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
