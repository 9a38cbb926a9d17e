//! Runs on the NVIDIA GPUs of this machine.

#[path = "../support/mod.rs"]
mod support;

mod agreement;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
