//! Encoded samples of a track, one behind the other: in memory, or in a file that has no name.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use super::atomic;
use super::error::{Error, Result};

/// Encoded samples.
pub(super) struct Samples {
    /// Where each ends, from 0.
    ends: Vec<u64>,
    bytes: Bytes,
}

enum Bytes {
    Memory(Vec<u8>),
    File(File),
}

impl Samples {
    /// None yet, held in memory.
    pub(super) fn in_memory() -> Self {
        Samples { ends: Vec::new(), bytes: Bytes::Memory(Vec::new()) }
    }

    /// None yet, held in the folder of the file `path`; nothing is left there, however the process ends.
    ///
    /// # Errors
    /// A folder that cannot be written to.
    pub(super) fn beside(path: &Path) -> Result<Self> {
        Ok(Samples { ends: Vec::new(), bytes: Bytes::File(unnamed(path)?) })
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Adds a sample.
    ///
    /// # Errors
    /// One of 4 GiB; a disk that is full.
    pub(super) fn push(&mut self, sample: &[u8]) -> Result<()> {
        if u32::try_from(sample.len()).is_err() {
            return Err(Error::Container("a sample is over 4 GiB".into()));
        }
        match &mut self.bytes {
            Bytes::Memory(all) => all.extend(sample),
            Bytes::File(file) => file.write_all(sample).map_err(Error::io("write", Path::new("encoded samples")))?,
        }
        self.ends.push(self.end(self.len()) + sample.len() as u64);
        Ok(())
    }

    /// Where the first `n` end.
    fn end(&self, n: usize) -> u64 {
        n.checked_sub(1).map_or(0, |last| self.ends[last])
    }

    /// Bytes of some of them.
    pub(super) fn bytes(&self, samples: Range<usize>) -> u64 {
        self.end(samples.end) - self.end(samples.start)
    }

    /// Bytes of each.
    pub(super) fn sizes(&self) -> impl Iterator<Item = u32> {
        // None is larger.
        (0..self.len()).map(|n| self.bytes(n..n + 1) as u32)
    }

    /// Writes some of them.
    ///
    /// # Errors
    /// Those of reading and writing.
    pub(super) fn write(&self, samples: Range<usize>, out: &mut impl Write) -> io::Result<()> {
        let (start, count) = (self.end(samples.start), self.bytes(samples));
        match &self.bytes {
            Bytes::Memory(all) => out.write_all(&all[start as usize..(start + count) as usize]),
            Bytes::File(file) => {
                let mut file = file;
                file.seek(SeekFrom::Start(start))?;
                io::copy(&mut file.take(count), out).map(drop)
            }
        }
    }
}

/// A file without a name in the folder for the temporary files of `path`.
///
/// # Errors
/// A folder that cannot be written to.
pub(super) fn unnamed(path: &Path) -> Result<File> {
    let folder = atomic::scratch_folder(path)?;
    std::fs::create_dir_all(&folder).map_err(Error::io("create folder", &folder))?;
    tempfile::tempfile_in(&folder).map_err(Error::io("create a temporary file in", &folder))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_holds_the_same_as_memory_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        for mut all in [Samples::in_memory(), Samples::beside(&folder.path().join("new/out.mp4")).unwrap()] {
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
