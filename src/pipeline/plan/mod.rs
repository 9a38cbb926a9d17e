//! Plans a run before any program is compiled: checks its configuration and files, and chooses its layout and memory
//! use.

pub mod derive;
#[cfg(test)]
mod effects;
pub(in crate::pipeline) mod fit;
pub(crate) mod layers;
pub mod layouts;
pub mod loras;
pub(crate) mod memory;
pub mod options;
pub mod origin;
pub(crate) mod outputs;
pub(crate) mod overwrites;
pub mod preflight;
pub(crate) mod residency;
pub mod resolved;
pub mod run_plan;
pub mod setup;
pub(crate) mod stream;
pub(crate) mod verify;
pub mod videos;
