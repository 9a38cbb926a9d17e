//! Attention kinds of layers: sliding window or full, in a repeating pattern.

use std::fmt;

use serde::Deserialize;

use super::COMPONENT;
use crate::{ComponentConfigError, require};

/// Tokens that a layer attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// The token itself and the `sliding_window - 1` tokens before it.
    SlidingAttention,
    /// The token itself and all tokens before it.
    FullAttention,
}

impl fmt::Display for LayerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LayerKind::SlidingAttention => "sliding_attention",
            LayerKind::FullAttention => "full_attention",
        })
    }
}

/// Returns the kinds of `layers` layers in which every `pattern`-th is a full-attention layer.
pub fn every(pattern: usize, layers: usize) -> Vec<LayerKind> {
    let kind = |i: usize| match (i + 1).is_multiple_of(pattern) {
        true => LayerKind::FullAttention,
        false => LayerKind::SlidingAttention,
    };
    (0..layers).map(kind).collect()
}

/// Returns the kinds that a configuration lists explicitly, or an error if their number differs from `layers`.
pub fn listed(kinds: &[LayerKind], layers: usize) -> Result<Vec<LayerKind>, ComponentConfigError> {
    let supported = "one entry for each layer (num_hidden_layers)";
    require(kinds.len() == layers, COMPONENT, "layer_types length", kinds.len(), supported)?;
    Ok(kinds.to_vec())
}
