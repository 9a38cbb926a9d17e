//! Reads `transformer/config.json`.

use serde::Deserialize;

use crate::av::Av;
use crate::feed_forward::Activation;
use crate::ranges::check_heads;
use crate::{ConfigError, parse_config, require};
use ltx2_base::with_defaults;
use ltx2_nn::rope::Pairing;
use ltx2_nn::{AttentionLayer, Axis, Heads};

/// Folder of the transformer in a model.
pub const COMPONENT: &str = "transformer";

with_defaults! {
    /// Configuration of the transformer, with the defaults of the reference class.
    #[derive(Clone, Debug, Deserialize)]
    #[serde(default)]
    pub struct TransformerConfig {
        pub in_channels: usize = 128,
        pub out_channels: Option<usize> = None,
        pub patch_size: usize = 1,
        pub patch_size_t: usize = 1,
        pub num_attention_heads: usize = 32,
        pub attention_head_dim: usize = 128,
        pub cross_attention_dim: usize = 4096,
        pub vae_scale_factors: [usize; 3] = [8, 32, 32],
        pub pos_embed_max_pos: usize = 20,
        pub base_height: usize = 2048,
        pub base_width: usize = 2048,
        pub gated_attn: bool = false,
        pub cross_attn_mod: bool = false,
        pub audio_in_channels: usize = 128,
        pub audio_out_channels: Option<usize> = None,
        pub audio_patch_size: usize = 1,
        pub audio_patch_size_t: usize = 1,
        pub audio_num_attention_heads: usize = 32,
        pub audio_attention_head_dim: usize = 64,
        pub audio_cross_attention_dim: usize = 2048,
        pub audio_scale_factor: usize = 4,
        pub audio_pos_embed_max_pos: usize = 20,
        pub audio_sampling_rate: usize = 16000,
        pub audio_hop_length: usize = 160,
        pub audio_gated_attn: bool = false,
        pub audio_cross_attn_mod: bool = false,
        pub num_layers: usize = 48,
        pub activation_fn: Activation = Activation::GeluTanh,
        pub qk_norm: String = "rms_norm_across_heads".into(),
        pub norm_elementwise_affine: bool = false,
        pub norm_eps: f64 = 1e-6,
        pub caption_channels: usize = 3840,
        pub attention_bias: bool = true,
        pub attention_out_bias: bool = true,
        pub rope_theta: f64 = 10000.0,
        pub rope_double_precision: bool = true,
        pub causal_offset: usize = 1,
        pub timestep_scale_multiplier: f64 = 1000.0,
        pub cross_attn_timestep_scale_multiplier: f64 = 1000.0,
        pub rope_type: Pairing = Pairing::Interleaved,
        pub use_prompt_embeddings: bool = true,
        pub perturbed_attn: bool = false,
        pub ff_bias: bool = true,
        pub audio_ff_bias: bool = true,
        pub use_prompt_adaln_single: bool = true,
        pub use_keyframes_abs_pos_embedding: bool = false,
    }
}

/// Sizes and options of the video or the audio stream.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub prefix: &'static str,
    /// Name of the cross-modal attention in which this stream provides the queries: `audio_to_video` or
    /// `video_to_audio`.
    pub(crate) cross_name: &'static str,
    pub sequence: Axis,
    pub attention: AttentionLayer,
    /// Whether the timestep modulates text attention (LTX-2.3).
    pub(crate) text_modulation: bool,
    /// Width of the text context that the stream attends to.
    pub context: usize,
    pub ff_bias: bool,
    pub in_channels: usize,
    pub out_channels: usize,
}

impl Stream {
    /// Returns the width of the residual stream.
    pub fn width(&self) -> usize {
        self.attention.heads.width()
    }

    pub(crate) fn text_attention(&self) -> AttentionLayer {
        AttentionLayer { sequence: [self.sequence, Axis::TextSequence], ..self.attention }
    }

    /// Returns the number of rows of the main modulation table.
    pub fn modulation_rows(&self) -> usize {
        if self.text_modulation { 9 } else { 6 }
    }

