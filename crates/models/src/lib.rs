//! The networks of LTX-2, one module each, and their shared layers and configuration checks.

#![warn(missing_docs)]

pub mod audio_vae;
pub mod av;
pub mod chat;
pub(crate) mod config_keys;
pub mod connectors;
pub mod diffusion_decoder;
pub mod duration_head;
pub mod families;
pub mod feed_forward;
pub mod gemma;
pub mod gemma3;
pub mod gemma4;
pub mod pixels;
pub mod presets;
pub mod ranges;
#[doc(hidden)]
pub mod testing;
pub mod text_encoder;
pub mod timestep;
pub mod tokenizer;
pub mod transformer;
pub mod upsampler;
pub mod video_vae;
pub mod vocoder;

use std::borrow::Cow;
use std::fmt;

use serde::de::DeserializeOwned;

use self::config_keys::{keys, refuse_unread};
use ltx2_nn::{Param, Params, ValuePlacement};
use ltx2_stablehlo::{Program, ProgramOutput, Result, Value};

/// A network ready to compile: its program and its parameters.
#[derive(Clone, Debug)]
pub struct Network {
    /// The program; its arguments are the inputs and the parameters, matched by name.
    pub program: Program,
    /// Parameters in order of first use.
    pub params: Vec<Param>,
    /// Placements of the program's inputs, parameters and activations, as the layout shards them.
    pub placements: Vec<ValuePlacement>,
    /// One line for each sharding rule of the layout that could not be applied as written.
    pub notes: Vec<String>,
}

impl Network {
    /// Finishes the program built through `p`; `results` come from [`Params::output`].
    ///
    /// # Errors
    /// Returns the first error recorded while building the graph, with its op, scope and shapes.
    pub fn finish(p: &Params, results: Vec<(ProgramOutput, Value)>) -> Result<Self> {
        let program = p.builder().finish_with(results)?;
        Ok(Network { program, params: p.declared(), placements: p.placements(), notes: p.notes() })
    }

    /// Returns the size of all parameters in bytes, without sharding.
    pub fn parameter_bytes(&self) -> usize {
        self.params.iter().map(|p| p.ty.bytes()).sum()
    }
}

/// Error in a component's `config.json`.
#[derive(Debug)]
pub enum ComponentConfigError {
    /// The file cannot be deserialized, or a list has the wrong length. The message contains the key.
    Form {
        /// Folder of the component in the model.
        component: &'static str,
        /// Description of the problem, including the key.
        message: String,
    },
    /// An unsupported value.
    Unsupported {
        /// Folder of the component in the model.
        component: &'static str,
        /// Key in `config.json`, or a quantity derived from one, such as `layer_types length`.
        key: Cow<'static, str>,
        /// The value as JSON.
        value: String,
        /// The supported values, as text for the message.
        supported: Cow<'static, str>,
    },
    /// A key that this program does not know; the model may be newer than the program.
    Unread {
        /// Folder of the component in the model.
        component: &'static str,
        /// Unknown key in `config.json`.
        key: String,
        /// The value as JSON.
        value: String,
    },
    /// A number, possibly derived from several keys, that is outside its allowed range.
    OutOfRange {
        /// Folder of the component in the model.
        component: &'static str,
        /// Key in `config.json`, or the expression that derives the number from keys.
        key: String,
        /// The number, or the length of a list.
        value: String,
        /// The allowed range, as text for the message.
        range: String,
    },
}

impl std::error::Error for ComponentConfigError {}

/// Prints the error without its location: the `PipelineError::Config` of `ltx2` adds the
/// file and the component.
impl fmt::Display for ComponentConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ComponentConfigError::Form { message, .. } => f.write_str(message),
            ComponentConfigError::Unsupported { key, value, supported, .. } => {
                write!(f, "{key} = {value} is not supported, only {supported}")
            }
            ComponentConfigError::Unread { key, value, .. } => {
                write!(f, "unknown key {key} = {value}; the model may be newer than this program")
            }
            ComponentConfigError::OutOfRange { key, value, range, .. } => {
                write!(f, "{key} = {value} is out of range: it must be {range}")
            }
        }
    }
}

/// Deserializes a component's configuration. Every key must be a field of `T` or known to have no effect.
///
/// # Errors
/// Returns an error for an unknown key, a number out of range or a value of the wrong type.
pub(crate) fn parse_config<T: DeserializeOwned>(
    component: &'static str,
    json: &serde_json::Value,
) -> std::result::Result<T, ComponentConfigError> {
    refuse_unread(component, json, |key| keys::<T>().contains(&key))?;
    read_keys(component, json)
}

/// Deserializes the keys of `T` from a component's configuration and ignores all other keys.
///
/// # Errors
/// Returns an error for a number outside its [range](ranges) or a value of the wrong type.
pub fn read_keys<T: DeserializeOwned>(
    component: &'static str,
    json: &serde_json::Value,
) -> std::result::Result<T, ComponentConfigError> {
    ranges::check(component, json, |key| keys::<T>().contains(&key))?;
    serde_path_to_error::deserialize(json)
        .map_err(|e| ComponentConfigError::Form { component, message: format!("{}: {}", e.path(), e.inner()) })
}

/// Returns the error for an unsupported value unless `ok`; `supported` lists the allowed values.
///
/// # Errors
/// Returns the error of [`unsupported`].
pub fn require(
    ok: bool,
    component: &'static str,
    key: impl Into<Cow<'static, str>>,
    value: impl serde::Serialize,
    supported: &'static str,
) -> std::result::Result<(), ComponentConfigError> {
    if ok { Ok(()) } else { Err(unsupported(component, key, value, supported)) }
}

/// Returns the error for an unsupported value in a component's `config.json`. The message shows the value as JSON.
pub fn unsupported(
    component: &'static str,
    key: impl Into<Cow<'static, str>>,
    value: impl serde::Serialize,
    supported: impl Into<Cow<'static, str>>,
) -> ComponentConfigError {
    let value = serde_json::to_string(&value).expect("numbers, strings and lists serialize to JSON");
    ComponentConfigError::Unsupported { component, key: key.into(), value, supported: supported.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_types_and_unknown_keys_are_reported_by_key() {
        #[derive(Debug, serde::Deserialize)]
        struct C {
            widths: Vec<usize>,
        }
        let error = |json| parse_config::<C>("connectors", &json).expect_err("wrong").to_string();
        let wrong = "widths[1]: invalid type: string \"two\", expected usize";
        assert_eq!(error(serde_json::json!({"widths": [1, "two"]})), wrong);
        let silent = serde_json::json!({"widths": [], "_class_name": "C", "causal_temporal_positioning": false});
        assert!(parse_config::<C>("connectors", &silent).expect("known keys").widths.is_empty());
        let new = "unknown key depth = 3; the model may be newer than this program";
        assert_eq!(error(serde_json::json!({"widths": [], "depth": 3})), new);
        assert!(error(serde_json::json!({"widths": [], "causal_temporal_positioning": true})).contains("newer"));
    }

    #[test]
    fn unsupported_values_are_shown_as_json() {
        let shown = |value: serde_json::Value, error: ComponentConfigError| {
            assert_eq!(error.to_string(), format!("key = {value} is not supported, only 1"));
        };
        shown(2.0.into(), unsupported("vae", "key", Some(2.0), "1"));
        shown(serde_json::Value::Null, unsupported("vae", "key", None::<f64>, "1"));
        shown("gelu".into(), unsupported("vae", "key", Some("gelu"), "1"));
        shown(serde_json::json!([1, 2]), unsupported("vae", "key", [1, 2], "1"));
    }
}
