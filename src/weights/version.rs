//! Generations of the model, and how files and configurations tell which they are of.

use std::fmt;

use serde_json::Value;

use super::Component;

/// The key that tells transformers after LTX-2.3.
pub(super) const KEYFRAMES: &str = "use_keyframes_abs_pos_embedding";

/// A generation of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// LTX-2, 19B.
    V2_0,
    /// LTX-2.3, 22B.
    V2_3,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Version::V2_0 => "2.0",
            Version::V2_3 => "2.3",
        })
    }
}

impl Version {
    /// The generation that a transformer's configuration is of; none where it is of neither.
    pub(crate) fn of_transformer(config: &Value) -> Option<Self> {
        let flag = |key: &str, default: bool| config.get(key).and_then(Value::as_bool).unwrap_or(default);
        if flag(KEYFRAMES, false) {
            return None;
        }
        // LTX-2.3 projects captions before the connectors and modulates the text by the noise level.
        match (flag("use_prompt_embeddings", true), flag("cross_attn_mod", false)) {
            (true, false) => Some(Version::V2_0),
            (false, true) => Some(Version::V2_3),
            _ => None,
        }
    }

    /// The generation that a component's configuration is of, where generations differ in it.
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
