//! Sections of the configuration in the header of Lightricks' single files.

use std::path::Path;

use serde_json::{Map, Value};

use super::error::WeightsError;

/// A section of the header's `config`, with file and name for error messages.
#[derive(Clone, Copy)]
pub(super) struct Section<'a> {
    pub(super) path: &'a Path,
    name: &'a str,
    pub(super) values: Option<&'a Map<String, Value>>,
}

impl<'a> Section<'a> {
    pub(super) fn new(path: &'a Path, config: &'a Value, name: &'a str) -> Self {
        Section { path, name, values: config.get(name).and_then(Value::as_object) }
    }

    pub(super) fn sub(self, name: &'a str) -> Self {
        Section { values: self.values.and_then(|v| v.get(name)).and_then(Value::as_object), name, ..self }
    }

    pub(super) fn get(self, key: &str) -> Option<&'a Value> {
        self.values?.get(key).filter(|v| !v.is_null())
    }

    /// Returns a value, or the training code's default.
    pub(super) fn or(self, key: &str, default: impl Into<Value>) -> Value {
        self.get(key).cloned().unwrap_or_else(|| default.into())
    }

    /// Returns entry `i` of a list, or of the training code's default list.
    pub(super) fn entry(self, key: &str, i: usize, default: Value) -> Result<Value, WeightsError> {
        let list = self.or(key, default);
        list.get(i).cloned().ok_or_else(|| self.error(key, format!("has no entry {i}: {list}")))
    }

    pub(super) fn flag(self, key: &str, default: bool) -> Result<bool, WeightsError> {
        let typed = |got: &Value| got.as_bool().ok_or_else(|| self.error(key, format!("is {got}, not true or false")));
        self.get(key).map_or(Ok(default), typed)
    }

    /// Returns the index of a string value among the supported ones; 0 if the key is absent.
    pub(super) fn choice(self, key: &str, known: [&str; 2]) -> Result<usize, WeightsError> {
        let Some(got) = self.get(key) else { return Ok(0) };
        let [a, b] = known;
        let place = known.iter().position(|name| got == name);
        place.ok_or_else(|| self.error(key, format!("is {got}, but only \"{a}\" and \"{b}\" are supported")))
    }

    pub(super) fn error(self, key: &str, reason: impl Into<String>) -> WeightsError {
        let key = format!("config.{}.{key}", self.name);
        WeightsError::Config { path: self.path.to_path_buf(), key, reason: reason.into() }
    }

    /// Returns an error if the key has a value other than `want`, the only supported one.
    pub(super) fn require(self, key: &str, want: Value) -> Result<(), WeightsError> {
        match self.get(key) {
            Some(got) if *got != want => Err(self.error(key, format!("is {got}, but only {want} is supported"))),
            _ => Ok(()),
        }
    }
}
