//! Reads `connectors/config.json`.

use serde::Deserialize;

use crate::av::Av;
use crate::ranges::check_heads;
use crate::{ComponentConfigError, parse_config, require};
use ltx2_base::with_defaults;
use ltx2_nn::rope::Pairing;
use ltx2_nn::{AttentionLayer, Axis, Heads};

/// Folder of the connectors in a model.
pub const COMPONENT: &str = "connectors";

with_defaults! {
    /// Configuration of the text connectors, with the defaults of the diffusers class.
    #[derive(Clone, Debug, Deserialize)]
    #[serde(default)]
    pub struct ConnectorsConfig {
        pub(crate) caption_channels: usize = 3840,
        pub(crate) text_proj_in_factor: usize = 49,
        pub(crate) video_connector_num_attention_heads: usize = 30,
        pub(crate) video_connector_attention_head_dim: usize = 128,
        pub(crate) video_connector_num_layers: usize = 2,
        pub(crate) video_connector_num_learnable_registers: Option<usize> = Some(128),
        pub(crate) video_gated_attn: bool = false,
        pub(crate) audio_connector_num_attention_heads: usize = 30,
        pub(crate) audio_connector_attention_head_dim: usize = 128,
        pub(crate) audio_connector_num_layers: usize = 2,
        pub(crate) audio_connector_num_learnable_registers: Option<usize> = Some(128),
        pub(crate) audio_gated_attn: bool = false,
        pub(crate) connector_rope_base_seq_len: usize = 4096,
        pub(crate) rope_theta: f64 = 10000.0,
        pub(crate) rope_double_precision: bool = true,
        pub(crate) rope_type: Pairing = Pairing::Interleaved,
        pub(crate) per_modality_projections: bool = false,
        pub(crate) video_hidden_dim: usize = 4096,
        pub(crate) audio_hidden_dim: usize = 2048,
        pub(crate) proj_bias: bool = false,
    }
}

/// A linear projection of the text encoder's normalized hidden states.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TextMap {
    pub(crate) name: &'static str,
    pub(crate) width: usize,
    /// Factor by which the input is multiplied.
    pub(crate) scale: f64,
}

/// Configuration of the video or the audio connector.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connector {
    pub(crate) stream: &'static str,
    /// Attention layer; the total width of its heads is the width of the connector.
    pub(crate) attention: AttentionLayer,
    pub(crate) layers: usize,
    /// Number of learned registers that replace padding tokens. `None`: padding stays and is masked.
    pub(crate) registers: Option<usize>,
}

impl ConnectorsConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// Returns an error if a key has the wrong type or its value is out of range or unsupported.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ComponentConfigError> {
        let c: Self = parse_config(COMPONENT, json)?;
        let widths = match c.per_modality_projections {
            false => Av::both(("caption_channels", c.caption_channels)),
            true => {
                Av { video: ("video_hidden_dim", c.video_hidden_dim), audio: ("audio_hidden_dim", c.audio_hidden_dim) }
            }
        };
        let keys = Av {
            video: ["video_connector_num_attention_heads", "video_connector_attention_head_dim"],
            audio: ["audio_connector_num_attention_heads", "audio_connector_attention_head_dim"],
        };
        for ((connector, [count, head_dim]), (key, width)) in c.connectors().zip(keys).zip(widths) {
            let heads = connector.attention.heads;
            require(heads.dim.is_multiple_of(2), COMPONENT, head_dim, heads.dim, "an even number")?;
            check_heads(COMPONENT, [count, head_dim], heads)?;
            require(heads.width() == width, COMPONENT, key, width, "the width of the connectors (heads * head_dim)")?;
        }
        Ok(c)
    }

    /// Returns an error if the number of hidden states of the text encoder does not match the weights of the
    /// projection.
    pub fn check_states(&self, states: usize) -> Result<(), ComponentConfigError> {
        let (key, factor) = ("text_proj_in_factor", self.text_proj_in_factor);
        require(factor == states, COMPONENT, key, factor, "the number of hidden states of the text encoder")
    }

    pub(crate) fn connectors(&self) -> Av<Connector> {
        let layer = |count, dim, gated| AttentionLayer {
            heads: Heads { count, dim },
            bias: true,
            out_bias: true,
            gated,
            pairing: self.rope_type,
            sequence: [Axis::TextSequence; 2],
        };
        Av {
            video: Connector {
                stream: "video",
                attention: layer(
                    self.video_connector_num_attention_heads,
                    self.video_connector_attention_head_dim,
                    self.video_gated_attn,
                ),
                layers: self.video_connector_num_layers,
                registers: self.video_connector_num_learnable_registers,
            },
            audio: Connector {
                stream: "audio",
                attention: layer(
                    self.audio_connector_num_attention_heads,
                    self.audio_connector_attention_head_dim,
                    self.audio_gated_attn,
                ),
                layers: self.audio_connector_num_layers,
                registers: self.audio_connector_num_learnable_registers,
            },
        }
    }

    /// Returns the projections of the normalized text: one shared by both connectors, or one for video and one for
    /// audio.
    pub(crate) fn text_maps(&self) -> Vec<TextMap> {
        if !self.per_modality_projections {
            return vec![TextMap { name: "text_proj_in", width: self.caption_channels, scale: 1.0 }];
        }
        let map = |name, width: usize| {
            let scale = (width as f64 / self.caption_channels as f64).sqrt();
            TextMap { name, width, scale }
        };
        vec![map("video_text_proj_in", self.video_hidden_dim), map("audio_text_proj_in", self.audio_hidden_dim)]
    }

    /// Returns the total number of channels of all text projections.
    pub fn text_width(&self) -> usize {
        self.text_maps().iter().map(|m| m.width).sum()
    }

    /// Returns the least common multiple of the register counts of both connectors. The number of text tokens must be a
    /// multiple of it.
    pub fn token_multiple(&self) -> usize {
        let Av { video: a, audio: b } = self.connectors().map(|c| c.registers.unwrap_or(1));
        (1..b).map(|n| n * a).find(|tokens| tokens.is_multiple_of(b)).unwrap_or(a * b)
    }

    /// Returns the width of each connector's output.
    pub fn widths(&self) -> Av<usize> {
        self.connectors().map(|c| c.attention.heads.width())
    }
}
