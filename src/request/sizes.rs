//! Sizes of a model, from its configuration files.

use crate::av::Av;
use crate::models::connectors::ConnectorsConfig;
use crate::models::transformer::TransformerConfig;
use crate::models::{audio_vae, video_vae};
use crate::sampling::latents::{AudioGrid, VideoGrid};

/// Model sizes that determine valid requests and program shapes.
pub struct ModelSizes {
    /// Configuration of the transformer.
    pub(crate) transformer: TransformerConfig,
    /// Compression ratios and patch sizes that convert video sizes to latent shapes and token counts.
    pub(crate) video_grid: VideoGrid,
    /// Channels of video latents.
    pub(crate) video_channels: usize,
    /// Rates and compression ratios that convert durations to audio latent shapes.
    pub(crate) audio_grid: AudioGrid,
    /// Channels of audio latents.
    pub(crate) audio_channels: usize,
    /// Channels of the projected text embeddings.
    pub(crate) text_width: usize,
    /// Output channels of the connectors.
    pub(crate) text_channels: Av<usize>,
    /// Prompt lengths must be a multiple of this number of tokens.
    pub(crate) token_multiple: usize,
}

impl ModelSizes {
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

/// Returns the grids from which token positions are computed.
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
