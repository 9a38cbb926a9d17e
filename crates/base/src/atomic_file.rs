//! Atomic file writes: a temporary file in the target folder is renamed to its final name when complete.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::destination::{self, Destination};
use crate::{failpoint, temporaries};

/// A failed file operation.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct FileError {
    /// Verb phrase for the failed operation, such as `read` or `create folder`. The message continues with the path.
    pub action: &'static str,
    /// File or folder that the operation concerns, or a description of a file without a name.
    pub path: PathBuf,
    /// Cause of the failure.
    pub source: std::io::Error,
}

/// Result of a file operation.
pub type Result<T> = std::result::Result<T, FileError>;

impl FileError {
    /// Returns a closure for `map_err` that creates a [`FileError`].
    pub fn at(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| FileError { action, path, source }
    }
}

/// Returns the folder for an output's temporary files. This is the output's own folder, so that a rename stays within
/// one file system. If the output is a device or a pipe, it is the system's temporary folder.
pub fn scratch_folder(path: &Path) -> Result<PathBuf> {
    Ok(match destination_of(path)? {
        Destination::File(target) => destination::folder(&target),
        Destination::Stream(_) => std::env::temp_dir(),
    })
}

fn destination_of(path: &Path) -> Result<Destination> {
    Destination::classify(path).map_err(FileError::at("write", path))
}

/// Returns the last component of a path, for failpoints.
pub fn name(path: &Path) -> impl Display {
    path.file_name().unwrap_or_default().display()
}

/// Creates an empty temporary file in the folder of `path` (see [`scratch_folder`]), and any missing parent folders.
/// The file is deleted unless it is passed to [`persist`].
///
/// The temporary name ends with `suffix`, for programs that derive the format from the extension.
pub fn temporary_next_to(path: &Path, suffix: &str) -> Result<NamedTempFile> {
    let folder = scratch_folder(path)?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".ltx2-").suffix(suffix);
    #[cfg(unix)]
    {
        // `tempfile` makes files private by default; the finished file needs the usual permissions.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let create = || {
        std::fs::create_dir_all(&folder).map_err(FileError::at("create folder", &folder))?;
        builder.tempfile_in(&folder).map_err(FileError::at("create a temporary file in", &folder))
    };
    // A concurrent [`check_writable`] on the same folder may remove the folder between the two calls; retry once.
    let file = match create() {
        Err(FileError { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => create()?,
        created => created?,
    };
    temporaries::note(file.path());
    Ok(file)
}

/// The file system calls of an atomic write, as a trait so that tests can record their order.
trait Calls {
    fn write(&mut self, bytes: &[u8]) -> Result<()>;
    /// Writes the file's bytes to disk before it returns.
    fn sync_file(&mut self) -> Result<()>;
    fn rename(&mut self) -> Result<()>;
    /// Writes the folder entry to disk before it returns.
    fn sync_folder(&mut self) -> Result<()>;
}

/// Writes `parts`, syncs and renames the file. Because of the order of the calls, a crash at any point leaves either
/// the complete new file or the previous one.
fn replace_by(calls: &mut impl Calls, parts: &[&[u8]]) -> Result<()> {
    parts.iter().try_for_each(|part| calls.write(part))?;
    calls.sync_file()?;
    calls.rename()?;
    calls.sync_folder()
}

/// A temporary file in the same folder as its target.
struct SiblingTempFile<'a> {
    /// The temporary file; `None` after it was renamed.
    file: Option<NamedTempFile>,
    /// Path as the caller passed it, for messages.
    path: &'a Path,
    /// Path after symbolic links are resolved.
    target: &'a Path,
    /// Whether to replace an existing file. If false, an existing file is an error.
    replace: bool,
}

impl SiblingTempFile<'_> {
    fn file(&mut self) -> Result<&mut NamedTempFile> {
        let gone = || std::io::Error::other("the temporary file was already renamed");
        self.file.as_mut().ok_or_else(|| FileError::at("write", self.path)(gone()))
    }
}

