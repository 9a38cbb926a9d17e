//! The normalised fields of a request.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::read::{invalid, shown, structure, value};
use super::table::{self, FieldEffect, FieldKind, PATHS, Spec, WRAPPERS};
use crate::serve::error::ApiError;

/// YAML key and field name of each end of a retake's time span.
pub(super) const ENDS: [(&str, &str); 2] = [("from", "start"), ("to", "end")];

/// Fields of a request, with normalised values under canonical names.
#[derive(Debug, Default)]
pub(super) struct RequestFields {
    /// Field values by canonical name.
    pub(super) values: Map<String, Value>,
    /// Name that the client used for each field, by canonical name.
    names: BTreeMap<&'static str, String>,
}

impl RequestFields {
    /// Reads the fields of a body. Fields that contain files are kept unchanged. Errors contain the client's field
    /// names.
    pub(super) fn read(fields: Map<String, Value>) -> Result<Self, ApiError> {
        let mut given = RequestFields::default();
        let mut wrapped = Vec::new();
        for (name, field) in fields {
            match WRAPPERS.contains(&name.as_str()) {
                true => wrapped.push((name, field)),
                false => given.add(&name, name.clone(), field)?,
            }
        }
        for (wrapper, inner) in wrapped {
            let Value::Object(inner) = structure(&wrapper, inner)? else {
                return Err(invalid(&wrapper, "must be an object whose members are fields"));
            };
            for (name, field) in inner.into_iter().filter(|(_, field)| !field.is_null()) {
                given.add(&name, format!("{wrapper}.{}", plain(&name)), field)?;
            }
        }
        Ok(given)
    }

    fn add(&mut self, name: &str, shown_as: String, field: Value) -> Result<(), ApiError> {
        let spec = known(name, &shown_as)?;
        let read = match spec.place {
            FieldEffect::Neutral(values) => return neutral(values, &shown_as, &field),
            _ => value(&shown_as, spec.kind, field)?,
        };
        if let Some(other) = self.values.get(spec.name) {
            if *other != read {
                let first = self.name(spec.name);
                return Err(invalid(
                    &shown_as,
                    format!("an alias of {first}, which has a different value; remove one of the two fields"),
                ));
            }
            return Ok(());
        }
        self.values.insert(spec.name.into(), read);
        self.names.insert(spec.name, shown_as);
        Ok(())
    }

    /// Replaces `auto_duration: true` by `num_frames: "auto"`. Fails if the request also sets a duration or number of
    /// frames.
    pub(super) fn expand_auto_duration(&mut self) -> Result<(), ApiError> {
        let Some((name, Value::Bool(true))) = self.take("auto_duration") else { return Ok(()) };
        let other =
            ["num_frames", "seconds"].into_iter().find(|own| self.get(own).is_some_and(|value| value != "auto"));
        if let Some(other) = other {
            let other = self.name(other);
            return Err(invalid(&name, format!("cannot be combined with {other}; remove one of the two fields")));
        }
        self.put("num_frames", Some(name), "auto".into());
        Ok(())
    }

    /// Returns the name that the client used for a field.
    pub(super) fn name(&self, field: &'static str) -> String {
        self.names.get(field).cloned().unwrap_or_else(|| field.into())
    }

    /// Returns whether the client sent a field under this name.
    pub(super) fn uses_name(&self, name: &str) -> bool {
        self.names.values().any(|own| own == name)
    }

    pub(super) fn get(&self, field: &str) -> Option<&Value> {
        self.values.get(field)
    }

    pub(super) fn text(&self, field: &str) -> Option<&str> {
        self.get(field).and_then(Value::as_str)
    }

    /// Removes a field. Returns the client's name for it and its value.
    pub(super) fn take(&mut self, field: &'static str) -> Option<(String, Value)> {
        Some((self.name(field), self.values.shift_remove(field)?))
    }

    /// Sets the value of a field and the client's name for it. `None`: the canonical name.
    pub(super) fn put(&mut self, field: &'static str, name: Option<String>, value: Value) {
        self.values.insert(field.into(), value);
        self.names.insert(field, name.unwrap_or_else(|| field.into()));
    }
}

/// Shortens a name for error messages and removes control characters.
pub(super) fn plain(name: &str) -> String {
    name.chars().take(64).filter(|c| !c.is_control()).collect()
}

/// Returns the table row for a field name. The error for an unknown name contains the most similar known name.
fn known(name: &str, shown_as: &str) -> Result<&'static Spec, ApiError> {
    if let Some(spec) = table::find(name) {
        return Ok(spec);
    }
    if PATHS.contains(&name) {
        let why = format!("{shown_as}: requests cannot contain paths on the server; download the video by its id");
        return Err(ApiError::field("parameter_not_allowed", shown_as, why));
    }
    if WRAPPERS.contains(&name) {
        return Err(invalid(shown_as, "must not be nested"));
    }
    let why = format!("unknown field '{}'; did you mean '{}'?", plain(name), table::nearest(name));
    Err(ApiError::field("unknown_field", shown_as, why))
}

/// Rejects a field that this server does not support unless its value is one of `values`, which have no effect.
fn neutral(values: &[&str], shown_as: &str, field: &Value) -> Result<(), ApiError> {
    let own = match value(shown_as, FieldKind::Word(64), field.clone()) {
        Ok(Value::String(text)) => text.to_ascii_lowercase(),
        _ => String::new(),
    };
    if values.contains(&own.as_str()) || (own == "0" && values == ["false"]) {
        return Ok(());
    }
    let why = match values {
        [] => format!("{shown_as}: not supported by this server; remove this field"),
        _ => format!("{shown_as}: {} is not supported; supported: {}", shown(field), values.join(", ")),
    };
    Err(ApiError::field("unsupported_parameter", shown_as, why))
}
