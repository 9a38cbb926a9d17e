//! Exclusive file locks.

use std::fs::{File, TryLockError};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Maximum wait for a lock. Between `fork` and `exec`, a child process holds copies of all open file descriptors, so a
/// lock can outlive its `File`.
const WAIT: Duration = Duration::from_secs(1);

/// Locks a file until it is closed.
///
/// # Errors
/// Returns an error if the file is still locked after one second, or if the file system has no locks.
pub fn lock(file: &File) -> Result<(), TryLockError> {
    let started = Instant::now();
    loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if started.elapsed() < WAIT => sleep(Duration::from_millis(10)),
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_is_acquired_once_all_copies_of_the_handle_are_closed() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open = || File::open(file.path()).expect("opens");
        let held = open();
        lock(&held).expect("unlocked");
        assert!(matches!(lock(&open()), Err(TryLockError::WouldBlock)));
        let copy = held.try_clone().expect("a copy");
        drop(held);
        let child = std::thread::spawn(move || {
            sleep(Duration::from_millis(100));
            drop(copy);
        });
        lock(&open()).expect("locked after the copy is closed");
        child.join().expect("ended");
    }
}
