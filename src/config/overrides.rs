//! The command line as it overrides a configuration.

use serde_json::Value;

/// A flag of the command line that writes a key.
#[derive(Clone, Debug)]
pub struct Flag {
    /// Its name, without dashes.
    pub name: &'static str,
    /// The key it writes.
    pub path: &'static str,
    pub value: Value,
    /// Gives way to `--set` of the same key: flags that write the keys of both streams at once.
    pub yields: bool,
}

/// Configuration as the command line gives it: files, and what overrides their values.
#[derive(Clone, Debug, Default)]
pub struct CliOverrides {
    /// YAML files, sidecars, or names of shipped configurations, each laid over those before it.
    pub files: Vec<String>,
    pub set: Vec<String>,
    pub flags: Vec<Flag>,
    pub seconds: Option<f64>,
    pub mesh: Option<String>,
    /// Inputs and a model that differ from those of a sidecar among the files are a warning instead of an error.
    pub allow_changed_inputs: bool,
}

impl CliOverrides {
    /// Adds a flag, when it was given.
    pub fn flag(&mut self, name: &'static str, path: &'static str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.flags.push(Flag { name, path, value: value.into(), yields: false });
        }
    }

    /// Adds a flag that stands for several keys and gives way to `--set` of one of them.
    pub fn shared_flag(&mut self, name: &'static str, paths: &[&'static str], value: Option<impl Into<Value>>) {
        let value = value.map(Into::into);
        for path in paths {
            self.flags.extend(value.clone().map(|value| Flag { name, path, value, yields: true }));
        }
    }
}
