//! Interrupts of a command: what the first signal waits for, and what is kept before the process ends.
//!
//! A first signal ends the process at once, in whatever phase it is, unless a [`hold`] says that results are about to be kept. Then
//! it waits for these; a second signal does not. A [`keeper`] writes results that exist in memory alone.

use std::fmt::Write;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Between two looks at whether a hold has ended.
const LOOK: Duration = Duration::from_millis(10);

/// Writes results; returns where they are, for the error line.
type Keep = Box<dyn FnOnce() -> Option<String> + Send>;

static STATE: Mutex<State> = Mutex::new(State::new());

struct State {
    phase: Phase,
    /// What the process does, as the error line continues "interrupted".
    doing: String,
    holds: Vec<(u64, &'static str)>,
    keepers: Vec<(u64, Keep)>,
    compilations: Vec<u64>,
    next: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    /// A signal came, and a hold was there.
    Asked,
    /// The work was told, and ends by itself.
    Stopping,
    /// The process ends now.
    Ending,
}

/// What a signal does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The process ends now: [`last_words`].
    Now,
    /// It ends after this work: [`wait`].
    After(&'static str),
}

impl State {
    const fn new() -> Self {
        State {
            phase: Phase::Running,
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
            (Phase::Running, Some(&(_, what))) => {
                self.phase = Phase::Asked;
                Reply::After(what)
            }
            _ => {
                self.phase = Phase::Ending;
                Reply::Now
            }
        }
    }

    /// After a first signal: whether the process ends now, or its work ends it. `None`: neither yet.
    fn ends_now(&mut self) -> Option<bool> {
        match self.phase {
            Phase::Asked if self.holds.is_empty() => {
                self.phase = Phase::Ending;
                Some(true)
            }
            Phase::Running | Phase::Asked => None,
            Phase::Stopping | Phase::Ending => Some(false),
        }
    }

    fn only_compiles(&self) -> bool {
        !self.compilations.is_empty() && self.holds.is_empty()
    }

    fn stops(&mut self) -> bool {
        if self.phase == Phase::Asked {
            self.phase = Phase::Stopping;
        }
        self.phase != Phase::Running
    }
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Entry of a hold, a keeper or a compilation; dropping it removes the entry.
#[derive(Debug)]
pub(crate) struct Guard(u64);

/// Names work whose end the first signal waits for.
pub(crate) fn hold(what: &'static str) -> Guard {
    let mut state = state();
    let number = state.number();
    state.holds.push((number, what));
    Guard(number)
}

/// Has `keep` called before an interrupt ends the process, on the thread that does so: it writes results that exist in memory alone.
pub(crate) fn keeper(keep: impl FnOnce() -> Option<String> + Send + 'static) -> Guard {
    let mut state = state();
    let number = state.number();
    state.keepers.push((number, Box::new(keep)));
    Guard(number)
}

/// Says that this thread compiles, which nothing can stop.
pub(crate) fn compiling() -> Guard {
    let mut state = state();
    let number = state.number();
    state.compilations.push(number);
    Guard(number)
}

/// Whether a compilation is all that a drain would wait for.
pub(crate) fn only_compiles() -> bool {
    state().only_compiles()
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut state = state();
        state.holds.retain(|(number, _)| *number != self.0);
        state.compilations.retain(|number| *number != self.0);
        let at = state.keepers.iter().position(|(number, _)| *number == self.0);
        // Dropped after the lock: its results may hold guards of their own.
        let keep = at.map(|at| state.keepers.remove(at));
        drop(state);
        drop(keep);
    }
}

/// Sets what the error line of an interrupt says after "interrupted".
pub(crate) fn doing(what: impl Into<String>) {
    state().doing = what.into();
}

/// Whether an interrupt asks the work to end. Whoever gets `true` returns an error, which ends the process. Does not return where
/// the process ends now.
pub(crate) fn stops() -> bool {
    let stops = state().stops();
    stay_if_ending();
    stops
}

/// Does not return where an interrupt ends the process now: that thread has the last word.
pub(crate) fn stay_if_ending() {
    while state().phase == Phase::Ending {
        thread::park();
    }
}

/// What a signal that came does.
pub(crate) fn request() -> Reply {
    state().request()
}

/// Waits after [`Reply::After`]; whether the process ends now.
pub(crate) fn wait() -> bool {
    loop {
        if let Some(ends) = state().ends_now() {
            return ends;
        }
        thread::sleep(LOOK);
    }
}

/// Keeps the results of all keepers. Returns the text of the error line.
pub(crate) fn last_words() -> String {
    let (doing, keepers) = {
        let mut state = state();
        (mem::take(&mut state.doing), mem::take(&mut state.keepers))
    };
    let mut line = if doing.is_empty() { "interrupted".to_string() } else { format!("interrupted {doing}") };
    for kept in keepers.into_iter().filter_map(|(_, keep)| keep()) {
        // A String takes all that is written.
        let _ = write!(line, "; {kept}");
    }
    line
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_ends_at_once_unless_results_are_about_to_be_kept() {
        let mut state = State::new();
        assert!(!state.stops());
        assert_eq!((state.request(), state.phase), (Reply::Now, Phase::Ending));

        let mut state = State { holds: vec![(1, "the steps under way")], ..State::new() };
        assert_eq!(state.request(), Reply::After("the steps under way"));
        assert_eq!(state.ends_now(), None);
        state.holds.clear();
        assert_eq!((state.ends_now(), state.phase), (Some(true), Phase::Ending));
    }

    #[test]
    fn a_compilation_is_left_unless_results_are_about_to_be_kept() {
        let mut state = State { compilations: vec![1], ..State::new() };
        assert!(state.only_compiles() && !State::new().only_compiles());
        state.holds.push((2, "x"));
        assert!(!state.only_compiles());
    }

    #[test]
    fn work_that_was_told_ends_by_itself_unless_a_second_signal_comes() {
        let mut state = State { holds: vec![(1, "x")], ..State::new() };
        state.request();
        assert!(state.stops());
        state.holds.clear();
        assert_eq!(state.ends_now(), Some(false));
        assert_eq!((state.request(), state.ends_now()), (Reply::Now, Some(false)));
    }

    #[test]
    fn entries_count_until_their_guards_are_dropped() {
        doing("after 3 of 8 steps");
        let kept = keeper(|| Some("the steps are kept in a".into()));
        let silent = keeper(|| None);
        drop(keeper(|| Some("gone".into())));
        let (held, compiles) = (hold("x"), compiling());
        let (hold, compilation) = (held.0, compiles.0);
        // Other tests of this process may have entries, too.
        let has = || {
            let state = state();
            (state.holds.iter().any(|(n, _)| *n == hold), state.compilations.contains(&compilation))
        };
        assert_eq!(has(), (true, true));
        drop(held);
        assert_eq!(has(), (false, true));
        drop(compiles);
        assert_eq!(has(), (false, false));
        assert_eq!(last_words(), "interrupted after 3 of 8 steps; the steps are kept in a");
        drop((kept, silent));
        assert_eq!(last_words(), "interrupted");
    }
}
