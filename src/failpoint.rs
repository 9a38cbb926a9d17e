//! Fail points: named moments of a run, at which a test of crash safety kills the process. Release builds have none.
//!
//! With `LTX2_FAILPOINT='rename out.mp4'` the process prints `at rename out.mp4` to stderr at that moment and goes no
//! further. With `LTX2_FAILPOINT='fail rename out.mp4'` that step fails, and the run continues as after any error.

use std::fmt::Display;
use std::sync::OnceLock;
use std::thread;

/// Stops for good, where this moment was asked for.
pub(crate) fn reach(phase: &str, what: impl Display) {
    within(phase, what, || ());
}

/// Does `work`. Where this moment was asked for, it is announced before and nothing comes after: whoever kills the
/// process upon that line kills it within `work`.
pub(crate) fn within<T>(phase: &str, what: impl Display, work: impl FnOnce() -> T) -> T {
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

/// An error, where this step was asked to fail.
///
/// # Errors
/// The step was asked to fail.
pub(crate) fn fail(phase: &str, what: impl Display) -> std::io::Result<()> {
    match asked("fail", &format_args!("{phase} {what}")) {
        true => Err(std::io::Error::other("the test asked for a failure")),
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
