//! Progress on stderr.

use crate::pipeline::phase::Phase;
use crate::pipeline::plan::videos::Job;
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

use super::tell;
use crate::interrupts;
use crate::pipeline::generate::{FinishedVideo, Observer, OnLoad};

/// All progress bars and spinners on the terminal.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Standard error. A write hides the progress bars, so that lines are not mixed with them.
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        BARS.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Erases all progress bars and spinners, and shows no more of them.
pub fn close() {
    // A terminal that cannot be written shows nothing.
    let _ = BARS.clear();
    BARS.set_draw_target(ProgressDrawTarget::hidden());
}

/// Shows a progress bar on a terminal, otherwise a line per tenth of the steps. Stops the run on an interrupt.
pub(crate) struct ProgressDisplay {
    bar: Option<ProgressBar>,
    /// Spinner of a phase without steps.
    spinner: Option<ProgressBar>,
    terminal: bool,
    quiet: bool,
    videos: usize,
    tenths: usize,
}

impl ProgressDisplay {
    pub(crate) fn new(quiet: bool) -> Self {
        interrupts::doing("before the first step; no video was written");
        let terminal = io::stderr().is_terminal();
        ProgressDisplay { bar: None, spinner: None, terminal, quiet, videos: 1, tenths: 0 }
    }

    /// Shows what a phase without steps does: a spinner with the elapsed time on a terminal, otherwise a line.
    fn show(&mut self, what: String) {
        self.spinner = None;
        if self.quiet {
            return;
        }
        if !self.terminal {
            return tell(what);
        }
        let style = ProgressStyle::with_template("{spinner} {msg}, {elapsed}");
        let spinner = ProgressBar::new_spinner().with_message(what).with_finish(ProgressFinish::AndClear);
        let spinner = BARS.add(spinner);
        spinner.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        spinner.enable_steady_tick(TICK);
        self.spinner = Some(spinner);
    }
}

/// Interval at which a spinner moves.
const TICK: Duration = Duration::from_millis(100);

/// Describes a phase without steps. `None`: the phase is too short to be shown, or has steps.
fn described(phase: Phase) -> Option<&'static str> {
    match phase {
        Phase::PromptEnhancer => Some("enhancing the prompt"),
        Phase::TextEncoder => Some("encoding the prompt"),
        Phase::Upsampler => Some("upsampling"),
        Phase::VideoDecoder => Some("decoding the video"),
        Phase::AudioDecoder => Some("decoding the audio"),
        Phase::Connectors | Phase::Denoise | Phase::Refine | Phase::Round => None,
    }
}

/// Returns a prefix with the numbers of the current videos, if there are several.
fn which(jobs: &[Job], videos: usize) -> String {
    match jobs {
        [job] if videos > 1 => format!("video {} of {videos} ", job.index + 1),
        [first, .., last] => format!("videos {} to {} of {videos} ", first.index + 1, last.index + 1),
        _ => String::new(),
    }
}

/// Creates a progress bar in bytes, hidden without a terminal.
fn byte_bar(what: &'static str, total: u64, terminal: bool) -> ProgressBar {
    let bar = if terminal { BARS.add(ProgressBar::new(total)) } else { ProgressBar::hidden() };
    let style = ProgressStyle::with_template(
        "{prefix} {bar:32} {decimal_bytes}/{decimal_total_bytes}, {decimal_bytes_per_sec} (ETA {eta})",
    );
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())).with_prefix(what)
}

