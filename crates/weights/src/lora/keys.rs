//! Tensor names in adapter files: which part of an update a tensor is, and which module of the model it updates.

use std::collections::{BTreeMap, BTreeSet};

use crate::Component;
use crate::error::WeightsError;
use crate::keys::{self, SingleFileKeys};
use crate::source::ModelSource;

/// Role of a tensor in an update, determined by the suffix of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LoraTensorRole {
    /// `A` of a LoRA, `[rank, in]`.
    Down,
    /// `B` of a LoRA, `[out, rank]`.
    Up,
    /// Bias of `B`, `[out]`.
    UpBias,
    /// Scalar alpha.
    Alpha,
    /// Magnitude of a DoRA, in PEFT's naming scheme.
    PeftMagnitude,
    /// Magnitude of a DoRA, in LyCORIS' naming scheme.
    LycorisMagnitude,
    /// Factors of a LoHa: `(w1_a · w1_b) ∘ (w2_a · w2_b)`.
    Hada1A,
    Hada1B,
    Hada2A,
    Hada2B,
    /// Factors of a LoKr, each a matrix or a product of two: `w1 ⊗ w2`.
    Kron1,
    Kron1A,
    Kron1B,
    Kron2,
    Kron2A,
    Kron2B,
    /// Difference that is added to a weight.
    Diff,
    /// Difference that is added to a bias.
    DiffBias,
}

/// Suffixes of tensor names: first part, second part, role, and whether PEFT may write the adapter's name between the
/// parts.
const ROLES: [(&str, &str, LoraTensorRole, bool); 21] = [
    (".lora_A", ".weight", LoraTensorRole::Down, true),
    (".lora_down", ".weight", LoraTensorRole::Down, false),
    (".lora_B", ".weight", LoraTensorRole::Up, true),
    (".lora_up", ".weight", LoraTensorRole::Up, false),
    (".lora_B", ".bias", LoraTensorRole::UpBias, true),
    (".alpha", "", LoraTensorRole::Alpha, false),
    (".lora_magnitude_vector", "", LoraTensorRole::PeftMagnitude, true),
    (".lora_magnitude_vector", ".weight", LoraTensorRole::PeftMagnitude, true),
    (".dora_scale", "", LoraTensorRole::LycorisMagnitude, false),
    (".hada_w1_a", "", LoraTensorRole::Hada1A, true),
    (".hada_w1_b", "", LoraTensorRole::Hada1B, true),
    (".hada_w2_a", "", LoraTensorRole::Hada2A, true),
    (".hada_w2_b", "", LoraTensorRole::Hada2B, true),
    (".lokr_w1", "", LoraTensorRole::Kron1, true),
    (".lokr_w1_a", "", LoraTensorRole::Kron1A, true),
    (".lokr_w1_b", "", LoraTensorRole::Kron1B, true),
    (".lokr_w2", "", LoraTensorRole::Kron2, true),
    (".lokr_w2_a", "", LoraTensorRole::Kron2A, true),
    (".lokr_w2_b", "", LoraTensorRole::Kron2B, true),
    (".diff", "", LoraTensorRole::Diff, false),
    (".diff_b", "", LoraTensorRole::DiffBias, false),
];

/// Name parts that identify unsupported adapter types.
const UNSUPPORTED: [(&str, &str); 4] = [
    (".lora_mid.", "a LoCon"),
    (".lokr_t2", "a LoKr of a convolution"),
    (".hada_t", "a LoHa of a convolution"),
    (".oft_", "an OFT"),
];

