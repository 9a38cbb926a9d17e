//! Key-value store in this process's memory.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ltx2_pjrt::{KvError, KvStore};

/// A key-value store for the threads of one process; [`super::StoreServer`] serves it to other processes.
#[derive(Default)]
pub struct MemoryStore {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl MemoryStore {
    fn values(&self) -> MutexGuard<'_, HashMap<String, Vec<u8>>> {
        // Every change is a single insertion or removal, so the map stays consistent even if a thread panics.
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of keys.
    pub(super) fn keys(&self) -> usize {
        self.values().len()
    }
}

impl KvStore for MemoryStore {
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
        let end = Instant::now().checked_add(timeout);
        let mut values = self.values();
        loop {
            if let Some(value) = values.get(key) {
                return Ok(value.clone());
            }
            let left = end.map_or(timeout, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(KvError::Timeout { key: key.into(), after: timeout });
            }
            values = self.changed.wait_timeout(values, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn try_get(&self, key: &str) -> Result<Vec<u8>, KvError> {
        self.values().get(key).cloned().ok_or_else(|| KvError::NotFound(key.into()))
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        let mut values = self.values();
        if values.contains_key(key) {
            return Err(KvError::AlreadyExists(key.into()));
        }
        values.insert(key.into(), value.into());
        self.changed.notify_all();
        Ok(())
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        self.values().insert(key.into(), value.into());
        self.changed.notify_all();
        Ok(())
    }

    fn remove(&self, key: &str) -> Result<(), KvError> {
        self.values().remove(key);
        Ok(())
    }
}
