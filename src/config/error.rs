//! Errors of a configuration: always one line that says where, what, and what would be right.

use std::fmt;
use std::path::PathBuf;

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueOrigin {
    /// The program's own.
    Default,
    Preset(&'static str),
    /// A line of a file, from 1; the file as it was named.
    File {
        file: String,
        line: u64,
    },
    /// A line of a sidecar, which holds every key of the run that it repeats.
    Sidecar {
        file: String,
        line: u64,
    },
    Set,
    Flag(&'static str),
    /// A field of a request to the server.
    Field(String),
    /// Of the given video.
    Video(String),
    /// Of the header of a LoRA.
    Lora(String),
    /// The pipeline's own, in the default's place.
    Pipeline(&'static str),
    /// Follows from `reference`, which was written there.
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

/// An error of the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{place}: {message}")]
    Syntax { place: String, message: String },
    #[error("{place}: unknown key '{key}'; {hint}")]
    UnknownKey { place: String, key: String, hint: String },
    #[error("{place}: '{key}' must be {expected}, not {found}")]
    WrongType { place: String, key: String, expected: String, found: String },
    #[error("{key} = {value} ({origin}): {why}")]
    Value { key: &'static str, value: String, origin: ValueOrigin, why: String },
    /// Two keys that exclude each other, written in one place.
    #[error("{place}: '{first}' and '{second}' exclude each other; keep one")]
    Both { place: String, first: &'static str, second: &'static str },
    #[error("{place}: 'extends' goes in a circle: {chain}")]
    Cycle { place: String, chain: String },
    /// A given video that cannot be read.
    #[error(transparent)]
    Video(crate::media::Error),
    /// A LoRA whose header cannot be used.
    #[error(transparent)]
    Lora(crate::weights::WeightsError),
    /// `--set` or `--mesh` that cannot be read.
    #[error("{0}")]
    Flag(String),
}
