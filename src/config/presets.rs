//! The files of `configs/` and `shardings/` that the binary carries.

use super::error::ConfigError;
use super::schema::Pipeline;
use crate::weights::Version;

/// What to avoid unless a request says otherwise.
pub const NEGATIVE_PROMPT: &str = include_str!("../../configs/negative_prompt.txt");

const LTX2: &str = "ltx2";
const LTX2_3: &str = "ltx2_3";

/// The configurations, by name.
pub const CONFIGS: [(&str, &str); 5] = [
    (LTX2, include_str!("../../configs/ltx2.yml")),
    ("ltx2_full_guidance", include_str!("../../configs/ltx2_full_guidance.yml")),
    (LTX2_3, include_str!("../../configs/ltx2_3.yml")),
    ("nano", include_str!("../../configs/nano.yml")),
    ("nano_2_3", include_str!("../../configs/nano_2_3.yml")),
];

macro_rules! shipped {
    ($name:literal) => {
        ($name, include_str!(concat!("../../shardings/", $name, ".yml")))
    };
}

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
    match (version, pipeline) {
        (Version::V2_0, Pipeline::TextToVideo) => Ok(LTX2),
        (Version::V2_3, Pipeline::TextToVideo) => Ok(LTX2_3),
        (_, other) => Err(ConfigError::NotBuilt(format!(
            "pipeline '{}' is not built yet; built: {}",
            other.name(),
            Pipeline::TextToVideo.name()
        ))),
    }
}
