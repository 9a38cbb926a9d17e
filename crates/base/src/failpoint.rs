//! Fail points: named points of a run at which a crash-safety test kills the process. Disabled in release builds.
//!
//! With `LTX2_FAILPOINT='rename out.mp4'` the process prints `at rename out.mp4` to stderr when it reaches that point,
//! and then blocks forever. With `LTX2_FAILPOINT='fail rename out.mp4'` the operation returns an error, which the run
//! handles as usual.

use std::fmt::Display;
use std::sync::OnceLock;
use std::thread;

/// If `LTX2_FAILPOINT` is `PHASE WHAT`, prints `at PHASE WHAT` and blocks forever.
pub fn reach(phase: &str, what: impl Display) {
    within(phase, what, || ());
}

/// Runs `work`. If `LTX2_FAILPOINT` is `PHASE WHAT`, prints `at PHASE WHAT` before `work` and blocks forever after it,
/// so that a test can kill the process while `work` runs.
pub fn within<T>(phase: &str, what: impl Display, work: impl FnOnce() -> T) -> T {
    let asked = asked(phase, &what);
    if asked {
        eprintln!("at {phase} {what}");
    }
    let done = work();
    if asked {
        loop {
            thread::park();
        }
    }
    done
}

/// Returns an error if `LTX2_FAILPOINT` is `fail PHASE WHAT`.
pub fn fail(phase: &str, what: impl Display) -> std::io::Result<()> {
    match asked("fail", &format_args!("{phase} {what}")) {
        true => Err(std::io::Error::other("failure injected by LTX2_FAILPOINT")),
        false => Ok(()),
    }
}

fn asked(phase: &str, what: &impl Display) -> bool {
    static ASKED: OnceLock<Option<String>> = OnceLock::new();
    cfg!(debug_assertions)
        && ASKED
            .get_or_init(|| std::env::var("LTX2_FAILPOINT").ok())
            .as_ref()
            .is_some_and(|asked| *asked == format!("{phase} {what}"))
}
