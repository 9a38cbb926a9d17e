//! Gemma-3, the text encoder.

mod config;
mod model;
#[cfg(test)]
mod tests;

pub(crate) use config::COMPONENT;
pub use config::{Gemma3Config, LayerKind};
pub use model::{TOKENIZER, program};