    pub fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl TransformerConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// Returns an error if a key has the wrong type or its value is out of range or unsupported.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ConfigError> {
        let c: Self = parse_config(COMPONENT, json)?;
        require(c.qk_norm == "rms_norm_across_heads", COMPONENT, "qk_norm", &c.qk_norm, "rms_norm_across_heads")?;
        check_heads(COMPONENT, ["num_attention_heads", "attention_head_dim"], c.video_heads())?;
        check_heads(COMPONENT, ["audio_num_attention_heads", "audio_attention_head_dim"], c.audio_heads())?;
        let rope_heads = c.audio_cross_attention_dim.is_multiple_of(2 * c.num_attention_heads);
        require(
            c.audio_cross_attention_dim == c.audio_heads().width() && rope_heads,
            COMPONENT,
            "audio_cross_attention_dim",
            c.audio_cross_attention_dim,
            "audio_num_attention_heads * audio_attention_head_dim, if a multiple of 2 * num_attention_heads",
        )?;
        let even = c.attention_head_dim.is_multiple_of(2) && c.audio_attention_head_dim.is_multiple_of(2);
        require(even, COMPONENT, "attention_head_dim", c.attention_head_dim, "even head dimensions")?;
        Ok(c)
    }

    pub(crate) fn video_heads(&self) -> Heads {
        Heads { count: self.num_attention_heads, dim: self.attention_head_dim }
    }

    /// Returns the attention heads of the audio stream, which are also those of both cross-modal attentions.
    pub fn audio_heads(&self) -> Heads {
        Heads { count: self.audio_num_attention_heads, dim: self.audio_attention_head_dim }
    }

    fn layer(&self, heads: Heads, gated: bool, sequence: [Axis; 2]) -> AttentionLayer {
        AttentionLayer {
            heads,
            sequence,
            bias: self.attention_bias,
            out_bias: self.attention_out_bias,
            gated,
            pairing: self.rope_type,
        }
    }

    pub fn streams(&self) -> Av<Stream> {
        Av { video: self.video(), audio: self.audio() }
    }

    pub fn video(&self) -> Stream {
        Stream {
            prefix: "",
            cross_name: "audio_to_video",
            sequence: Axis::VideoSequence,
            attention: self.layer(self.video_heads(), self.gated_attn, [Axis::VideoSequence; 2]),
            text_modulation: self.cross_attn_mod,
            context: self.cross_attention_dim,
            ff_bias: self.ff_bias,
            in_channels: self.in_channels,
            out_channels: self.out_channels.unwrap_or(self.in_channels),
        }
    }

    pub fn audio(&self) -> Stream {
        Stream {
            prefix: "audio_",
            cross_name: "video_to_audio",
            sequence: Axis::AudioSequence,
            attention: self.layer(self.audio_heads(), self.audio_gated_attn, [Axis::AudioSequence; 2]),
            text_modulation: self.audio_cross_attn_mod,
            context: self.audio_cross_attention_dim,
            ff_bias: self.audio_ff_bias,
            in_channels: self.audio_in_channels,
            out_channels: self.audio_out_channels.unwrap_or(self.audio_in_channels),
        }
    }

    /// Returns the cross-modal attention with video queries and audio keys.
    pub(crate) fn a2v(&self) -> AttentionLayer {
        self.layer(self.audio_heads(), self.gated_attn, [Axis::VideoSequence, Axis::AudioSequence])
    }

    /// Returns the cross-modal attention with audio queries and video keys.
    pub(crate) fn v2a(&self) -> AttentionLayer {
        self.layer(self.audio_heads(), self.audio_gated_attn, [Axis::AudioSequence, Axis::VideoSequence])
    }

    /// Whether a block's linear layers are quantized in runs with 8-bit weights. The first block and about the last
    /// tenth of the blocks stay in bf16, as in the published 8-bit model (of 48 blocks: 0 and 43 to 47).
    pub fn quantizes(&self, block: usize) -> bool {
        let last = (5 * self.num_layers + 24) / 48;
        (1..self.num_layers - last).contains(&block)
    }

    /// Whether the noise level modulates the text context, so that text keys and values change with every step.
    pub(crate) fn has_prompt_adaln(&self) -> bool {
        self.prompt_modulation() && self.use_prompt_adaln_single
    }

    /// Whether blocks scale and shift the text context before text attention.
    pub(crate) fn prompt_modulation(&self) -> bool {
        self.cross_attn_mod || self.audio_cross_attn_mod
    }
}
