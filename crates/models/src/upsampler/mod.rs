//! Latent upsamplers: networks that change the height and width of latents, or increase the number of frames.

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

/// Folder of the spatial upsampler in a model.
pub const COMPONENT: &str = "latent_upsampler";
/// Folder of the temporal upsampler in a model.
pub const TEMPORAL: &str = "temporal_latent_upsampler";
