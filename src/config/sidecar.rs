//! Loads sidecars as configurations. A sidecar is the JSON file next to a video; its key `config` holds the complete
//! configuration that the video was generated with.

use serde_json::Value;

use super::check;
use super::effect::RULES;
use super::effect_facts::EffectFacts;
use super::error::{ConfigError, ValueOrigin};
use super::paths::model_paths;
use super::schema::{Config, LayerForm, RecordedLayers};
use super::tree::Tree;
use super::yaml::{YamlData, YamlNode};
use crate::weights::Version;

/// Data that a sidecar records about its run, in addition to the configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Sidecar {
    /// Path of the sidecar.
    pub file: String,
    /// Hashes of the input files, by path.
    pub inputs: Value,
    /// Path and fingerprints of the model.
    pub model: Value,
    /// Versions of this program, the plugin and the platform.
    pub versions: Value,
    /// Form of the loops over layers if `runtime.layers` was `auto`. `None`: the configuration of the recorded run, a flag
    /// or another file sets it.
    pub layers: Option<RecordedLayers>,
    /// Prompts as the user wrote them and how they were enhanced; null if they were not enhanced.
    pub enhancement: Value,
    /// Whether a flag, `--set` or another file selects a model other than that of the sidecar.
    pub uses_other_model: bool,
    /// Whether a model or input file that differs from the one recorded in the sidecar causes a warning instead of an
    /// error (`--allow-changed-inputs`).
    pub allows_changes: bool,
}

/// Returns the keys that identify the model.
fn model_keys() -> impl Iterator<Item = String> {
    model_paths().chain(["variant", "weights", "weights_seed"]).map(|key| format!("model.{key}"))
}

/// Reason that a sidecar records for the form of layers if the configuration sets it.
pub(crate) const SET_LAYERS: &str = "set in the configuration";

/// Returns the form of layers that `runtime.layers: auto` selected in a recorded run, from the key `layers` of its
/// sidecar. `None`: the configuration set it.
fn recorded_layers(layers: &Value) -> Option<RecordedLayers> {
    if layers["reason"] == SET_LAYERS {
        return None;
    }
    let form = if layers["form"] == LayerForm::Loop.name() { LayerForm::Loop } else { LayerForm::Unrolled };
    // Runs whose sidecars have no key `layers` unrolled layers where this is the platform's default.
    Some(RecordedLayers { platform: layers["platform"].as_str().map(String::from), form })
}

impl Sidecar {
    /// Returns the sidecar in the parsed file `root`; `None` if the file is a plain configuration.
    pub(super) fn from_node(root: &YamlNode, file: &str) -> Option<Self> {
        let is_map = |node: &YamlNode| matches!(node.data, YamlData::Map(_));
        root.get("config").filter(|config| is_map(config))?;
        let part = |key: &str| root.get(key).map_or(Value::Null, YamlNode::to_value);
        Some(Sidecar {
            file: file.into(),
            inputs: part("inputs"),
            model: part("model"),
            versions: part("versions"),
            layers: recorded_layers(&part("layers")),
            enhancement: part("enhancement"),
            uses_other_model: false,
            allows_changes: false,
        })
    }

    /// Sets [`Sidecar::uses_other_model`] and clears [`Sidecar::layers`] according to the merged configuration.
    pub(super) fn within(mut self, merged: &Tree) -> Self {
        if !matches!(merged.origin("runtime.layers"), ValueOrigin::Default | ValueOrigin::Sidecar { .. }) {
            self.layers = None;
        }
        self.uses_other_model = model_keys().any(|key| match merged.origin(&key) {
            ValueOrigin::Default | ValueOrigin::Preset(_) => false,
            ValueOrigin::File { file, .. } | ValueOrigin::Sidecar { file, .. } => file != self.file,
            _ => true,
        });
        self
    }
}

/// Keys of `output` that request files.
const OUTPUTS: [&str; 6] = ["path", "save_frames", "save_audio", "save_exr", "preview_every", "preview_decoder"];

/// Returns the configuration of a sidecar (its key `config`), and whether the file is a sidecar. The keys that request
/// files are removed so that a rerun does not overwrite the files of the first run: the video gets a default name, and
/// frames, audio and previews are saved only on request. A form of layers that the program selected is also removed,
/// because it applies only to the platform of the recorded run ([`Sidecar::layers`]).
pub(super) fn unwrap(root: YamlNode) -> (YamlNode, bool) {
    let YamlData::Map(entries) = root.data else { return (root, false) };
    let Some(at) = entries.iter().position(|(k, n)| k == "config" && matches!(n.data, YamlData::Map(_))) else {
        return (YamlNode { line: root.line, data: YamlData::Map(entries) }, false);
    };
    let layers = entries.iter().find(|(k, _)| k == "layers").map_or(Value::Null, |(_, layers)| layers.to_value());
    let selected = recorded_layers(&layers).filter(|_| !layers.is_null()).is_some();
    let mut config = entries.into_iter().nth(at).map_or(YamlNode::from_value(Value::Null), |(_, n)| n);
    if let YamlData::Map(sections) = &mut config.data {
        for (name, section) in sections {
            let is_removed = |key: &str| match name.as_str() {
                "output" => OUTPUTS.contains(&key),
                "runtime" => selected && key == "layers",
                _ => false,
            };
            if let YamlData::Map(keys) = &mut section.data {
                keys.retain(|(key, _)| !is_removed(key));
            }
        }
    }
    (config, true)
}

