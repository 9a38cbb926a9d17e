//! Claims on entries of the compile cache, among processes.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long another process's compile is waited for: longer than any takes, but for one that was stopped.
const PATIENCE: Duration = Duration::from_secs(1800);

/// A process's claim on an entry that is not there: others that want its program wait until it is dropped. It is a locked file
/// next to the entry, so that it ends with its process.
pub(super) struct Claim {
    path: PathBuf,
    file: File,
}

impl Claim {
    /// Waits for whoever compiles the same program. None where no file can be locked, or nobody gives it up: a program is then
    /// compiled twice at worst.
    pub(super) fn wait(name: &str, entry: &Path) -> Option<Self> {
        let path = entry.with_extension("lock");
        fs::create_dir_all(entry.parent()?).ok()?;
        let file = File::create(&path).ok()?;
        let started = Instant::now();
        let mut is_said = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Some(Claim { path, file }),
                Err(TryLockError::WouldBlock) if started.elapsed() < PATIENCE => {}
                Err(_) => return None,
            }
            if !is_said {
                tracing::info!("{name}: waiting for another process that compiles it ({})", path.display());
                is_said = true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Before the lock ends: whoever waits holds the removed file, whoever comes now makes another, and both look for the entry.
        _ = fs::remove_file(&self.path);
        _ = self.file.unlock();
    }
}
