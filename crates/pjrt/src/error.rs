//! Errors of this crate.

use std::fmt;
use std::path::PathBuf;

use super::abi::error_code;
use super::discover::Platform;

/// Result of this crate's functions.
pub type Result<T> = std::result::Result<T, PjrtError>;

/// An error of this crate. The message is one line and contains the path of the plugin file, unless no plugin or no
/// hardware was found.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PjrtError {
    /// The plugin file cannot be loaded, or is not a compatible plugin.
    #[error("{}: cannot load the plugin: {reason}", plugin.display())]
    Load {
        /// Path of the plugin file.
        plugin: PathBuf,
        /// Cause, on one line.
        reason: String,
    },
    /// The PJRT version of the plugin is older than this crate requires.
    #[error(
        "{}: the plugin is too old: it has PJRT {}.{}, but {need} is required; install a newer one with `{}`",
        plugin.display(), has.0, has.1, Platform::install_command()
    )]
    TooOld {
        /// Path of the plugin file.
        plugin: PathBuf,
        /// Major and minor PJRT version of the plugin.
        has: (i32, i32),
        /// Required versions, for example `0.81 or newer (built for 0.114)`.
        need: String,
    },
    /// The plugin does not have a function that was called.
    #[error("{}: {call} is not supported by this plugin (PJRT {}.{})", plugin.display(), has.0, has.1)]
    Unsupported {
        /// Path of the plugin file.
        plugin: PathBuf,
        /// C name of the function.
        call: &'static str,
        /// Major and minor PJRT version of the plugin.
        has: (i32, i32),
    },
    /// A plugin function returned an error.
    #[error("{}: {call} failed ({code}): {message}", plugin.display())]
    Call {
        /// Path of the plugin file.
        plugin: PathBuf,
        /// C name of the function.
        call: &'static str,
        /// Error code that the plugin returned.
        code: Code,
        /// Message of the plugin, joined to one line.
        message: String,
    },
    /// The plugin does not have the profiler extension.
    #[error(
        "{}: this plugin has no profiler (PJRT_Profiler_Extension); use --platform {}",
        plugin.display(), Platform::with_profiler()
    )]
    NoProfiler {
        /// Path of the plugin file.
        plugin: PathBuf,
    },
    /// This crate rejected an argument before it called the plugin.
    #[error("{}: {call}: {reason}", plugin.display())]
    Argument {
        /// Path of the plugin file.
        plugin: PathBuf,
        /// C name of the function.
        call: &'static str,
        /// Cause, on one line.
        reason: String,
    },
    /// A buffer has an element type that this crate does not support.
    #[error("{}: PJRT element type {kind} is not supported", plugin.display())]
    ElementType {
        /// Path of the plugin file.
        plugin: PathBuf,
        /// Number of the type in `PJRT_Buffer_Type`.
        kind: u32,
    },
    /// This machine does not have the hardware that the plugin needs.
    #[error("platform {platform}: {reason}; use `--platform auto`, or see `ltx2 doctor` for the available platforms")]
    NoHardware {
        /// Name of the platform, for example `tpu`.
        platform: &'static str,
        /// Cause, on one line.
        reason: String,
    },
    /// A flag in the environment would make the plugin abort the process.
    #[error("{reason} (plugin {}); correct or remove the flag", plugin.display())]
    Flags {
        /// Path of the plugin file.
        plugin: PathBuf,
        /// Message of the plugin about the flag, with the name of the variable.
        reason: String,
    },
    /// No plugin file was found.
    #[error(
        "no {platform} plugin found: run `ltx2 plugin install {platform}`, or set LTX2_PJRT_PLUGIN to a plugin file; searched {}",
        places(searched)
    )]
    NotFound {
        /// Name of the platform, such as `cuda`.
        platform: &'static str,
        /// Places that were searched, in order.
        searched: Vec<String>,
    },
}

/// Maximum number of searched places that an error message lists.
const MOST_PLACES: usize = 2;

/// Formats the first [`MOST_PLACES`] searched places, and the number of the others.
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
        self.code() == Some(Code::RESOURCE_EXHAUSTED)
    }

    /// Returns whether pinned host memory ran out. PJRT has the same error code for both kinds of memory, so this depends
    /// on the message of XLA's allocator.
    pub fn is_out_of_host_memory(&self) -> bool {
        self.is_out_of_memory() && self.to_string().contains("Out of host memory")
    }

    /// Returns whether the plugin does not have the called function or returned `UNIMPLEMENTED`.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, PjrtError::Unsupported { .. }) || self.code() == Some(Code(error_code::UNIMPLEMENTED))
    }
}

/// A PJRT error code (the canonical codes of Abseil).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

impl Code {
    /// The cause is not known.
    pub const UNKNOWN: Code = Code(error_code::UNKNOWN);
    /// The device or the host ran out of memory.
    pub const RESOURCE_EXHAUSTED: Code = Code(error_code::RESOURCE_EXHAUSTED);

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

/// Joins an error's message with the messages of its sources (libloading puts the dynamic loader's message into a
/// source).
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
        let advice = "no cuda plugin found: run `ltx2 plugin install cuda`, or set LTX2_PJRT_PLUGIN to a plugin file";
        assert_eq!(said(30), format!("{advice}; searched /folder/0, /folder/1 and 28 other places"));
        assert!(said(3).ends_with("/folder/1 and 1 other place") && said(1).ends_with("; searched /folder/0"));
        assert!(said(30).len() < 200);
    }
}
