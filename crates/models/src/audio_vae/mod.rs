//! The audio VAE: encodes a log-mel spectrogram to latents and decodes latents to a spectrogram, using 2D convolutions
//! over time and mel bins. The module also computes the spectrogram of audio samples.

mod config;
mod decoder;
mod encoder;
mod layers;
mod mel;
mod resample;
#[cfg(test)]
mod tests;

pub use config::AudioVaeConfig;
pub use config::COMPRESSION;
pub use decoder::{decode, decoder_program};
pub use encoder::{encode, encoder_program};
pub use mel::log_mel;
pub use mel::samples_for_frames;
pub use resample::resample;

/// Folder of the audio VAE in a model.
pub const COMPONENT: &str = "audio_vae";
