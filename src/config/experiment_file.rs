//! Reading of an experiment file: names made paths, and what contradicts itself refused with its line.

use std::path::Path;

use super::error::ConfigError;
use super::experiment::{Cases, Experiment, OneOrMany};
use super::validate::validate_experiment;
use super::yaml::{self, Data, Node};
use super::{paths, presets};
use crate::text_file;

/// Most cases of a file: a case takes seconds, and all are written down before the first.
const MOST: usize = 4000;

/// Reads an experiment. Files next to it are named from there; other names are shipped ones.
///
/// # Errors
/// No such file; an unknown key, a wrong type, keys that exclude each other, an unknown configuration or slice, with line;
/// nothing to compile.
pub fn read_experiment(path: &Path) -> Result<Experiment, ConfigError> {
    let label = path.display().to_string();
    let text = text_file::read(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
    let node = yaml::parse(&text, &label)?;
    validate_experiment(&node, &label)?;
    let wrong = |message: String| ConfigError::Syntax { place: label.clone(), message };
    let mut file: Experiment = serde_json::from_value(node.to_value()).map_err(|e| wrong(e.to_string()))?;
    Written { label: &label, node: &node }.check(&file)?;
    from_folder(&mut file, path.parent().unwrap_or(Path::new("")));
    Written { label: &label, node: &node }.names_are_known(&file)?;
    let count = file.count();
    if count > MOST {
        return Err(wrong(format!("{count} cases are more than {MOST}")));
    }
    let cases = file.cases();
    if cases.is_empty() {
        return Err(wrong("no case is left: give layouts and targets, slices, or include".into()));
    }
    for case in &cases {
        if case.target.is_none() {
            return Err(wrong("a case has no target: give targets, e.g. [tpu:v5p:2x2x2], or slices".into()));
        }
        case.size().map_err(|e| wrong(e.to_string()))?;
    }
    Ok(file)
}

/// Names every file beside the experiment from the working directory.
fn from_folder(file: &mut Experiment, folder: &Path) {
    let beside = |name: &mut String| {
        if folder.join(name.as_str()).is_file() {
            *name = paths::join(folder, name);
        }
    };
    beside(&mut file.config);
    file.configs.iter_mut().chain(&mut file.layouts).for_each(beside);
    file.slices.0.iter_mut().map(|(name, _)| name).for_each(beside);
    for Cases { config, slice, layout, .. } in file.include.iter_mut().chain(&mut file.exclude) {
        let named = [config, slice, layout].into_iter().flatten();
        named.flat_map(OneOrMany::as_mut_slice).for_each(beside);
    }
}

/// A file as it was written, for the lines of what is wrong in it.
struct Written<'a> {
    label: &'a str,
    node: &'a Node,
}

/// Keys that name several cases.
const LISTS: [&str; 2] = ["include", "exclude"];

impl Written<'_> {
    fn place(&self, node: &Node) -> String {
        format!("{}:{}", self.label, node.line)
    }

    /// Entries of a list of cases.
    fn entries(&self, list: &str) -> &[Node] {
        match self.node.get(list) {
            Some(Node { data: Data::List(entries), .. }) => entries,
            _ => &[],
        }
    }

    /// Keys that exclude each other.
    fn check(&self, file: &Experiment) -> Result<(), ConfigError> {
        let both = |first, second, node: &Node| Err(ConfigError::Both { place: self.place(node), first, second });
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

    /// Whether every configuration is a file or shipped, and every slice of a case one of `slices`.
    fn names_are_known(&self, file: &Experiment) -> Result<(), ConfigError> {
        let root = |key: &str| self.node.get(key).unwrap_or(self.node);
        self.is_a_config(&file.config, "config", root("config"))?;
        file.configs.iter().try_for_each(|name| self.is_a_config(name, "configs", root("configs")))?;
        for name in file.slices.names() {
            let slices = root("slices");
            // A file beside this one has another name by now; it is there.
            self.is_a_config(name, "slices", slices.get(name).unwrap_or(slices))?;
        }
        for (list, all) in LISTS.into_iter().zip([&file.include, &file.exclude]) {
            for (Cases { config, slice, .. }, entry) in all.iter().zip(self.entries(list)) {
                let at = |key: &str| entry.get(key).unwrap_or(entry);
                for name in config.iter().flat_map(OneOrMany::as_slice) {
                    self.is_a_config(name, &format!("{list}: config"), at("config"))?;
                }
                for name in slice.iter().flat_map(OneOrMany::as_slice) {
                    self.is_a_slice(name, file, &format!("{list}: slice"), at("slice"))?;
                }
            }
        }
        Ok(())
    }

    fn is_a_config(&self, name: &str, key: &str, node: &Node) -> Result<(), ConfigError> {
        if Path::new(name).is_file() || presets::shipped_config(name).is_some() {
            return Ok(());
        }
        let message = format!("'{key}': '{name}' is neither a file nor a shipped configuration");
        Err(ConfigError::Syntax { place: self.place(node), message })
    }

    fn is_a_slice(&self, name: &str, file: &Experiment, key: &str, node: &Node) -> Result<(), ConfigError> {
        if file.slices.names().any(|slice| slice == name) {
            return Ok(());
        }
        let all = file.slices.names().map(String::as_str).collect::<Vec<_>>().join(", ");
        let message = match all.as_str() {
            "" => format!("'{key}': '{name}' needs 'slices', which names it and its target"),
            all => format!("'{key}': '{name}' is not one of the slices {all}"),
        };
        Err(ConfigError::Syntax { place: self.place(node), message })
    }
}