/// Splits a tensor's name into its module, as the file spells it, and its role.
///
/// # Errors
/// If the key belongs to no supported adapter, returns the reason, a predicate such as `is not part of a LoRA`.
pub(super) fn split(key: &str) -> Result<(&str, LoraTensorRole), String> {
    let role = |(name, end, role, named): &(&str, &str, LoraTensorRole, bool)| {
        let (module, rest) = key.rsplit_once(name)?;
        let adapter = rest.strip_suffix(end)?;
        let is_name = |rest: &str| rest.strip_prefix('.').is_some_and(|name| !name.is_empty() && !name.contains('.'));
        (adapter.is_empty() || *named && is_name(adapter)).then_some((module, *role))
    };
    ROLES.iter().find_map(role).ok_or_else(|| match UNSUPPORTED.iter().find(|(part, _)| key.contains(part)) {
        Some((_, kind)) => {
            format!("is part of {kind}, which is not supported; use a LoRA, DoRA, LoHa or LoKr of linear layers")
        }
        None => {
            "is not part of a LoRA; supported are lora_A, lora_B (lora_down, lora_up), alpha, lora_magnitude_vector, \
                 dora_scale, hada_w*, lokr_w*, diff and diff_b"
                .into()
        }
    })
}

/// A module of the model, as a file names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LoraModule {
    /// Component and name in the model.
    Named(Component, String),
    /// A name with `_` instead of `.`, as kohya's trainers and musubi-tuner write it.
    Flat(String),
}

/// Prefixes of names with `_` instead of `.`: kohya and musubi-tuner, OneTrainer, LyCORIS.
const FLAT: [&str; 3] = ["lora_unet_", "lora_transformer_", "lycoris_"];
/// Prefixes of all other names, in the order in which they are stripped.
const PREFIXES: [&str; 4] = ["base_model.model.", "model.", "diffusion_model.", "transformer."];
/// Names of the connectors' top-level modules in the model.
const CONNECTORS: [&str; 5] =
    ["video_connector", "audio_connector", "text_proj_in", "video_text_proj_in", "audio_text_proj_in"];

/// Returns the module that a name in a file refers to. Accepts diffusers' and Lightricks' names after any prefixes.
pub(super) fn module(name: &str) -> LoraModule {
    if let Some(flat) = FLAT.iter().find_map(|prefix| name.strip_prefix(prefix)) {
        return LoraModule::Flat(flat.to_string());
    }
    let rest = PREFIXES.iter().fold(name, |rest, prefix| rest.strip_prefix(prefix).unwrap_or(rest));
    let (in_connectors, rest) = rest.strip_prefix("connectors.").map_or((false, rest), |rest| (true, rest));
    let single = match keys::is_projection(rest) {
        true => rest.to_string(),
        false => format!("{}{rest}", keys::TRANSFORMER),
    };
    let first = rest.split_once('.').map_or(rest, |(first, _)| first);
    match SingleFileKeys::new([]).map(&single) {
        Some((Component::Transformer, _)) if in_connectors || CONNECTORS.contains(&first) => {
            LoraModule::Named(Component::Connectors, rest.to_string())
        }
        Some((component, name)) => LoraModule::Named(component, name),
        None => LoraModule::Named(Component::Transformer, rest.to_string()),
    }
}

/// Returns a module's name in the model in which it was trained: without the prefix of diffusers or PEFT.
pub(super) fn in_own_model(module: &str) -> &str {
    let prefixes = ["base_model.model.", "transformer.", "connectors."];
    prefixes.iter().find_map(|prefix| module.strip_prefix(prefix)).unwrap_or(module)
}

/// The modules of a model by their names with `_` instead of `.`.
pub(super) struct FlatModules(BTreeMap<String, BTreeSet<(Component, String)>>);

/// Components that LoRAs update.
const COMPONENTS: [Component; 2] = [Component::Transformer, Component::Connectors];

impl FlatModules {
    /// Lists the modules of a model's transformer and connectors with diffusers' and Lightricks' names.
    pub(super) fn new(model: &ModelSource) -> Result<Self, WeightsError> {
        let mut modules: BTreeMap<String, BTreeSet<(Component, String)>> = BTreeMap::new();
        for component in COMPONENTS.into_iter().filter(|component| model.has(*component)) {
            let checkpoint = model.checkpoint(component)?;
            for module in checkpoint.names().filter_map(|name| name.strip_suffix(".weight")) {
                for name in [module.to_string(), keys::lightricks(component, module)] {
                    modules.entry(name.replace('.', "_")).or_default().insert((component, module.to_string()));
                }
            }
        }
        Ok(FlatModules(modules))
    }

