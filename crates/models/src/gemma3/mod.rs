//! Gemma 3, the text encoder of LTX-2.0 and 2.3.

mod config;
mod model;
#[cfg(test)]
mod tests;

use super::families::Family;
use super::gemma::{IGNORED_KEYS, RANGES};
pub use config::Gemma3Config;

pub use super::gemma::COMPONENT;
pub use super::gemma::LayerKind;
pub use model::program;

pub(super) const FAMILY: Family = Family {
    model_types: &["gemma3", "gemma3_text"],
    ranges: RANGES,
    ignored_keys: IGNORED_KEYS,
    read: |json| Ok(Box::new(Gemma3Config::from_json(json)?)),
};
