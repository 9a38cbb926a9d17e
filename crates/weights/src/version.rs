//! Model versions, and how they are detected from files and configurations.

use std::fmt;

use serde_json::Value;

use super::Component;

/// Key that LTX-2.5 adds to the transformer's configuration.
pub(super) const USE_KEYFRAMES: &str = "use_keyframes_abs_pos_embedding";

/// A tensor that LTX-2.5's transformer adds.
pub(super) const KEYFRAMES: &str = "keyframes_abs_pos_embedding";

/// A version of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// LTX-2, 19B.
    V2_0,
    /// LTX-2.3, 22B. LTX-2.5's connectors, autoencoders and vocoder also have this version, because their layouts are
    /// unchanged.
    V2_3,
    /// LTX-2.5, 22B.
    V2_5,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Version::V2_0 => "2.0",
            Version::V2_3 => "2.3",
            Version::V2_5 => "2.5",
        })
    }
}

impl Version {
    /// Detects the model version from a transformer's configuration. `None`: the keys match no version.
    pub fn of_transformer(config: &Value) -> Option<Self> {
        let flag = |key: &str, default: bool| config.get(key).and_then(Value::as_bool).unwrap_or(default);
        // LTX-2.3 projects captions before the connectors and modulates the text by the noise level.
        match (flag("use_prompt_embeddings", true), flag("cross_attn_mod", false)) {
            (true, false) => (!flag(USE_KEYFRAMES, false)).then_some(Version::V2_0),
            (false, true) => Some(Version::since_2_3(config)),
            _ => None,
        }
    }

    /// Distinguishes LTX-2.3 from LTX-2.5 by keys that are the same in both configuration layouts.
    pub(super) fn since_2_3(transformer: &Value) -> Self {
        match transformer.get(USE_KEYFRAMES) == Some(&true.into()) || transformer.get("ff_bias") == Some(&false.into())
        {
            true => Version::V2_5,
            false => Version::V2_3,
        }
    }

    /// Parses the major and minor version from a header's `model_version`, such as `2.5.0` or `v2.3-rc1`; a missing
    /// number becomes 0.
    pub(super) fn numbers(text: &str) -> (u64, u64) {
        let number = text.trim_start_matches(|c: char| !c.is_ascii_digit());
        let mut numbers = number.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
    }

    /// Detects the model version from a component's configuration. `None`: the version is unknown, or the component is
    /// the same in all versions.
    pub(super) fn of_config(component: Component, config: &Value) -> Option<Self> {
        let newer = |yes: bool| Some(if yes { Version::V2_3 } else { Version::V2_0 });
        match component {
            Component::Transformer => Version::of_transformer(config),
            Component::Connectors => {
                newer(config.get("per_modality_projections").and_then(Value::as_bool).unwrap_or(false))
            }
            Component::Vocoder => newer(config.get("_class_name").is_some_and(|c| c == "LTX2VocoderWithBWE")),
            _ => None,
        }
    }
}
