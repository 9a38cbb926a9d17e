//! Programs compiled for CUDA, without a GPU.

#![allow(clippy::unwrap_used)] // A test ends where something is not as it should be.
#![allow(unreachable_pub)] // Nobody uses a test binary as a library.

#[path = "../support/mod.rs"]
mod support;

mod programs;
mod targets;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
