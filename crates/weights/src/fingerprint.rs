//! Content fingerprints of model files and LoRAs: names, element types and shapes of all tensors, and samples of their
//! bytes.

use std::ops::Range;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::checkpoint::Checkpoint;
use super::error::WeightsError;

/// Prefix of fingerprints that cover tensor bytes. Fingerprints without it cover only headers and configurations.
pub const SAMPLED: &str = "v2:";

/// Bytes per block.
pub(super) const BLOCK: u64 = 4096;

/// Returns the byte ranges to hash in a tensor of `size` bytes: a block each at the start, middle and end, or the
/// complete tensor if it has at most four blocks.
pub(super) fn blocks(size: u64) -> Vec<Range<u64>> {
    if size <= 4 * BLOCK {
        return std::iter::once(0..size).collect();
    }
    let middle = (size - BLOCK) / 2;
    [0, middle, size - BLOCK].into_iter().map(|start| start..start + BLOCK).collect()
}

/// Hashes a text with its length, so that different sequences of texts never give the same hash input.
pub(super) fn add_text(hash: &mut Sha256, text: &str) {
    hash.update((text.len() as u64).to_le_bytes());
    hash.update(text);
}

/// Hashes every tensor of a checkpoint in name order: name, element type, shape and [`blocks`] of its bytes, which are
/// read in parallel.
///
/// # Errors
/// Returns an error if a file cannot be read.
pub(super) fn hash_checkpoint(checkpoint: &Checkpoint, hash: &mut Sha256) -> Result<(), WeightsError> {
    let names: Vec<&str> = checkpoint.names().collect();
    let contents: Vec<_> = names
        .par_iter()
        .map(|name| checkpoint.read_stored(name, blocks).map(Sha256::digest))
        .collect::<Result<_, WeightsError>>()?;
    for ((name, dtype, shape), content) in checkpoint.headers().zip(contents) {
        add_text(hash, &format!("{name} {dtype} {shape:?}"));
        hash.update(content);
    }
    Ok(())
}
