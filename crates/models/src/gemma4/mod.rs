//! Gemma 4, the text encoder of LTX-2.5.

mod config;
mod model;
mod rope;
#[cfg(test)]
mod tests;

use super::families::Family;
use super::gemma::{IGNORED_KEYS, RANGES};
pub use config::Gemma4Config;
pub use model::program;

pub(super) const FAMILY: Family = Family {
    model_types: &["gemma4_unified", "gemma4_unified_text"],
    ranges: RANGES,
    ignored_keys: IGNORED_KEYS,
    read: |json| Ok(Box::new(Gemma4Config::from_json(json)?)),
};
