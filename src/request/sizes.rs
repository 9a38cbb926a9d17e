//! Sizes of a model, from its configurations alone: no weights.

use crate::av::Av;
use crate::models::connectors::ConnectorsConfig;
use crate::models::transformer::TransformerConfig;
use crate::models::{audio_vae, video_vae};
use crate::sampling::latents::{AudioGrid, VideoGrid};

/// Sizes of a model that requests are checked against and programs are written from.
pub struct ModelSizes {
    /// Sizes of the transformer.
    pub(crate) transformer: TransformerConfig,
    /// Video sizes to latents to tokens.
    pub(crate) video_grid: VideoGrid,
    /// Channels of video latents.
    pub(crate) video_channels: usize,
    /// Durations to latents.
    pub(crate) audio_grid: AudioGrid,
    /// Channels of audio latents.
    pub(crate) audio_channels: usize,
    /// Channels of the projected text.
    pub(crate) text_width: usize,
    /// Channels of the connectors' two results.
    pub(crate) text_channels: Av<usize>,
    /// The smallest prompt length; every legal one is a multiple of it.
    pub(crate) token_multiple: usize,
}

impl ModelSizes {
    /// The sizes that follow from a model's configurations.
    pub(crate) fn new(
        transformer: TransformerConfig,
        connectors: &ConnectorsConfig,
        vae: &video_vae::Geometry,
        audio: &audio_vae::AudioVaeConfig,
    ) -> Self {
        ModelSizes {
            video_grid: VideoGrid {
                spatial_compression: vae.spatial(),
                temporal_compression: vae.temporal(),
                patch_size: transformer.patch_size,
                patch_size_t: transformer.patch_size_t,
            },
            video_channels: vae.latent_channels,
            audio_grid: AudioGrid {
                sampling_rate: audio.sample_rate,
                hop_length: audio.mel_hop_length,
                temporal_compression: audio_vae::COMPRESSION,
                mel_bins: audio.bins(),
                mel_compression: audio_vae::COMPRESSION,
            },
            audio_channels: audio.latent_channels,
            text_width: connectors.text_width(),
            text_channels: connectors.widths(),
            token_multiple: connectors.token_multiple(),
            transformer,
        }
    }
}

/// Grids that token positions come from, by the transformer's configuration alone.
pub(crate) fn coordinate_grids(c: &TransformerConfig) -> (VideoGrid, AudioGrid) {
    let video = VideoGrid {
        spatial_compression: c.vae_scale_factors[1],
        temporal_compression: c.vae_scale_factors[0],
        patch_size: c.patch_size,
        patch_size_t: c.patch_size_t,
    };
    let audio = AudioGrid {
        sampling_rate: c.audio_sampling_rate,
        hop_length: c.audio_hop_length,
        temporal_compression: c.audio_scale_factor,
        mel_bins: 1,
        mel_compression: 1,
    };
    (video, audio)
}
