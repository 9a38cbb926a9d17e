//! The audio autoencoder: samples to a log-mel spectrogram to latents, and latents to a spectrogram, by convolutions over time
//! and mel bins.

mod config;
mod decoder;
mod encoder;
mod layers;
mod mel;
mod resample;
#[cfg(test)]
mod tests;

pub use config::AudioVaeConfig;
pub(crate) use config::COMPRESSION;
pub use decoder::{decode, decoder_program};
pub use encoder::{encode, encoder_program};
pub use mel::log_mel;
pub(crate) use mel::samples_of;
pub use resample::resample;

/// The model folder's name.
pub(crate) const COMPONENT: &str = "audio_vae";
