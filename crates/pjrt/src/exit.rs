//! Exits the process immediately, handles aborts in C code, and makes writes beyond the file size limit fail with an
//! error.

use std::ffi::c_int;
use std::io::{self, Read, Write};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use signal_hook_registry::SigId;

/// Signals that ask a process to terminate: SIGINT (Ctrl-C) and SIGTERM (`kill`).
const END: [c_int; 2] = [2, 15];

/// Signal that `abort` raises.
const SIGABRT: c_int = 6;

/// Signal that a write beyond the file size limit raises: SIGXFSZ, with the number that Linux and macOS use.
const SIGXFSZ: c_int = 25;

/// `SIG_IGN`: the handler that ignores the signal.
const IGNORED: usize = 1;

/// Signal handlers that [`exit_on_signals`] has installed.
static EXIT_HANDLERS: Mutex<Vec<SigId>> = Mutex::new(Vec::new());

unsafe extern "C" {
    fn _exit(code: c_int) -> !;
    fn write(file: c_int, bytes: *const u8, count: usize) -> isize;
    fn signal(number: c_int, handler: usize) -> usize;
}

/// Exits immediately, without running exit handlers. A plugin's exit handler would wait for programs on its devices,
/// and such a program may wait for a process that has exited.
pub fn end_process(code: i32) -> ! {
    // SAFETY: POSIX `_exit` accepts any code and has no preconditions.
    unsafe { _exit(code) }
}

/// Makes a write beyond `RLIMIT_FSIZE` (`ulimit -f`) fail with "File too large" instead of killing the process. Child
/// processes inherit this setting.
pub fn report_file_limits() {
    // SAFETY: a valid signal number and `SIG_IGN`; no handler is called.
    unsafe { signal(SIGXFSZ, IGNORED) };
}

/// Makes SIGINT and SIGTERM write `words` to stderr and exit with `code`, until [`remove_signal_handlers`]. Starts no
/// thread, so that the caller may still set environment variables.
///
/// # Errors
/// Returns an error if a handler cannot be installed.
pub fn exit_on_signals(words: &'static str, code: i32) -> io::Result<()> {
    for signal in END {
        let handler = move || {
            // SAFETY: `words` is a static string; `write` and `_exit` are async-signal-safe.
            unsafe {
                write(2, words.as_ptr(), words.len());
                _exit(code)
            }
        };
        // SAFETY: as above; the handler takes no lock and does not allocate.
        let id = unsafe { signal_hook_registry::register(signal, handler) }?;
        EXIT_HANDLERS.lock().unwrap_or_else(PoisonError::into_inner).push(id);
    }
    Ok(())
}

/// Removes the handlers of [`exit_on_signals`]. Other handlers stay.
pub fn remove_signal_handlers() {
    let handlers = std::mem::take(&mut *EXIT_HANDLERS.lock().unwrap_or_else(PoisonError::into_inner));
    for id in handlers {
        signal_hook_registry::unregister(id);
    }
}

/// Runs `words` when C code aborts this process, and then exits with code 1. `words` runs on a separate thread while
/// the aborting thread sleeps and keeps its locks. If `words` takes longer than `patience`, the signal kills the
/// process.
///
/// # Errors
/// Returns an error if the thread, the pipe or the signal handler cannot be created.
pub fn on_abort(patience: Duration, words: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let (mut aborted, signal) = io::pipe()?;
    let say = move || {
        // The write end is never closed, so a successful read means that the process aborts.
        if aborted.read_exact(&mut [0]).is_ok() {
            words();
            end_process(1)
        }
    };
    thread::Builder::new().name("abort".into()).spawn(say)?;
    let handler = move || {
        // If the write fails, the default action of the signal kills the process.
        if (&signal).write_all(&[0]).is_ok() {
            thread::sleep(patience);
        }
    };
    // SAFETY: the handler only calls `write` and `nanosleep`, which are async-signal-safe. It takes no lock and does
    // not allocate.
    unsafe { signal_hook_registry::register(SIGABRT, handler) }.map(|_| ())
}
