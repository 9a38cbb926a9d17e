//! Output destinations: a file that is renamed into place when complete, or a stream (device, pipe) written directly.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

/// Maximum number of symbolic links to follow, as on Linux.
const LINKS: usize = 40;

/// Destination of an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// A regular file or a path that does not exist. The finished output is renamed to it; symbolic links to it are
    /// kept.
    File(PathBuf),
    /// A character device, a FIFO, or an open descriptor such as `/dev/stdout`. Written directly.
    Stream(PathBuf),
}

impl Destination {
    /// Classifies `path` after following symbolic links. A directory counts as a file; writing to it fails later.
    ///
    /// # Errors
    /// Returns an error for a block device, a socket, or a loop of symbolic links.
    pub fn classify(path: &Path) -> io::Result<Self> {
        let mut target = path.to_path_buf();
        for _ in 0..LINKS {
            let Ok(about) = fs::symlink_metadata(&target) else { return Ok(Destination::File(target)) };
            let kind = about.file_type();
            let refused = |kind: &str| {
                let why = format!("the path is a {kind}; use a file, a FIFO or a character device");
                Err(io::Error::new(ErrorKind::InvalidInput, why))
            };
            if kind.is_char_device() || kind.is_fifo() || (kind.is_symlink() && descriptor(&target).is_some()) {
                return Ok(Destination::Stream(target));
            }
            if kind.is_block_device() {
                return refused("block device");
            }
            if kind.is_socket() {
                return refused("socket");
            }
            if !kind.is_symlink() {
                return Ok(Destination::File(target));
            }
            target = folder(&target).join(fs::read_link(&target)?);
        }
        Err(rustix::io::Errno::LOOP.into())
    }

    /// Returns whether writing to `path` would replace an existing file.
    pub fn is_taken(path: &Path) -> bool {
        matches!(Destination::classify(path), Ok(Destination::File(target)) if target.is_file())
    }

    /// Returns whether `path` is a device, a pipe or an open descriptor.
    pub fn is_stream(path: &Path) -> bool {
        matches!(Destination::classify(path), Ok(Destination::Stream(_)))
    }
}

/// Returns whether `path` is a character device such as `/dev/null`, which several outputs may share.
pub fn is_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|about| about.file_type().is_char_device())
}

/// Returns the parent directory; `.` for a bare file name.
pub fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// Returns the `/proc/.../fd` directory that contains `path`; `None` if `path` is not a descriptor link.
fn descriptor(path: &Path) -> Option<PathBuf> {
    let folder = folder(path).canonicalize().ok()?;
    (folder.starts_with("/proc") && folder.ends_with("fd")).then_some(folder)
}

/// Opens a [`Destination::Stream`] for writing; opening a FIFO blocks until it has a reader. Standard output and
/// standard error are duplicated rather than reopened, so that they keep their file position.
pub fn open_stream(path: &Path) -> io::Result<File> {
    let own = Path::new("/proc/self/fd").canonicalize().ok();
    let name = path.file_name().filter(|_| own.is_some() && descriptor(path) == own);
    match name.and_then(|name| name.to_str()) {
        Some("1") => Ok(io::stdout().as_fd().try_clone_to_owned()?.into()),
        Some("2") => Ok(io::stderr().as_fd().try_clone_to_owned()?.into()),
        _ => File::options().append(true).open(path),
    }
}

/// Checks that a [`Destination::Stream`] is writable. Does not open it, because opening a FIFO blocks until it has a
/// reader.
pub fn check_stream(path: &Path) -> io::Result<()> {
    Ok(access(path, Access::WRITE_OK)?)
}

/// Checks that the file extension is one of `endings`. Devices and pipes need no extension.
///
/// # Errors
/// Returns a message with the path, `written` (a clause that states the file format) and the allowed extensions.
pub fn check_ending(path: &Path, written: &str, endings: &[&str]) -> Result<(), String> {
    let own = path.extension().map(|own| own.to_string_lossy().to_lowercase());
    if own.is_some_and(|own| endings.contains(&own.as_str())) || Destination::is_stream(path) {
        return Ok(());
    }
    let named: Vec<String> = endings.iter().map(|ending| format!(".{ending}")).collect();
    Err(format!("{}: {written}; use the extension {}", path.display(), named.join(" or ")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn symbolic_links_are_resolved() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("deep")).unwrap();
        symlink("deep/b.json", path("a.json")).unwrap();
        symlink("../c.json", path("deep/b.json")).unwrap();
        // A chain of links to a path that does not exist at first, then to a file.
        let target = Destination::File(path("deep/../c.json"));
        assert_eq!(Destination::classify(&path("a.json")).unwrap(), target);
        assert!(!Destination::is_taken(&path("a.json")));
        fs::write(path("c.json"), "{}").unwrap();
        assert_eq!(Destination::classify(&path("a.json")).unwrap(), target);
        assert!(Destination::is_taken(&path("a.json")) && Destination::is_taken(&path("c.json")));
        symlink("y", path("x")).unwrap();
        symlink("x", path("y")).unwrap();
        assert!(Destination::classify(&path("x")).unwrap_err().to_string().contains("symbolic links"));
    }

    #[test]
    fn sockets_and_block_devices_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        for device in ["/dev/null", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/2"] {
            assert!(Destination::is_stream(Path::new(device)) && !Destination::is_taken(Path::new(device)), "{device}");
        }
        let link = folder.path().join("null.mp4");
        symlink("/dev/null", &link).unwrap();
        assert_eq!(Destination::classify(&link).unwrap(), Destination::Stream("/dev/null".into()));
        let socket = folder.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        assert!(
            Destination::classify(&socket).unwrap_err().to_string().starts_with("the path is a socket; use a file")
        );
        assert!(check_stream(Path::new("/dev/null")).is_ok());
        // Only the superuser can create a block device; most other machines have one.
        let disk = folder.path().join("disk");
        let number = rustix::fs::makedev(7, 0);
        let is_made = mknodat(CWD, &disk, FileType::BlockDevice, Mode::RUSR, number).is_ok();
        let is_block = |path: &PathBuf| fs::metadata(path).is_ok_and(|about| about.file_type().is_block_device());
        let others = fs::read_dir("/dev").unwrap().flatten().map(|entry| entry.path()).filter(is_block);
        for disk in is_made.then_some(disk).into_iter().chain(others) {
            let error = Destination::classify(&disk).unwrap_err().to_string();
            assert!(error.starts_with("the path is a block device; use a file"), "{}: {error}", disk.display());
        }
    }

    #[test]
    fn wrong_file_extension_is_rejected() {
        let check = |path: &str| check_ending(Path::new(path), "videos are written as MP4", &["mp4"]);
        assert!(check("a.mp4").is_ok() && check("a.MP4").is_ok() && check("/dev/null").is_ok());
        for path in ["x.webm", "x.gif", "x", "-", "mp4", ".mp4"] {
            assert_eq!(check(path).unwrap_err(), format!("{path}: videos are written as MP4; use the extension .mp4"));
        }
    }
}
