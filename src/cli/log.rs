//! The log on stderr.

use std::fmt::{self as text, Write as _};
use std::io::IsTerminal;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Registry, fmt, prelude::*, reload};

use crate::config::LogFormat;

/// Handle by which [`only_warnings`] changes the filter; unset if the user chose a level.
static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// Filter of lines up to a level. Lines of other crates, which speak of their own parts, are at `trace` alone.
fn filter_of(level: &str) -> String {
    // The names of all crates of the workspace start with it.
    if level == "trace" { level.into() } else { format!("off,ltx2={level}") }
}

/// Starts the log. `LTX2_LOG` overrides `-v` and `-q`.
pub fn start(verbose: u8, quiet: u8) {
    let level = filter_of(match (verbose, quiet) {
        (0, 0) => "info",
        (0, 1) => "warn",
        (0, _) => "error",
        (1, _) => "debug",
        _ => "trace",
    });
    let wanted = std::env::var("LTX2_LOG").ok().filter(|v| !v.is_empty());
    let filter = wanted.as_deref().map(EnvFilter::try_new);
    let mistake = filter.as_ref().and_then(|f| f.as_ref().err()).map(ToString::to_string);
    let asked = wanted.is_some() || verbose > 0;
    let filter = filter.and_then(Result::ok).unwrap_or_else(|| EnvFilter::new(level));
    let (filter, handle) = reload::Layer::new(filter);
    let colours = std::io::stderr().is_terminal();
    let lines = fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(colours)
        .event_format(Lines(fmt::format().with_ansi(colours).with_target(verbose > 0).without_time()))
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
        let _ = handle.modify(|filter| *filter = EnvFilter::new(filter_of("warn")));
    }
}

/// Whether lines are objects of JSON.
static JSON: AtomicBool = AtomicBool::new(false);

/// Target of lines that are objects by themselves.
const OBJECTS: &str = "ltx2::serve::access";

/// Takes the form of the lines from here on.
pub(crate) fn form(format: LogFormat) {
    JSON.store(format == LogFormat::Json, Ordering::Relaxed);
}

/// Lines of text, or an object each.
struct Lines(Format<Full, ()>);

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> text::Result {
        if !JSON.load(Ordering::Relaxed) {
            return self.0.format_event(ctx, writer, event);
        }
        let metadata = event.metadata();
        let mut fields = Fields::default();
        event.record(&mut fields);
        if metadata.target() == OBJECTS {
            return writeln!(writer, "{}", fields.message);
        }
        let mut object = json!({
            "time": format!("{:.3}", jiff::Timestamp::now()),
            "level": metadata.level().as_str().to_lowercase(),
            "target": metadata.target(),
            "message": fields.message,
        });
        if !fields.others.is_empty() {
            object["fields"] = Value::Object(fields.others);
        }
        writeln!(writer, "{object}")
    }
}

/// Text and fields of an event.
#[derive(Default)]
struct Fields {
    message: String,
    others: Map<String, Value>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn text::Debug) {
        if field.name() == "message" {
            // Writing to a string does not fail.
            let _ = write!(self.message, "{value:?}");
        } else {
            self.others.insert(field.name().into(), format!("{value:?}").into());
        }
    }
}
