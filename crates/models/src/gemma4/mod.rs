//! Gemma 4, the text encoder of LTX-2.5.

pub(super) mod config;
mod model;
mod rope;
#[cfg(test)]
mod tests;

pub use config::Gemma4Config;
pub use model::program;
