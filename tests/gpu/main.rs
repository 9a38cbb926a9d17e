//! Runs on the NVIDIA GPUs of this machine.

#![allow(clippy::unwrap_used)] // A test ends where something is not as it should be.
#![allow(clippy::disallowed_methods)] // What a command printed is empty where it is no text.
#![allow(unreachable_pub)] // Nobody uses a test binary as a library.

#[path = "../support/mod.rs"]
mod support;

mod agreement;
mod eight_bits;
mod windows;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
