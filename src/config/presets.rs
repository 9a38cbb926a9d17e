//! Default values, and the files of `configs/` and `shardings/` that are embedded in the binary.

use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use serde_json::Value;

use super::error::{ConfigError, ValueOrigin};
use super::schema::Config;
use super::tree::Tree;
use super::validate::{in_file, validate};
use super::yaml::{self, YamlData, YamlNode};

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

/// Shipped configurations, by name.
pub const CONFIGS: [(&str, &str); 37] = [
    config!("ltx2"),
    config!("ltx2_full_guidance"),
    config!("ltx2_two_stage"),
    config!("ltx2_distilled"),
    config!("ltx2_hq"),
    config!("ltx2_3"),
    config!("ltx2_3_two_stage"),
    config!("ltx2_3_distilled"),
    config!("ltx2_3_hq"),
    config!("ltx2_5"),
    config!("ltx2_5_two_stage"),
    config!("ltx2_5_distilled"),
    config!("ltx2_5_hq"),
    config!("ltx2_5_dfr"),
    config!("nano"),
    config!("nano_two_stage"),
    config!("nano_2_0"),
    config!("nano_2_3"),
    config!("nano_2_5"),
    config!("tpu/v5e-8-int8"),
    config!("tpu/v5e-16"),
    config!("tpu/v5e-16-int8"),
    config!("tpu/v5e-16-large"),
    config!("tpu/v6e-4-int8"),
    config!("tpu/v6e-8"),
    config!("tpu/v6e-8-2_3"),
    config!("tpu/v6e-8-2_5"),
    config!("tpu/v6e-8-int8"),
    config!("tpu/v6e-8-large"),
    config!("tpu/v6e-16"),
    config!("tpu/v6e-64"),
    config!("tpu/v5p-8"),
    config!("tpu/v5p-8-2_5"),
    config!("tpu/v5p-32"),
    config!("tpu/tpu7x-8"),
    config!("tpu/tpu7x-8-2_5"),
    config!("tpu/tpu7x-8-2_3-large"),
];

/// Shipped layouts, by name: recommended ones first, then historical ones.
pub(crate) const LAYOUTS: [(&str, &str); 22] = [
    shipped!("replicated"),
    shipped!("sequence"),
    shipped!("ring"),
    shipped!("ulysses"),
    shipped!("hybrid"),
    shipped!("cfg"),
    shipped!("cfg-ulysses"),
    shipped!("cfg-ulysses-encoder"),
    shipped!("cfg-hybrid"),
    shipped!("tensor"),
    shipped!("tensor-encoder"),
    shipped!("tensor-sequence"),
    shipped!("tensor-hybrid"),
    shipped!("fsdp-ulysses"),
    shipped!("fsdp-sequence"),
    shipped!("fsdp-ffn"),
    shipped!("before-385"),
    shipped!("ffn-matched"),
    shipped!("qkv-unsharded"),
    shipped!("out-unsharded"),
    shipped!("tensor-gathered-ffn"),
    shipped!("rope-gathered"),
];

/// Returns the names of the recommended layouts. Historical layouts are kept for measurements only.
pub fn shipped_layouts() -> impl Iterator<Item = &'static str> {
    LAYOUTS.into_iter().filter(|(_, text)| !text.starts_with("# History")).map(|(name, _)| name)
}

/// Minimum Jaro-Winkler similarity of names that an error suggests.
const SIMILAR: f64 = 0.8;

/// Shipped files, as pairs of name and text.
pub(crate) type Shipped = &'static [(&'static str, &'static str)];

/// Returns a shipped file by name, with or without `.yml`.
pub(crate) fn find(shipped: Shipped, name: &str) -> Option<(&'static str, &'static str)> {
    let name = name.strip_suffix(".yml").unwrap_or(name);
    shipped.iter().find(|(n, _)| *n == name).copied()
}

/// Returns a shipped configuration by its name or its path in the repository.
pub(crate) fn shipped_config(name: &str) -> Option<(&'static str, &'static str)> {
    find(&CONFIGS, name.strip_prefix("configs/").unwrap_or(name))
}

/// Returns the names that are similar to `name`, the most similar first, at most three. Compares the last components of
/// paths, without `.yml`.
fn similar_names(shipped: Shipped, name: &str) -> Vec<&'static str> {
    let last = |name: &str| {
        let name = name.strip_suffix(".yml").unwrap_or(name);
        name.rsplit('/').next().unwrap_or(name).to_string()
    };
    let wanted = last(name);
    let scored = shipped.iter().map(|(own, _)| (strsim::jaro_winkler(&last(own), &wanted), *own));
    let mut similar: Vec<_> = scored.filter(|(score, _)| *score >= SIMILAR).collect();
    similar.sort_by(|a, b| b.0.total_cmp(&a.0));
    similar.into_iter().take(3).map(|(_, name)| name).collect()
}

