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
}

impl ConfigError {
    /// The error without its file.
    pub(crate) fn message(&self) -> String {
        match self {
            ConfigError::Form { message, .. } => message.clone(),
            ConfigError::Unsupported { key, value, supported, .. } => {
                format!("{key} = {value} is not supported, only {supported}")
            }
            ConfigError::Unread { key, value, .. } => {
                format!("{key} = {value} is a key that this program does not know: the model may be newer than it")
            }
        }
    }
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ConfigError::Form { component, .. }
        | ConfigError::Unsupported { component, .. }
        | ConfigError::Unread { component, .. }) = self;
        write!(f, "config.json of '{component}': {}", self.message())
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
/// A key of the wrong type, by name.
pub(crate) fn read_keys<T: DeserializeOwned>(
    component: &'static str,
    json: &serde_json::Value,
) -> std::result::Result<T, ConfigError> {
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
    value: impl std::fmt::Debug,
    supported: &'static str,
) -> std::result::Result<(), ConfigError> {
    if ok { Ok(()) } else { Err(unsupported(component, key, value, supported)) }
}

/// A value that no code computes.
pub(crate) fn unsupported(
    component: &'static str,
    key: impl Into<Cow<'static, str>>,
    value: impl std::fmt::Debug,
    supported: &'static str,
) -> ConfigError {
    ConfigError::Unsupported { component, key: key.into(), value: format!("{value:?}"), supported }
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
        let wrong = "config.json of 'connectors': widths[1]: invalid type: string \"two\", expected usize";
        assert_eq!(error(serde_json::json!({"widths": [1, "two"]})), wrong);
        let silent = serde_json::json!({"widths": [], "_class_name": "C", "causal_temporal_positioning": false});
        assert!(parse_config::<C>("connectors", &silent).expect("known keys").widths.is_empty());
        let new = "config.json of 'connectors': depth = 3 is a key that this program does not know: the model may be \
                   newer than it";
        assert_eq!(error(serde_json::json!({"widths": [], "depth": 3})), new);
        assert!(error(serde_json::json!({"widths": [], "causal_temporal_positioning": true})).contains("newer"));
    }
}
