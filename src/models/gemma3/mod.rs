//! Gemma-3, the text encoder.

mod config;
mod model;
#[cfg(test)]
mod tests;

pub use config::{COMPONENT, Gemma3Config, LayerKind, RopeBase};
pub use model::{TOKENIZER, program};
