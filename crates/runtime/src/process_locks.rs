//! Locks that prevent several processes from compiling the same program at the same time.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Maximum wait for another process to compile a program. Only a suspended process takes this long.
const PATIENCE: Duration = Duration::from_secs(1800);

/// Lock on a missing compile-cache entry: other processes that need the program wait until the lock is dropped.
/// Implemented as a locked file next to the entry, so that the system releases the lock when the process that holds it
/// exits.
pub(super) struct ProcessLock {
    path: PathBuf,
    file: File,
}

impl ProcessLock {
    /// Waits while another process compiles the same program, then takes the lock. `None` if the file cannot be locked
    /// or the wait exceeds [`PATIENCE`]; the program may then be compiled twice.
    pub(super) fn wait(name: &str, entry: &Path) -> Option<Self> {
        let path = entry.with_extension("lock");
        fs::create_dir_all(entry.parent()?).ok()?;
        let file = File::create(&path).ok()?;
        let started = Instant::now();
        let mut is_said = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Some(ProcessLock { path, file }),
                Err(TryLockError::WouldBlock) if started.elapsed() < PATIENCE => {}
                Err(_) => return None,
            }
            if !is_said {
                tracing::info!("waiting for another process to compile {name} ({})", path.display());
                is_said = true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for ProcessLock {
    fn drop(&mut self) {
        // Remove the file before unlocking: processes that already wait then lock the removed file, later ones create a
        // new file, and both check for the entry after that.
        _ = fs::remove_file(&self.path);
        _ = self.file.unlock();
    }
}
