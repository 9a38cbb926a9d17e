//! Claims on entries of the compile cache, among processes.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// A process's claim on an entry that is not there: others that want its program wait until it is dropped. It is a locked file
/// next to the entry, so that it ends with its process.
pub(super) struct Claim {
    path: PathBuf,
    file: File,
}

impl Claim {
    /// Waits for whoever compiles the same program. None where no file can be locked: a program is then compiled twice at worst.
    pub(super) fn wait(entry: &Path) -> Option<Self> {
        let path = entry.with_extension("lock");
        fs::create_dir_all(entry.parent()?).ok()?;
        let file = File::create(&path).ok()?;
        file.lock().ok()?;
        Some(Claim { path, file })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Before the lock ends: whoever waits holds the removed file, whoever comes now makes another, and both look for the entry.
        _ = fs::remove_file(&self.path);
        _ = self.file.unlock();
    }
}
