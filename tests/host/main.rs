//! Tests without a plugin: the command line and rules of the repository.

#![allow(clippy::unwrap_used)] // Tests may panic.
#![allow(clippy::disallowed_methods)] // Non-UTF-8 output of a command counts as empty.
#![allow(unreachable_pub)] // A test binary has no public API.

#[path = "../support/mod.rs"]
mod support;

mod config;
mod constants;
mod experiments;
mod first_run;
mod flags;
mod history;
mod key_tables;
mod names;
mod programs;
mod reference;
mod reliability;
mod source_rules;
mod thresholds;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
