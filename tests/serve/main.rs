//! Tests of the server: jobs and their store, HTTP, and the web page. Most use a scripted device, without a model.

#![allow(clippy::unwrap_used)] // A test ends where something is not as it should be.
#![allow(clippy::disallowed_methods)] // What a command printed is empty where it is no text.
#![allow(unreachable_pub)] // Nobody uses a test binary as a library.

#[path = "../support/mod.rs"]
mod support;

mod api;
mod auth;
mod command;
mod container;
mod crash;
mod descriptors;
mod disk;
mod edits;
mod events;
mod figures;
mod guide;
mod jobs;
mod limits;
mod load;
mod malformed;
mod memory;
mod nano;
mod paths;
mod places;
mod recorded;
mod scripted;
mod served;
mod site;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
