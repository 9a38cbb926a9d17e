//! The video autoencoder: frames to latents and back, by convolutions over time, height and width.

mod config;
mod decoder;
mod encoder;
mod layers;
#[cfg(test)]
mod tests;

pub use config::{DecoderConfig, DownStage, EncoderConfig, Geometry, VideoVaeConfig};
pub use decoder::{decode, decoder_program};
pub use encoder::encoder_program;

/// The model folder's name.
pub(crate) const COMPONENT: &str = "vae";
