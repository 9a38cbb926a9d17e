//! The networks of LTX-2, one folder each, and what two of them share.

pub mod audio_vae;
pub(crate) mod config_keys;
pub mod connectors;
pub mod diffusion_decoder;
pub mod duration_head;
pub mod families;
pub(crate) mod feed_forward;
pub(crate) mod gemma;
pub mod gemma3;
pub mod gemma4;
pub mod pixels;
pub mod presets;
pub(crate) mod ranges;
#[cfg(test)]
pub(crate) mod testing;
pub mod text_encoder;
pub(crate) mod timestep;
pub mod tokenizer;
pub mod transformer;
pub mod upsampler;
pub mod video_vae;
pub mod vocoder;

use std::borrow::Cow;
use std::fmt;

use serde::de::DeserializeOwned;

use self::config_keys::{keys, refuse_unread};
use crate::hlo::{Output, Program, Result, Value};
use crate::nn::{Param, Params, Placement};

/// A network ready to compile: its program and the parameters among the program's arguments.
#[derive(Clone, Debug)]
pub struct Network {
    /// The program; its arguments are the inputs and the parameters, by name.
    pub program: Program,
    /// The parameters, in the order of first use.
    pub params: Vec<Param>,
    pub(crate) placements: Vec<Placement>,
    /// Notes on what the layout's rules could not split, a line each.
    pub notes: Vec<String>,
}

impl Network {
    /// Ends the program under `p` with its results (see [`Params::output`]).
    ///
    /// # Errors
    /// The first mistake made while building.
    pub fn finish(p: &Params, results: Vec<(Output, Value)>) -> Result<Self> {
        let program = p.builder().finish_with(results)?;
        Ok(Network { program, params: p.declared(), placements: p.placements(), notes: p.notes() })
    }

    /// Bytes of all parameters, unsharded.
    pub fn parameter_bytes(&self) -> usize {
        self.params.iter().map(|p| p.ty.bytes()).sum()
    }
}

/// Error in a model's `config.json`.
#[derive(Debug)]
pub enum ConfigError {
    /// Not of the expected form: the parser's message, naming the key.
    Form {
        component: &'static str,
        message: String,
    },
    /// A value this program does not compute.
    Unsupported {
        component: &'static str,
        key: Cow<'static, str>,
        value: String,
        supported: &'static str,
    },
    Unread {
        component: &'static str,
        key: String,
        value: String,
    },
    /// A number, or one derived from several, that no model has.
    OutOfRange {
        component: &'static str,
        key: String,
        value: String,
        range: String,
    },
}

impl std::error::Error for ConfigError {}

/// The error alone: [`PipelineError::Config`](crate::pipeline::PipelineError::Config) names file and component.
impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigError::Form { message, .. } => f.write_str(message),
            ConfigError::Unsupported { key, value, supported, .. } => {
                write!(f, "{key} = {value} is not supported, only {supported}")
            }
            ConfigError::Unread { key, value, .. } => {
                write!(f, "{key} = {value} is a key that this program does not know: the model may be newer than it")
            }
            ConfigError::OutOfRange { key, value, range, .. } => {
                write!(f, "{key} = {value} is out of range: it must be {range}")
            }
        }
    }
}

/// Reads a component's configuration, whose keys are those of `T` and such as change no result.
///
/// # Errors
/// A key that nothing reads, or of the wrong type, by name.
pub(crate) fn parse_config<T: DeserializeOwned>(
    component: &'static str,
    json: &serde_json::Value,
) -> std::result::Result<T, ConfigError> {
    refuse_unread(component, json, |key| keys::<T>().contains(&key))?;
    read_keys(component, json)
}

/// Reads some keys of a component's configuration.
///
/// # Errors
/// A number outside its [range](ranges), a key of the wrong type, by name.
pub(crate) fn read_keys<T: DeserializeOwned>(
    component: &'static str,
    json: &serde_json::Value,
) -> std::result::Result<T, ConfigError> {
    ranges::check(component, json, |key| keys::<T>().contains(&key))?;
    serde_path_to_error::deserialize(json)
        .map_err(|e| ConfigError::Form { component, message: format!("{}: {}", e.path(), e.inner()) })
}

/// Refuses a value that no code computes.
///
/// # Errors
/// [`ConfigError::Unsupported`] unless `ok`.
pub(crate) fn require(
    ok: bool,
    component: &'static str,
    key: impl Into<Cow<'static, str>>,
    value: impl serde::Serialize,
    supported: &'static str,
) -> std::result::Result<(), ConfigError> {
    if ok { Ok(()) } else { Err(unsupported(component, key, value, supported)) }
}

/// The error of a value that no code computes; the message shows it as JSON, as the file does.
pub(crate) fn unsupported(
    component: &'static str,
    key: impl Into<Cow<'static, str>>,
    value: impl serde::Serialize,
    supported: &'static str,
) -> ConfigError {
    let value = serde_json::to_string(&value).expect("numbers, text and lists have a JSON form");
    ConfigError::Unsupported { component, key: key.into(), value, supported }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_type_names_the_key() {
        #[derive(Debug, serde::Deserialize)]
        struct C {
            widths: Vec<usize>,
        }
        let error = |json| parse_config::<C>("connectors", &json).expect_err("wrong").to_string();
        let wrong = "widths[1]: invalid type: string \"two\", expected usize";
        assert_eq!(error(serde_json::json!({"widths": [1, "two"]})), wrong);
        let silent = serde_json::json!({"widths": [], "_class_name": "C", "causal_temporal_positioning": false});
        assert!(parse_config::<C>("connectors", &silent).expect("known keys").widths.is_empty());
        let new = "depth = 3 is a key that this program does not know: the model may be newer than it";
        assert_eq!(error(serde_json::json!({"widths": [], "depth": 3})), new);
        assert!(error(serde_json::json!({"widths": [], "causal_temporal_positioning": true})).contains("newer"));
    }

    #[test]
    fn unsupported_values_are_shown_as_json() {
        let shown = |value: serde_json::Value, error: ConfigError| {
            assert_eq!(error.to_string(), format!("key = {value} is not supported, only 1"));
        };
        shown(2.0.into(), unsupported("vae", "key", Some(2.0), "1"));
        shown(serde_json::Value::Null, unsupported("vae", "key", None::<f64>, "1"));
        shown("gelu".into(), unsupported("vae", "key", Some("gelu"), "1"));
        shown(serde_json::json!([1, 2]), unsupported("vae", "key", [1, 2], "1"));
    }
}