/// If the run enhances prompts, replaces the enhanced prompts of the sidecar by those that the user wrote, so that they
/// are not enhanced twice.
pub(super) fn restore_prompts(layers: &mut [Tree], sidecar: &Sidecar) {
    let enhances = layers.iter().rev().find_map(|layer| layer.leaf("request.enhance_prompt"));
    if enhances.is_none_or(|(value, _)| *value != Value::Bool(true)) {
        return;
    }
    let original = |enhanced: &Value| {
        let all = sidecar.enhancement["prompts"].as_array()?;
        all.iter().find(|own| own["enhanced"] == *enhanced).map(|own| own["prompt"].clone())
    };
    for layer in layers {
        for key in ["request.prompt", "request.chain.prompts"] {
            let Some((value, origin)) = layer.leaf(key) else { continue };
            let (mut value, origin) = (value.clone(), origin.clone());
            if !matches!(&origin, ValueOrigin::Sidecar { file, .. } if *file == sidecar.file) {
                continue;
            }
            let prompts = match &mut value {
                Value::Array(prompts) => prompts.as_mut_slice(),
                one => std::slice::from_mut(one),
            };
            for prompt in prompts {
                if let Some(original) = original(prompt) {
                    tracing::info!("{}: enhancing the original prompt {original}", sidecar.file);
                    *prompt = original;
                }
            }
            layer.set(key, value, &origin);
        }
    }
}

/// Returns whether the value at a key comes from a sidecar.
pub(super) fn holds(tree: &Tree, key: &str) -> bool {
    matches!(tree.origin(key), ValueOrigin::Sidecar { .. })
}

/// Returns the number of frames that a sidecar among the layers sets.
pub(super) fn frames(layers: &[Tree]) -> Option<usize> {
    let of = |layer: &Tree| layer.leaf("request.num_frames").map(|(value, origin)| (value.clone(), origin.clone()));
    let found = layers.iter().filter_map(of).find(|(_, origin)| matches!(origin, ValueOrigin::Sidecar { .. }))?;
    found.0.as_u64().and_then(|frames| usize::try_from(frames).ok())
}

/// Resets values of the sidecar that had an effect in the recorded run but have none with the current flags, such as
/// the span of a retake in another pipeline, or an option of another sampler. `without_flags` is `merged` without the
/// flags; `config` is the typed form of `merged`. Returns whether a value was reset.
pub(super) fn prune(
    merged: &mut Tree,
    below: &Tree,
    without_flags: &Tree,
    config: &Config,
    version: Version,
) -> Result<bool, ConfigError> {
    let has = |is: &dyn Fn(&str, &ValueOrigin) -> bool| {
        let mut leaves = Vec::new();
        merged.leaves(String::new(), &mut leaves);
        leaves.iter().any(|(path, origin)| is(path, origin))
    };
    let is_overridden =
        has(&|path, origin| matches!(origin, ValueOrigin::Set | ValueOrigin::Flag(_)) && !path.starts_with("output."));
    if !is_overridden || !has(&|_, origin| matches!(origin, ValueOrigin::Sidecar { .. })) {
        return Ok(false);
    }
    let own = EffectFacts { config: &check::typed(without_flags)?, version };
    let facts = EffectFacts { config, version };
    let mut changed = false;
    for rule in RULES {
        for key in rule.keys {
            let all = {
                let mut own = Vec::new();
                merged.get(key).into_iter().for_each(|tree| tree.leaves((*key).into(), &mut own));
                !own.is_empty() && own.iter().all(|(_, origin)| matches!(origin, ValueOrigin::Sidecar { .. }))
            };
            let base = below.get(key).cloned().unwrap_or(Tree::Leaf(Value::Null, ValueOrigin::Default));
            let value = merged.get(key).map(Tree::to_value);
            if !all || value == Some(base.to_value()) || (rule.reason)(&own, key).is_some() {
                continue;
            }
            if let Some(why) = (rule.reason)(&facts, key) {
                tracing::info!("ignoring {key} from {}: {why}", merged.origin(key));
                merged.replace(key, base);
                changed = true;
            }
        }
    }
    Ok(changed)
}
