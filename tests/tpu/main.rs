//! Programs compiled for TPUs, without a TPU.

#![allow(clippy::unwrap_used)] // A test ends where something is not as it should be.
#![allow(clippy::disallowed_methods)] // What a command printed is empty where it is no text.
#![allow(unreachable_pub)] // Nobody uses a test binary as a library.

#[path = "../support/mod.rs"]
mod support;

mod attention;
mod budgets;
mod programs;
mod search;
mod shipped;
mod why;

fn main() -> std::process::ExitCode {
    // libtpu reads its variables from the environment, which is ours as long as no thread is started.
    ltx2::pjrt::prepare_absent_tpus();
    support::harness::main()
}
