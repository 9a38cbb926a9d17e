//! Configuration of an adapter: the entry `lora_adapter_metadata` of diffusers' headers, or PEFT's
//! `adapter_config.json`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::keys::in_own_model;
use super::wrong;
use crate::Component;
use crate::checkpoint::{Checkpoint, read_json};
use crate::error::WeightsError;

/// Header key of diffusers' adapter configuration.
const HEADER: &str = "lora_adapter_metadata";
/// Weight file in a folder that PEFT saved.
pub(super) const PEFT_WEIGHTS: &str = "adapter_model.safetensors";
/// Configuration in a folder that PEFT saved.
const PEFT_CONFIG: &str = "adapter_config.json";

/// Keys that change the merged weights in ways that are not supported, if they are neither null, false nor empty.
const UNSUPPORTED: [&str; 8] = [
    "fan_in_fan_out",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "alora_invocation_tokens",
    "layer_replication",
    "target_parameters",
    "modules_to_save",
];
/// Values of `init_lora_weights` with which PEFT changes the weights of the model.
const CHANGED_MODEL: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// Returns the path of the configuration that PEFT saved with a weight file, if there is one.
fn peft_config(weights: &Path) -> Option<PathBuf> {
    let config = weights.with_file_name(PEFT_CONFIG);
    (weights.file_name()? == PEFT_WEIGHTS && config.is_file()).then_some(config)
}

/// Settings of one module in an adapter's configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Listed {
    pub(super) alpha: Option<f64>,
    pub(super) rank: Option<f64>,
    /// Whether alpha is divided by the square root of the rank.
    pub(super) is_rank_stabilized: bool,
}

/// An adapter's configuration; `Null` if the adapter has none.
#[derive(Debug)]
pub(super) struct Metadata(Value);

impl Metadata {
    /// Reads the configuration of an adapter.
    ///
    /// # Errors
    /// Returns an error if the configuration is damaged or enables something that is not supported.
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<Self, WeightsError> {
        let path = checkpoint.path();
        let (source, value) = match (peft_config(path), checkpoint.metadata(HEADER)) {
            (Some(config), _) => (PEFT_CONFIG, read_json(&config)?),
            (None, Some(text)) => {
                let fail = |e| wrong(path, HEADER, format!("is not JSON: {e}"));
                (HEADER, serde_json::from_str(text).map_err(fail)?)
            }
            (None, None) => return Ok(Metadata(Value::Null)),
        };
        let metadata = Metadata(value);
        let faults = [Component::Transformer, Component::Connectors].map(|component| metadata.fault(component));
        match faults.into_iter().flatten().next() {
            Some(reason) => Err(wrong(path, source, reason)),
            None => Ok(metadata),
        }
    }

    /// Returns why the configuration is not supported, as a predicate such as `enables use_qalora, …`.
    fn fault(&self, component: Component) -> Option<String> {
        let is_set = |value: &Value| match value {
            Value::Bool(on) => *on,
            Value::Array(items) => !items.is_empty(),
            Value::Object(items) => !items.is_empty(),
            _ => true,
        };
        if let Some(key) = UNSUPPORTED.iter().find(|key| self.get(component, key).is_some_and(is_set)) {
            return Some(format!("enables {key}, which is not supported"));
        }
        let init = self.get(component, "init_lora_weights").and_then(Value::as_str).unwrap_or_default();
        if CHANGED_MODEL.iter().any(|kind| init.starts_with(kind)) {
            return Some(format!(
                "has init_lora_weights {init}, which changes the model's weights; save the LoRA with PEFT's \
                 path_initial_model_for_weight_conversion"
            ));
        }
        for (default, patterns) in NUMBERS {
            let defaults = default.iter().filter_map(|key| self.get(component, key));
            let listed = self.patterns(component, patterns);
            if let Some(number) = defaults.chain(listed.map(|(_, number)| number)).find(|number| !number.is_number()) {
                return Some(format!(
                    "has the {} {number}, which is not a number",
                    default[0].trim_start_matches("lora_")
                ));
            }
            // The matrices of a LoRA determine its ranks.
            let is_lora = self.get(component, "peft_type").is_none_or(|kind| kind == "LORA");
            let is_name = |c: char| is_lora && patterns == "rank_pattern" || c.is_alphanumeric() || "._-".contains(c);
            let mut listed = self.patterns(component, patterns);
            if let Some((pattern, _)) = listed.find(|(pattern, _)| !end(pattern).chars().all(is_name)) {
                return Some(format!("has the unsupported {patterns} `{pattern}`; use the end of a module name"));
            }
        }
        None
    }

    fn get(&self, component: Component, key: &str) -> Option<&Value> {
        let own = self.0.get(format!("{}.{key}", component.folder()));
        own.or_else(|| self.0.get(key)).filter(|v| !v.is_null())
    }

    fn patterns(&self, component: Component, key: &str) -> impl Iterator<Item = (&str, &Value)> {
        let listed = self.get(component, key).and_then(Value::as_object);
        listed.into_iter().flatten().map(|(pattern, number)| (&pattern[..], number))
    }

    /// Returns the settings of a module. `names`: its names in the file and in the model.
    pub(super) fn listed(&self, component: Component, names: [&str; 2]) -> Listed {
        let names = [in_own_model(names[0]), names[1]];
        let [alpha, rank] = NUMBERS.map(|(default, patterns)| self.number(component, names, default, patterns));
        let is_rank_stabilized = self.get(component, "use_rslora").and_then(Value::as_bool).unwrap_or(false);
        Listed { alpha, rank, is_rank_stabilized }
    }

    /// Returns the value of the first pattern that matches the end of the module's name, or else the default.
    fn number(&self, component: Component, names: [&str; 2], default: &[&str], patterns: &str) -> Option<f64> {
        let fits = |(pattern, _): &(&str, &Value)| {
            names
                .iter()
                .filter_map(|name| name.strip_suffix(end(pattern)))
                .any(|rest| rest.is_empty() || (!pattern.starts_with('^') && rest.ends_with('.')))
        };
        let own = self.patterns(component, patterns).find(fits).map(|(_, number)| number);
        own.or_else(|| default.iter().find_map(|key| self.get(component, key))).and_then(Value::as_f64)
    }

    /// Returns the bytes of PEFT's configuration of a weight file, which are part of the adapter's fingerprint.
    pub(super) fn peft_bytes(weights: &Path) -> Result<Option<Vec<u8>>, WeightsError> {
        let read = |path: PathBuf| fs::read(&path).map_err(WeightsError::io(&path, "cannot read"));
        peft_config(weights).map(read).transpose()
    }
}

/// Configuration keys of alpha and of the rank: keys of the default for all modules, and the key of the values for
/// modules that match a pattern. PEFT names the default `lora_alpha` for LoRAs and `alpha` for other adapters.
const NUMBERS: [(&[&str], &str); 2] = [(&["lora_alpha", "alpha"], "alpha_pattern"), (&["r"], "rank_pattern")];

/// Removes the leading `^`, which marks a pattern that must match the complete name.
fn end(pattern: &str) -> &str {
    pattern.strip_prefix('^').unwrap_or(pattern)
}
