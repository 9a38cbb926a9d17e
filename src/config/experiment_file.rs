//! Reads and validates experiment files.

use std::path::Path;

use super::error::{ConfigError, ValueOrigin};
use super::experiment::{Cases, Experiment, OneOrMany};
use super::validate::validate_experiment;
use super::yaml::{self, YamlData, YamlNode};
use super::{paths, presets};
use crate::text_file;

/// Maximum number of cases. Compiling a case takes seconds, and all cases are listed before the first one runs.
const MOST: usize = 4000;

/// Reads an experiment file. Names of files next to it are replaced by paths; other names refer to shipped files.
///
/// # Errors
/// Returns an error if the file cannot be read, has no cases or too many, sets unknown or mutually exclusive keys or a
/// value of the wrong type, or refers to an unknown configuration or slice.
pub fn read_experiment(path: &Path) -> Result<Experiment, ConfigError> {
    let label = path.display().to_string();
    let text = text_file::read(path).map_err(|source| ConfigError::unreadable(path, source))?;
    let node = yaml::parse(&text, &label)?;
    validate_experiment(&node, &label)?;
    let wrong = |message: String| ConfigError::syntax(&*label, message);
    let mut file: Experiment = serde_json::from_value(node.to_value()).map_err(|e| wrong(e.to_string()))?;
    ParsedExperiment { label: &label, node: &node }.check(&file)?;
    from_folder(&mut file, path.parent().unwrap_or(Path::new("")));
    ParsedExperiment { label: &label, node: &node }.check_names(&file)?;
    let count = file.count();
    if count > MOST {
        return Err(wrong(format!("{count} cases exceed the limit of {MOST}")));
    }
    let cases = file.cases();
    if cases.is_empty() {
        return Err(wrong("no cases: set layouts and targets, slices, or include".into()));
    }
    for case in &cases {
        if case.target.is_none() {
            return Err(wrong("a case has no target: set targets, e.g. [tpu:v5p:2x2x2], or slices".into()));
        }
        case.size().map_err(|e| wrong(e.to_string()))?;
    }
    Ok(file)
}

/// Replaces names of files that exist in `folder` by paths that start with `folder`.
fn from_folder(file: &mut Experiment, folder: &Path) {
    let resolve = |name: &mut String| {
        if folder.join(name.as_str()).is_file() {
            *name = paths::join(folder, name);
        }
    };
    resolve(&mut file.config);
    file.configs.iter_mut().chain(&mut file.layouts).for_each(resolve);
    file.slices.0.iter_mut().map(|(name, _)| name).for_each(resolve);
    for Cases { config, slice, layout, .. } in file.include.iter_mut().chain(&mut file.exclude) {
        let named = [config, slice, layout].into_iter().flatten();
        named.flat_map(OneOrMany::as_mut_slice).for_each(resolve);
    }
}

/// Experiment file with its YAML tree, for line numbers in errors.
struct ParsedExperiment<'a> {
    label: &'a str,
    node: &'a YamlNode,
}

/// Keys whose values are lists of [`Cases`].
const LISTS: [&str; 2] = ["include", "exclude"];

impl ParsedExperiment<'_> {
    fn place(&self, node: &YamlNode) -> String {
        format!("{}:{}", self.label, node.line)
    }

    /// Returns the YAML entries of the key `list`.
    fn entries(&self, list: &str) -> &[YamlNode] {
        match self.node.get(list) {
            Some(YamlNode { data: YamlData::List(entries), .. }) => entries,
            _ => &[],
        }
    }

    /// Rejects mutually exclusive keys.
    fn check(&self, file: &Experiment) -> Result<(), ConfigError> {
        let both = |first, second, node: &YamlNode| {
            let origin = ValueOrigin::File { file: self.label.into(), line: node.line };
            Err(ConfigError::exclusive(origin, first, second))
        };
        if let (Some(_), Some(node)) = (self.node.get("config"), self.node.get("configs")) {
            return both("config", "configs", node);
        }
        if file.slices.0.is_empty() {
            return Ok(());
        }
        if let Some(node) = self.node.get("targets") {
            return both("slices", "targets", node);
        }
        let mut entries = LISTS.into_iter().flat_map(|list| self.entries(list));
        entries.find_map(|entry| entry.get("target")).map_or(Ok(()), |node| both("slices", "target", node))
    }

    /// Checks that every configuration is a file or a shipped configuration, and that every slice of an entry is a key
    /// of `slices`.
    fn check_names(&self, file: &Experiment) -> Result<(), ConfigError> {
        let root = |key: &str| self.node.get(key).unwrap_or(self.node);
        self.check_config_name(&file.config, "config", root("config"))?;
        file.configs.iter().try_for_each(|name| self.check_config_name(name, "configs", root("configs")))?;
        for name in file.slices.names() {
            let slices = root("slices");
            // `from_folder` may have replaced the key by a path, which the parsed YAML does not contain.
            self.check_config_name(name, "slices", slices.get(name).unwrap_or(slices))?;
        }
        for (list, all) in LISTS.into_iter().zip([&file.include, &file.exclude]) {
            for (Cases { config, slice, .. }, entry) in all.iter().zip(self.entries(list)) {
                let at = |key: &str| entry.get(key).unwrap_or(entry);
                for name in config.iter().flat_map(OneOrMany::as_slice) {
                    self.check_config_name(name, &format!("{list}: config"), at("config"))?;
                }
                for name in slice.iter().flat_map(OneOrMany::as_slice) {
                    self.check_slice_name(name, file, &format!("{list}: slice"), at("slice"))?;
                }
            }
        }
        Ok(())
    }

    fn check_config_name(&self, name: &str, key: &str, node: &YamlNode) -> Result<(), ConfigError> {
        if Path::new(name).is_file() || presets::shipped_config(name).is_some() {
            return Ok(());
        }
        let message = format!("'{key}': '{name}' is neither a file nor a shipped configuration");
        Err(ConfigError::syntax(self.place(node), message))
    }

    fn check_slice_name(&self, name: &str, file: &Experiment, key: &str, node: &YamlNode) -> Result<(), ConfigError> {
        if file.slices.names().any(|slice| slice == name) {
            return Ok(());
        }
        let all = file.slices.names().map(String::as_str).collect::<Vec<_>>().join(", ");
        let message = match all.as_str() {
            "" => format!("'{key}': '{name}' is not defined; add the slice and its target to 'slices'"),
            all => format!("'{key}': '{name}' is not one of the slices {all}"),
        };
        Err(ConfigError::syntax(self.place(node), message))
    }
}
