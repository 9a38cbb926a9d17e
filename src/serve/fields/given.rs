//! Fields of a request, each once, under its own name.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::read::{invalid, shown, structure, value};
use super::table::{self, FieldKind, PATHS, Place, Spec, WRAPPERS};
use crate::serve::error::ApiError;

/// Fields in one form, whatever names and types the client wrote them with.
#[derive(Debug, Default)]
pub(super) struct RequestFields {
    /// By the fields' own names.
    pub(super) values: Map<String, Value>,
    /// The client's names of them.
    names: BTreeMap<&'static str, String>,
}

impl RequestFields {
    /// Reads the fields of a body; of kinds that files belong to, as they stand.
    ///
    /// # Errors
    /// `unknown_field`, `parameter_not_allowed`, `unsupported_parameter`, `invalid_value`, by the client's name.
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
                return Err(invalid(&wrapper, "must be an object of fields"));
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
            Place::Neutral(values) => return neutral(values, &shown_as, &field),
            _ => value(&shown_as, spec.kind, field)?,
        };
        if let Some(other) = self.values.get(spec.name) {
            if *other != read {
                let first = self.name(spec.name);
                return Err(invalid(
                    &shown_as,
                    format!("is another name of {first}, which says something else; keep one"),
                ));
            }
            return Ok(());
        }
        self.values.insert(spec.name.into(), read);
        self.names.insert(spec.name, shown_as);
        Ok(())
    }

    /// Turns `auto_duration` into the number of frames that it stands for.
    ///
    /// # Errors
    /// A length beside it.
    pub(super) fn spell_duration(&mut self) -> Result<(), ApiError> {
        let Some((name, Value::Bool(true))) = self.take("auto_duration") else { return Ok(()) };
        let other =
            ["num_frames", "seconds"].into_iter().find(|own| self.get(own).is_some_and(|value| value != "auto"));
        if let Some(other) = other {
            let other = self.name(other);
            return Err(invalid(&name, format!("predicts the length, and {other} gives it; keep one")));
        }
        self.put("num_frames", Some(name), "auto".into());
        Ok(())
    }

    /// The client's name of a field.
    pub(super) fn name(&self, field: &'static str) -> String {
        self.names.get(field).cloned().unwrap_or_else(|| field.into())
    }

    /// Whether the client wrote a field of this name.
    pub(super) fn has_written(&self, name: &str) -> bool {
        self.names.values().any(|own| own == name)
    }

    /// A field's value.
    pub(super) fn get(&self, field: &str) -> Option<&Value> {
        self.values.get(field)
    }

    /// A field as text.
    pub(super) fn text(&self, field: &str) -> Option<&str> {
        self.get(field).and_then(Value::as_str)
    }

    /// Takes a field out, with the client's name of it.
    pub(super) fn take(&mut self, field: &'static str) -> Option<(String, Value)> {
        Some((self.name(field), self.values.shift_remove(field)?))
    }

    /// Puts a field in another form, with the client's name of it.
    pub(super) fn put(&mut self, field: &'static str, name: Option<String>, value: Value) {
        self.values.insert(field.into(), value);
        self.names.insert(field, name.unwrap_or_else(|| field.into()));
    }
}

/// A name as errors show it.
pub(super) fn plain(name: &str) -> String {
    name.chars().take(64).filter(|c| !c.is_control()).collect()
}

/// The field of a name.
fn known(name: &str, shown_as: &str) -> Result<&'static Spec, ApiError> {
    if let Some(spec) = table::find(name) {
        return Ok(spec);
    }
    if PATHS.contains(&name) {
        let why = format!("{shown_as}: requests name no paths of the server; download the video by its id");
        return Err(ApiError::field("parameter_not_allowed", shown_as, why));
    }
    if WRAPPERS.contains(&name) {
        return Err(invalid(shown_as, "stands at the top alone"));
    }
    let why = format!("there is no field '{}'; did you mean '{}'?", plain(name), table::nearest(name));
    Err(ApiError::field("unknown_field", shown_as, why))
}

/// Refuses a value that would mean something elsewhere.
fn neutral(values: &[&str], shown_as: &str, field: &Value) -> Result<(), ApiError> {
    let own = match value(shown_as, FieldKind::Word(64), field.clone()) {
        Ok(Value::String(text)) => text.to_ascii_lowercase(),
        _ => String::new(),
    };
    if values.contains(&own.as_str()) || (own == "0" && values == ["false"]) {
        return Ok(());
    }
    let why = match values {
        [] => format!("{shown_as}: is not supported here; leave it out"),
        _ => format!("{shown_as}: {} is not supported here; only {}", shown(field), values.join(", ")),
    };
    Err(ApiError::field("unsupported_parameter", shown_as, why))
}