/// Returns a function that shows the progress of `total` bytes: a bar on a terminal, otherwise a line with the rate per tenth. The
/// function takes the number of bytes of each finished part.
pub(crate) fn byte_progress(what: &'static str, total: u64) -> impl Fn(u64) + Sync {
    let is_quiet = !tracing::enabled!(tracing::Level::INFO);
    let terminal = !is_quiet && io::stderr().is_terminal();
    let (bar, done, started) = (byte_bar(what, total, terminal), AtomicU64::new(0), Instant::now());
    let tenths = move |bytes: u64| bytes * 10 / total.max(1);
    move |bytes| {
        let before = done.fetch_add(bytes, Ordering::Relaxed);
        bar.set_position(before + bytes);
        if before + bytes == total {
            bar.finish_and_clear();
        }
        if !is_quiet && !terminal && tenths(before + bytes) > tenths(before) {
            let rate = (before + bytes) as f64 / 1e6 / started.elapsed().as_secs_f64().max(1e-3);
            tell(format_args!("{what} {}0 %, {rate:.1} MB/s", tenths(before + bytes)));
        }
    }
}

impl Observer for ProgressDisplay {
    fn planned(&mut self, jobs: &[Job]) {
        self.videos = jobs.len();
        if jobs.iter().any(|job| job.prompt.trim().is_empty()) {
            tracing::info!("the prompt is empty: the video is unconditional");
        }
    }

    fn progress(&mut self, jobs: &[Job], phase: Phase, done: usize, total: usize) -> ControlFlow<()> {
        let steps = matches!(phase, Phase::Denoise | Phase::Refine | Phase::Round);
        interrupts::doing(match steps {
            true if done < total => format!("after {done} of {total} steps; no video was written"),
            true => "after the last step; no video was written".into(),
            false => format!("in phase {}; no video was written", phase.label()),
        });
        if done < total && interrupts::stops() {
            if let Some(bar) = self.bar.take() {
                bar.abandon();
            }
            return ControlFlow::Break(());
        }
        let video = which(jobs, self.videos);
        if !steps {
            if let Some(what) = described(phase).filter(|_| done == 0) {
                self.show(format!("{video}{what}"));
            }
            if phase == Phase::PromptEnhancer && done == total {
                self.spinner = None;
            }
            return ControlFlow::Continue(());
        }
        self.spinner = None;
        if self.quiet {
            return ControlFlow::Continue(());
        }
        if self.terminal {
            let bar = self.bar.get_or_insert_with(|| {
                let bar = BARS.add(ProgressBar::new(total as u64));
                let style = ProgressStyle::with_template("{prefix}{bar:32} {pos}/{len} steps, {elapsed} (ETA {eta})");
                bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
                bar.set_prefix(format!("{video}{} ", phase.label()));
                bar
            });
            bar.set_position(done as u64);
            if done == total {
                bar.finish();
                self.bar = None;
            }
            return ControlFlow::Continue(());
        }
        let tenths = done * 10 / total.max(1);
        if done == 0 {
            self.tenths = 0;
        } else if tenths > self.tenths {
            self.tenths = tenths;
            tell(format_args!("{video}{} {done}/{total} steps", phase.label()));
        }
        ControlFlow::Continue(())
    }

    fn on_load(&mut self) -> Option<OnLoad> {
        if self.quiet {
            return None;
        }
        let (current, terminal) = (Mutex::new(None), self.terminal);
        Some(Arc::new(move |done, total| {
            let mut current = current.lock().unwrap_or_else(PoisonError::into_inner);
            if done == 0 {
                *current = Some((byte_bar("load", total, terminal), Instant::now()));
            }
            let Some((bar, started)) = &*current else { return };
            bar.set_position(done);
            if done >= total {
                bar.finish_and_clear();
                let (gigabytes, seconds) = (total as f64 / 1e9, started.elapsed().as_secs_f64());
                tracing::info!("loaded {gigabytes:.2} GB in {seconds:.1} s, {:.1} GB/s", gigabytes / seconds);
            }
        }))
    }

    fn writing(&mut self, paths: &[PathBuf]) {
        let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
        self.show(format!("writing {}", paths.join(", ")));
    }

    fn finished(&mut self, video: &FinishedVideo, table: &str) {
        self.spinner = None;
        if !self.quiet {
            tell(format_args!("{}\n{table}", video.path.display()));
        }
    }
}
