//! The audio autoencoder's decoder: latents to a log-mel spectrogram, by convolutions over time and mel bins.

mod config;
mod decoder;
mod layers;
#[cfg(test)]
mod tests;

pub use config::{COMPRESSION, Causality, DecoderConfig, Norm};
pub use decoder::{decode, decoder_program};

/// The model folder's name.
pub const COMPONENT: &str = "audio_vae";
