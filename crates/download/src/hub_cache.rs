//! The local cache of Hugging Face tools: `models--org--name` with `blobs` (contents by checksum), `snapshots` (links to
//! blobs by commit and path) and `refs` (commits by revision).

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::error::DownloadError;
use crate::hub::HubFile;

/// A repository in the cache.
#[derive(Clone, Debug)]
pub struct CachedRepository {
    folder: PathBuf,
    locks: PathBuf,
}

impl CachedRepository {
    /// Returns the place of the repository `org/name` in the cache folder `…/hub`; creates nothing.
    pub fn new(cache: &Path, repository: &str) -> Self {
        let name = format!("models--{}", repository.replace('/', "--"));
        CachedRepository { locks: cache.join(".locks").join(&name), folder: cache.join(name) }
    }

    /// Returns the folder of a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    fn blobs(&self) -> PathBuf {
        self.folder.join("blobs")
    }

    fn blob(&self, file: &HubFile) -> PathBuf {
        self.blobs().join(file.checksum.digits())
    }

    /// Returns the path of a file's partial download.
    pub fn partial(&self, file: &HubFile) -> PathBuf {
        self.blobs().join(format!("{}.incomplete", file.checksum.digits()))
    }

    /// Returns whether the file's blob is complete. Its contents are not read: blobs get their name only after their
    /// checksum is verified.
    pub fn has(&self, file: &HubFile) -> bool {
        self.blob(file).metadata().is_ok_and(|about| about.is_file() && about.len() == file.size)
    }

    /// Locks a file's blob, as other Hugging Face tools do, until the returned lock is dropped. Calls `wait` before
    /// waiting for another process. `None`: the file system has no locks.
    ///
    /// # Errors
    /// Returns an error if the lock file cannot be created.
    pub fn lock(&self, file: &HubFile, wait: impl FnOnce(&Path)) -> Result<Option<File>, DownloadError> {
        for folder in [&self.locks, &self.blobs()] {
            fs::create_dir_all(folder).map_err(DownloadError::file(folder, "create the folder"))?;
        }
        let path = self.locks.join(format!("{}.lock", file.checksum.digits()));
        let lock = File::options().write(true).create(true).truncate(false).open(&path);
        let lock = lock.map_err(DownloadError::file(&path, "write"))?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            wait(&path);
        }
        Ok(lock.lock().is_ok().then_some(lock))
    }

    /// Moves a file's verified partial download to its place.
    ///
    /// # Errors
    /// Returns an error if the file cannot be renamed.
    pub fn complete(&self, file: &HubFile) -> Result<(), DownloadError> {
        let blob = self.blob(file);
        fs::rename(self.partial(file), &blob).map_err(DownloadError::file(&blob, "write"))
    }

    /// Links a file's blob into the snapshot of a commit.
    ///
    /// # Errors
    /// Returns an error if the link cannot be created.
    pub fn link(&self, commit: &str, file: &HubFile) -> Result<(), DownloadError> {
        let path = self.snapshot(commit).join(&file.path);
        let up = "../".repeat(file.path.split('/').count() + 1);
        let target = PathBuf::from(format!("{up}blobs/{}", file.checksum.digits()));
        if fs::read_link(&path).is_ok_and(|present| present == target) {
            return Ok(());
        }
        let write = || {
            fs::create_dir_all(path.parent().unwrap_or(&path))?;
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            symlink(&target, &path)
        };
        write().map_err(DownloadError::file(&path, "create the link"))
    }

    /// Records the commit of a branch or tag. Does nothing if `revision` is the commit itself.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn record(&self, revision: &str, commit: &str) -> Result<(), DownloadError> {
        let path = self.folder.join("refs").join(revision);
        if revision == commit || fs::read_to_string(&path).is_ok_and(|present| present == commit) {
            return Ok(());
        }
        let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
        let write = || {
            fs::create_dir_all(path.parent().unwrap_or(&path))?;
            fs::write(&temporary, commit)?;
            fs::rename(&temporary, &path)
        };
        write().map_err(|error| {
            // The error of the write matters more than one of the clean-up.
            let _ = fs::remove_file(&temporary);
            DownloadError::file(&path, "write")(error)
        })
    }

    /// Returns the partial downloads that match none of `files`, the files of a revision, and that no process is
    /// writing. They may belong to another revision.
    pub fn other_partials(&self, files: &[HubFile]) -> Vec<PathBuf> {
        let mut others = Vec::new();
        for entry in fs::read_dir(self.blobs()).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let digits = name.to_str().and_then(|name| name.strip_suffix(".incomplete"));
            let Some(digits) = digits.filter(|own| files.iter().all(|file| file.checksum.digits() != *own)) else {
                continue;
            };
            let lock = File::open(self.locks.join(format!("{digits}.lock")));
            let is_in_use = lock.is_ok_and(|lock| matches!(lock.try_lock(), Err(TryLockError::WouldBlock)));
            if !is_in_use {
                others.push(path);
            }
        }
        others
    }
}
