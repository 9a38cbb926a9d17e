//! Compression ratios and channels, from the configuration alone.

use serde::Deserialize;
use serde_json::Value;

use super::COMPONENT;
use crate::models::{ConfigError, parse_config};

/// Mel frames and mel bins a latent covers: time and bins are halved twice.
pub const COMPRESSION: usize = 4;

/// Sizes of an audio autoencoder as the host needs them; defaults are the reference class' own.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct Geometry {
    /// Channels of a token's statistics.
    pub base_channels: usize,
    /// Channels of the latents.
    pub latent_channels: usize,
    /// Samples a second that the mel spectrogram is taken of.
    pub sample_rate: usize,
    /// Samples between two mel frames.
    pub mel_hop_length: usize,
    mel_bins: Option<usize>,
}

impl Default for Geometry {
    fn default() -> Self {
        Geometry { base_channels: 128, latent_channels: 8, sample_rate: 16000, mel_hop_length: 160, mel_bins: Some(64) }
    }
}

impl Geometry {
    /// Reads `audio_vae/config.json`.
    ///
    /// # Errors
    /// A key of the wrong type, by name.
    pub fn from_json(json: &Value) -> Result<Self, ConfigError> {
        parse_config(COMPONENT, json)
    }

    /// Mel bins.
    pub fn bins(&self) -> usize {
        self.mel_bins.unwrap_or(64)
    }

    /// Mel bins of the latents.
    pub fn latent_bins(&self) -> usize {
        self.bins() / COMPRESSION
    }
}
