//! Handling of interrupt signals: what the process finishes after the first signal, and which results it saves before
//! it exits.
//!
//! The first signal terminates the process immediately, unless a [`hold`] exists, which announces that results are
//! about to be saved. The process then exits when all holds are released, or when the work stops with an error (see
//! [`stops`]). A second signal always terminates the process immediately. Before the process exits, each [`keeper`]
//! saves results that exist only in memory.

use std::fmt::Write;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Polling interval of [`wait`].
const LOOK: Duration = Duration::from_millis(10);

/// Function that runs before the process exits, usually to save results. Returns a clause for the error line, such as
/// where the results are. `None`: no clause.
type ExitHook = Box<dyn FnOnce() -> Option<String> + Send>;

static STATE: Mutex<InterruptState> = Mutex::new(InterruptState::new());

struct InterruptState {
    phase: InterruptPhase,
    /// Text that follows "interrupted" in the error line.
    doing: String,
    holds: Vec<(u64, &'static str)>,
    keepers: Vec<(u64, ExitHook)>,
    compilations: Vec<u64>,
    next: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InterruptPhase {
    Running,
    /// A signal arrived while a hold existed.
    SignalReceived,
    /// The work has been asked to stop and will return an error.
    Stopping,
    /// The process is exiting.
    Exiting,
}

/// Response of the process to a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Exit immediately, with [`exit_report`] as the error line.
    Now,
    /// Exit once the work with this description has ended; see [`wait`].
    After(&'static str),
}

impl InterruptState {
    const fn new() -> Self {
        InterruptState {
            phase: InterruptPhase::Running,
            doing: String::new(),
            holds: Vec::new(),
            keepers: Vec::new(),
            compilations: Vec::new(),
            next: 0,
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn request(&mut self) -> Reply {
        match (self.phase, self.holds.first()) {
            (InterruptPhase::Running, Some(&(_, what))) => {
                self.phase = InterruptPhase::SignalReceived;
                Reply::After(what)
            }
            _ => {
                self.phase = InterruptPhase::Exiting;
                Reply::Now
            }
        }
    }

    /// Returns `Some(true)` if the last hold was released, so the interrupt thread must exit the process now. Returns
    /// `Some(false)` if the process will exit because the work returns an error. `None`: neither has happened yet.
    fn ends_now(&mut self) -> Option<bool> {
        match self.phase {
            InterruptPhase::SignalReceived if self.holds.is_empty() => {
                self.phase = InterruptPhase::Exiting;
                Some(true)
            }
            InterruptPhase::Running | InterruptPhase::SignalReceived => None,
            InterruptPhase::Stopping | InterruptPhase::Exiting => Some(false),
        }
    }

    fn only_compiles(&self) -> bool {
        !self.compilations.is_empty() && self.holds.is_empty()
    }

    fn stops(&mut self) -> bool {
        if self.phase == InterruptPhase::SignalReceived {
            self.phase = InterruptPhase::Stopping;
        }
        self.phase != InterruptPhase::Running
    }
}

fn state() -> MutexGuard<'static, InterruptState> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registration of a hold, a keeper or a compilation; dropping it removes the entry.
#[derive(Debug)]
pub struct InterruptGuard(u64);

/// Registers work that the first signal waits for.
pub fn hold(what: &'static str) -> InterruptGuard {
    let mut state = state();
    let number = state.number();
    state.holds.push((number, what));
    InterruptGuard(number)
}

/// Registers a function that saves in-memory results. It runs before an interrupt terminates the process, on the
/// thread that terminates it.
pub fn keeper(keep: impl FnOnce() -> Option<String> + Send + 'static) -> InterruptGuard {
    let mut state = state();
    let number = state.number();
    state.keepers.push((number, Box::new(keep)));
    InterruptGuard(number)
}

/// Registers a compilation on this thread. Compilations cannot be cancelled.
pub fn compiling() -> InterruptGuard {
    let mut state = state();
    let number = state.number();
    state.compilations.push(number);
    InterruptGuard(number)
}

/// Returns whether compilations are the only work that a drain (graceful shutdown) has to wait for.
pub fn only_compiles() -> bool {
    state().only_compiles()
}

impl Drop for InterruptGuard {
    fn drop(&mut self) {
        let mut state = state();
        state.holds.retain(|(number, _)| *number != self.0);
        state.compilations.retain(|number| *number != self.0);
        let at = state.keepers.iter().position(|(number, _)| *number == self.0);
        // The hook is dropped after unlocking, because the results that it captures may contain guards.
        let keep = at.map(|at| state.keepers.remove(at));
        drop(state);
        drop(keep);
    }
}

/// Sets the text that follows "interrupted" in the error line.
pub fn doing(what: impl Into<String>) {
    state().doing = what.into();
}

/// Returns whether the work must stop because of an interrupt. If `true`, the caller must return an error, after which
/// the process exits. Never returns if the process is already exiting.
pub fn stops() -> bool {
    let stops = state().stops();
    block_if_ending();
    stops
}

/// Blocks forever if an interrupt is terminating the process, so that only the interrupt thread prints the error line.
pub fn block_if_ending() {
    while state().phase == InterruptPhase::Exiting {
        thread::park();
    }
}

/// Records a signal and returns the response to it.
pub fn request() -> Reply {
    state().request()
}

/// After [`Reply::After`], waits until all holds are released or the work stops. Returns `true` if the caller must exit
/// the process, `false` if the process exits because the work returns an error.
pub fn wait() -> bool {
    loop {
        if let Some(ends) = state().ends_now() {
            return ends;
        }
        thread::sleep(LOOK);
    }
}

/// Runs all keepers and returns the text of the error line.
pub fn exit_report() -> String {
    let (doing, keepers) = {
        let mut state = state();
        (mem::take(&mut state.doing), mem::take(&mut state.keepers))
    };
    let mut line = if doing.is_empty() { "interrupted".to_string() } else { format!("interrupted {doing}") };
    for kept in keepers.into_iter().filter_map(|(_, keep)| keep()) {
        // Writing to a String cannot fail.
        let _ = write!(line, "; {kept}");
    }
    line
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn first_signal_exits_once_no_work_delays_it() {
        let mut state = InterruptState::new();
        assert!(!state.stops());
        assert_eq!((state.request(), state.phase), (Reply::Now, InterruptPhase::Exiting));

        let mut state = InterruptState { holds: vec![(1, "the current steps")], ..InterruptState::new() };
        assert_eq!(state.request(), Reply::After("the current steps"));
        assert_eq!(state.ends_now(), None);
        state.holds.clear();
        assert_eq!((state.ends_now(), state.phase), (Some(true), InterruptPhase::Exiting));
    }

    #[test]
    fn process_with_held_work_is_not_only_compiling() {
        let mut state = InterruptState { compilations: vec![1], ..InterruptState::new() };
        assert!(state.only_compiles() && !InterruptState::new().only_compiles());
        state.holds.push((2, "x"));
        assert!(!state.only_compiles());
    }

    #[test]
    fn second_signal_exits_while_work_is_stopping() {
        let mut state = InterruptState { holds: vec![(1, "x")], ..InterruptState::new() };
        state.request();
        assert!(state.stops());
        state.holds.clear();
        assert_eq!(state.ends_now(), Some(false));
        assert_eq!((state.request(), state.ends_now()), (Reply::Now, Some(false)));
    }

    #[test]
    fn dropping_a_guard_removes_its_entry() {
        doing("after 3 of 8 steps");
        let kept = keeper(|| Some("the steps are kept in a".into()));
        let silent = keeper(|| None);
        drop(keeper(|| Some("gone".into())));
        let (held, compiles) = (hold("x"), compiling());
        let (hold, compilation) = (held.0, compiles.0);
        // Check only these entries, because other tests of this process may also register entries.
        let has = || {
            let state = state();
            (state.holds.iter().any(|(n, _)| *n == hold), state.compilations.contains(&compilation))
        };
        assert_eq!(has(), (true, true));
        drop(held);
        assert_eq!(has(), (false, true));
        drop(compiles);
        assert_eq!(has(), (false, false));
        assert_eq!(exit_report(), "interrupted after 3 of 8 steps; the steps are kept in a");
        drop((kept, silent));
        assert_eq!(exit_report(), "interrupted");
    }
}
