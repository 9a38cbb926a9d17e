//! Stores a track's encoded samples in memory or in an unnamed file.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use super::error::{MediaError, Result};
use ltx2_base::atomic_file;

/// Encoded samples, concatenated.
pub(super) struct Samples {
    /// End offset of each sample in bytes.
    ends: Vec<u64>,
    bytes: SampleStorage,
}

enum SampleStorage {
    Memory(Vec<u8>),
    File(File),
}

impl Samples {
    /// Creates an empty store in memory.
    pub(super) fn in_memory() -> Self {
        Samples { ends: Vec::new(), bytes: SampleStorage::Memory(Vec::new()) }
    }

    /// Creates an empty store in an unnamed file in the folder of `path`. The file system deletes the file when the
    /// process exits, even after a crash.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be written to.
    pub(super) fn on_disk(path: &Path) -> Result<Self> {
        Ok(Samples { ends: Vec::new(), bytes: SampleStorage::File(unnamed(path)?) })
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Appends a sample.
    ///
    /// # Errors
    /// Returns an error if the sample is 4 GiB or larger, or if it cannot be written.
    pub(super) fn push(&mut self, sample: &[u8]) -> Result<()> {
        if u32::try_from(sample.len()).is_err() {
            return Err(MediaError::Container("an encoded sample has 4 GiB or more".into()));
        }
        match &mut self.bytes {
            SampleStorage::Memory(all) => all.extend(sample),
            SampleStorage::File(file) => {
                file.write_all(sample).map_err(MediaError::io("write", Path::new("encoded samples")))?
            }
        }
        self.ends.push(self.end(self.len()) + sample.len() as u64);
        Ok(())
    }

    /// Returns the end offset in bytes of the first `n` samples.
    fn end(&self, n: usize) -> u64 {
        n.checked_sub(1).map_or(0, |last| self.ends[last])
    }

    /// Returns the total size in bytes of a range of samples.
    pub(super) fn bytes(&self, samples: Range<usize>) -> u64 {
        self.end(samples.end) - self.end(samples.start)
    }

    /// Returns the size in bytes of each sample.
    pub(super) fn sizes(&self) -> impl Iterator<Item = u32> {
        // `push` has checked that each size fits in u32.
        (0..self.len()).map(|n| self.bytes(n..n + 1) as u32)
    }

    /// Writes a range of samples to `out`.
    pub(super) fn write(&self, samples: Range<usize>, out: &mut impl Write) -> io::Result<()> {
        let (start, count) = (self.end(samples.start), self.bytes(samples));
        match &self.bytes {
            SampleStorage::Memory(all) => out.write_all(&all[start as usize..(start + count) as usize]),
            SampleStorage::File(file) => {
                let mut file = file;
                file.seek(SeekFrom::Start(start))?;
                io::copy(&mut file.take(count), out).map(drop)
            }
        }
    }
}

/// Creates an unnamed file in the folder for the temporary files of `path`.
///
/// # Errors
/// Returns an error if the folder cannot be written to.
pub(super) fn unnamed(path: &Path) -> Result<File> {
    let folder = atomic_file::scratch_folder(path)?;
    std::fs::create_dir_all(&folder).map_err(MediaError::io("create folder", &folder))?;
    tempfile::tempfile_in(&folder).map_err(MediaError::io("create a temporary file in", &folder))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn file_storage_matches_memory_and_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        for mut all in [Samples::in_memory(), Samples::on_disk(&folder.path().join("new/out.mp4")).unwrap()] {
            for sample in [&b"one"[..], b"", b"three"] {
                all.push(sample).unwrap();
            }
            assert_eq!((all.len(), all.bytes(0..3), all.bytes(1..3)), (3, 8, 5));
            assert_eq!(all.sizes().collect::<Vec<_>>(), [3, 0, 5]);
            let mut out = Vec::new();
            all.write(1..3, &mut out).unwrap();
            all.write(0..1, &mut out).unwrap();
            assert_eq!(out, b"threeone");
        }
        assert_eq!(std::fs::read_dir(folder.path().join("new")).unwrap().count(), 0);
    }
}
