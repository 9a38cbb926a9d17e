//! Errors of a configuration. Every message is one line: location, problem and valid values.

use std::fmt;
use std::path::PathBuf;

use super::message::Message;

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueOrigin {
    /// Built-in default.
    Default,
    Preset(&'static str),
    /// Line of a configuration file, counted from 1, with the file name as the user wrote it.
    File {
        file: String,
        line: u64,
    },
    /// Line of a sidecar. A sidecar sets every key, with the values of the run that wrote it.
    Sidecar {
        file: String,
        line: u64,
    },
    Set,
    Flag(&'static str),
    /// Field of a server request.
    Field(String),
    /// Property of the input video at this path.
    Video(String),
    /// Header of the LoRA file at this path.
    Lora(String),
    /// Default of the pipeline with this name, which replaces the general default.
    Pipeline(&'static str),
    /// Set by the key `reference`, which was written at this origin.
    Reference(Box<ValueOrigin>),
}

impl fmt::Display for ValueOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueOrigin::Default => f.write_str("default"),
            ValueOrigin::Preset(name) => write!(f, "preset {name}"),
            ValueOrigin::File { file, line } | ValueOrigin::Sidecar { file, line } => write!(f, "{file}:{line}"),
            ValueOrigin::Set => f.write_str("--set"),
            ValueOrigin::Flag(flag) => write!(f, "flag --{flag}"),
            ValueOrigin::Field(name) => write!(f, "request field '{name}'"),
            ValueOrigin::Video(path) => write!(f, "video {path}"),
            ValueOrigin::Lora(path) => write!(f, "LoRA {path}"),
            ValueOrigin::Pipeline(name) => write!(f, "pipeline {name}"),
            ValueOrigin::Reference(from) => write!(f, "reference, {from}"),
        }
    }
}

/// Where a tree of keys was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// Line of a file, counted from 1.
    File { file: String, line: u64 },
    /// Command-line argument, such as `--set sampler.steps=8` or `--width`.
    Argument(String),
    /// Field of a server request.
    Field(String),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::File { file, line } => write!(f, "{file}:{line}"),
            Location::Argument(argument) => f.write_str(argument),
            Location::Field(name) => write!(f, "request field '{name}'"),
        }
    }
}

/// Error while loading or checking a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{place}: {message}")]
    Syntax { place: String, message: String },
    #[error("{location}: unknown key '{key}'; {hint}")]
    UnknownKey { location: Location, key: String, hint: String },
    #[error("{location}: '{key}' must be {expected}, not {found}")]
    WrongType { location: Location, key: String, expected: String, found: String },
    #[error("{key} = {value} ({origin}): {why}")]
    Value { key: &'static str, value: String, origin: ValueOrigin, why: Message },
    /// Two mutually exclusive keys that are set in the same place.
    #[error("{origin}: '{first}' and '{second}' are mutually exclusive; remove one")]
    Both { origin: ValueOrigin, first: &'static str, second: &'static str },
    #[error("{place}: circular 'extends': {chain}")]
    Cycle { place: String, chain: String },
    /// An input video that cannot be read.
    #[error(transparent)]
    Video(crate::media::MediaError),
    /// A LoRA file with an invalid header.
    #[error(transparent)]
    Lora(crate::weights::WeightsError),
    /// An argument (`--set`, `--mesh` or another flag) or a file that cannot be used.
    #[error("{0}")]
    Flag(String),
}
