//! Reads `transformer/config.json`.

use serde::Deserialize;

use crate::av::Av;
use crate::feed_forward::Activation;
use crate::ranges::check_heads;
use crate::{ComponentConfigError, parse_config, require};
use ltx2_base::with_defaults;
use ltx2_nn::rope::Pairing;
use ltx2_nn::{AttentionLayer, Axis, Heads};
use ltx2_weights::quantize::quantized_blocks;

/// Folder of the transformer in a model.
pub const COMPONENT: &str = "transformer";

with_defaults! {
    /// Configuration of the transformer, with the defaults of the diffusers class.
    #[derive(Clone, Debug, Deserialize)]
    #[serde(default)]
    pub struct TransformerConfig {
        /// Channels of a video token: latent channels times latents per patch.
        pub in_channels: usize = 128,
        /// Channels of a predicted video token. `None`: `in_channels`.
        pub out_channels: Option<usize> = None,
        /// Side length in latents of the square that a video token covers in each latent frame.
        pub patch_size: usize = 1,
        /// Latent frames per video token.
        pub patch_size_t: usize = 1,
        /// Number of attention heads of the video stream.
        pub num_attention_heads: usize = 32,
        /// Features per attention head of the video stream; even.
        pub attention_head_dim: usize = 128,
        /// Width of the video text context; read only if `use_prompt_embeddings` is false.
        pub cross_attention_dim: usize = 4096,
        /// Frames, rows and columns of pixels per video latent.
        pub vae_scale_factors: [usize; 3] = [8, 32, 32],
        /// Time in seconds by which RoPE of video self-attention divides token times.
        pub pos_embed_max_pos: usize = 20,
        /// Height in pixels by which RoPE divides the rows of video tokens.
        pub base_height: usize = 2048,
        /// Width in pixels by which RoPE divides the columns of video tokens.
        pub base_width: usize = 2048,
        /// Whether attention with video queries multiplies the result of each head by a learned gate.
        pub gated_attn: bool = false,
        /// Whether the timestep modulates text attention of the video stream (LTX-2.3).
        pub cross_attn_mod: bool = false,
        /// Channels of an audio token: latent channels times latent mel bins.
        pub audio_in_channels: usize = 128,
        /// Channels of a predicted audio token. `None`: `audio_in_channels`.
        pub audio_out_channels: Option<usize> = None,
        /// Key of the diffusers class that this program accepts but does not use.
        pub audio_patch_size: usize = 1,
        /// Latents per audio token along time; used only for token positions.
        pub audio_patch_size_t: usize = 1,
        /// Number of attention heads of the audio stream and of cross-modal attention.
        pub audio_num_attention_heads: usize = 32,
        /// Features per attention head of the audio stream and of cross-modal attention; even.
        pub audio_attention_head_dim: usize = 64,
        /// Width of the audio stream and of its text context.
        pub audio_cross_attention_dim: usize = 2048,
        /// Mel frames per audio latent; used only for token positions.
        pub audio_scale_factor: usize = 4,
        /// Time in seconds by which RoPE of audio self-attention divides token times.
        pub audio_pos_embed_max_pos: usize = 20,
        /// Sampling rate in Hz of the audio that mel frames are computed from; used only for token positions.
        pub audio_sampling_rate: usize = 16000,
        /// Samples between consecutive mel frames; used only for token positions.
        pub audio_hop_length: usize = 160,
        /// Whether attention with audio queries multiplies the result of each head by a learned gate.
        pub audio_gated_attn: bool = false,
        /// Whether the timestep modulates text attention of the audio stream (LTX-2.3).
        pub audio_cross_attn_mod: bool = false,
        /// Number of blocks.
        pub num_layers: usize = 48,
        /// Activation of the feed-forward layers.
        pub activation_fn: Activation = Activation::GeluTanh,
        /// Norm of queries and keys; only `rms_norm_across_heads` is supported.
        pub qk_norm: String = "rms_norm_across_heads".into(),
        /// Whether the norms of the blocks have learned weights.
        pub norm_elementwise_affine: bool = false,
        /// Epsilon of the norms of the blocks.
        pub norm_eps: f64 = 1e-6,
        /// Channels of the text embeddings; read only if `use_prompt_embeddings` is true.
        pub caption_channels: usize = 3840,
        /// Whether the query, key and value projections have biases.
        pub attention_bias: bool = true,
        /// Whether the output projections of attention have biases.
        pub attention_out_bias: bool = true,
        /// Ratio of the highest to the lowest RoPE frequency.
        pub rope_theta: f64 = 10000.0,
        /// Whether RoPE frequencies are computed in f64 instead of f32.
        pub rope_double_precision: bool = true,
        /// Frames (video) or mel frames (audio) that the first latent covers; used only for token positions.
        pub causal_offset: usize = 1,
        /// Factor from noise levels (0 to 1) to timesteps.
        pub timestep_scale_multiplier: f64 = 1000.0,
        /// Factor from noise levels to the timesteps of the cross-modal gates.
        pub cross_attn_timestep_scale_multiplier: f64 = 1000.0,
        /// Pairing of the features of a head: RoPE rotates the two features of each pair together.
        pub rope_type: Pairing = Pairing::Interleaved,
        /// Whether the model projects text embeddings to the width of each stream.
        pub use_prompt_embeddings: bool = true,
        /// Whether diffusers can apply spatio-temporal guidance to the model; programs do not depend on it.
        pub perturbed_attn: bool = false,
        /// Whether the linear layers of the video feed-forward layers have biases.
        pub ff_bias: bool = true,
        /// Whether the linear layers of the audio feed-forward layers have biases.
        pub audio_ff_bias: bool = true,
        /// Whether the noise level modulates the text context, if `cross_attn_mod` or `audio_cross_attn_mod` is set.
        pub use_prompt_adaln_single: bool = true,
        /// Whether video tokens of single-frame latents get a learned embedding (LTX-2.5).
        pub use_keyframes_abs_pos_embedding: bool = false,
    }
}

