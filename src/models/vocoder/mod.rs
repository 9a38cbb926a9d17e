//! The vocoder: a log-mel spectrogram to a waveform, by transposed convolutions and residual blocks.

mod activation;
mod config;
mod generator;
#[cfg(test)]
mod tests;

pub use activation::AntiAlias;
pub use config::{Activation, FinalActivation, VocoderConfig};
pub use generator::{vocode, vocoder_program};

/// The model folder's name.
pub const COMPONENT: &str = "vocoder";
