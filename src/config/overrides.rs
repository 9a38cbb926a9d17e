//! Command-line overrides of a configuration.

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
    /// Whether a model or input file that differs from the one recorded in a sidecar is a warning instead of an error.
    pub allow_changed_inputs: bool,
}

impl CliOverrides {
    /// Adds a flag if it has a value.
    pub fn flag(&mut self, name: &'static str, path: &'static str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.flags.push(Flag { name, path, value: value.into(), yields: false });
        }
    }

    /// Adds a flag that sets several keys; `--set` of one of the keys takes precedence.
    pub fn shared_flag(&mut self, name: &'static str, paths: &[&'static str], value: Option<impl Into<Value>>) {
        let value = value.map(Into::into);
        for path in paths {
            self.flags.extend(value.clone().map(|value| Flag { name, path, value, yields: true }));
        }
    }
}
