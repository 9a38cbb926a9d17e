//! What is wrong with a configuration: always one line that says where, what, and what would be right.

use std::fmt;
use std::path::PathBuf;

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The program's own.
    Default,
    /// A preset.
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
    Reference(Box<Origin>),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::Preset(name) => write!(f, "preset {name}"),
            Origin::File { file, line } => write!(f, "{file}:{line}"),
            Origin::Set => f.write_str("--set"),
            Origin::Flag(flag) => write!(f, "flag --{flag}"),
            Origin::Reference(from) => write!(f, "reference, {from}"),
        }
    }
}

/// An error of the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// File.
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
        /// What is accepted.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A value that cannot be used.
    #[error("{key} = {value} ({origin}): {why}")]
    Value {
        /// Key with its path.
        key: &'static str,
        /// Value.
        value: String,
        /// Where it was written.
        origin: Origin,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// Two keys that exclude each other, written in one place.
    #[error("{place}: '{first}' and '{second}' exclude each other; keep one")]
    Both {
        /// File and line, or flag.
        place: String,
        /// A key.
        first: &'static str,
        /// Another.
        second: &'static str,
    },
    /// `extends` in a circle.
    #[error("{place}: 'extends' goes in a circle: {chain}")]
    Cycle {
        /// File and line.
        place: String,
        /// The files.
        chain: String,
    },
    /// `--set` or `--mesh` that cannot be read.
    #[error("{0}")]
    Flag(String),
}
