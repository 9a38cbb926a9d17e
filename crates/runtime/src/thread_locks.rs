//! Locks that prevent several threads of this process from compiling the same program at the same time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{Builder, JoinHandle};

/// Lock on one entry of the compile cache. Threads that need the same program wait until the first thread has written
/// the entry.
#[derive(Clone, Default)]
pub(super) struct EntryLock(Arc<Mutex<PendingWrite>>);

/// State of writing an entry.
#[derive(Default)]
pub(super) enum PendingWrite {
    #[default]
    Done,
    /// The entry has to be written after the program has been launched, because some plugins do not run a program while
    /// they serialize it.
    Due(Box<dyn FnOnce() + Send>),
    Running(JoinHandle<()>),
}

impl EntryLock {
    pub(super) fn at(entry: &Path) -> Self {
        static TURNS: Mutex<BTreeMap<PathBuf, EntryLock>> = Mutex::new(BTreeMap::new());
        TURNS.lock().unwrap_or_else(PoisonError::into_inner).entry(entry.into()).or_default().clone()
    }

    /// Acquires the lock, after finishing a pending write of the entry.
    pub(super) fn wait(&self) -> MutexGuard<'_, PendingWrite> {
        let mut writing = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::take(&mut *writing) {
            PendingWrite::Done => {}
            PendingWrite::Due(write) => write(),
            // If the thread panicked, the panic was already printed and the entry is missing.
            PendingWrite::Running(thread) => drop(thread.join()),
        }
        writing
    }

    /// Starts a pending write in a background thread. Does nothing if another thread holds the lock: that thread
    /// finishes the pending write itself, and a run must not wait for it.
    pub(super) fn write(&self) {
        let mut writing = match self.0.try_lock() {
            Ok(writing) => writing,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        *writing = match std::mem::take(&mut *writing) {
            PendingWrite::Due(write) => match Builder::new().name("save".into()).spawn(write) {
                Ok(thread) => PendingWrite::Running(thread),
                Err(error) => {
                    tracing::warn!("a program is not written to the compile cache: cannot start a thread: {error}");
                    PendingWrite::Done
                }
            },
            other => other,
        }
    }
}

/// Locks of the entries that this engine writes. Dropping this struct waits until the entries are written.
#[derive(Default)]
pub(super) struct EntryLocks(Mutex<Vec<EntryLock>>);

impl EntryLocks {
    pub(super) fn add(&self, entry_lock: EntryLock) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(entry_lock);
    }
}

impl Drop for EntryLocks {
    fn drop(&mut self) {
        for entry_lock in self.0.get_mut().unwrap_or_else(PoisonError::into_inner) {
            drop(entry_lock.wait());
        }
    }
}
