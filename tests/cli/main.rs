//! Tests of the `ltx2` binary: commands as a user types them, on the CPU plugin.

#![allow(clippy::unwrap_used)] // A test ends where something is not as it should be.
#![allow(clippy::disallowed_methods)] // What a command printed is empty where it is no text.
#![allow(unreachable_pub)] // Nobody uses a test binary as a library.

#[path = "../support/mod.rs"]
mod support;

mod bench;
mod bench_results;
mod cache;
mod chain;
mod compare;
mod compile;
mod compiler_crashes;
mod components;
mod concurrency;
mod convert;
mod crash_safety;
mod disk_failures;
mod enhance;
mod examples;
mod faults;
mod generate;
mod given_video;
mod guides;
mod hdr;
mod interrupts;
mod late_failures;
mod layout_auto;
mod layout_files;
mod library;
mod ltx2_5;
mod memory;
mod model_files;
mod models;
mod module_store;
mod nano_quality;
mod output_places;
mod outputs;
mod packages;
mod plugins;
mod pods;
mod profile;
mod pull;
mod quality;
mod random_requests;
mod references;
mod resume;
mod search;
mod seeds;
mod sounds;
mod streaming;
mod tiling;
mod time_line;
mod tune;
mod unused_parts;
mod upsampling;
mod verdicts;
mod verify;
mod watchdog;
mod why;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
