//! Command-line overrides of a configuration.

use serde::Serialize;
use serde_json::Value;

/// Command-line flag that sets a key.
#[derive(Clone, Debug)]
pub struct Flag {
    /// Name without dashes.
    pub name: &'static str,
    /// Key that the flag sets.
    pub path: &'static str,
    pub value: Value,
    /// Whether `--set` of the same key takes precedence; true for flags that set the keys of both streams.
    pub yields: bool,
}

/// Configuration part of a command line: files and overrides.
#[derive(Clone, Debug, Default)]
pub struct CliOverrides {
    /// YAML files, sidecars or names of shipped configurations; each overrides the previous ones.
    pub files: Vec<String>,
    pub set: Vec<String>,
    pub flags: Vec<Flag>,
    pub seconds: Option<f64>,
    pub mesh: Option<String>,
    /// Whether a model or input file that differs from the one recorded in a sidecar causes a warning instead of an
    /// error.
    pub allow_changed_inputs: bool,
}

impl CliOverrides {
    /// Adds a flag, unless its value is null, false or an empty list.
    pub fn flag(&mut self, name: &'static str, path: &'static str, value: impl Serialize) {
        self.add(name, &[path], value, false);
    }

    /// Adds a flag that sets several keys; `--set` of one of the keys takes precedence.
    pub fn shared_flag(&mut self, name: &'static str, paths: &[&'static str], value: impl Serialize) {
        self.add(name, paths, value, true);
    }

    fn add(&mut self, name: &'static str, paths: &[&'static str], value: impl Serialize, yields: bool) {
        let value = serde_json::to_value(value).expect("the value of a flag serializes");
        let is_set = match &value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(items) => !items.is_empty(),
            _ => true,
        };
        let flag = |path: &&'static str| Flag { name, path, value: value.clone(), yields };
        self.flags.extend(paths.iter().filter(|_| is_set).map(flag));
    }
}
