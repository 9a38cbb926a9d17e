//! LoRAs of a request, selected by their names in `serve.loras`. Paths are rejected.

use serde_json::{Value, json};

use super::Fields;
use super::read::{invalid, no_more, number, shown, structure, take};
use super::request_fields::{RequestFields, plain};
use crate::config::{generates_hdr, ic_lora_files};
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
        let is_known = |name: &str| self.serve().loras.contains_key(name);
        items.into_iter().map(|item| read_lora(field, item, &is_known, &self.known_loras())).collect()
    }

    /// Converts the IC-LoRA of a request into `{name, scale}`. Rejects paths and names that the server does not offer.
    pub(super) fn read_ic_lora(&self, field: &str, given: Value) -> Result<Value, ApiError> {
        let own = &self.serve().ic_loras;
        let is_known = |name: &str| own.iter().any(|known| known == name);
        let known = if own.is_empty() { "none are available (serve.ic_loras)".into() } else { available(own) };
        read_lora(field, given, &is_known, &known)
    }

    /// Returns whether a LoRA of the server's configuration or of the request generates HDR video.
    pub(super) fn has_hdr_lora(&self, given: &RequestFields) -> bool {
        let loras = self.with_loras(given.get("lora").unwrap_or(&Value::Null));
        let own = given.get("ic_lora").and_then(|own| own["name"].as_str()).map_or_else(Vec::new, ic_lora_files);
        let paths = loras.as_array().into_iter().flatten().filter_map(|lora| lora["path"].as_str());
        paths.chain(own.iter().map(String::as_str)).any(generates_hdr)
    }

    fn known_loras(&self) -> String {
        let names: Vec<&String> = self.serve().loras.keys().collect();
        if names.is_empty() { "none are available (serve.loras)".into() } else { available(names) }
    }

    /// Returns the LoRAs of the server's configuration, without those that are added again when the request is loaded,
    /// followed by the LoRAs of the request.
    pub(super) fn with_loras(&self, named: &Value) -> Value {
        let config = &self.loaded.config;
        let own = config.model.loras.iter().filter(|lora| !config.adds_lora(lora)).map(|lora| json!(lora));
        let added = named.as_array().into_iter().flatten().filter_map(|lora| {
            let known = self.serve().loras.get(lora["name"].as_str()?)?;
            Some(json!({"path": known.path, "strength": lora["scale"], "stages": known.stages, "apply": known.apply}))
        });
        own.chain(added).collect()
    }
}

fn available<'a>(names: impl IntoIterator<Item = &'a String>) -> String {
    format!("available: {}", names.into_iter().map(String::as_str).collect::<Vec<_>>().join(", "))
}

/// Converts a LoRA into `{name, scale}`. `is_known` decides whether the server offers a name; `known` lists these names.
fn read_lora(field: &str, item: Value, is_known: &dyn Fn(&str) -> bool, known: &str) -> Result<Value, ApiError> {
    let mut item = match structure(field, item)? {
        Value::Object(item) => item,
        Value::String(name) => [("name".to_string(), Value::String(name))].into_iter().collect(),
        other => return Err(invalid(field, format!("must be an object {{name, scale}}, not {}", shown(&other)))),
    };
    for path in ["path", "lora_path", "local_path", "lora_weights"] {
        if take(&mut item, path).is_some() {
            let why = format!("{field}: LoRAs are selected by name, not by path; {}", known);
            return Err(ApiError::field("parameter_not_allowed", format!("{field}.{path}"), why));
        }
    }
    let names = ["name", "lora_name", "adapter", "lora_nickname"].iter().find_map(|key| take(&mut item, key));
    let scale = ["scale", "lora_scale", "strength"].iter().find_map(|key| take(&mut item, key));
    no_more(field, &item, "name, scale")?;
    let Some(Value::String(name)) = names else { return Err(invalid(field, "a LoRA has no name")) };
    if !is_known(&name) {
        return Err(invalid(field, format!("unknown LoRA '{}'; {}", plain(&name), known)));
    }
    let scale = scale.map_or(Ok(1.0), |scale| number(field, &scale))?;
    if !(-MAX_SCALE..=MAX_SCALE).contains(&scale) {
        return Err(invalid(field, format!("scale must be from -{MAX_SCALE} to {MAX_SCALE}, not {scale}")));
    }
    Ok(json!({"name": name, "scale": scale}))
}
