//! The video VAE: encodes frames to latents and decodes latents to frames, by 3D convolutions.

mod config;
mod decoder;
mod encoder;
mod layers;
#[cfg(test)]
mod tests;

pub use config::{DecoderConfig, EncoderConfig, Geometry, VideoVaeConfig};
pub use decoder::{decode, decoder_program};
pub use encoder::encoder_program;

/// Folder of the video VAE in a model.
pub const COMPONENT: &str = "vae";