impl Calls for SiblingTempFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let path = self.path;
        let (first, rest) = bytes.split_at(bytes.len() / 2);
        self.file()?.write_all(first).map_err(FileError::at("write", path))?;
        failpoint::reach("write", name(path));
        self.file()?.write_all(rest).map_err(FileError::at("write", path))
    }

    fn sync_file(&mut self) -> Result<()> {
        let path = self.path;
        self.file()?.as_file().sync_all().map_err(FileError::at("write", path))
    }

    fn rename(&mut self) -> Result<()> {
        failpoint::reach("rename", name(self.path));
        failpoint::fail("rename", name(self.path)).map_err(FileError::at("rename the finished file to", self.path))?;
        let Some(file) = self.file.take() else { return Ok(()) };
        let named = if self.replace { file.persist(self.target) } else { persist_new(file, self.target) };
        named.map(drop).map_err(|e| FileError::at("rename the finished file to", self.path)(e.error))
    }

    fn sync_folder(&mut self) -> Result<()> {
        let folder = destination::folder(self.target);
        sync_folder(&folder).map_err(FileError::at("write", &folder))
    }
}

/// Renames a file without replacing an existing one. File systems without an atomic exclusive rename get a check for an
/// existing file just before an ordinary rename.
fn persist_new(file: NamedTempFile, path: &Path) -> std::result::Result<std::fs::File, tempfile::PersistError> {
    file.persist_noclobber(path).or_else(|refused| match refused.error.kind() {
        std::io::ErrorKind::AlreadyExists => Err(refused),
        _ if path.symlink_metadata().is_ok() => Err(refused),
        _ => refused.file.persist(path),
    })
}

/// Syncs a folder, so that renames in it survive a crash. Does nothing if the file system cannot sync folders or the
/// folder is not readable; a rename in such a folder reaches the disk later.
pub fn sync_folder(folder: &Path) -> std::io::Result<()> {
    use std::io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    match std::fs::File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(e) if matches!(e.kind(), InvalidInput | PermissionDenied | Unsupported) => Ok(()),
        other => other,
    }
}

/// Renames the temporary file to `path`. If `replace` is false, an existing file is an error. If `path` is a device or
/// a pipe, copies the bytes into it.
pub fn persist(file: NamedTempFile, path: &Path, replace: bool) -> Result<()> {
    match destination_of(path)? {
        Destination::File(target) => {
            replace_by(&mut SiblingTempFile { file: Some(file), path, target: &target, replace }, &[])
        }
        Destination::Stream(stream) => {
            let copy = || std::io::copy(&mut file.reopen()?, &mut destination::open_stream(&stream)?);
            copy().map(drop).map_err(FileError::at("write", path))
        }
    }
}

/// Checks that a file can be created at `path`, so that an unusable path is reported before hours of work. Removes the
/// parent folders that it had to create for the check.
///
/// # Errors
/// Returns an error if `path` is a folder, or if its folder cannot be created or written to.
pub fn check_writable(path: &Path) -> Result<()> {
    if path.is_dir() || path.file_name().is_none() {
        let source = std::io::ErrorKind::IsADirectory.into();
        return Err(FileError { action: "write", path: path.into(), source });
    }
    let target = match destination_of(path)? {
        Destination::File(target) => target,
        Destination::Stream(stream) => {
            return destination::check_stream(&stream).map_err(FileError::at("write", path));
        }
    };
    let folder = destination::folder(&target);
    let missing: Vec<&Path> = folder.ancestors().take_while(|f| !f.as_os_str().is_empty() && !f.exists()).collect();
    let tried = temporary_next_to(&target, ".part").map(drop);
    // Deepest folder first. A folder that another process has started to use is not empty, so it is not removed.
    missing.into_iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
    tried
}

