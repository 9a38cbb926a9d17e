//! A folder that is open: its files are reached from there, by names that no link leads elsewhere.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};

#[cfg(test)]
use super::tests::{Call, note};

/// Of folders: nobody else's to see.
const FOLDER: Mode = Mode::RWXU;
/// Of files.
const FILE: Mode = Mode::from_bits_retain(0o600);
/// Prefix of files that are not finished.
pub(super) const TEMPORARY: &str = ".ltx2-";

/// Why a folder cannot be made where there is something else.
fn in_the_way(path: &Path, error: io::Error) -> io::Error {
    if error.kind() != io::ErrorKind::AlreadyExists {
        return error;
    }
    let why = match std::fs::read_link(path) {
        Ok(target) => format!("it is a link to {}, which is no folder: create that folder first", target.display()),
        Err(_) => "it is a file: give a folder".into(),
    };
    io::Error::new(error.kind(), why)
}

/// An open folder.
#[derive(Debug)]
pub(super) struct Folder(OwnedFd);

impl Folder {
    const FLAGS: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC).union(OFlags::RDONLY);

    /// A folder by its path, which is made where it is not there. The path is the operator's own: links in it are followed.
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        let builder = &mut std::fs::DirBuilder::new();
        let made = std::os::unix::fs::DirBuilderExt::mode(builder.recursive(true), FOLDER.bits()).create(path);
        made.map_err(|error| in_the_way(path, error))?;
        Ok(Folder(rustix::fs::openat(CWD, path, Self::FLAGS, Mode::empty())?))
    }

    /// A folder in this one, which has to be there.
    pub(super) fn child(&self, name: &str) -> io::Result<Self> {
        Ok(Folder(rustix::fs::openat(&self.0, name, Self::FLAGS | OFlags::NOFOLLOW, Mode::empty())?))
    }

    /// A folder in this one, which is made where it is not there.
    pub(super) fn child_or_new(&self, name: &str) -> io::Result<Self> {
        let child = match self.new_child(name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.child(name).map_err(|error| {
                let is_folder =
                    self.stat(name).is_some_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory);
                let why =
                    "is a link or a file, not a folder: links within the state folder are not followed; link all of it";
                if is_folder { error } else { io::Error::new(error.kind(), format!("{name} {why}")) }
            })?,
            other => other?,
        };
        rustix::fs::fchmod(&child.0, FOLDER)?;
        Ok(child)
    }

    /// A new folder in this one.
    pub(super) fn new_child(&self, name: &str) -> io::Result<Self> {
        rustix::fs::mkdirat(&self.0, name, FOLDER)?;
        #[cfg(test)]
        note(&self.0, |at| Call::Folder(at.join(name)));
        self.child(name)
    }

    /// Names of what is in it, in no order.
    pub(super) fn names(&self) -> io::Result<Vec<OsString>> {
        let entries = rustix::fs::Dir::read_from(&self.0)?;
        let names = entries.map(|entry| Ok(OsString::from_vec(entry?.file_name().to_bytes().to_vec())));
        let own = |name: &io::Result<OsString>| !matches!(name, Ok(name) if name == "." || name == "..");
        names.filter(own).collect()
    }

    /// A plain file, to be read.
    pub(super) fn open(&self, name: &str) -> io::Result<File> {
        // A pipe would keep its opener waiting.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = File::from(rustix::fs::openat(&self.0, name, flags, Mode::empty())?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no plain file"));
        }
        Ok(file)
    }

    /// A file's bytes.
    pub(super) fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open(name)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Opens a file to be written from its start.
    pub(super) fn create(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = File::from(rustix::fs::openat(&self.0, name, flags, FILE)?);
        #[cfg(test)]
        note(&self.0, |at| Call::File(at.join(name)));
        Ok(file)
    }

    /// Writes a file from its start. Its bytes survive a crash; its name does after [`Folder::sync`].
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.create(name)?;
        file.write_all(bytes)?;
        #[cfg(test)]
        note(&self.0, |at| Call::Bytes(at.join(name), bytes.to_vec()));
        file.sync_all()?;
        #[cfg(test)]
        note(&self.0, |at| Call::SyncFile(at.join(name)));
        Ok(())
    }

    /// Puts a file under its name, whole or not at all. The name survives a crash after [`Folder::sync`].
    pub(super) fn put(&self, name: &str, bytes: &[u8], moment: impl FnOnce()) -> io::Result<()> {
        let temporary = format!("{TEMPORARY}{name}");
        let write = || -> io::Result<()> {
            self.write(&temporary, bytes)?;
            moment();
            rustix::fs::renameat(&self.0, &temporary, &self.0, name)?;
            #[cfg(test)]
            note(&self.0, |at| Call::Rename(at.join(&temporary), at.join(name)));
            Ok(())
        };
        write().inspect_err(|_| drop(self.unlink(&temporary)))
    }

    /// Moves something to another folder. A name that is taken there is an error.
    pub(super) fn move_to(&self, name: &Path, other: &Folder, new: &Path) -> io::Result<()> {
        rustix::fs::renameat_with(&self.0, name, &other.0, new, rustix::fs::RenameFlags::NOREPLACE)?;
        #[cfg(test)]
        note(&self.0, |from| Call::Rename(from.join(name), super::tests::path(&other.0).join(new)));
        Ok(())
    }

    /// Removes a file; one that is not there is fine.
    pub(super) fn unlink(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.0, name, AtFlags::empty()) {
            Ok(()) => {
                #[cfg(test)]
                note(&self.0, |at| Call::Unlink(at.join(name)));
                Ok(())
            }
            Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Properties of a name's own file or link.
    pub(super) fn stat(&self, name: &str) -> Option<Stat> {
        rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW).ok()
    }

    /// Whether there is a plain file of that name.
    pub(super) fn has_file(&self, name: &str) -> bool {
        self.stat(name).is_some_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
    }

    /// Keeps a file from others' eyes, however it was made.
    pub(super) fn keep_private(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::fchmod(self.open(name)?, FILE)?)
    }

    /// Bytes that its files take on the disk.
    pub(super) fn bytes(&self) -> u64 {
        // A folder that is gone takes none.
        let names = self.names().into_iter().flatten();
        let stats = names.filter_map(|name| self.stat(name.to_str()?));
        stats.map(|stat| u64::try_from(stat.st_blocks).unwrap_or(0) * 512).sum()
    }

    /// Bytes that are free for this program on the disk.
    pub(super) fn free(&self) -> io::Result<u64> {
        let about = rustix::fs::fstatvfs(&self.0)?;
        Ok(about.f_bavail * about.f_frsize)
    }

    /// The names in it survive a crash once this has returned.
    pub(super) fn sync(&self) -> io::Result<()> {
        rustix::fs::fsync(&self.0)?;
        #[cfg(test)]
        note(&self.0, Call::SyncFolder);
        Ok(())
    }
}
