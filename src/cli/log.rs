//! Log on stderr.

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

use super::progress::Stderr;
use crate::config::LogFormat;

/// Handle with which [`only_warnings`] changes the filter; unset if the user chose a level.
static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// Returns the filter directives of a level. Only `trace` includes other crates.
fn filter_of(level: &str) -> String {
    // The names of all crates of the workspace start with `ltx2`.
    if level == "trace" { level.into() } else { format!("off,ltx2={level}") }
}

/// Crates that log the headers of requests, which contain access tokens and passwords.
const LOG_CREDENTIALS: [&str; 3] = ["ureq", "ureq_proto", "rustls"];

/// Returns a filter that excludes the log of [`LOG_CREDENTIALS`], whatever the directives say.
fn without_credentials(directives: &str) -> Result<EnvFilter, tracing_subscriber::filter::ParseError> {
    let is_kept = |directive: &&str| {
        let target = directive.split(['=', '[']).next().unwrap_or("").trim();
        !LOG_CREDENTIALS.iter().any(|name| target.split("::").next() == Some(name))
    };
    let kept = directives.split(',').filter(is_kept);
    let all: Vec<String> = kept.map(String::from).chain(LOG_CREDENTIALS.map(|name| format!("{name}=off"))).collect();
    EnvFilter::try_new(all.join(","))
}

/// Starts logging. `LTX2_LOG` overrides `-v` and `-q`.
pub fn start(verbose: u8, quiet: u8) {
    let level = filter_of(match (verbose, quiet) {
        (0, 0) => "info",
        (0, 1) => "warn",
        (0, _) => "error",
        (1, _) => "debug",
        _ => "trace",
    });
    let wanted = std::env::var("LTX2_LOG").ok().filter(|v| !v.is_empty());
    let filter = wanted.as_deref().map(without_credentials);
    let mistake = filter.as_ref().and_then(|f| f.as_ref().err()).map(ToString::to_string);
    let asked = wanted.is_some() || verbose > 0;
    let filter = filter.and_then(Result::ok);
    let filter = filter.unwrap_or_else(|| without_credentials(&level).expect("valid directives"));
    let (filter, handle) = reload::Layer::new(filter);
    let colours = std::io::stderr().is_terminal();
    let lines = fmt::layer()
        .with_writer(|| Stderr)
        .with_ansi(colours)
        .event_format(Lines(fmt::format().with_ansi(colours).with_target(verbose > 0).without_time()))
        // By default, a failed log write is reported with `eprintln!`, which panics if stderr cannot be written.
        .log_internal_errors(false);
    tracing_subscriber::registry().with(filter).with(lines).init();
    if !asked {
        // Logging starts only once.
        let _ = FILTER.set(handle);
    }
    if let Some(why) = mistake {
        tracing::warn!("ignoring LTX2_LOG, which is not a valid filter: {why}");
    }
}

/// Reduces the log to warnings and errors, unless the user chose a level. Called in all processes but the first.
pub(crate) fn only_warnings() {
    if let Some(handle) = FILTER.get() {
        // If the subscriber no longer exists, the level stays unchanged.
        let _ = handle.modify(|filter| *filter = EnvFilter::new(filter_of("warn")));
    }
}

/// Whether each log line is a JSON object.
static JSON: AtomicBool = AtomicBool::new(false);

/// Target of events whose message already is a JSON object.
const OBJECTS: &str = "ltx2::serve::access";

/// Sets the format of all following log lines.
pub(crate) fn form(format: LogFormat) {
    JSON.store(format == LogFormat::Json, Ordering::Relaxed);
}

/// Formats an event as text or as a JSON object.
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
        let mut fields = EventFields::default();
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

/// Message and fields of an event.
#[derive(Default)]
struct EventFields {
    message: String,
    others: Map<String, Value>,
}

impl Visit for EventFields {
    fn record_debug(&mut self, field: &Field, value: &dyn text::Debug) {
        if field.name() == "message" {
            // Writing to a string does not fail.
            let _ = write!(self.message, "{value:?}");
        } else {
            self.others.insert(field.name().into(), format!("{value:?}").into());
        }
    }
}
