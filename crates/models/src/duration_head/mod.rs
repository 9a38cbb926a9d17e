//! The duration head of LTX-2.5: predicts the duration of a shot in seconds from the text embeddings of its prompt, and
//! converts it to a frame count.

pub(super) mod config;
mod frames;
mod model;
#[cfg(test)]
mod tests;

pub use config::DurationHeadConfig;
pub use frames::{FrameRounding, frames};
pub use model::program;

/// Folder of the duration head in a model.
pub const COMPONENT: &str = "duration_head";
