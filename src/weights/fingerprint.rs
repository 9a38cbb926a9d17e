//! Content fingerprints of model files and LoRAs: names, element types and shapes of all tensors, and blocks of their bytes.

use std::ops::Range;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::checkpoint::Checkpoint;
use super::error::WeightsError;

/// Prefix of fingerprints that cover the bytes of tensors. A fingerprint without it covers headers and configurations only.
pub(crate) const SAMPLED: &str = "v2:";

/// Bytes of a block.
pub(super) const BLOCK: u64 = 4096;

/// Blocks of a tensor of `size` bytes that are hashed: its start, middle and end; all of a tensor of four blocks or fewer.
pub(super) fn blocks(size: u64) -> Vec<Range<u64>> {
    if size <= 4 * BLOCK {
        return std::iter::once(0..size).collect();
    }
    let middle = (size - BLOCK) / 2;
    [0, middle, size - BLOCK].into_iter().map(|start| start..start + BLOCK).collect()
}

/// Adds a text with its length, so that two texts never hash as one other.
pub(super) fn add_text(hash: &mut Sha256, text: &str) {
    hash.update((text.len() as u64).to_le_bytes());
    hash.update(text);
}

/// Adds every tensor of a checkpoint in the order of names: name, element type, shape and [`blocks`] of its bytes, which
/// are read in parallel.
///
/// # Errors
/// A file that cannot be read.
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
