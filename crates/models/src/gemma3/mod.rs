//! Gemma 3, the text encoder of LTX-2.0 and 2.3.

pub(super) mod config;
mod model;
#[cfg(test)]
mod tests;

pub use config::Gemma3Config;

pub use super::gemma::COMPONENT;
pub use super::gemma::LayerKind;
pub use model::program;
