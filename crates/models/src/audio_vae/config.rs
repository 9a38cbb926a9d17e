//! Reads `audio_vae/config.json`.

use serde::Deserialize;

use super::COMPONENT;
use crate::ranges::check_at_most;
use crate::{ComponentConfigError, parse_config, require};
use ltx2_base::with_defaults;

/// Number of groups of each group norm.
pub(super) const GROUPS: usize = 32;

with_defaults! {
    /// Configuration of the audio VAE, with the defaults of the diffusers class.
    #[derive(Clone, Debug, Deserialize)]
    #[serde(default)]
    pub struct AudioVaeConfig {
        /// Channels after the encoder's first convolution; level `i` has `ch_mult[i]` times as many.
        pub base_channels: usize = 128,
        /// Channels of the encoder's input spectrogram.
        pub in_channels: usize = 2,
        /// Channels of the decoder's output spectrogram.
        pub(crate) output_channels: usize = 2,
        pub(crate) ch_mult: Vec<usize> = vec![1, 2, 4],
        pub(crate) num_res_blocks: usize = 2,
        pub(crate) attn_resolutions: Option<Vec<usize>> = None,
        pub(crate) resolution: usize = 256,
        /// Channels of the latents.
        pub latent_channels: usize = 8,
        pub(crate) norm_type: Norm = Norm::Pixel,
        pub(crate) causality_axis: Causality = Causality::Height,
        pub(crate) mid_block_add_attention: bool = false,
        /// Sampling rate of the audio that the mel spectrogram is computed from, in Hz.
        pub sample_rate: usize = 16000,
        /// Samples between consecutive mel frames.
        pub mel_hop_length: usize = 160,
        pub(crate) mel_bins: Option<usize> = Some(64),
        /// Whether the encoder outputs a log-variance for each latent in addition to its mean.
        pub(crate) double_z: bool = true,
    }
}

/// Maximum number of resolution levels.
const MAX_LEVELS: usize = 8;

/// Maximum number of mel frames per second; the published models have 100.
const MAX_MEL_FRAMES: usize = 2000;

/// Mel frames and mel bins per latent: both axes are halved twice.
pub const COMPRESSION: usize = 4;

/// Normalization of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Norm {
    /// Divides by the root mean square over the channels.
    Pixel,
    /// Group norm over all positions, with learned weights.
    Group,
}

/// Axis along which convolutions are causal, that is, read no later element. `Height` is time, `Width` the mel bins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Causality {
    /// No axis.
    None,
    /// The mel bins.
    Width,
    /// Time.
    Height,
    /// The mel bins, as with `Width`, except that upsampling keeps the first output bin.
    WidthCompatibility,
}

impl AudioVaeConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// Returns an error if a key has the wrong type or its value is out of range or unsupported.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ComponentConfigError> {
        // In diffusers, the encoder and the decoder accept null, but the autoencoder class does not.
        let null = json.get("causality_axis").is_some_and(serde_json::Value::is_null);
        require(!null, COMPONENT, "causality_axis", Option::<&str>::None, "none, width, height, width-compatibility")?;
        let c: Self = parse_config(COMPONENT, json)?;
        require(!c.ch_mult.is_empty(), COMPONENT, "ch_mult", &c.ch_mult, "one entry or more")?;
        // Each level halves the size, so deeper levels would have nothing left to halve.
        check_at_most(COMPONENT, "ch_mult length", c.ch_mult.len(), MAX_LEVELS)?;
        let per_second = c.sample_rate / c.mel_hop_length;
        check_at_most(COMPONENT, "sample_rate / mel_hop_length", per_second, MAX_MEL_FRAMES)?;
        require(c.double_z, COMPONENT, "double_z", c.double_z, "true")?;
        if c.norm_type == Norm::Group {
            let free = c.causality_axis == Causality::None;
            require(free, COMPONENT, "norm_type", "group", "pixel if causality_axis is not none")?;
            let fits = c.ch_mult.iter().all(|m| (c.base_channels * m).is_multiple_of(GROUPS));
            require(fits, COMPONENT, "base_channels", c.base_channels, "multiples of 32 if norm_type is group")?;
        }
        Ok(c)
    }

    /// Returns the number of mel bins.
    pub fn bins(&self) -> usize {
        self.mel_bins.unwrap_or(64)
    }

    /// Returns the number of mel frames that the given number of latents covers: 4 each, except that the first latent
    /// covers a single frame if convolutions are causal along time.
    pub fn frames_of(&self, latents: usize) -> usize {
        match self.causality_axis {
            Causality::Height => COMPRESSION * latents.saturating_sub(1) + 1,
            Causality::None | Causality::Width | Causality::WidthCompatibility => COMPRESSION * latents,
        }
    }

    /// Returns the number of mel bins of the latents.
    pub fn latent_bins(&self) -> usize {
        self.bins() / COMPRESSION
    }

    /// Returns the number of channels of a level; level 0 is the one nearest to the spectrogram.
    pub fn channels(&self, level: usize) -> usize {
        self.base_channels * self.ch_mult[level]
    }

    /// Returns whether each residual block of a level is followed by attention.
    pub fn attends(&self, level: usize) -> bool {
        let deepest = self.resolution >> (self.ch_mult.len() - 1);
        let here = deepest << (self.ch_mult.len() - 1 - level);
        self.attn_resolutions.as_ref().is_some_and(|r| r.contains(&here))
    }
}
