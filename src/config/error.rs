//! Errors of a configuration. Every message is one line: location, problem and valid values.

use std::borrow::Cow;
use std::path::Path;
use std::{fmt, io};

use super::message::{Message, Setting};
use crate::media::MediaError;
use crate::weights::WeightsError;

/// Origin of a value: the place where it was written.
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
    /// Command-line argument or line of a file, as shown to the user: `--set sampler.steps=8`, `--width`, `x.yml:3`.
    Argument(String),
    /// Field of a server request.
    Field(String),
    /// Property of the input video at this path.
    Video(String),
    /// Header of the LoRA file at this path.
    Lora(String),
    /// Default of the pipeline with this name, which replaces the general default.
    Pipeline(&'static str),
    /// Default set by the key `reference`, whose own origin this is.
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
            ValueOrigin::Argument(argument) => f.write_str(argument),
            ValueOrigin::Field(name) => write!(f, "request field '{name}'"),
            ValueOrigin::Video(path) => write!(f, "video {path}"),
            ValueOrigin::Lora(path) => write!(f, "LoRA {path}"),
            ValueOrigin::Pipeline(name) => write!(f, "pipeline {name}"),
            ValueOrigin::Reference(from) => write!(f, "reference, {from}"),
        }
    }
}

/// Kind of a configuration error.
#[derive(Debug)]
pub enum ConfigErrorKind {
    /// A file cannot be read; the key is its path.
    Unreadable(io::Error),
    /// A file or an argument has invalid syntax.
    Syntax,
    UnknownKey,
    WrongType,
    /// A number, a size or a list is outside the limit.
    OutOfRange,
    /// The value is not a known name.
    NotOneOf,
    /// The value contradicts another value.
    Conflict,
    /// Two mutually exclusive keys are set in the same file, command line or request.
    Exclusive,
    /// The pipeline requires a value that is not set.
    Missing,
    /// The pipeline or the model does not support the value.
    Unsupported,
    /// The run does not read the key.
    NoEffect,
    /// A file extends itself, directly or through other files.
    Cycle,
    /// A command-line argument, or a file that it names, cannot be used.
    Argument,
    /// An input video cannot be read.
    Video(Box<MediaError>),
    /// A LoRA file has an invalid header.
    Lora(Box<WeightsError>),
}

/// Values that a key accepts, or another reason why a value is invalid.
#[derive(Clone, Debug, PartialEq)]
pub enum Limit {
    Reason(Message),
    /// A number greater than this bound.
    Above(f64),
    /// A number of the form `step * n + remainder`; `remainder` is 0 or 1.
    Step {
        step: usize,
        remainder: usize,
        /// The options that require this step, such as " with two stages".
        with: String,
        /// The nearest valid numbers.
        nearest: [usize; 2],
    },
    /// Types, values or keys of the schema.
    Schema(String),
    /// The other of two mutually exclusive keys.
    Excludes(&'static str),
}

impl Limit {
    /// Returns the limit as a text, with placeholders for the settings that it mentions.
    pub(crate) fn message(&self) -> Message {
        match self {
            Limit::Reason(why) => why.clone(),
            Limit::Above(least) => format!("must be above {least}").into(),
            Limit::Step { step, remainder, with, nearest: [low, high] } => {
                let multiple = if *remainder == 0 { "a multiple" } else { "one more than a multiple" };
                format!("must be {multiple} of {step}{with}; the nearest are {low} and {high}").into()
            }
            Limit::Schema(text) => text.clone().into(),
            Limit::Excludes(key) => Setting::Key(key).into(),
        }
    }
}

impl<T> From<T> for Limit
where
    Message: From<T>,
{
    fn from(why: T) -> Self {
        Limit::Reason(why.into())
    }
}

/// Error while loading or checking a configuration. `Display` uses the names of flags and YAML keys.
#[derive(Debug)]
pub struct ConfigError {
    pub kind: ConfigErrorKind,
    /// Dotted key, or the path of an unreadable file; empty if the error is about an argument or a whole file.
    pub key: Cow<'static, str>,
    /// Rejected value. `None`: the text of `limit` quotes it, or the error is not about a value.
    pub value: Option<String>,
    /// Origin of the value; `None` if it is unknown.
    pub origin: Option<ValueOrigin>,
    pub limit: Box<Limit>,
}

impl ConfigError {
    /// Returns an error about a key without a rejected value; `limit` may quote the value.
    pub(crate) fn key(kind: ConfigErrorKind, key: impl Into<Cow<'static, str>>, limit: impl Into<Limit>) -> Self {
        ConfigError { kind, key: key.into(), value: None, origin: None, limit: Box::new(limit.into()) }
    }

