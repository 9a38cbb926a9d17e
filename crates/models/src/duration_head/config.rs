//! Reads `duration_head/config.json`.

use serde::Deserialize;

use super::COMPONENT;
use crate::av::Av;
use crate::{ComponentConfigError, parse_config, require};
use ltx2_base::with_defaults;
use ltx2_nn::Heads;

with_defaults! {
    /// Keys of `config.json`, with the defaults of the diffusers class.
    #[derive(Deserialize)]
    #[serde(default)]
    pub(in crate) struct DurationHeadFile {
        video_cross_attention_dim: usize = 4096,
        audio_cross_attention_dim: usize = 2048,
        pooler_hidden_dim: usize = 256,
        num_queries: usize = 1,
        num_pooler_heads: usize = 4,
        mlp_hidden_dim: usize = 256,
    }
}

/// Structure of the duration head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DurationHeadConfig {
    /// Widths of the video and audio text embeddings.
    pub text: Av<usize>,
    /// Number of learned queries.
    pub queries: usize,
    /// Attention heads; their total width is the hidden width of the pooler.
    pub heads: Heads,
    /// Hidden width of the MLP.
    pub mlp: usize,
}

impl DurationHeadConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// Returns an error if a key has the wrong type or its value is out of range or unsupported.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ComponentConfigError> {
        let f: DurationHeadFile = parse_config(COMPONENT, json)?;
        let (width, count) = (f.pooler_hidden_dim, f.num_pooler_heads);
        let divides = width.is_multiple_of(count);
        require(divides, COMPONENT, "pooler_hidden_dim", width, "multiples of num_pooler_heads")?;
        Ok(DurationHeadConfig {
            text: Av { video: f.video_cross_attention_dim, audio: f.audio_cross_attention_dim },
            queries: f.num_queries,
            heads: Heads { count, dim: width / count },
            mlp: f.mlp_hidden_dim,
        })
    }
}
