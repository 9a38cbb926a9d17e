//! Tests of the fingerprints of models and LoRAs.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::super::fingerprint::{BLOCK, SAMPLED, blocks};
use super::super::lora::lora_fingerprint;
use crate::{Component, ModelSource, Overrides};

fn write(path: &Path, bytes: &[u8]) {
    let view = TensorView::new(Dtype::F8_E5M2, vec![bytes.len()], bytes).unwrap();
    std::fs::write(path, safetensors::serialize([("a.weight", view)], None).unwrap()).unwrap();
}

#[test]
fn fingerprint_samples_start_middle_and_end() {
    assert_eq!(blocks(100), std::iter::once(0..100).collect::<Vec<_>>());
    assert_eq!(blocks(4 * BLOCK), std::iter::once(0..4 * BLOCK).collect::<Vec<_>>());
    assert_eq!(blocks(100 * BLOCK), [0..BLOCK, 99 * BLOCK / 2..99 * BLOCK / 2 + BLOCK, 99 * BLOCK..100 * BLOCK]);
}

/// Writing the same bytes again gives the same fingerprint, although the modification time differs.
#[test]
fn changed_bytes_change_the_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lora.safetensors");
    let fingerprint = |bytes: &[u8]| {
        write(&path, bytes);
        lora_fingerprint(path.to_str().unwrap()).unwrap()
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
fn changed_weight_changes_only_its_component_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/models/tiny_a"));
    let copied = std::process::Command::new("cp").arg("-r").arg(tiny).arg(folder.path().join("m")).status().unwrap();
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
