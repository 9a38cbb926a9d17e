//! Complete files or none: a temporary name in the target folder, renamed at the end.

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::error::{Error, Result};
use crate::destination::{self, Destination};
use crate::{failpoint, temporaries};

/// Folder for the temporary files of an output: its own, where they can be renamed to it.
pub(super) fn scratch_folder(path: &Path) -> Result<PathBuf> {
    Ok(match destination_of(path)? {
        Destination::File(target) => destination::folder(&target),
        Destination::Stream(_) => std::env::temp_dir(),
    })
}

fn destination_of(path: &Path) -> Result<Destination> {
    Destination::of(path).map_err(Error::io("write", path))
}

/// The name of a file without its folder.
pub(super) fn name(path: &Path) -> impl Display {
    path.file_name().unwrap_or_default().display()
}

/// An empty file next to the file at `path`, its parents created, deleted unless [`persist`]ed. For a device or a pipe it is in the
/// folder of temporary files.
///
/// `suffix` ends its name, so that a program which looks at extensions sees the right one.
pub(super) fn beside(path: &Path, suffix: &str) -> Result<NamedTempFile> {
    let folder = scratch_folder(path)?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".ltx2-").suffix(suffix);
    #[cfg(unix)]
    {
        // Temporary files are private by default; the finished file has the permissions of any new file.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let create = || {
        std::fs::create_dir_all(&folder).map_err(Error::io("create folder", &folder))?;
        builder.tempfile_in(&folder).map_err(Error::io("create a temporary file in", &folder))
    };
    // Another process that only checks the folder may remove it between the two calls.
    let file = match create() {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => create()?,
        created => created?,
    };
    temporaries::note(file.path());
    Ok(file)
}

/// The calls by which a file gets its bytes and then its name.
trait Calls {
    fn write(&mut self, bytes: &[u8]) -> Result<()>;
    /// The bytes are on the disk when it ends.
    fn sync_file(&mut self) -> Result<()>;
    fn rename(&mut self) -> Result<()>;
    /// The name is on the disk when it ends.
    fn sync_folder(&mut self) -> Result<()>;
}

/// Gives a file bytes and its name, in the order that leaves it whole, or what had the name before, if the machine stops at any
/// moment.
fn replace_by(calls: &mut impl Calls, parts: &[&[u8]]) -> Result<()> {
    parts.iter().try_for_each(|part| calls.write(part))?;
    calls.sync_file()?;
    calls.rename()?;
    calls.sync_folder()
}

/// A temporary file beside the one that it becomes.
struct Beside<'a> {
    /// None once it has its name.
    file: Option<NamedTempFile>,
    /// As it was given, for messages.
    path: &'a Path,
    /// The file at the end of its links.
    target: &'a Path,
    /// Whether a file that has the name is replaced; else it stays and is an error.
    replace: bool,
}

impl Beside<'_> {
    fn file(&mut self) -> Result<&mut NamedTempFile> {
        let gone = || std::io::Error::other("the temporary file has its name already");
        self.file.as_mut().ok_or_else(|| Error::io("write", self.path)(gone()))
    }
}

impl Calls for Beside<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let path = self.path;
        let (first, rest) = bytes.split_at(bytes.len() / 2);
        self.file()?.write_all(first).map_err(Error::io("write", path))?;
        failpoint::reach("write", name(path));
        self.file()?.write_all(rest).map_err(Error::io("write", path))
    }

    fn sync_file(&mut self) -> Result<()> {
        let path = self.path;
        self.file()?.as_file().sync_all().map_err(Error::io("write", path))
    }

    fn rename(&mut self) -> Result<()> {
        failpoint::reach("rename", name(self.path));
        failpoint::fail("rename", name(self.path)).map_err(Error::io("rename the finished file to", self.path))?;
        let Some(file) = self.file.take() else { return Ok(()) };
        let named = if self.replace { file.persist(self.target) } else { persist_new(file, self.target) };
        named.map(drop).map_err(|e| Error::io("rename the finished file to", self.path)(e.error))
    }

    fn sync_folder(&mut self) -> Result<()> {
        let folder = destination::folder(self.target);
        sync_folder(&folder).map_err(Error::io("write", &folder))
    }
}