/// Writes `bytes` to `path` atomically: readers never see a partial file. Creates missing parent folders and replaces
/// an existing file. If `path` is a symbolic link, replaces the file that it points to. If `path` is a device or a
/// pipe, writes the bytes into it.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    write_file(path, bytes, true)
}

/// Writes a file like [`write_atomically`]. If `replace` is false, an existing file is an error.
pub fn write_file(path: &Path, bytes: &[u8], replace: bool) -> Result<()> {
    match destination_of(path)? {
        Destination::File(target) => {
            let file = Some(temporary_next_to(&target, ".part")?);
            replace_by(&mut SiblingTempFile { file, path, target: &target, replace }, &[bytes])
        }
        Destination::Stream(stream) => {
            let write = || destination::open_stream(&stream)?.write_all(bytes);
            write().map_err(FileError::at("write", path))
        }
    }
}

/// Writes a file like [`write_file`], but with the closure `write`, which receives an empty temporary file.
///
/// # Errors
/// Returns the error of `write`, or an error if the file cannot be written.
pub fn write_file_with<E: From<FileError>>(
    path: &Path,
    replace: bool,
    write: impl FnOnce(File) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let file = temporary_next_to(path, ".part")?;
    write(file.reopen().map_err(FileError::at("write", path))?)?;
    Ok(persist(file, path, replace)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cleanup_removes_only_unfinished_files() {
        // The cleanup also removes temporary files of concurrent tests, so this test runs in a child process.
        const ALONE: &str = "LTX2_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let mut test = std::process::Command::new(std::env::current_exe().unwrap());
            test.args(["--exact", "atomic_file::tests::cleanup_removes_only_unfinished_files"]).env(ALONE, "1");
            assert!(test.output().unwrap().status.success());
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("done.json");
        write_atomically(&path, b"{}").unwrap();
        let under_way = temporary_next_to(&folder.path().join("out.mp4"), ".mp4").unwrap();
        assert!(under_way.path().exists());
        temporaries::remove_all();
        assert!(!under_way.path().exists() && path.exists());
    }

    #[test]
    fn check_writable_leaves_no_folder() {
        let folder = tempfile::tempdir().unwrap();
        check_writable(&folder.path().join("new/deep/out.mp4")).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let taken = folder.path().join("taken");
        std::fs::create_dir(&taken).unwrap();
        check_writable(&taken.join("out.mp4")).unwrap();
        assert!(taken.is_dir(), "an existing folder is not removed");
        assert!(check_writable(&taken).is_err(), "a folder is not a writable file");
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum FileCall {
        Write(usize),
        SyncFile,
        Rename,
        SyncFolder,
    }

    /// File writer for tests that records the calls in order.
    struct RecordingWriter(Vec<FileCall>);

    impl Calls for RecordingWriter {
        fn write(&mut self, bytes: &[u8]) -> Result<()> {
            self.0.push(FileCall::Write(bytes.len()));
            Ok(())
        }

        fn sync_file(&mut self) -> Result<()> {
            self.0.push(FileCall::SyncFile);
            Ok(())
        }

        fn rename(&mut self) -> Result<()> {
            self.0.push(FileCall::Rename);
            Ok(())
        }

        fn sync_folder(&mut self) -> Result<()> {
            self.0.push(FileCall::SyncFolder);
            Ok(())
        }
    }

    /// Returns the possible states of the target after a crash that follows these calls. `None` is the previous file; a
    /// number is the length in bytes of the new file. Bytes that were not synced may be partly or completely lost.
    fn states_after_crash(made: &[FileCall]) -> Vec<Option<usize>> {
        let since = |call: FileCall| made.iter().rposition(|one| *one == call);
        let (mut written, mut safe) = (0, 0);
        for call in made {
            match call {
                FileCall::Write(bytes) => written += bytes,
                FileCall::SyncFile => safe = written,
                FileCall::Rename | FileCall::SyncFolder => {}
            }
        }
        let Some(renamed) = since(FileCall::Rename) else { return vec![None] };
        let is_kept = since(FileCall::SyncFolder).is_some_and(|synced| synced > renamed);
        (safe..=written).map(Some).chain((!is_kept).then_some(None)).collect()
    }

    /// Returns whether a crash at any point leaves the complete new file or the previous one, and whether the new file
    /// exists after all calls.
    fn survives(calls: &[FileCall], bytes: usize) -> bool {
        let is_right = |state: &Option<usize>| state.is_none_or(|left| left == bytes);
        let everywhere = (0..=calls.len()).flat_map(|n| states_after_crash(&calls[..n])).all(|state| is_right(&state));
        everywhere && states_after_crash(calls) == [Some(bytes)]
    }

    #[test]
    fn crash_at_any_call_keeps_old_or_complete_new_file() {
        let mut recorded = RecordingWriter(Vec::new());
        replace_by(&mut recorded, &[b"abc", b"de"]).unwrap();
        let calls = recorded.0;
        assert_eq!(calls.iter().filter(|call| matches!(call, FileCall::Write(_))).count(), 2);
        assert!(survives(&calls, 5), "{calls:?}");
        // Leaving out any call, or swapping two, breaks the guarantee.
        for n in 0..calls.len() {
            let without = [&calls[..n], &calls[n + 1..]].concat();
            assert!(!survives(&without, 5), "without {:?}", calls[n]);
        }
        for n in 1..calls.len() - 1 {
            let mut swapped = calls.clone();
            swapped.swap(n, n + 1);
            assert!(!survives(&swapped, 5), "{swapped:?}");
        }
    }

    #[test]
    fn writing_through_symlink_replaces_its_target() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("else")).unwrap();
        std::os::unix::fs::symlink("else/a.json", path("a.json")).unwrap();
        check_writable(&path("a.json")).unwrap();
        assert!(write_file(&path("a.json"), b"1", false).is_ok() && write_file(&path("a.json"), b"2", false).is_err());
        write_atomically(&path("a.json"), b"2").unwrap();
        let (mut file, link) =
            (temporary_next_to(&path("a.json"), ".mp4").unwrap(), std::fs::read_link(path("a.json")).unwrap());
        assert_eq!(file.path().parent(), Some(&*path("else")));
        file.write_all(b"3").unwrap();
        persist(file, &path("a.json"), true).unwrap();
        assert_eq!((std::fs::read(path("else/a.json")).unwrap(), link), (b"3".to_vec(), "else/a.json".into()));
        assert!(path("a.json").is_symlink());
        assert_eq!(std::fs::read_dir(path("else")).unwrap().count(), 1);
    }

    #[test]
    fn writing_to_fifo_keeps_the_fifo() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.json");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        check_writable(&path).unwrap();
        for (replace, is_whole) in [(false, true), (true, false)] {
            let reader = std::thread::spawn({
                let path = path.clone();
                move || std::fs::read(path)
            });
            if is_whole {
                write_file(&path, b"bytes", replace).unwrap();
            } else {
                let mut file = temporary_next_to(&path, ".mp4").unwrap();
                file.write_all(b"bytes").unwrap();
                persist(file, &path, replace).unwrap();
            }
            assert_eq!(reader.join().unwrap().unwrap(), b"bytes");
        }
        use std::os::unix::fs::FileTypeExt;
        assert!(path.metadata().unwrap().file_type().is_fifo());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    /// `/dev/null` cannot be synced, so it stands in for a disk whose fsync fails.
    #[test]
    fn failed_fsync_prevents_rename() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.mp4");
        let (_, temporary) = temporary_next_to(&path, ".mp4").unwrap().into_parts();
        let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
        let error = persist(NamedTempFile::from_parts(null, temporary), &path, true).err().map(|e| e.to_string());
        assert!(error.as_ref().is_some_and(|e| e.contains("out.mp4")) && !path.exists(), "{error:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    }
}
