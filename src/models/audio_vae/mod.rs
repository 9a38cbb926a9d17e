//! The audio autoencoder's decoder: latents to a log-mel spectrogram, by convolutions over time and mel bins.

mod config;
mod decoder;
mod layers;
#[cfg(test)]
mod tests;

pub(crate) use config::COMPRESSION;
pub use config::DecoderConfig;
pub use decoder::{decode, decoder_program};

/// The model folder's name.
pub(crate) const COMPONENT: &str = "audio_vae";
