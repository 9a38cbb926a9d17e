//! Temporary files and folders of this process, for an end without destructors.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Those that exist, among up to [`RENAMED`] that have been renamed or removed.
static TEMPORARIES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Paths that no longer exist and may still be listed: a server makes files for as long as it runs.
const RENAMED: usize = 64;

/// Adds a temporary file or folder to the list.
pub(crate) fn note(path: &Path) {
    add(&mut TEMPORARIES.lock().unwrap_or_else(PoisonError::into_inner), path);
}

fn add(list: &mut Vec<PathBuf>, path: &Path) {
    if list.len() >= RENAMED {
        list.retain(|path| path.exists());
    }
    list.push(path.into());
}

/// Removes the temporary files and folders of this process, before it ends without destructors.
pub(crate) fn remove_all() {
    for path in TEMPORARIES.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        // One that was renamed or removed no longer exists.
        let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn renamed_files_leave_the_list() {
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
