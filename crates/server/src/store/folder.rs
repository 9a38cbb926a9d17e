//! An open folder. Its files are accessed relative to its file descriptor, without following symbolic links.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};

#[cfg(test)]
use super::tests::{StoreCall, note};

/// Mode of new folders, which only the owner can access.
const FOLDER: Mode = Mode::RWXU;
/// Mode of new files, which only the owner can access.
const FILE: Mode = Mode::from_bits_retain(0o600);
/// Prefix of the names of incomplete files.
pub(super) const TEMPORARY: &str = ".ltx2-";

/// Adds the reason to the error of a folder that cannot be created because its path exists but is not a folder.
fn folder_error(path: &Path, error: io::Error) -> io::Error {
    if error.kind() != io::ErrorKind::AlreadyExists {
        return error;
    }
    let why = match std::fs::read_link(path) {
        Ok(target) => {
            format!("the path is a link to {}, which is not a folder; create that folder first", target.display())
        }
        Err(_) => "the path is a file; use a folder".into(),
    };
    io::Error::new(error.kind(), why)
}

#[derive(Debug)]
pub(super) struct Folder(OwnedFd);

impl Folder {
    const FLAGS: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC).union(OFlags::RDONLY);

    /// Opens the folder at a path; creates it if it does not exist. Symbolic links in the path are followed, because
    /// the operator chose it.
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        let builder = &mut std::fs::DirBuilder::new();
        let made = std::os::unix::fs::DirBuilderExt::mode(builder.recursive(true), FOLDER.bits()).create(path);
        made.map_err(|error| folder_error(path, error))?;
        Ok(Folder(rustix::fs::openat(CWD, path, Self::FLAGS, Mode::empty())?))
    }

    /// Opens an existing subfolder.
    pub(super) fn child(&self, name: &str) -> io::Result<Self> {
        Ok(Folder(rustix::fs::openat(&self.0, name, Self::FLAGS | OFlags::NOFOLLOW, Mode::empty())?))
    }

    /// Opens a subfolder; creates it if it does not exist.
    pub(super) fn child_or_new(&self, name: &str) -> io::Result<Self> {
        let child = match self.new_child(name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.child(name).map_err(|error| {
                let is_folder =
                    self.stat(name).is_some_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory);
                let why = "is a link or a file, not a folder; only the state folder itself may be a link";
                if is_folder { error } else { io::Error::new(error.kind(), format!("{name} {why}")) }
            })?,
            other => other?,
        };
        rustix::fs::fchmod(&child.0, FOLDER)?;
        Ok(child)
    }

    /// Creates a subfolder.
    pub(super) fn new_child(&self, name: &str) -> io::Result<Self> {
        rustix::fs::mkdirat(&self.0, name, FOLDER)?;
        #[cfg(test)]
        note(&self.0, |at| StoreCall::Folder(at.join(name)));
        self.child(name)
    }

    /// Returns the names of all entries, in no particular order.
    pub(super) fn names(&self) -> io::Result<Vec<OsString>> {
        let entries = rustix::fs::Dir::read_from(&self.0)?;
        let names = entries.map(|entry| Ok(OsString::from_vec(entry?.file_name().to_bytes().to_vec())));
        let own = |name: &io::Result<OsString>| !matches!(name, Ok(name) if name == "." || name == "..");
        names.filter(own).collect()
    }

    /// Opens a regular file for reading.
    pub(super) fn open(&self, name: &str) -> io::Result<File> {
        // Without `NONBLOCK`, opening a FIFO would block.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = File::from(rustix::fs::openat(&self.0, name, flags, Mode::empty())?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(file)
    }

    pub(super) fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open(name)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Opens a file for writing and truncates it.
    pub(super) fn create(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = File::from(rustix::fs::openat(&self.0, name, flags, FILE)?);
        #[cfg(test)]
        note(&self.0, |at| StoreCall::File(at.join(name)));
        Ok(file)
    }

    /// Writes and syncs a file. The file's name is durable only after [`Folder::sync`].
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.create(name)?;
        file.write_all(bytes)?;
        #[cfg(test)]
        note(&self.0, |at| StoreCall::Bytes(at.join(name), bytes.to_vec()));
        file.sync_all()?;
        #[cfg(test)]
        note(&self.0, |at| StoreCall::SyncFile(at.join(name)));
        Ok(())
    }

    /// Writes a file atomically, by renaming a temporary file. The file's name is durable only after [`Folder::sync`].
    pub(super) fn put(&self, name: &str, bytes: &[u8], moment: impl FnOnce()) -> io::Result<()> {
        let temporary = format!("{TEMPORARY}{name}");
        let write = || -> io::Result<()> {
            self.write(&temporary, bytes)?;
            moment();
            rustix::fs::renameat(&self.0, &temporary, &self.0, name)?;
            #[cfg(test)]
            note(&self.0, |at| StoreCall::Rename(at.join(&temporary), at.join(name)));
            Ok(())
        };
        write().inspect_err(|_| drop(self.unlink(&temporary)))
    }

    /// Moves an entry to another folder. Fails if that folder already has an entry with the new name.
    pub(super) fn move_to(&self, name: &Path, other: &Folder, new: &Path) -> io::Result<()> {
        rustix::fs::renameat_with(&self.0, name, &other.0, new, rustix::fs::RenameFlags::NOREPLACE)?;
        #[cfg(test)]
        note(&self.0, |from| StoreCall::Rename(from.join(name), super::tests::path(&other.0).join(new)));
        Ok(())
    }

    /// Removes a file. Does nothing if the file does not exist.
    pub(super) fn unlink(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.0, name, AtFlags::empty()) {
            Ok(()) => {
                #[cfg(test)]
                note(&self.0, |at| StoreCall::Unlink(at.join(name)));
                Ok(())
            }
            Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the metadata of an entry. Does not follow symbolic links.
    pub(super) fn stat(&self, name: &str) -> Option<Stat> {
        rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW).ok()
    }

    /// Returns whether a regular file with that name exists.
    pub(super) fn has_file(&self, name: &str) -> bool {
        self.stat(name).is_some_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
    }

    /// Makes a file accessible only to its owner, whatever mode it was created with.
    pub(super) fn make_private(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::fchmod(self.open(name)?, FILE)?)
    }

    /// Returns the disk space that the folder's files use, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        // The folder may have been removed; it then uses no space.
        let names = self.names().into_iter().flatten();
        let stats = names.filter_map(|name| self.stat(name.to_str()?));
        stats.map(|stat| u64::try_from(stat.st_blocks).unwrap_or(0) * 512).sum()
    }

    /// Returns the free disk space that is available to this process, in bytes.
    pub(super) fn free(&self) -> io::Result<u64> {
        let about = rustix::fs::fstatvfs(&self.0)?;
        Ok(about.f_bavail * about.f_frsize)
    }

    /// Syncs the folder, which makes the names of its entries durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        rustix::fs::fsync(&self.0)?;
        #[cfg(test)]
        note(&self.0, StoreCall::SyncFolder);
        Ok(())
    }
}
