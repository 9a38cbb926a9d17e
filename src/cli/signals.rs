//! Handlers of SIGINT, SIGTERM and SIGHUP, on a separate thread.

use std::fs;
use std::sync::Once;
use std::thread::Builder;

use rustix::process::{Pid, Signal, kill_process};
use tokio::signal::unix::{SignalKind, signal};

use super::{progress, tell};
use crate::interrupts::{self, Reply};
use crate::pjrt::{end_process, exit_on_signals, remove_signal_handlers};
use crate::temporaries;

/// Exit code of an interrupted command.
pub(super) const INTERRUPTED: u8 = 130;

/// Received signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReceivedSignal {
    /// SIGINT or SIGTERM.
    End,
    Hangup,
}

/// Calls `on_signal` for each subsequent SIGINT and SIGTERM and, if `hangup` is set, for each SIGHUP.
///
/// # Errors
/// Returns an error if a thread or a signal handler cannot be created.
pub(super) fn listen(hangup: bool, on_signal: impl Fn(ReceivedSignal) + Send + 'static) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let listening = runtime.enter();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hung_up = if hangup { Some(signal(SignalKind::hangup())?) } else { None };
    drop(listening);
    remove_signal_handlers();
    let listen = async move {
        loop {
            let hangup = async {
                match &mut hung_up {
                    Some(signal) => signal.recv().await,
                    None => std::future::pending().await,
                }
            };
            let heard = tokio::select! {
                _ = terminate.recv() => ReceivedSignal::End,
                _ = interrupt.recv() => ReceivedSignal::End,
                _ = hangup => ReceivedSignal::Hangup,
            };
            on_signal(heard);
        }
    };
    Builder::new().name("signals".into()).spawn(move || runtime.block_on(listen))?;
    Ok(())
}

/// Makes SIGINT and SIGTERM terminate this command immediately with exit code 130, until [`listen`]. Starts no thread.
pub(super) fn end_at_once() {
    if let Err(e) = exit_on_signals("error: interrupted before the start; nothing was written\n", INTERRUPTED.into()) {
        tracing::warn!("cannot handle SIGINT and SIGTERM yet: {e}");
    }
}

/// Makes SIGINT and SIGTERM terminate this command with exit code 130, immediately or after pending results are saved.
/// Starts a thread, so environment variables must be set before this call.
pub(super) fn end_command() {
    static LISTENS: Once = Once::new();
    LISTENS.call_once(listen_to_end);
}

fn listen_to_end() {
    let on_signal = |_| match interrupts::request() {
        Reply::Now => end(),
        Reply::After(what) => {
            tell(format_args!("stopping after {what}; interrupt again to stop immediately"));
            let wait = || {
                if interrupts::wait() {
                    end();
                }
            };
            if Builder::new().name("interrupt".into()).spawn(wait).is_err() {
                end();
            }
        }
    };
    if let Err(e) = listen(false, on_signal) {
        tracing::warn!("cannot handle SIGINT and SIGTERM; they will terminate the process without cleanup: {e}");
    }
}

/// Saves pending results, removes temporary files, and terminates this process and its child processes.
fn end() -> ! {
    end_children();
    progress::close();
    tell(format_args!("error: {}", interrupts::exit_report()));
    temporaries::remove_all();
    end_process(INTERRUPTED.into())
}

/// Sends SIGTERM to the child processes: plugin trials, experiment commands, ffmpeg, compilers.
fn end_children() {
    // If the system does not list child processes, they exit when their pipes close.
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return };
    let lists = threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    for child in lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>())
    {
        // The child may have ended already.
        let _ = Pid::from_raw(child).map(|child| kill_process(child, Signal::TERM));
    }
}
