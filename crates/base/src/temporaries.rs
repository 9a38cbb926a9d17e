//! Registry of this process's temporary files and directories, which are removed when the process exits without running
//! destructors.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Paths of temporary files and directories, including at most [`RENAMED`] paths that no longer exist.
static TEMPORARIES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// When the registry contains this many paths, adding a path first removes those that no longer exist. Otherwise, the
/// registry of a server would grow for as long as the server runs.
const RENAMED: usize = 64;

/// Registers a temporary file or directory.
pub fn note(path: &Path) {
    add(&mut TEMPORARIES.lock().unwrap_or_else(PoisonError::into_inner), path);
}

fn add(list: &mut Vec<PathBuf>, path: &Path) {
    if list.len() >= RENAMED {
        list.retain(|path| path.exists());
    }
    list.push(path.into());
}

/// Removes all registered files and directories. Called before the process exits without running destructors.
pub fn remove_all() {
    for path in TEMPORARIES.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        // Fails harmlessly for paths that were renamed or removed.
        let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn renamed_files_are_pruned_from_the_registry() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("there");
        fs::write(&there, "").unwrap();
        let mut list = vec![there.clone()];
        for n in 0..10 * RENAMED {
            add(&mut list, &folder.path().join(n.to_string()));
            assert!(list.len() <= RENAMED && list[0] == there, "{}", list.len());
        }
    }
}
