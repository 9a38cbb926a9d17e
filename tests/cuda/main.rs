//! What the CUDA compiler makes of our programs, with no GPU at hand.

#[path = "../support/mod.rs"]
mod support;

mod programs;
mod targets;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