/// Gives a file a name that no file has. On a file system that cannot tell at that moment, the name is looked at just before.
fn persist_new(file: NamedTempFile, path: &Path) -> std::result::Result<std::fs::File, tempfile::PersistError> {
    file.persist_noclobber(path).or_else(|refused| match refused.error.kind() {
        std::io::ErrorKind::AlreadyExists => Err(refused),
        _ if path.symlink_metadata().is_ok() => Err(refused),
        _ => refused.file.persist(path),
    })
}

/// Waits until the names in a folder are on the disk. Some file systems have no such call, and some folders may be written to and
/// not read: names are on the disk a little later there.
pub(crate) fn sync_folder(folder: &Path) -> std::io::Result<()> {
    use std::io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    match std::fs::File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(e) if matches!(e.kind(), InvalidInput | PermissionDenied | Unsupported) => Ok(()),
        other => other,
    }
}

/// Gives the temporary file its name; a file that has it is replaced, or stays and is an error. A device or a pipe gets its bytes.
pub(super) fn persist(file: NamedTempFile, path: &Path, replace: bool) -> Result<()> {
    match destination_of(path)? {
        Destination::File(target) => replace_by(&mut Beside { file: Some(file), path, target: &target, replace }, &[]),
        Destination::Stream(stream) => {
            let copy = || std::io::copy(&mut file.reopen()?, &mut destination::open_stream(&stream)?);
            copy().map(drop).map_err(Error::io("write", path))
        }
    }
}

/// Checks that a file can be created at `path`, so that an unusable path is reported before hours of work. Leaves nothing
/// behind: parent folders that the check creates are removed again.
///
/// # Errors
/// A folder that cannot be created or written to; a folder at `path`.
pub fn check_writable(path: &Path) -> Result<()> {
    if path.is_dir() || path.file_name().is_none() {
        let source = std::io::ErrorKind::IsADirectory.into();
        return Err(Error::Io { action: "write", path: path.into(), source });
    }
    let target = match destination_of(path)? {
        Destination::File(target) => target,
        Destination::Stream(stream) => return destination::check_stream(&stream).map_err(Error::io("write", path)),
    };
    let folder = destination::folder(&target);
    let missing: Vec<&Path> = folder.ancestors().take_while(|f| !f.as_os_str().is_empty() && !f.exists()).collect();
    let tried = beside(&target, ".part").map(drop);
    // The deepest comes first. A folder that another process uses by now is not empty, and stays.
    missing.into_iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
    tried
}

/// Writes `bytes` to `path`: parents are created, an existing file is replaced, and no reader sees half of it. A link stays: the file
/// that it leads to is replaced. A device or a pipe gets the bytes.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    write_file(path, bytes, true)
}

