//! Content fingerprints of model files and LoRAs: names, element types and shapes of all tensors, and blocks of their bytes.

use std::ops::Range;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::checkpoint::Checkpoint;
use super::error::WeightsError;
use super::lora::locate;

/// Prefix of fingerprints that cover the bytes of tensors. A fingerprint without it covers headers and configurations only.
pub(crate) const SAMPLED: &str = "v2:";

/// Bytes of a block.
const BLOCK: u64 = 4096;

/// Blocks of a tensor of `size` bytes that are hashed: its start, middle and end; all of a tensor of four blocks or fewer.
fn blocks(size: u64) -> Vec<Range<u64>> {
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

/// Fingerprint of a LoRA: its header's metadata and its tensors. It does not depend on where the file is or when it was
/// written.
///
/// # Errors
/// No such file, or a damaged one.
pub(crate) fn of_lora(name: &str) -> Result<String, WeightsError> {
    let checkpoint = Checkpoint::open(&locate(name)?)?;
    let mut hash = Sha256::new();
    checkpoint.all_metadata().iter().for_each(|(key, value)| add_text(&mut hash, &format!("{key}={value}")));
    hash_checkpoint(&checkpoint, &mut hash)?;
    Ok(format!("{SAMPLED}{}", hex::encode(hash.finalize())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::weights::{Component, ModelSource, Overrides};
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;
    use std::path::Path;

    fn write(path: &Path, bytes: &[u8]) {
        let view = TensorView::new(Dtype::F8_E5M2, vec![bytes.len()], bytes).unwrap();
        std::fs::write(path, safetensors::serialize([("a.weight", view)], None).unwrap()).unwrap();
    }

    #[test]
    fn start_middle_and_end_are_hashed_and_small_tensors_whole() {
        assert_eq!(blocks(100), [0..100]);
        assert_eq!(blocks(4 * BLOCK), [0..4 * BLOCK]);
        assert_eq!(blocks(100 * BLOCK), [0..BLOCK, 99 * BLOCK / 2..99 * BLOCK / 2 + BLOCK, 99 * BLOCK..100 * BLOCK]);
    }

    /// Also of an element type that no program reads; a copy at another time has the same fingerprint.
    #[test]
    fn changed_bytes_change_the_fingerprint() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lora.safetensors");
        let fingerprint = |bytes: &[u8]| {
            write(&path, bytes);
            of_lora(path.to_str().unwrap()).unwrap()
        };
        let size = 20 * BLOCK as usize;
        let whole = vec![0; size];
        let first = fingerprint(&whole);
        assert!(first.starts_with(SAMPLED) && first.len() == SAMPLED.len() + 64, "{first}");
        assert_eq!(fingerprint(&whole), first);
        for at in [0, size / 2, size - 1] {
            let mut changed = whole.clone();
            changed[at] = 1;
            assert_ne!(fingerprint(&changed), first, "byte {at}");
        }
        let mut changed = whole[..4 * BLOCK as usize].to_vec();
        let small = fingerprint(&changed);
        changed[BLOCK as usize + 7] = 1;
        assert_ne!(fingerprint(&changed), small, "a small tensor is hashed whole");
    }

    #[test]
    fn models_that_differ_in_one_weight_differ_in_that_component() {
        let folder = tempfile::tempdir().unwrap();
        let tiny = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/tiny_a"));
        let copied =
            std::process::Command::new("cp").arg("-r").arg(tiny).arg(folder.path().join("m")).status().unwrap();
        assert!(copied.success());
        let open = |path: &Path| ModelSource::open(path.to_str().unwrap(), &Overrides::default()).unwrap();
        let (first, copy) = (open(tiny), open(&folder.path().join("m")));
        let print = |source: &ModelSource, part| source.fingerprint(part).unwrap();
        let present = || Component::ALL.into_iter().filter(|part| first.has(*part));
        assert!(present().all(|part| print(&first, part) == print(&copy, part)));

        let weights = folder.path().join("m/vae/diffusion_pytorch_model.safetensors");
        let mut bytes = std::fs::read(&weights).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&weights, bytes).unwrap();
        let changed = open(&folder.path().join("m"));
        let differ: Vec<_> = present().filter(|part| print(&first, *part) != print(&changed, *part)).collect();
        assert_eq!(differ, [Component::Vae]);
    }
}
