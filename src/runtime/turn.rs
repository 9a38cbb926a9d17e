//! Turns at the entries of the compile cache.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Turn at one entry of the compile cache. The threads of a process that want its program wait for the first, and for the thread
/// that writes what the first compiled.
#[derive(Clone, Default)]
pub(super) struct Turn(Arc<Mutex<Writing>>);

/// The thread that writes an entry, if there is one.
pub(super) type Writing = Option<JoinHandle<()>>;

impl Turn {
    pub(super) fn at(entry: &Path) -> Self {
        static TURNS: Mutex<BTreeMap<PathBuf, Turn>> = Mutex::new(BTreeMap::new());
        TURNS.lock().unwrap_or_else(PoisonError::into_inner).entry(entry.into()).or_default().clone()
    }

    /// Waits for it.
    pub(super) fn take(&self) -> MutexGuard<'_, Writing> {
        let mut writing = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = writing.take() {
            // Its panic has been printed; the entry is not there.
            let _ = thread.join();
        }
        writing
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
            drop(turn.take());
        }
    }
}
