//! Kinds of layers, by the span that they attend to: a window of tokens or all, in a pattern.

use std::fmt;

use serde::Deserialize;

use super::COMPONENT;
use crate::models::{ConfigError, require};

/// Span that a layer attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// The last `sliding_window` tokens.
    SlidingAttention,
    /// Every earlier token.
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

/// The kinds of `layers` layers, of which every `pattern`-th is a full one.
pub(crate) fn every(pattern: usize, layers: usize) -> Vec<LayerKind> {
    let kind = |i: usize| match (i + 1).is_multiple_of(pattern) {
        true => LayerKind::FullAttention,
        false => LayerKind::SlidingAttention,
    };
    (0..layers).map(kind).collect()
}

/// The kinds of `layers` layers as a configuration lists them.
///
/// # Errors
/// A list of another length.
pub(crate) fn listed(kinds: &[LayerKind], layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    let supported = "one entry for each of num_hidden_layers";
    require(kinds.len() == layers, COMPONENT, "layer_types", kinds.len(), supported)?;
    Ok(kinds.to_vec())
}
