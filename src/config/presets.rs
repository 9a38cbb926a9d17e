//! The files of `configs/` and `shardings/` that the binary carries.

use super::error::ConfigError;
use super::schema::Pipeline;
use crate::weights::Version;

/// What to avoid unless a request says otherwise.
pub const NEGATIVE_PROMPT: &str = include_str!("../../configs/negative_prompt.txt");

macro_rules! config {
    ($name:literal) => {
        ($name, include_str!(concat!("../../configs/", $name, ".yml")))
    };
}

macro_rules! shipped {
    ($name:literal) => {
        ($name, include_str!(concat!("../../shardings/", $name, ".yml")))
    };
}

/// The configurations, by name.
pub const CONFIGS: [(&str, &str); 6] = [
    config!("ltx2"),
    config!("ltx2_full_guidance"),
    config!("ltx2_two_stage"),
    config!("ltx2_distilled"),
    config!("ltx2_hq"),
    config!("nano"),
];

/// The layouts, by name: those to use, then the history.
pub const LAYOUTS: [(&str, &str); 15] = [
    shipped!("replicated"),
    shipped!("sequence"),
    shipped!("ulysses"),
    shipped!("ring"),
    shipped!("hybrid"),
    shipped!("cfg"),
    shipped!("cfg-ulysses"),
    shipped!("tensor"),
    shipped!("fsdp-ulysses"),
    shipped!("before-385"),
    shipped!("ffn-matched"),
    shipped!("qkv-unsharded"),
    shipped!("out-unsharded"),
    shipped!("tensor-gathered-ffn"),
    shipped!("rope-gathered"),
];

/// The names of the layouts to use; those of the history are kept to be measured.
pub fn shipped_layouts() -> impl Iterator<Item = &'static str> {
    LAYOUTS.into_iter().filter(|(_, text)| !text.starts_with("# History")).map(|(name, _)| name)
}

/// A shipped file by its name, with or without `.yml`.
pub fn find(shipped: &'static [(&'static str, &'static str)], name: &str) -> Option<(&'static str, &'static str)> {
    let name = name.strip_suffix(".yml").unwrap_or(name);
    shipped.iter().find(|(n, _)| *n == name).copied()
}

/// The preset of a model generation and a pipeline.
///
/// # Errors
/// [`ConfigError::NotBuilt`] where there is none yet.
pub fn choose(version: Version, pipeline: Pipeline) -> Result<&'static str, ConfigError> {
    if version == Version::V2_3 {
        let message = "models of the LTX-2.3 generation are not built yet; use an LTX-2 model";
        return Err(ConfigError::NotBuilt(message.into()));
    }
    Ok(match pipeline {
        Pipeline::TextToVideo | Pipeline::ImageToVideo => "ltx2",
        Pipeline::TwoStage | Pipeline::Keyframes => "ltx2_two_stage",
        Pipeline::Distilled => "ltx2_distilled",
        Pipeline::Hq => "ltx2_hq",
    })
}