/// Returns the error for a name that is neither a file nor shipped, with similar shipped names. `command` lists all
/// shipped names.
pub(crate) fn not_shipped(shipped: Shipped, command: &str, name: &str) -> ConfigError {
    let similar = similar_names(shipped, name).iter().map(|name| format!("'{name}'")).collect::<Vec<_>>();
    let hint = match similar.split_last() {
        None => String::new(),
        Some((only, [])) => format!("did you mean {only}? "),
        Some((last, others)) => format!("did you mean {} or {last}? ", others.join(", ")),
    };
    let what = command.trim_end_matches('s');
    ConfigError::argument(format!("{name}: no such file or {what}; {hint}`ltx2 {command}` lists every {what}"))
}

/// Returns the first sentence of the comment at the start of a shipped file.
pub(crate) fn summary(text: &str) -> String {
    let comment = text.lines().map_while(|line| line.strip_prefix("# ")).collect::<Vec<_>>().join(" ");
    comment.split_once(". ").map_or(comment.trim_end_matches('.'), |(first, _)| first).to_string()
}

/// Returns the shipped configuration that a configuration file is an unmodified copy of, if any. TPU configurations do
/// not count, because they are for any model.
pub(super) fn model_config(label: &str, text: &str) -> Option<&'static str> {
    let name = label.rsplit_once("configs/").map_or(label, |(_, name)| name);
    let (name, own) = shipped_config(name)?;
    (own == text && !name.starts_with("tpu/")).then_some(name)
}

/// Returns whether a layout is shipped, given its name or its path in the repository.
pub(crate) fn is_shipped_layout(name: &str) -> bool {
    shipped_layout(name).is_some()
}

/// Returns a shipped layout by its name or its path in the repository.
pub(crate) fn shipped_layout(name: &str) -> Option<(&'static str, &'static str)> {
    find(&LAYOUTS, name.strip_prefix("shardings/").unwrap_or(name))
}

/// Returns whether a value is from a preset or an unmodified shipped configuration, including a copy that was loaded
/// from a different path.
pub(super) fn is_shipped(origin: &ValueOrigin) -> bool {
    match origin {
        ValueOrigin::Preset(_) => true,
        ValueOrigin::File { file, .. } => {
            let name = file.rsplit_once("configs/").map_or(file.as_str(), |(_, name)| name);
            let is_same = |text: &str| std::fs::read_to_string(file).map_or(true, |own| own == text);
            shipped_config(name).is_some_and(|(_, text)| is_same(text))
        }
        _ => false,
    }
}

/// Returns the default of every key.
pub(super) fn defaults() -> &'static Tree {
    static DEFAULTS: LazyLock<Tree> = LazyLock::new(|| {
        let value = serde_json::to_value(Config::default()).expect("a configuration serializes");
        Tree::from_node(&YamlNode::from_value(value), &|_| ValueOrigin::Default)
    });
    &DEFAULTS
}

/// Returns a preset and the presets it extends, base first. Each preset is parsed once per process.
pub(super) fn preset_layers(name: &'static str) -> Result<Vec<Tree>, ConfigError> {
    static PARSED: Mutex<BTreeMap<&str, Vec<Tree>>> = Mutex::new(BTreeMap::new());
    let parsed = || PARSED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(layers) = parsed().get(name) {
        return Ok(layers.clone());
    }
    let layers = parse_preset(name)?;
    parsed().insert(name, layers.clone());
    Ok(layers)
}

fn parse_preset(name: &'static str) -> Result<Vec<Tree>, ConfigError> {
    let text = find(&CONFIGS, name).map_or("", |(_, text)| text);
    let node = yaml::parse(text, name)?;
    validate(&node, &in_file(name))?;
    let parent = match node.get("extends") {
        Some(YamlNode { data: YamlData::Scalar(Value::String(parent)), .. }) => find(&CONFIGS, parent),
        _ => None,
    };
    let mut layers = parent.map_or(Ok(Vec::new()), |(parent, _)| preset_layers(parent))?;
    let mut own = Tree::from_node(&node, &|_| ValueOrigin::Preset(name));
    own.remove("extends");
    layers.push(own);
    Ok(layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_suggest_similar_ones() {
        let said = |shipped, command, name: &str| not_shipped(shipped, command, name).to_string();
        let error = said(&CONFIGS, "presets", "ltx3");
        assert!(
            error.starts_with("ltx3: no such file or preset; did you mean ") && error.contains("'ltx2'"),
            "{error}"
        );
        assert!(error.ends_with("? `ltx2 presets` lists every preset"), "{error}");
        assert!(said(&CONFIGS, "presets", "v6e-9").contains("'tpu/v6e-8'"));
        assert!(said(&CONFIGS, "presets", "configs/ltx2_hp.yml").contains("did you mean 'ltx2_hq'"));
        assert!(said(&LAYOUTS, "layouts", "ulyses").contains("did you mean 'ulysses'"));
        let none = "foo: no such file or layout; `ltx2 layouts` lists every layout";
        assert_eq!(said(&LAYOUTS, "layouts", "foo"), none);
    }

    #[test]
    fn every_shipped_file_has_a_summary() {
        for (name, text) in CONFIGS.iter().chain(&LAYOUTS) {
            let summary = summary(text);
            assert!((20..240).contains(&summary.len()), "{name}: {summary}");
        }
    }
}
