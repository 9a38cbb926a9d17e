//! Complete files or none: a temporary name in the target folder, renamed at the end.

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tempfile::NamedTempFile;

use super::error::{Error, Result};
use crate::failpoint;

/// The temporary files that are there, for an end without destructors, among up to [`NAMED`] that have got their names meanwhile.
static TEMPORARIES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Files that may have their names and still be listed: a server makes files for as long as it runs.
const NAMED: usize = 64;

/// Notes a temporary file.
fn note(list: &mut Vec<PathBuf>, path: &Path) {
    if list.len() >= NAMED {
        list.retain(|path| path.exists());
    }
    list.push(path.into());
}

/// Removes temporary files that this process is writing, before it ends at once.
pub fn remove_temporaries() {
    for path in TEMPORARIES.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        // One that has its name, or was removed, is no longer there.
        let _ = std::fs::remove_file(path);
    }
}

/// Folder of a file; `.` for a bare name.
pub(super) fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// The name of a file without its folder.
pub(super) fn name(path: &Path) -> impl Display {
    path.file_name().unwrap_or_default().display()
}

/// An empty file next to `path`, its parents created, deleted unless [`persist`]ed.
///
/// `suffix` ends its name, so that a program which looks at extensions sees the right one.
pub(super) fn beside(path: &Path, suffix: &str) -> Result<NamedTempFile> {
    let folder = folder(path);
    std::fs::create_dir_all(&folder).map_err(Error::io("create folder", &folder))?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".ltx2-").suffix(suffix);
    #[cfg(unix)]
    {
        // Temporary files are private by default; the finished file has the permissions of any new file.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let file = builder.tempfile_in(&folder).map_err(Error::io("create a temporary file in", &folder))?;
    note(&mut TEMPORARIES.lock().unwrap_or_else(PoisonError::into_inner), file.path());
    Ok(file)
}

/// Gives the temporary file its name; a file that has it is replaced, or stays and is an error.
pub(super) fn persist(file: NamedTempFile, path: &Path, replace: bool) -> Result<()> {
    // What is behind a name survives a machine that stops at once.
    file.as_file().sync_all().map_err(Error::io("write", path))?;
    failpoint::reach("rename", name(path));
    let named = if replace { file.persist(path) } else { file.persist_noclobber(path) };
    named.map(drop).map_err(|e| Error::io("rename the finished file to", path)(e.error))
}

/// Whether a file can be made at `path`, its parents created: said before hours of work instead of after.
///
/// # Errors
/// The folder that cannot be made or written to.
pub fn check_writable(path: &Path) -> Result<()> {
    beside(path, ".part").map(drop)
}

/// Writes `bytes` to `path`: parents are created, an existing file is replaced, and no reader sees half of it.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    write(path, bytes, true)
}

/// [`write_atomically`], where a file that has the name by then may stay, which is an error.
pub(super) fn write(path: &Path, bytes: &[u8], replace: bool) -> Result<()> {
    let mut file = beside(path, ".part")?;
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    file.write_all(first).map_err(Error::io("write", path))?;
    failpoint::reach("write", name(path));
    file.write_all(rest).map_err(Error::io("write", path))?;
    persist(file, path, replace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_being_written_is_removed_and_what_is_written_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("done.json");
        write_atomically(&path, b"{}").unwrap();
        let under_way = beside(&folder.path().join("out.mp4"), ".mp4").unwrap();
        assert!(under_way.path().exists());
        remove_temporaries();
        assert!(!under_way.path().exists() && path.exists());
    }

    #[test]
    fn files_that_have_their_names_are_listed_no_longer() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("there");
        std::fs::write(&there, "").unwrap();
        let mut list = vec![there.clone()];
        for n in 0..10 * NAMED {
            note(&mut list, &folder.path().join(n.to_string()));
            assert!(list.len() <= NAMED && list[0] == there, "{}", list.len());
        }
    }

    /// `/dev/null`, which cannot be synchronized, stands for a disk that fails when it has to keep what it was given.
    #[test]
    fn a_file_has_its_name_only_when_the_disk_has_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.mp4");
        let (_, temporary) = beside(&path, ".mp4").unwrap().into_parts();
        let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
        let error = persist(NamedTempFile::from_parts(null, temporary), &path, true).err().map(|e| e.to_string());
        assert!(error.as_ref().is_some_and(|e| e.contains("out.mp4")) && !path.exists(), "{error:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    }
}