    /// Returns the modules that a name may refer to. The name may begin with prefixes of enclosing modules.
    pub(super) fn find(&self, flat: &str) -> BTreeSet<&(Component, String)> {
        let names = unprefixed(flat);
        names.iter().filter_map(|name| self.0.get(*name)).flatten().collect()
    }

    /// Returns the module with the most similar name.
    pub(super) fn most_similar(&self, flat: &str) -> Option<&(Component, String)> {
        let near = most_similar(self.0.keys().map(String::as_str), unprefixed(flat).last()?)?;
        self.0[near].first()
    }
}

/// Returns a name, followed by the shorter names without prefixes of enclosing modules.
fn unprefixed(flat: &str) -> Vec<&str> {
    let mut names = vec![flat];
    for prefix in ["model_", "diffusion_model_", "connectors_", "text_embedding_projection_"] {
        let stripped: Vec<&str> = names.iter().filter_map(|name| name.strip_prefix(prefix)).collect();
        names.extend(stripped);
    }
    names
}

/// Returns the element of `names` that is most similar to `name`.
pub(super) fn most_similar<'a>(names: impl Iterator<Item = &'a str>, name: &str) -> Option<&'a str> {
    names.min_by_key(|known| strsim::levenshtein(known, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_names_split_into_module_and_role() {
        for (key, module, role) in [
            ("a.b.lora_A.weight", "a.b", LoraTensorRole::Down),
            ("a.b.lora_A.default.weight", "a.b", LoraTensorRole::Down),
            ("a.b.lora_B.bias", "a.b", LoraTensorRole::UpBias),
            ("a.b.lora_magnitude_vector", "a.b", LoraTensorRole::PeftMagnitude),
            ("a.b.lora_magnitude_vector.weight", "a.b", LoraTensorRole::PeftMagnitude),
            ("a.b.lora_magnitude_vector.default.weight", "a.b", LoraTensorRole::PeftMagnitude),
            ("a.b.lokr_w1_a", "a.b", LoraTensorRole::Kron1A),
            ("a.b.lokr_w1.default", "a.b", LoraTensorRole::Kron1),
            ("lora_unet_a_b.dora_scale", "lora_unet_a_b", LoraTensorRole::LycorisMagnitude),
            ("a.b.diff_b", "a.b", LoraTensorRole::DiffBias),
        ] {
            assert_eq!(split(key), Ok((module, role)), "{key}");
        }
        for key in ["a.b.weight", "a.lora_A.x.y.weight", "a.alpha.default", "a.lora_C.weight", "a.diff.weight"] {
            assert!(split(key).is_err_and(|why| why.contains("is not part of a LoRA")), "{key}");
        }
    }

    #[test]
    fn all_known_prefixes_map_to_the_same_module() {
        let named = |component, name: &str| LoraModule::Named(component, name.to_string());
        let time = named(Component::Transformer, "time_embed.linear");
        for prefix in ["", "diffusion_model.", "model.diffusion_model.", "base_model.model.", "transformer."] {
            assert_eq!(module(&format!("{prefix}adaln_single.linear")), time, "{prefix}");
            assert_eq!(module(&format!("{prefix}time_embed.linear")), time, "{prefix}");
        }
        let connector = named(Component::Connectors, "video_connector.transformer_blocks.0.attn1.to_q");
        for name in [
            "connectors.video_connector.transformer_blocks.0.attn1.to_q",
            "diffusion_model.connectors.video_connector.transformer_blocks.0.attn1.to_q",
            "video_connector.transformer_blocks.0.attn1.to_q",
            "diffusion_model.video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q",
        ] {
            assert_eq!(module(name), connector, "{name}");
        }
        let projection = named(Component::Connectors, "text_proj_in");
        for name in
            ["text_embedding_projection.aggregate_embed", "diffusion_model.text_embedding_projection.aggregate_embed"]
        {
            assert_eq!(module(name), projection, "{name}");
        }
        assert_eq!(module("lora_unet_model_a_b"), LoraModule::Flat("model_a_b".into()));
    }
}
