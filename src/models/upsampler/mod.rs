//! The latent upsampler between two stages: latents to latents of more rows and columns, or frames.

mod config;
mod filters;
mod model;
#[cfg(test)]
mod tests;

pub use config::UpsamplerConfig;
pub use filters::{adain, tone_map};
pub use model::program;

/// The model folder's name.
pub(crate) const COMPONENT: &str = "latent_upsampler";
