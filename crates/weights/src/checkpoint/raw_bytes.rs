//! Access to tensor bytes and metadata as stored in the files, for fingerprints.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::{Checkpoint, WeightsError};

impl Checkpoint {
    /// Reads ranges of a tensor's stored bytes, whatever its element type. `ranges` returns the ranges to read for a
    /// given number of stored bytes. If the tensor has row factors, the ranges of the factors' bytes follow.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing, or if the file cannot be read or has changed since it was opened.
    pub(crate) fn read_stored(
        &self,
        name: &str,
        ranges: impl Fn(u64) -> Vec<Range<u64>>,
    ) -> Result<Vec<u8>, WeightsError> {
        let mut bytes = Vec::new();
        let mut next = Some(self.tensors.get(name).ok_or_else(|| self.missing(name))?);
        while let Some(entry) = next {
            let shard = &self.shards[entry.shard];
            for range in ranges(entry.range.end - entry.range.start) {
                let start = bytes.len();
                bytes.resize(start + (range.end - range.start) as usize, 0);
                let read = shard.file.read_exact_at(&mut bytes[start..], entry.range.start + range.start);
                read.map_err(WeightsError::io(&shard.path, "cannot read"))?;
            }
            shard.check()?;
            next = entry.factors.as_deref();
        }
        Ok(bytes)
    }

    /// Returns the files' free-form header metadata, sorted by key.
    pub(crate) fn all_metadata(&self) -> BTreeMap<&str, &str> {
        let of_shards = self.shards.iter().filter_map(|shard| shard.header.metadata().as_ref());
        of_shards.flatten().map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }
}
