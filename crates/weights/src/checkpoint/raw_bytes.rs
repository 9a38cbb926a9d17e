//! Access to tensor bytes and metadata as stored in the files, for fingerprints.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Checkpoint, WeightsError};

impl Checkpoint {
    /// Reads ranges of a tensor's stored bytes, whatever its element type. `ranges` returns the ranges to read for a
    /// given number of stored bytes. If the tensor has scales or zero points, the ranges of their bytes follow.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing, or if the file cannot be read or has changed since it was opened.
    pub(crate) fn read_stored(
        &self,
        name: &str,
        ranges: impl Fn(u64) -> Vec<Range<u64>>,
    ) -> Result<Vec<u8>, WeightsError> {
        let mut bytes = Vec::new();
        let view = &self.entry(name)?.view;
        let operands = view.decoder.as_ref().map_or(Vec::new(), |decoder| decoder.operands());
        for view in [view].into_iter().chain(operands) {
            let stored = view.range.clone();
            for range in ranges(stored.end - stored.start) {
                let start = bytes.len();
                bytes.resize(start + (range.end - range.start) as usize, 0);
                view.shard.read(stored.start + range.start, &mut bytes[start..])?;
            }
        }
        Ok(bytes)
    }

    /// Returns the files' free-form header metadata, sorted by key.
    pub(crate) fn all_metadata(&self) -> BTreeMap<&str, &str> {
        let of_shards = self.shards.iter().flat_map(|shard| &shard.metadata);
        of_shards.map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }
}
