//! Programs compiled for TPUs without a TPU.

#![allow(clippy::unwrap_used)] // Tests may panic.
#![allow(clippy::disallowed_methods)] // Non-UTF-8 output of a command counts as empty.
#![allow(unreachable_pub)] // A test binary has no public API.

#[path = "../support/mod.rs"]
mod support;

mod attention;
mod budgets;
mod programs;
mod search;
mod shipped;
mod why;

fn main() -> std::process::ExitCode {
    // libtpu reads its variables from the environment, which may only be changed before threads are started.
    ltx2::pjrt::prepare_absent_tpus();
    support::harness::main()
}
