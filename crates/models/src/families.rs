//! The families of text encoders.

use std::borrow::Cow;

use serde_json::Value;

use super::config_keys::InertKey;
use super::ranges::Row;
use super::text_encoder::TextEncoder;
use super::{ComponentConfigError, gemma3, gemma4, unsupported};

/// Folder of the text encoder in a model.
pub const COMPONENT: &str = "text_encoder";

/// A family of text encoders: what its `config.json` may contain, and its reader.
pub(crate) struct Family {
    /// Supported values of `model_type`, beginning with that of the published files.
    pub(crate) model_types: &'static [&'static str],
    /// Ranges of the numeric keys.
    pub(crate) ranges: &'static [Row],
    /// Keys that are not read.
    pub(crate) ignored_keys: &'static [InertKey],
    /// Reads and checks the configuration.
    pub(crate) read: fn(&Value) -> Result<Box<dyn TextEncoder>, ComponentConfigError>,
}

/// All families.
const FAMILIES: [Family; 2] = [gemma3::FAMILY, gemma4::FAMILY];

/// Returns the families that a component consists of: all for the text encoder, none for other components.
pub(crate) fn of(component: &str) -> &'static [Family] {
    if component == COMPONENT { &FAMILIES } else { &[] }
}

/// Reads the configuration of a text encoder of any supported model type.
///
/// # Errors
/// Returns an error if `model_type` is unknown or a key of the configuration is invalid or unsupported.
pub fn text_encoder(json: &Value) -> Result<Box<dyn TextEncoder>, ComponentConfigError> {
    let name = json.get("model_type");
    let is_named = |family: &&Family| family.model_types.iter().any(|known| name.is_some_and(|name| name == known));
    match FAMILIES.iter().find(is_named) {
        Some(family) => (family.read)(json),
        None => {
            let published = FAMILIES.map(|family| family.model_types[0]).join(" or ");
            Err(unsupported(COMPONENT, "model_type", name, Cow::Owned(published)))
        }
    }
}
