//! Tests that need no plugin: the command line, and rules of the repository itself.

#[path = "../support/mod.rs"]
mod support;

mod config;
mod reliability;
mod structure;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
