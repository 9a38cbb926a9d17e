//! Gemma-4, the text encoder of LTX-2.5.

mod config;
mod model;
mod rope;
#[cfg(test)]
mod tests;

pub use config::Gemma4Config;
pub use model::program;
