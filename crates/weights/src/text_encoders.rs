//! The families of text encoders: the model versions that use them, and the names of their tensors.

use serde_json::Value;

use super::checkpoint::Checkpoint;
use super::derived;
use super::error::WeightsError;
use super::version::Version;

type DeriveConfig = fn(&Checkpoint) -> Result<Value, WeightsError>;

/// A family of text encoders.
pub(super) struct Family {
    /// Name of the language model.
    pub(super) name: &'static str,
    /// Supported values of `model_type` in `config.json`.
    model_types: &'static [&'static str],
    /// Start of the `model_type` and of llama.cpp's architecture of all models of the family, including unsupported
    /// sizes.
    prefix: &'static str,
    /// Model versions that use the family.
    pub(super) versions: &'static [Version],
    /// Whether the configuration must have the model's `gemma_version`.
    pub(super) has_version: bool,
    /// Modules of the first layer that identify a file without a configuration.
    modules: &'static [&'static str],
    /// Derives `config.json` from the tensors of a file without a configuration. `None`: not possible.
    derive: Option<DeriveConfig>,
    /// Where to get the text encoder, for error messages.
    pub(super) source: &'static str,
}

const GEMMA_3: Family = Family {
    name: "Gemma 3",
    model_types: &["gemma3", "gemma3_text"],
    prefix: "gemma3",
    versions: &[Version::V2_0, Version::V2_3],
    has_version: false,
    modules: &["self_attn.q_norm.weight", "pre_feedforward_layernorm.weight"],
    derive: Some(derived::gemma_3_config),
    source: "Gemma-3-12B, the folder of google/gemma-3-12b-it or ComfyUI's gemma_3_12B_it.safetensors",
};

const GEMMA_4: Family = Family {
    name: "Gemma 4",
    model_types: &["gemma4_unified", "gemma4_unified_text"],
    prefix: "gemma4",
    versions: &[Version::V2_5],
    has_version: true,
    modules: &["self_attn.q_norm.weight", "pre_feedforward_layernorm.weight", "layer_scalar"],
    derive: None,
    source: "LTX-2.5's own text encoder, text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors or text_encoder \
             of Lightricks/LTX-2.5-Diffusers",
};

/// All families. A family whose modules include those of another comes first.
const FAMILIES: [Family; 2] = [GEMMA_4, GEMMA_3];

/// Prefix of the language model's tensors in this program, and in the files of Google and transformers.
pub(super) const LANGUAGE_MODEL: &str = "language_model.model.";

/// Image and audio modules, which text prompts do not use.
pub(super) const NON_TEXT_MODULES: [&str; 5] =
    ["vision_tower.", "multi_modal_projector.", "vision_embedder.", "embed_vision.", "embed_audio."];

impl Family {
    /// Returns the family of this model type or GGUF architecture, supported or not.
    pub(super) fn of_type(model_type: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| model_type.starts_with(family.prefix))
    }

    /// Returns the family of this model version's text encoder: that of `model_type` if the version uses it.
    pub(super) fn for_version(version: Version, model_type: &str) -> &'static Family {
        let mut users = FAMILIES.iter().filter(|family| family.versions.contains(&version));
        let own = users.clone().find(|family| family.supports(model_type));
        own.or_else(|| users.next()).expect("every version has a text encoder")
    }

    /// Returns the family whose tensors a file without a configuration has. `prefixes`: prefixes that the names of the
    /// tensors may have.
    pub(super) fn of_tensors(file: &Checkpoint, prefixes: &[&str]) -> Option<&'static Family> {
        let has = |module: &&str| prefixes.iter().any(|prefix| file.contains(&format!("{prefix}layers.0.{module}")));
        FAMILIES.iter().find(|family| family.modules.iter().all(&has))
    }

    /// Returns whether the family supports a model type.
    pub(super) fn supports(&self, model_type: &str) -> bool {
        self.model_types.contains(&model_type)
    }

    /// Returns the model versions that use the family: "LTX-2.0 and LTX-2.3".
    pub(super) fn users(&self) -> String {
        self.versions.iter().map(|version| format!("LTX-{version}")).collect::<Vec<_>>().join(" and ")
    }
}

/// Derives the `config.json` of a text encoder from its tensors, whose names begin with [`LANGUAGE_MODEL`]. `None`: it
/// does not follow from the tensors.
///
/// # Errors
/// Returns an error if a tensor is missing.
pub(super) fn derived_config(weights: &Checkpoint) -> Result<Option<Value>, WeightsError> {
    let derive = Family::of_tensors(weights, &[LANGUAGE_MODEL]).and_then(|family| family.derive);
    derive.map(|derive| derive(weights)).transpose()
}

/// Converts the name of a text encoder's tensor to the form `language_model.model.…`.
///
/// Also accepts the module tree of newer transformers versions (`model.language_model.…`) and that of the text-only
/// model (`model.…`). Names of image and audio modules are converted to names that no text tensor has.
pub(super) fn tensor_name(key: &str) -> String {
    if key.starts_with(LANGUAGE_MODEL) {
        return key.to_string();
    }
    if let Some(rest) = key.strip_prefix("model.language_model.") {
        return format!("{LANGUAGE_MODEL}{rest}");
    }
    match key.strip_prefix("model.") {
        Some(rest) if NON_TEXT_MODULES.iter().any(|module| rest.starts_with(module)) => rest.into(),
        Some(rest) => format!("{LANGUAGE_MODEL}{rest}"),
        None => key.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Component, is_inert};

    #[test]
    fn tensor_name_spellings_are_normalized() {
        for prefix in ["language_model.model.", "model.language_model.", "model."] {
            let key = format!("{prefix}layers.3.self_attn.q_proj.weight");
            assert_eq!(tensor_name(&key), "language_model.model.layers.3.self_attn.q_proj.weight");
        }
        let gemma_3 = ["vision_tower.x", "model.vision_tower.x", "lm_head.weight", "model.multi_modal_projector.y"];
        let gemma_4 = ["model.vision_embedder.patch_dense.bias", "model.embed_vision.x", "model.embed_audio.y"];
        for key in [&gemma_3[..], &gemma_4].concat() {
            assert!(!tensor_name(key).starts_with(LANGUAGE_MODEL), "{key}");
            assert!(is_inert(Component::TextEncoder, &tensor_name(key)), "{key}");
        }
    }

    #[test]
    fn every_version_has_a_text_encoder() {
        for version in [Version::V2_0, Version::V2_3, Version::V2_5] {
            assert!(Family::for_version(version, "unknown").users().contains(&version.to_string()), "{version}");
        }
    }
}
