//! Turns at the entries of the compile cache.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{Builder, JoinHandle};

/// Turn at one entry of the compile cache. The threads of a process that want its program wait for the first one, until what it
/// compiled is written.
#[derive(Clone, Default)]
pub(super) struct Turn(Arc<Mutex<Writing>>);

/// Writing of an entry.
#[derive(Default)]
pub(super) enum Writing {
    #[default]
    Done,
    /// To be done when the program has been launched: a plugin that serializes a program does not run it meanwhile.
    Due(Box<dyn FnOnce() + Send>),
    Running(JoinHandle<()>),
}

impl Turn {
    pub(super) fn at(entry: &Path) -> Self {
        static TURNS: Mutex<BTreeMap<PathBuf, Turn>> = Mutex::new(BTreeMap::new());
        TURNS.lock().unwrap_or_else(PoisonError::into_inner).entry(entry.into()).or_default().clone()
    }

    /// Waits for it; what is due is done.
    pub(super) fn wait(&self) -> MutexGuard<'_, Writing> {
        let mut writing = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::take(&mut *writing) {
            Writing::Done => {}
            Writing::Due(write) => write(),
            // Its panic has been printed; the entry is not there.
            Writing::Running(thread) => drop(thread.join()),
        }
        writing
    }

    /// Does what is due in a thread of its own. Whoever has the turn now has done it, or compiled something else: a run does not
    /// wait for that.
    pub(super) fn write(&self) {
        let mut writing = match self.0.try_lock() {
            Ok(writing) => writing,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        *writing = match std::mem::take(&mut *writing) {
            Writing::Due(write) => match Builder::new().name("save".into()).spawn(write) {
                Ok(thread) => Writing::Running(thread),
                Err(error) => {
                    tracing::warn!("a program is not kept in the compile cache: no thread: {error}");
                    Writing::Done
                }
            },
            other => other,
        }
    }
}

/// Turns whose entries an engine writes; it ends when they are written.
#[derive(Default)]
pub(super) struct Turns(Mutex<Vec<Turn>>);

impl Turns {
    pub(super) fn add(&self, turn: Turn) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(turn);
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        for turn in self.0.get_mut().unwrap_or_else(PoisonError::into_inner) {
            drop(turn.wait());
        }
    }
}
