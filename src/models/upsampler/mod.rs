//! The latent upsamplers: latents to latents of more rows and columns, or frames.

pub(super) mod config;
mod filters;
mod model;
#[cfg(test)]
mod tests;
mod upsampling;

pub use config::UpsamplerConfig;
pub use filters::{adain, tone_map};
pub use model::program;
pub use upsampling::Upsampling;

/// The model folder's name.
pub(crate) const COMPONENT: &str = "latent_upsampler";
/// The folder's name of the upsampler in time.
pub(crate) const TEMPORAL: &str = "temporal_latent_upsampler";
