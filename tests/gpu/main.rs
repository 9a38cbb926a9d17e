//! Tests that run on the NVIDIA GPUs of this machine.

#![allow(clippy::unwrap_used)] // Tests may panic.
#![allow(clippy::disallowed_methods)] // Non-UTF-8 output of a command counts as empty.
#![allow(unreachable_pub)] // A test binary has no public API.

#[path = "../support/mod.rs"]
mod support;

mod agreement;
mod eight_bits;
mod row_kernels;
mod windows;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