/// [`write_atomically`]; without `replace` a file of that name stays and is an error.
pub(crate) fn write_file(path: &Path, bytes: &[u8], replace: bool) -> Result<()> {
    match destination_of(path)? {
        Destination::File(target) => {
            let file = Some(beside(&target, ".part")?);
            replace_by(&mut Beside { file, path, target: &target, replace }, &[bytes])
        }
        Destination::Stream(stream) => {
            let write = || destination::open_stream(&stream)?.write_all(bytes);
            write().map_err(Error::io("write", path))
        }
    }
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
        temporaries::remove_all();
        assert!(!under_way.path().exists() && path.exists());
    }

    #[test]
    fn checking_a_path_leaves_no_folder() {
        let folder = tempfile::tempdir().unwrap();
        check_writable(&folder.path().join("new/deep/out.mp4")).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let taken = folder.path().join("taken");
        std::fs::create_dir(&taken).unwrap();
        check_writable(&taken.join("out.mp4")).unwrap();
        assert!(taken.is_dir(), "a folder that was there stays");
        assert!(check_writable(&taken).is_err(), "a folder is no file");
    }

    /// A call, as a file system sees it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Call {
        Write(usize),
        SyncFile,
        Rename,
        SyncFolder,
    }

    /// Calls in the order in which they came.
    struct Recorded(Vec<Call>);

    impl Calls for Recorded {
        fn write(&mut self, bytes: &[u8]) -> Result<()> {
            self.0.push(Call::Write(bytes.len()));
            Ok(())
        }

        fn sync_file(&mut self) -> Result<()> {
            self.0.push(Call::SyncFile);
            Ok(())
        }

        fn rename(&mut self) -> Result<()> {
            self.0.push(Call::Rename);
            Ok(())
        }

        fn sync_folder(&mut self) -> Result<()> {
            self.0.push(Call::SyncFolder);
            Ok(())
        }
    }

    /// States of the name after the machine stopped when these calls had been made: none is the file that had it before, else the
    /// bytes of the new one. Bytes that were not synced are there in part, or not at all.
    fn after_a_stop(made: &[Call]) -> Vec<Option<usize>> {
        let since = |call: Call| made.iter().rposition(|one| *one == call);
        let (mut written, mut safe) = (0, 0);
        for call in made {
            match call {
                Call::Write(bytes) => written += bytes,
                Call::SyncFile => safe = written,
                Call::Rename | Call::SyncFolder => {}
            }
        }
        let Some(renamed) = since(Call::Rename) else { return vec![None] };
        let is_kept = since(Call::SyncFolder).is_some_and(|synced| synced > renamed);
        (safe..=written).map(Some).chain((!is_kept).then_some(None)).collect()
    }

    /// Whether the file is whole or the one before, wherever the machine stops, and there when the calls have ended.
    fn survives(calls: &[Call], bytes: usize) -> bool {
        let is_right = |state: &Option<usize>| state.is_none_or(|left| left == bytes);
        let everywhere = (0..=calls.len()).flat_map(|n| after_a_stop(&calls[..n])).all(|state| is_right(&state));
        everywhere && after_a_stop(calls) == [Some(bytes)]
    }

    #[test]
    fn a_machine_that_stops_at_any_call_leaves_a_whole_file_or_the_one_before() {
        let mut recorded = Recorded(Vec::new());
        replace_by(&mut recorded, &[b"abc", b"de"]).unwrap();
        let calls = recorded.0;
        assert_eq!(calls.iter().filter(|call| matches!(call, Call::Write(_))).count(), 2);
        assert!(survives(&calls, 5), "{calls:?}");
        // Each call is needed, in its place.
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
    fn a_link_stays_and_the_file_at_its_end_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("else")).unwrap();
        std::os::unix::fs::symlink("else/a.json", path("a.json")).unwrap();
        check_writable(&path("a.json")).unwrap();
        assert!(write_file(&path("a.json"), b"1", false).is_ok() && write_file(&path("a.json"), b"2", false).is_err());
        write_atomically(&path("a.json"), b"2").unwrap();
        let (mut file, link) = (beside(&path("a.json"), ".mp4").unwrap(), std::fs::read_link(path("a.json")).unwrap());
        assert_eq!(file.path().parent(), Some(&*path("else")));
        file.write_all(b"3").unwrap();
        persist(file, &path("a.json"), true).unwrap();
        assert_eq!((std::fs::read(path("else/a.json")).unwrap(), link), (b"3".to_vec(), "else/a.json".into()));
        assert!(path("a.json").is_symlink());
        assert_eq!(std::fs::read_dir(path("else")).unwrap().count(), 1);
    }

    #[test]
    fn a_fifo_gets_the_bytes_and_stays() {
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
                let mut file = beside(&path, ".mp4").unwrap();
                file.write_all(b"bytes").unwrap();
                persist(file, &path, replace).unwrap();
            }
            assert_eq!(reader.join().unwrap().unwrap(), b"bytes");
        }
        use std::os::unix::fs::FileTypeExt;
        assert!(path.metadata().unwrap().file_type().is_fifo());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
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
