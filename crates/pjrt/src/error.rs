//! Errors of plugins and of their C interface.

use std::fmt;
use std::path::PathBuf;

use super::abi::error_code;

/// The result of every call of this layer.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the PJRT layer; each message is one line and names the plugin file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{}: cannot load the plugin: {reason}", plugin.display())]
    Load { plugin: PathBuf, reason: String },
    #[error(
        "{}: the plugin is too old: it has PJRT {}.{} and {need} is needed; install a newer one with `ltx2 plugin install cpu|cuda|tpu`",
        plugin.display(), has.0, has.1
    )]
    TooOld { plugin: PathBuf, has: (i32, i32), need: String },
    #[error("{}: {call} is not supported by this plugin (PJRT {}.{})", plugin.display(), has.0, has.1)]
    Unsupported { plugin: PathBuf, call: &'static str, has: (i32, i32) },
    #[error("{}: {call} failed ({code}): {message}", plugin.display())]
    Call { plugin: PathBuf, call: &'static str, code: Code, message: String },
    #[error(
        "{}: this plugin has no profiler (PJRT_Profiler_Extension); the CUDA and TPU plugins have one: --platform cuda | tpu",
        plugin.display()
    )]
    NoProfiler { plugin: PathBuf },
    /// An argument was refused before the plugin saw it.
    #[error("{}: {call}: {reason}", plugin.display())]
    Argument { plugin: PathBuf, call: &'static str, reason: String },
    #[error("{}: element type {kind} of PJRT has no host form here", plugin.display())]
    ElementType { plugin: PathBuf, kind: u32 },
    /// The plugin is for hardware that this machine lacks.
    #[error("platform {platform}: {reason}; `--platform auto` uses what is there, `ltx2 doctor` shows it")]
    NoHardware { platform: &'static str, reason: String },
    /// The plugin ends the process that parses a flag of the environment.
    #[error("{reason} (plugin {}); correct or remove it", plugin.display())]
    Flags { plugin: PathBuf, reason: String },
    #[error(
        "no {platform} plugin found in {}; `ltx2 plugin install {platform}` fetches it, LTX2_PJRT_PLUGIN=FILE.so names one",
        places(searched)
    )]
    NotFound { platform: &'static str, searched: Vec<String> },
}

/// Places that an error names.
const MOST_PLACES: usize = 2;

/// The first of several places, and how many more there are.
fn places(searched: &[String]) -> String {
    let named = searched[..searched.len().min(MOST_PLACES)].join(", ");
    match searched.len() - searched.len().min(MOST_PLACES) {
        0 => named,
        1 => format!("{named} and 1 other place"),
        more => format!("{named} and {more} other places"),
    }
}

impl Error {
    /// The plugin's code, if the plugin was what failed.
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::Call { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// True when a device, or the host, had no memory for what was asked.
    pub fn is_out_of_memory(&self) -> bool {
        self.code() == Some(Code(error_code::RESOURCE_EXHAUSTED))
    }

    /// True when the plugin has no such call or answered "unimplemented".
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Error::Unsupported { .. }) || self.code() == Some(Code(error_code::UNIMPLEMENTED))
    }
}

/// A plugin's error code (the canonical codes of Abseil).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

impl Code {
    /// The C name without its prefix: `INVALID_ARGUMENT`, `RESOURCE_EXHAUSTED` …
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

/// An error's message and those of its sources. The loader's reason is a source of libloading's error.
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

/// Joins the lines of a plugin's message: compilers answer with several, callers print one. Where in the plugin's source
/// it arose is left out.
pub(super) fn one_line(message: &str) -> String {
    let message = message.split("=== Source Location Trace").next().unwrap_or_default();
    message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_plugin_is_told_in_a_short_line() {
        let searched = |count: usize| (0..count).map(|n| format!("/folder/{n}")).collect();
        let said = |count| Error::NotFound { platform: "cuda", searched: searched(count) }.to_string();
        assert!(said(30).starts_with("no cuda plugin found in /folder/0, /folder/1 and 28 other places; `ltx2 plugin"));
        assert!(said(3).contains("/folder/1 and 1 other place;") && said(1).contains("found in /folder/0;"));
        assert!(said(30).len() < 200);
    }
}
