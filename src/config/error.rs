//! Errors of a configuration: always one line that says where, what, and what would be right.

use std::fmt;
use std::path::PathBuf;

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueOrigin {
    /// The program's own.
    Default,
    Preset(&'static str),
    /// A line of a file.
    File {
        /// File, as it was named.
        file: String,
        /// Line, from 1.
        line: u64,
    },
    /// `--set`.
    Set,
    /// A flag of the command line.
    Flag(&'static str),
    /// Follows from `reference`, which was written there.
    Reference(Box<ValueOrigin>),
}

impl fmt::Display for ValueOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueOrigin::Default => f.write_str("default"),
            ValueOrigin::Preset(name) => write!(f, "preset {name}"),
            ValueOrigin::File { file, line } => write!(f, "{file}:{line}"),
            ValueOrigin::Set => f.write_str("--set"),
            ValueOrigin::Flag(flag) => write!(f, "flag --{flag}"),
            ValueOrigin::Reference(from) => write!(f, "reference, {from}"),
        }
    }
}

/// An error of the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Not YAML.
    #[error("{place}: {message}")]
    Syntax {
        /// File and line.
        place: String,
        /// The parser's message.
        message: String,
    },
    /// A key that does not exist.
    #[error("{place}: unknown key '{key}'; {hint}")]
    UnknownKey {
        /// File and line.
        place: String,
        /// Key with its path.
        key: String,
        /// The nearest key.
        hint: String,
    },
    /// A value of the wrong type.
    #[error("{place}: '{key}' must be {expected}, not {found}")]
    WrongType {
        /// File and line.
        place: String,
        /// Key with its path.
        key: String,
        /// Accepted values, in words.
        expected: String,
        /// The value, or its type, as written.
        found: String,
    },
    /// A value that cannot be used.
    #[error("{key} = {value} ({origin}): {why}")]
    Value {
        /// Key with its path.
        key: &'static str,
        value: String,
        /// Where it was written.
        origin: ValueOrigin,
        /// The fault, and what would be right.
        why: String,
    },
    /// Two keys that exclude each other, written in one place.
    #[error("{place}: '{first}' and '{second}' exclude each other; keep one")]
    Both {
        /// File and line, or flag.
        place: String,
        first: &'static str,
        second: &'static str,
    },
    /// `extends` in a circle.
    #[error("{place}: 'extends' goes in a circle: {chain}")]
    Cycle {
        /// File and line.
        place: String,
        chain: String,
    },
    /// `--set` or `--mesh` that cannot be read.
    #[error("{0}")]
    Flag(String),
}