/// Sizes and options of the video or the audio stream.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub(crate) prefix: &'static str,
    /// Name of the cross-modal attention in which this stream provides the queries: `audio_to_video` or
    /// `video_to_audio`.
    pub(crate) cross_name: &'static str,
    /// Sequence axis of the stream's tokens, for sharding.
    pub sequence: Axis,
    /// Self-attention layer; text attention differs only in the sequence axis of the keys.
    pub attention: AttentionLayer,
    /// Whether the timestep modulates text attention (LTX-2.3).
    pub(crate) text_modulation: bool,
    /// Width of the text context that the stream attends to.
    pub context: usize,
    pub(crate) ff_bias: bool,
    /// Channels of a token.
    pub in_channels: usize,
    pub(crate) out_channels: usize,
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

    /// Prepends the stream's prefix to a name, for example `audio_attn1`.
    pub(crate) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl TransformerConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// Returns an error if a key has the wrong type or its value is out of range or unsupported.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ComponentConfigError> {
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

    /// Returns the sizes and options of both streams.
    pub fn streams(&self) -> Av<Stream> {
        Av { video: self.video(), audio: self.audio() }
    }

    /// Returns the sizes and options of the video stream.
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

    /// Returns the sizes and options of the audio stream.
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

    /// Returns whether the linear layers of the block with this index are quantized if 8-bit weights are requested.
    pub fn quantizes(&self, block: usize) -> bool {
        quantized_blocks(self.num_layers).contains(&block)
    }

    /// Returns whether the noise level modulates the text context, so that text keys and values change with every step.
    pub(crate) fn has_prompt_adaln(&self) -> bool {
        self.prompt_modulation() && self.use_prompt_adaln_single
    }

    /// Returns whether blocks scale and shift the text context before text attention.
    pub(crate) fn prompt_modulation(&self) -> bool {
        self.cross_attn_mod || self.audio_cross_attn_mod
    }
}
