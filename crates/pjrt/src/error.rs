//! Errors of this crate.

use std::fmt;
use std::path::PathBuf;

use super::abi::error_code;

/// Result of this crate's functions.
pub type Result<T> = std::result::Result<T, PjrtError>;

/// An error of this crate. The message is one line; unless the error is that no plugin or no hardware was found, it
/// contains the plugin file.
#[derive(Debug, thiserror::Error)]
pub enum PjrtError {
    #[error("{}: cannot load the plugin: {reason}", plugin.display())]
    Load { plugin: PathBuf, reason: String },
    #[error(
        "{}: the plugin is too old: it has PJRT {}.{}, but {need} is required; install a newer one with `ltx2 plugin install cpu|cuda|tpu`",
        plugin.display(), has.0, has.1
    )]
    TooOld { plugin: PathBuf, has: (i32, i32), need: String },
    #[error("{}: {call} is not supported by this plugin (PJRT {}.{})", plugin.display(), has.0, has.1)]
    Unsupported { plugin: PathBuf, call: &'static str, has: (i32, i32) },
    #[error("{}: {call} failed ({code}): {message}", plugin.display())]
    Call { plugin: PathBuf, call: &'static str, code: Code, message: String },
    #[error(
        "{}: this plugin has no profiler (PJRT_Profiler_Extension); use --platform cuda or tpu",
        plugin.display()
    )]
    NoProfiler { plugin: PathBuf },
    /// This crate rejected an argument before it called the plugin.
    #[error("{}: {call}: {reason}", plugin.display())]
    Argument { plugin: PathBuf, call: &'static str, reason: String },
    #[error("{}: PJRT element type {kind} is not supported", plugin.display())]
    ElementType { plugin: PathBuf, kind: u32 },
    /// This machine does not have the hardware that the plugin needs.
    #[error("platform {platform}: {reason}; use `--platform auto`, or see `ltx2 doctor` for the available platforms")]
    NoHardware { platform: &'static str, reason: String },
    /// A flag in the environment would make the plugin abort the process.
    #[error("{reason} (plugin {}); correct or remove the flag", plugin.display())]
    Flags { plugin: PathBuf, reason: String },
    #[error(
        "no {platform} plugin found in {}; run `ltx2 plugin install {platform}`, or set LTX2_PJRT_PLUGIN to a plugin file",
        places(searched)
    )]
    NotFound { platform: &'static str, searched: Vec<String> },
}

/// The number of searched places that an error message lists.
const MOST_PLACES: usize = 2;

/// Lists the first places and states how many others there are.
fn places(searched: &[String]) -> String {
    let named = searched[..searched.len().min(MOST_PLACES)].join(", ");
    match searched.len() - searched.len().min(MOST_PLACES) {
        0 => named,
        1 => format!("{named} and 1 other place"),
        more => format!("{named} and {more} other places"),
    }
}

impl PjrtError {
    /// Returns the plugin's error code; `None` if the error does not come from a plugin call.
    pub fn code(&self) -> Option<Code> {
        match self {
            PjrtError::Call { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Returns whether the device or the host ran out of memory.
    pub fn is_out_of_memory(&self) -> bool {
        self.code() == Some(Code(error_code::RESOURCE_EXHAUSTED))
    }

    /// Returns whether the plugin does not have the function or returned `UNIMPLEMENTED`.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, PjrtError::Unsupported { .. }) || self.code() == Some(Code(error_code::UNIMPLEMENTED))
    }
}

/// A PJRT error code (the canonical codes of Abseil).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

impl Code {
    /// Returns the name without its C prefix: `INVALID_ARGUMENT`, `RESOURCE_EXHAUSTED` …
    pub fn name(self) -> &'static str {
        macro_rules! name_among {
            ($($name:ident)*) => {
                match self.0 {
                    $(error_code::$name => stringify!($name),)*
                    _ => "UNKNOWN",
                }
            };
        }
        name_among! {
            OK CANCELLED INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED RESOURCE_EXHAUSTED
            FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}

/// Joins an error's message with those of its sources (libloading puts the dynamic loader's message into a source).
pub fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    for source in std::iter::successors(error.source(), |e| e.source()) {
        let source = source.to_string();
        if !text.contains(&source) {
            text = format!("{text}: {source}");
        }
    }
    text
}

/// Joins the lines of a plugin's message with ` | `. Drops the source location trace.
pub(super) fn one_line(message: &str) -> String {
    let message = message.split("=== Source Location Trace").next().unwrap_or_default();
    message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn not_found_error_lists_two_places_and_counts_the_rest() {
        let searched = |count: usize| (0..count).map(|n| format!("/folder/{n}")).collect();
        let said = |count| PjrtError::NotFound { platform: "cuda", searched: searched(count) }.to_string();
        assert!(said(30).starts_with("no cuda plugin found in /folder/0, /folder/1 and 28 other places; run `ltx2"));
        assert!(said(3).contains("/folder/1 and 1 other place;") && said(1).contains("found in /folder/0;"));
        assert!(said(30).len() < 200);
    }
}
