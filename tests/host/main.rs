//! Tests that need no plugin: the command line, and rules of the repository itself.

#![allow(clippy::unwrap_used)] // A test ends where something is not as it should be.
#![allow(clippy::disallowed_methods)] // What a command printed is empty where it is no text.
#![allow(unreachable_pub)] // Nobody uses a test binary as a library.

#[path = "../support/mod.rs"]
mod support;

mod circles;
mod config;
mod constants;
mod experiments;
mod flags;
mod history;
mod key_tables;
mod names;
mod programs;
mod reference;
mod reliability;
mod structure;
mod thresholds;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
