//! Ends of this process that C code causes: one whose devices wait for what will not come, an abort, and a limit of file sizes.

use std::ffi::c_int;
use std::io::{self, Read, Write};
use std::thread;
use std::time::Duration;

/// The signal of `abort`.
const SIGABRT: c_int = 6;

/// The signal of a write beyond the limit of a file's size, on Linux and macOS.
const SIGXFSZ: c_int = 25;

/// The handler that ignores a signal: `SIG_IGN`.
const IGNORED: usize = 1;

unsafe extern "C" {
    fn _exit(code: c_int) -> !;
    fn signal(number: c_int, handler: usize) -> usize;
}

/// Ends the process now. Exit handlers are left out: a plugin's would wait for programs on its devices, and those for a
/// process that is gone.
pub fn end_process(code: i32) -> ! {
    // SAFETY: `_exit` of POSIX; it takes any number and needs nothing.
    unsafe { _exit(code) }
}

/// Makes a write beyond `RLIMIT_FSIZE` (`ulimit -f`) an error, "File too large", instead of the end of the process. Processes that
/// this one starts inherit it.
pub fn report_file_limits() {
    // SAFETY: `signal` of C with a signal that exists and the constant that ignores it; no handler is called.
    unsafe { signal(SIGXFSZ, IGNORED) };
}

/// Has `words` said when C code aborts this process, which then ends with exit code 1. They are said by a thread of their own, while
/// the one that aborts stands still, with every lock that it holds; if they take longer than `patience`, the signal ends the process.
///
/// # Errors
/// No thread, pipe or handler can be had.
pub fn on_abort(patience: Duration, words: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let (mut aborted, signal) = io::pipe()?;
    let say = move || {
        // The other end is never closed.
        if aborted.read_exact(&mut [0]).is_ok() {
            words();
            end_process(1)
        }
    };
    thread::Builder::new().name("abort".into()).spawn(say)?;
    let handler = move || {
        // An error leaves the signal's own end.
        if (&signal).write_all(&[0]).is_ok() {
            thread::sleep(patience);
        }
    };
    // SAFETY: the handler calls `write` and `nanosleep` alone, which a signal allows; it takes no lock and no memory.
    unsafe { signal_hook_registry::register(SIGABRT, handler) }.map(|_| ())
}
