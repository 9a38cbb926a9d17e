//! Programs compiled for CUDA, without a GPU.

#![allow(clippy::unwrap_used)] // A test ends where something is not as it should be.
#![allow(clippy::disallowed_methods)] // What a command printed is empty where it is no text.
#![allow(unreachable_pub)] // Nobody uses a test binary as a library.

#[path = "../support/mod.rs"]
mod support;

mod layout_choice;
mod programs;
mod targets;
mod why;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
