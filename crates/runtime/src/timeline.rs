//! Timeline of a process: start and end of each compile, load, run and write.

use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;

/// Width of the bar chart in characters.
const WIDTH: f64 = 48.0;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Sets the time origin of all timelines of this process to now. Without this call, the first span sets the origin.
pub fn begin() {
    LazyLock::force(&START);
}

/// Kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// Opening the plugin and its devices.
    Open,
    /// Generating a program's text.
    Program,
    /// Compiling a program.
    Compile,
    /// Loading a program from the compile cache.
    Cache,
    /// Writing a program to the compile cache.
    Save,
    /// Reading parameters and uploading them.
    Load,
    /// A phase of generating a video, including waits.
    Run,
    /// Encoding and writing a video.
    Write,
}

/// A piece of work with its start and end.
#[derive(Clone, Debug, Serialize)]
pub struct Span {
    pub(crate) work: SpanKind,
    /// Name of the program, components, phase or platform.
    pub(crate) name: String,
    /// Start in seconds since the time origin, which [`begin`] or the first span sets.
    pub from: f64,
    /// End in seconds since the time origin.
    pub to: f64,
    /// Bytes loaded or saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

impl Span {
    /// Creates a span from `since` until now.
    pub fn until_now(work: SpanKind, name: &str, since: Instant) -> Self {
        let at = |instant: Instant| instant.saturating_duration_since(*START).as_secs_f64();
        Span { work, name: name.into(), from: at(since), to: at(Instant::now()), bytes: None }
    }
}

/// The spans of a process so far. Clones share them; any thread may add spans.
#[derive(Clone, Debug, Default)]
pub struct Timeline(Arc<Mutex<Vec<Span>>>);

impl Timeline {
    /// Returns an independent copy of the spans so far.
    pub fn copy(&self) -> Self {
        Timeline(Arc::new(Mutex::new(self.spans())))
    }

    /// Adds a span from `since` until now.
    pub fn add(&self, work: SpanKind, name: &str, since: Instant, bytes: Option<u64>) {
        self.push(Span { bytes, ..Span::until_now(work, name, since) });
    }

    /// Adds a finished span.
    pub fn push(&self, span: Span) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }

    /// Returns all spans, ordered by start.
    pub fn spans(&self) -> Vec<Span> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        all.sort_by(|a, b| a.from.total_cmp(&b.from).then(b.to.total_cmp(&a.to)));
        all
    }

    /// Removes all spans.
    pub fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl fmt::Display for Timeline {
    /// Writes one line per span, with a bar from its start to its end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.spans();
        let end = all.iter().fold(f64::MIN_POSITIVE, |end, span| end.max(span.to));
        write!(f, "timeline, {end:.2} s")?;
        for Span { work, name, from, to, bytes } in all {
            let work = format!("{work:?}").to_lowercase();
            let [first, last] = [from, to].map(|at| (at / end * WIDTH).floor().min(WIDTH - 1.0) as usize);
            let (before, bar) = (" ".repeat(first), "#".repeat(last - first + 1));
            let after = " ".repeat(WIDTH as usize - last - 1);
            write!(f, "\n  {work:<8}{name:<24}{from:>8.2}{to:>8.2} s |{before}{bar}{after}|")?;
            if let Some(bytes) = bytes {
                let (gigabytes, seconds) = (bytes as f64 / 1e9, (to - from).max(1e-9));
                write!(f, " {gigabytes:.2} GB, {:.2} GB/s", gigabytes / seconds)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_displayed_in_order_of_start() {
        begin();
        let timeline = Timeline::default();
        let first = Instant::now();
        let second = first + std::time::Duration::from_millis(1);
        std::thread::sleep(std::time::Duration::from_millis(2));
        timeline.clone().add(SpanKind::Compile, "denoise", second, None);
        timeline.add(SpanKind::Load, "vae", first, Some(2_000_000));
        let spans = timeline.spans();
        assert_eq!(spans.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["vae", "denoise"]);
        assert!(spans.iter().all(|s| s.to > s.from));
        let text = timeline.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].trim_start().starts_with("load    vae") && lines[1].contains(" 0.00 GB, "), "{text}");
        assert!(lines[2].contains("compile denoise") && lines[2].ends_with("#|"), "{text}");
        timeline.clear();
        assert!(timeline.spans().is_empty());
    }
}
