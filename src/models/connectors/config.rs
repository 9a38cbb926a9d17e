//! `connectors/config.json`.

use serde::Deserialize;

use crate::models::attention::AttentionLayer;
use crate::models::{ConfigError, parse_config, require};
use crate::nn::rope::Pairing;
use crate::nn::{Axis, Heads};

/// The model folder's name.
pub const COMPONENT: &str = "connectors";

/// The connectors' configuration; defaults are the reference class' own.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // The keys are the reference's.
pub struct ConnectorsConfig {
    pub caption_channels: usize,
    pub text_proj_in_factor: usize,
    pub video_connector_num_attention_heads: usize,
    pub video_connector_attention_head_dim: usize,
    pub video_connector_num_layers: usize,
    pub video_connector_num_learnable_registers: Option<usize>,
    pub video_gated_attn: bool,
    pub audio_connector_num_attention_heads: usize,
    pub audio_connector_attention_head_dim: usize,
    pub audio_connector_num_layers: usize,
    pub audio_connector_num_learnable_registers: Option<usize>,
    pub audio_gated_attn: bool,
    pub connector_rope_base_seq_len: usize,
    pub rope_theta: f64,
    pub rope_double_precision: bool,
    pub rope_type: Pairing,
    pub per_modality_projections: bool,
    pub proj_bias: bool,
}

impl Default for ConnectorsConfig {
    fn default() -> Self {
        ConnectorsConfig {
            caption_channels: 3840,
            text_proj_in_factor: 49,
            video_connector_num_attention_heads: 30,
            video_connector_attention_head_dim: 128,
            video_connector_num_layers: 2,
            video_connector_num_learnable_registers: Some(128),
            video_gated_attn: false,
            audio_connector_num_attention_heads: 30,
            audio_connector_attention_head_dim: 128,
            audio_connector_num_layers: 2,
            audio_connector_num_learnable_registers: Some(128),
            audio_gated_attn: false,
            connector_rope_base_seq_len: 4096,
            rope_theta: 10000.0,
            rope_double_precision: true,
            rope_type: Pairing::Interleaved,
            per_modality_projections: false,
            proj_bias: false,
        }
    }
}

/// One of the two connectors.
#[derive(Clone, Copy, Debug)]
pub struct Connector {
    /// `video` or `audio`.
    pub stream: &'static str,
    /// Its attention; the heads' width is the connector's.
    pub attention: AttentionLayer,
    /// Blocks.
    pub layers: usize,
    /// Vectors that stand in for padding; none to keep the padding and mask it.
    pub registers: Option<usize>,
}

impl ConnectorsConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// A key of the wrong type, or a value no code computes.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ConfigError> {
        let c: Self = parse_config(COMPONENT, json)?;
        require(
            !c.per_modality_projections,
            COMPONENT,
            "per_modality_projections",
            c.per_modality_projections,
            "false (LTX-2.0's shared text projection)",
        )?;
        let keys = [
            ["video_connector_attention_head_dim", "video_connector_num_learnable_registers"],
            ["audio_connector_attention_head_dim", "audio_connector_num_learnable_registers"],
        ];
        for (connector, [head_dim, registers]) in c.connectors().into_iter().zip(keys) {
            let heads = connector.attention.heads;
            let (even, some) = (heads.dim > 0 && heads.dim.is_multiple_of(2), connector.registers != Some(0));
            require(even, COMPONENT, head_dim, heads.dim, "an even width")?;
            require(some, COMPONENT, registers, 0, "a positive number or null")?;
            let fits = heads.width() == c.caption_channels;
            require(fits, COMPONENT, "caption_channels", c.caption_channels, "the width of both connectors")?;
        }
        Ok(c)
    }

    /// The video and the audio connector.
    pub fn connectors(&self) -> [Connector; 2] {
        let layer = |count, dim, gated| AttentionLayer {
            heads: Heads { count, dim },
            bias: true,
            out_bias: true,
            gated,
            pairing: self.rope_type,
            sequence: [Axis::TextSequence; 2],
        };
        [
            Connector {
                stream: "video",
                attention: layer(
                    self.video_connector_num_attention_heads,
                    self.video_connector_attention_head_dim,
                    self.video_gated_attn,
                ),
                layers: self.video_connector_num_layers,
                registers: self.video_connector_num_learnable_registers,
            },
            Connector {
                stream: "audio",
                attention: layer(
                    self.audio_connector_num_attention_heads,
                    self.audio_connector_attention_head_dim,
                    self.audio_gated_attn,
                ),
                layers: self.audio_connector_num_layers,
                registers: self.audio_connector_num_learnable_registers,
            },
        ]
    }

    /// The smallest token count that both connectors take; every legal count is a multiple of it.
    pub fn token_multiple(&self) -> usize {
        let (a, b) = (
            self.video_connector_num_learnable_registers.unwrap_or(1),
            self.audio_connector_num_learnable_registers.unwrap_or(1),
        );
        let (mut x, mut y) = (a, b);
        while y != 0 {
            (x, y) = (y, x % y);
        }
        a / x * b
    }

    /// Channels of the two results.
    pub fn widths(&self) -> [usize; 2] {
        self.connectors().map(|c| c.attention.heads.width())
    }
}
