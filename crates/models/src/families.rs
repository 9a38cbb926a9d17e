//! Selects the text encoder family by the `model_type` of `text_encoder/config.json`.

use serde_json::Value;

use super::gemma3::{self, Gemma3Config};
use super::gemma4::Gemma4Config;
use super::text_encoder::TextEncoder;
use super::{ComponentConfigError, unsupported};

type EncoderReader = fn(&Value) -> Result<Box<dyn TextEncoder>, ComponentConfigError>;

/// Supported model types and their readers.
const FAMILIES: [(&str, EncoderReader); 4] =
    [("gemma3", gemma3), ("gemma3_text", gemma3), ("gemma4_unified", gemma4), ("gemma4_unified_text", gemma4)];

fn gemma3(json: &Value) -> Result<Box<dyn TextEncoder>, ComponentConfigError> {
    Ok(Box::new(Gemma3Config::from_json(json)?))
}

fn gemma4(json: &Value) -> Result<Box<dyn TextEncoder>, ComponentConfigError> {
    Ok(Box::new(Gemma4Config::from_json(json)?))
}

/// Reads the configuration of a text encoder of any supported model type.
///
/// # Errors
/// Returns an error if `model_type` is unknown or a key of the configuration is invalid or unsupported.
pub fn text_encoder(json: &Value) -> Result<Box<dyn TextEncoder>, ComponentConfigError> {
    let name = json.get("model_type");
    match FAMILIES.iter().find(|(known, _)| name.is_some_and(|name| name == known)) {
        Some((_, read)) => read(json),
        None => Err(unsupported(gemma3::COMPONENT, "model_type", name, "gemma3 or gemma4_unified")),
    }
}
