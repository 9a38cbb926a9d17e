//! A file that is being downloaded, with the checksum of the bytes received so far.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::error::DownloadError;

/// Size of the blocks that are read, written and hashed.
pub(crate) const BLOCK: usize = 1 << 18;

/// The checksum that a repository states for a file, in lower-case hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// SHA-256 of the contents.
    Sha256(String),
    /// Git's object id: the SHA-1 of a header with the size, and the contents.
    GitBlob(String),
}

impl Checksum {
    /// Returns the digits.
    pub fn digits(&self) -> &str {
        match self {
            Checksum::Sha256(digits) | Checksum::GitBlob(digits) => digits,
        }
    }

    /// Returns the name of the algorithm.
    pub fn kind(&self) -> &'static str {
        match self {
            Checksum::Sha256(_) => "sha256",
            Checksum::GitBlob(_) => "git blob id",
        }
    }

    fn hasher(&self, size: u64) -> Hasher {
        match self {
            Checksum::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Checksum::GitBlob(_) => Hasher::Sha1(Sha1::new().chain_update(format!("blob {size}\0"))),
        }
    }

    /// Computes the checksum of a file with the algorithm of `self`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn of_file(&self, path: &Path) -> Result<String, DownloadError> {
        let read = || {
            let mut file = File::open(path)?;
            let mut hasher = self.hasher(file.metadata()?.len());
            hasher.read(&mut file)?;
            Ok(hasher.digits())
        };
        read().map_err(DownloadError::file(path, "read"))
    }
}

#[derive(Clone, Debug)]
enum Hasher {
    Sha256(Sha256),
    Sha1(Sha1),
}

impl Hasher {
    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hash) => hash.update(bytes),
            Hasher::Sha1(hash) => hash.update(bytes),
        }
    }

    /// Hashes the rest of a file and returns its length.
    fn read(&mut self, file: &mut File) -> std::io::Result<u64> {
        let (mut block, mut total) = (vec![0; BLOCK], 0);
        loop {
            match file.read(&mut block)? {
                0 => return Ok(total),
                many => {
                    self.update(&block[..many]);
                    total += many as u64;
                }
            }
        }
    }

    fn digits(self) -> String {
        match self {
            Hasher::Sha256(hash) => hex::encode(hash.finalize()),
            Hasher::Sha1(hash) => hex::encode(hash.finalize()),
        }
    }
}

/// A file that is being downloaded. It stays on disk if the download fails, so that a later download can resume.
#[derive(Debug)]
pub struct PartialFile {
    path: PathBuf,
    file: File,
    have: u64,
    /// Size of the complete file in bytes; `None`: unknown.
    size: Option<u64>,
    empty: Hasher,
    hasher: Hasher,
}

impl PartialFile {
    /// Opens a file to which an earlier download may have written. Its bytes are hashed. `checksum` selects the
    /// algorithm; `size` is the size of the complete file in bytes.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened or read.
    pub fn resume(path: &Path, checksum: &Checksum, size: u64) -> Result<Self, DownloadError> {
        let open = || {
            let mut file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
            let empty = checksum.hasher(size);
            let mut hasher = empty.clone();
            let have = hasher.read(&mut file)?;
            Ok(PartialFile { path: path.into(), file, have, size: Some(size), empty, hasher })
        };
        let mut partial = open().map_err(DownloadError::file(path, "write"))?;
        if partial.have > size {
            partial.restart()?;
        }
        Ok(partial)
    }

    /// Opens a file of unknown size to which an earlier download may have written. Its bytes are hashed with SHA-256.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened or read.
    pub fn resume_unsized(path: &Path) -> Result<Self, DownloadError> {
        let partial = PartialFile::resume(path, &Checksum::Sha256(String::new()), u64::MAX)?;
        Ok(PartialFile { size: None, ..partial })
    }

    /// Returns the checksum of the bytes in the file.
    pub fn digits(&self) -> String {
        self.hasher.clone().digits()
    }

    /// Returns the number of bytes in the file.
    pub fn have(&self) -> u64 {
        self.have
    }

    /// Returns the size of the complete file in bytes; `None` if it is unknown.
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// Empties the file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be truncated.
    pub fn restart(&mut self) -> Result<(), DownloadError> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(DownloadError::file(&self.path, "write"))?;
        (self.have, self.hasher) = (0, self.empty.clone());
        Ok(())
    }

    /// Appends bytes. After an error, the file may end with a part of them.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), DownloadError> {
        self.file.write_all(bytes).map_err(DownloadError::file(&self.path, "write"))?;
        self.hasher.update(bytes);
        self.have += bytes.len() as u64;
        Ok(())
    }

    /// Flushes the file to disk and returns its checksum.
    ///
    /// # Errors
    /// Returns an error if the file cannot be flushed.
    pub fn finish(self) -> Result<String, DownloadError> {
        self.file.sync_all().map_err(DownloadError::file(&self.path, "write"))?;
        Ok(self.hasher.digits())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn checksums_match_known_values() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "abc").unwrap();
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        // `printf abc | git hash-object --stdin`
        let blob = "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f";
        for checksum in [Checksum::Sha256(sha256.into()), Checksum::GitBlob(blob.into())] {
            assert_eq!(checksum.of_file(&path).unwrap(), checksum.digits());
            let resumed = folder.path().join(checksum.kind());
            std::fs::write(&resumed, "a").unwrap();
            let mut partial = PartialFile::resume(&resumed, &checksum, 3).unwrap();
            assert_eq!(partial.have(), 1);
            partial.append(b"bc").unwrap();
            assert_eq!(partial.finish().unwrap(), checksum.digits());
            // Longer than the complete file: it cannot be resumed.
            std::fs::write(&resumed, "abcd").unwrap();
            let mut partial = PartialFile::resume(&resumed, &checksum, 3).unwrap();
            assert_eq!(partial.have(), 0);
            partial.append(b"abc").unwrap();
            assert_eq!(partial.finish().unwrap(), checksum.digits());
            assert_eq!(std::fs::read(&resumed).unwrap(), b"abc");
        }
    }
}
