//! Compression ratios and channels, from the configuration alone.

use serde::Deserialize;
use serde_json::Value;

use super::COMPONENT;
use crate::models::{ConfigError, parse_config};

/// Sizes of a video autoencoder as the host needs them; defaults are the reference class' own.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct Geometry {
    /// Channels of the latents.
    pub latent_channels: usize,
    spatial_compression_ratio: Option<usize>,
    temporal_compression_ratio: Option<usize>,
    spatio_temporal_scaling: Vec<bool>,
    patch_size: usize,
    patch_size_t: usize,
    /// Divides normalized latents.
    pub scaling_factor: f32,
}

impl Default for Geometry {
    fn default() -> Self {
        Geometry {
            latent_channels: 128,
            spatial_compression_ratio: None,
            temporal_compression_ratio: None,
            spatio_temporal_scaling: vec![true; 4],
            patch_size: 4,
            patch_size_t: 1,
            scaling_factor: 1.0,
        }
    }
}

impl Geometry {
    /// Reads `vae/config.json`.
    ///
    /// # Errors
    /// A key of the wrong type, by name.
    pub fn from_json(json: &Value) -> Result<Self, ConfigError> {
        parse_config(COMPONENT, json)
    }

    /// The ratio that is given, else the reference's formula: a doubling for every scaling stage.
    fn ratio(&self, given: Option<usize>, patch: usize) -> usize {
        let doublings = self.spatio_temporal_scaling.iter().filter(|s| **s).count();
        given.unwrap_or(patch << doublings).max(1)
    }

    /// Pixels a latent covers along each side.
    pub fn spatial(&self) -> usize {
        self.ratio(self.spatial_compression_ratio, self.patch_size)
    }

    /// Frames a latent covers.
    pub fn temporal(&self) -> usize {
        self.ratio(self.temporal_compression_ratio, self.patch_size_t)
    }
}
