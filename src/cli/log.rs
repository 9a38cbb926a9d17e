//! The log on stderr.

use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing_subscriber::{EnvFilter, Registry, fmt, prelude::*, reload};

/// Handle by which [`only_warnings`] changes the filter; unset if the user chose a level.
static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// Starts the log. `LTX2_LOG` overrides `-v` and `-q`.
pub fn start(verbose: u8, quiet: u8) {
    let level = match (verbose, quiet) {
        (0, 0) => "info",
        (0, 1) => "warn",
        (0, _) => "error",
        (1, _) => "debug",
        _ => "trace",
    };
    let wanted = std::env::var("LTX2_LOG").ok().filter(|v| !v.is_empty());
    let filter = wanted.as_deref().map(EnvFilter::try_new);
    let mistake = filter.as_ref().and_then(|f| f.as_ref().err()).map(ToString::to_string);
    let asked = wanted.is_some() || verbose > 0;
    let filter = filter.and_then(Result::ok).unwrap_or_else(|| EnvFilter::new(level));
    let (filter, handle) = reload::Layer::new(filter);
    let lines = fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(verbose > 0)
        .without_time()
        // A log that cannot be written is no reason to end: the message about it would end the process.
        .log_internal_errors(false);
    tracing_subscriber::registry().with(filter).with(lines).init();
    if !asked {
        // The log is started once.
        let _ = FILTER.set(handle);
    }
    if let Some(why) = mistake {
        tracing::warn!("LTX2_LOG is not a filter and is ignored: {why}");
    }
}

/// Reduces the log to warnings and errors, as all processes but the first do. A level that the user chose stays.
pub(crate) fn only_warnings() {
    if let Some(handle) = FILTER.get() {
        // The log goes on as it was where its filter is gone.
        let _ = handle.modify(|filter| *filter = EnvFilter::new("warn"));
    }
}