    /// Returns an error about the value of a key.
    pub(crate) fn value(
        kind: ConfigErrorKind,
        key: impl Into<Cow<'static, str>>,
        value: impl ToString,
        limit: impl Into<Limit>,
    ) -> Self {
        ConfigError { value: Some(value.to_string()), ..ConfigError::key(kind, key, limit) }
    }

    pub(crate) fn unreadable(path: &Path, source: io::Error) -> Self {
        ConfigError::key(ConfigErrorKind::Unreadable(source), path.display().to_string(), "")
    }

    /// Returns an error about the syntax of a file or an argument.
    pub(crate) fn syntax(place: impl Into<String>, why: impl Into<Limit>) -> Self {
        ConfigError::key(ConfigErrorKind::Syntax, "", why).at(ValueOrigin::Argument(place.into()))
    }

    /// Returns an error about a command-line argument, or about a file that an argument names; `why` quotes the
    /// argument.
    pub(crate) fn argument(why: impl Into<Limit>) -> Self {
        ConfigError::key(ConfigErrorKind::Argument, "", why)
    }

    /// Returns an error about two mutually exclusive keys that are set in the same place.
    pub(crate) fn exclusive(origin: ValueOrigin, first: &'static str, second: &'static str) -> Self {
        ConfigError::key(ConfigErrorKind::Exclusive, first, Limit::Excludes(second)).at(origin)
    }

    pub(crate) fn video(error: MediaError) -> Self {
        ConfigError::key(ConfigErrorKind::Video(Box::new(error)), "request.video", "")
    }

    pub(crate) fn lora(error: WeightsError) -> Self {
        ConfigError::key(ConfigErrorKind::Lora(Box::new(error)), "model.loras", "")
    }

    /// Returns the error with the origin of the value.
    #[must_use]
    pub(crate) fn at(self, origin: ValueOrigin) -> Self {
        ConfigError { origin: Some(origin), ..self }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ConfigError { kind, key, value, origin, limit } = self;
        let limit = limit.message();
        let place = || origin.as_ref().map_or(String::new(), |origin| format!("{origin}: "));
        match (kind, value) {
            (ConfigErrorKind::Unreadable(source), _) => write!(f, "cannot read {key}: {source}"),
            (ConfigErrorKind::Video(error), _) => error.fmt(f),
            (ConfigErrorKind::Lora(error), _) => error.fmt(f),
            (ConfigErrorKind::Syntax | ConfigErrorKind::Argument, _) => write!(f, "{}{limit}", place()),
            (ConfigErrorKind::UnknownKey, _) => write!(f, "{}unknown key '{key}'; {limit}", place()),
            (ConfigErrorKind::WrongType, Some(found)) => write!(f, "{}'{key}' must be {limit}, not {found}", place()),
            (ConfigErrorKind::Exclusive, _) => {
                write!(f, "{}'{key}' and '{limit}' are mutually exclusive; remove one", place())
            }
            (ConfigErrorKind::Cycle, _) => write!(f, "{}circular 'extends': {limit}", place()),
            (_, None) => write!(f, "{key}: {limit}"),
            (_, Some(value)) => match origin {
                Some(origin) => write!(f, "{key} = {value} ({origin}): {limit}"),
                None => write!(f, "{key} = {value}: {limit}"),
            },
        }
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.kind {
            ConfigErrorKind::Unreadable(source) => Some(source),
            ConfigErrorKind::Video(error) => error.source(),
            ConfigErrorKind::Lora(error) => error.source(),
            _ => None,
        }
    }
}
