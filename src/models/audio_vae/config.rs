//! `audio_vae/config.json`.

use serde::Deserialize;

use super::COMPONENT;
use crate::defaults::with_defaults;
use crate::models::ranges::check_at_most;
use crate::models::{ConfigError, parse_config, require};

/// Groups of a group norm.
pub(super) const GROUPS: usize = 32;

with_defaults! {
    /// The autoencoder's configuration; defaults are the reference class' own.
    #[derive(Clone, Debug, Deserialize)]
    #[serde(default)]
    pub struct AudioVaeConfig {
        pub(crate) base_channels: usize = 128,
        /// Channels of the spectrogram that is encoded.
        pub(crate) in_channels: usize = 2,
        /// Channels of the spectrogram that is decoded.
        pub(crate) output_channels: usize = 2,
        pub(crate) ch_mult: Vec<usize> = vec![1, 2, 4],
        pub(crate) num_res_blocks: usize = 2,
        pub(crate) attn_resolutions: Option<Vec<usize>> = None,
        pub(crate) resolution: usize = 256,
        pub(crate) latent_channels: usize = 8,
        pub(crate) norm_type: Norm = Norm::Pixel,
        pub(crate) causality_axis: Causality = Causality::Height,
        pub(crate) mid_block_add_attention: bool = false,
        /// Samples a second that the mel spectrogram is taken of.
        pub(crate) sample_rate: usize = 16000,
        /// Samples between two mel frames.
        pub(crate) mel_hop_length: usize = 160,
        pub(crate) mel_bins: Option<usize> = Some(64),
        /// Whether the encoder gives the variance of each latent beside its mean.
        pub(crate) double_z: bool = true,
    }
}

/// Largest number of levels.
const MAX_LEVELS: usize = 8;

/// Largest number of mel frames a second; the published models have 100.
const MAX_MEL_FRAMES: usize = 2000;

/// Mel frames and mel bins a latent covers: time and bins are halved twice.
pub(crate) const COMPRESSION: usize = 4;

/// Normalisation of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Norm {
    /// By the root mean square over the channels.
    Pixel,
    /// By mean and variance of groups of channels over all positions, with weights.
    Group,
}

/// Along which axis a convolution reads no later element. Time is the height, mel bins are the width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Causality {
    /// Along none.
    None,
    /// Along the mel bins.
    Width,
    /// Along time.
    Height,
    /// Along the mel bins, whose first one is kept after upsampling.
    WidthCompatibility,
}

impl AudioVaeConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// A key of the wrong type, or a value no code computes.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ConfigError> {
        // The reference's own networks would take it, its autoencoder does not.
        let null = json.get("causality_axis").is_some_and(serde_json::Value::is_null);
        require(!null, COMPONENT, "causality_axis", Option::<&str>::None, "none, width, height, width-compatibility")?;
        let c: Self = parse_config(COMPONENT, json)?;
        require(!c.ch_mult.is_empty(), COMPONENT, "ch_mult", &c.ch_mult, "one entry or more")?;
        // Levels halve sizes, so that more of them halve nothing.
        check_at_most(COMPONENT, "entries of ch_mult", c.ch_mult.len(), MAX_LEVELS)?;
        let per_second = c.sample_rate / c.mel_hop_length;
        check_at_most(COMPONENT, "sample_rate / mel_hop_length", per_second, MAX_MEL_FRAMES)?;
        require(c.double_z, COMPONENT, "double_z", c.double_z, "true")?;
        if c.norm_type == Norm::Group {
            let free = c.causality_axis == Causality::None;
            require(free, COMPONENT, "norm_type", "group", "pixel where causality_axis is not none")?;
            let fits = c.ch_mult.iter().all(|m| (c.base_channels * m).is_multiple_of(GROUPS));
            require(fits, COMPONENT, "base_channels", c.base_channels, "multiples of 32 where norm_type is group")?;
        }
        Ok(c)
    }

    /// Mel bins.
    pub(crate) fn bins(&self) -> usize {
        self.mel_bins.unwrap_or(64)
    }

    /// Mel frames that as many latents are encoded from: four of each, but where convolutions read nothing later one of the
    /// first.
    pub(crate) fn frames_of(&self, latents: usize) -> usize {
        match self.causality_axis {
            Causality::Height => COMPRESSION * latents.saturating_sub(1) + 1,
            Causality::None | Causality::Width | Causality::WidthCompatibility => COMPRESSION * latents,
        }
    }

    /// Mel bins of the latents.
    pub(crate) fn latent_bins(&self) -> usize {
        self.bins() / COMPRESSION
    }

    /// Channels of a level, 0 being the one nearest the spectrogram.
    pub(crate) fn channels(&self, level: usize) -> usize {
        self.base_channels * self.ch_mult[level]
    }

    /// Whether the blocks of a level are followed by attention.
    pub(crate) fn attends(&self, level: usize) -> bool {
        let deepest = self.resolution >> (self.ch_mult.len() - 1);
        let here = deepest << (self.ch_mult.len() - 1 - level);
        self.attn_resolutions.as_ref().is_some_and(|r| r.contains(&here))
    }
}
