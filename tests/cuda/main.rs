//! Programs compiled for CUDA without a GPU.

#![allow(clippy::unwrap_used)] // Tests may panic.
#![allow(clippy::disallowed_methods)] // Non-UTF-8 output of a command counts as empty.
#![allow(unreachable_pub)] // A test binary has no public API.

#[path = "../support/mod.rs"]
mod support;

mod layout_choice;
mod programs;
mod targets;
mod why;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
