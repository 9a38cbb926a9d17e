//! The duration head of LTX-2.5: the text contexts of a prompt to the seconds that its shot lasts, and those to frames.

pub(super) mod config;
mod frames;
mod model;
#[cfg(test)]
mod tests;

pub use config::DurationHeadConfig;
pub use frames::{Grid, frames};
pub use model::program;

/// The model folder's name.
pub(crate) const COMPONENT: &str = "duration_head";
