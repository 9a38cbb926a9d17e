//! `duration_head/config.json`.

use serde::Deserialize;

use super::COMPONENT;
use crate::av::Av;
use crate::defaults::with_defaults;
use crate::models::{ConfigError, parse_config, require};
use crate::nn::Heads;

with_defaults! {
    /// The file's keys; defaults are the reference class' own.
    #[derive(Deserialize)]
    #[serde(default)]
    pub(in crate::models) struct DurationHeadFile {
        video_cross_attention_dim: usize = 4096,
        audio_cross_attention_dim: usize = 2048,
        pooler_hidden_dim: usize = 256,
        num_queries: usize = 1,
        num_pooler_heads: usize = 4,
        mlp_hidden_dim: usize = 256,
    }
}

/// Structure of the head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DurationHeadConfig {
    /// Widths of the text contexts.
    pub(crate) text: Av<usize>,
    /// Learned queries.
    pub(crate) queries: usize,
    /// Heads of their attention; together the width of the head.
    pub(crate) heads: Heads,
    /// Width between the last two linear maps.
    pub(crate) mlp: usize,
}

impl DurationHeadConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// A key of the wrong type, or a value no code computes.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ConfigError> {
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
