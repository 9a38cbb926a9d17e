//! LoRAs of a request, selected by their names in `serve.loras`. Paths are rejected.

use serde_json::{Value, json};

use super::Fields;
use super::read::{invalid, no_more, number, shown, structure, take};
use super::request_fields::plain;
use crate::serve::error::ApiError;

/// Maximum number of LoRAs per request.
const MAX_LORAS: usize = 4;
/// Maximum absolute scale of a LoRA.
const MAX_SCALE: f64 = 2.0;

impl Fields {
    /// Converts the LoRAs of a request into a list of `{name, scale}`. Rejects paths and unknown names.
    pub(super) fn read_loras(&self, field: &str, given: Value) -> Result<Value, ApiError> {
        let items = match structure(field, given)? {
            Value::Array(items) => items,
            one => vec![one],
        };
        if items.len() > MAX_LORAS {
            return Err(invalid(field, format!("{} LoRAs exceed the limit of {MAX_LORAS}", items.len())));
        }
        items.into_iter().map(|item| self.read_lora(field, item)).collect()
    }

    fn read_lora(&self, field: &str, item: Value) -> Result<Value, ApiError> {
        let mut item = match structure(field, item)? {
            Value::Object(item) => item,
            Value::String(name) => [("name".to_string(), Value::String(name))].into_iter().collect(),
            other => return Err(invalid(field, format!("must be an object {{name, scale}}, not {}", shown(&other)))),
        };
        for path in ["path", "lora_path", "local_path", "lora_weights"] {
            if take(&mut item, path).is_some() {
                let why = format!("{field}: LoRAs are selected by name, not by path; {}", self.known_loras());
                return Err(ApiError::field("parameter_not_allowed", format!("{field}.{path}"), why));
            }
        }
        let names = ["name", "lora_name", "adapter", "lora_nickname"].iter().find_map(|key| take(&mut item, key));
        let scale = ["scale", "lora_scale", "strength"].iter().find_map(|key| take(&mut item, key));
        no_more(field, &item, "name, scale")?;
        let Some(Value::String(name)) = names else { return Err(invalid(field, "a LoRA has no name")) };
        if !self.serve().loras.contains_key(&name) {
            return Err(invalid(field, format!("unknown LoRA '{}'; {}", plain(&name), self.known_loras())));
        }
        let scale = scale.map_or(Ok(1.0), |scale| number(field, &scale))?;
        if !(-MAX_SCALE..=MAX_SCALE).contains(&scale) {
            return Err(invalid(field, format!("scale must be from -{MAX_SCALE} to {MAX_SCALE}, not {scale}")));
        }
        Ok(json!({"name": name, "scale": scale}))
    }

    fn known_loras(&self) -> String {
        let names: Vec<&str> = self.serve().loras.keys().map(String::as_str).collect();
        if names.is_empty() {
            "none are available (serve.loras)".into()
        } else {
            format!("available: {}", names.join(", "))
        }
    }

    /// Returns the LoRAs of the server's configuration, followed by those of the request.
    pub(super) fn with_loras(&self, named: &Value) -> Value {
        let own = self.loaded.config.model.loras.iter().map(|lora| json!(lora));
        let added = named.as_array().into_iter().flatten().filter_map(|lora| {
            let known = self.serve().loras.get(lora["name"].as_str()?)?;
            Some(json!({"path": known.path, "strength": lora["scale"], "stages": known.stages, "apply": known.apply}))
        });
        own.chain(added).collect()
    }
}
