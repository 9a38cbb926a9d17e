//! Weights merged with LoRAs: with each reference's rounding order, or with a single rounding.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::lora::{file, matrix, model, scattered, stored_tensor, tensors};
use crate::support::needs;
use crate::support::single_file::{TINY, write};
use half::bf16;
use ltx2::hlo::{DType, F8};
use ltx2::weights::lora::updates;
use ltx2::weights::lora_merge::merge;
use ltx2::weights::{Checkpoint, Component, LoraFile, MergeOrder, ScaledLora};
use ndarray::Array2;
use safetensors::Dtype;

/// Name of a weight `[48, 40]` in a file and in the model.
const NAME: &str = "blocks.0.to_q.weight";

fn weight(dir: &Path, values: &Array2<f32>, dtype: DType) -> Checkpoint {
    let path = dir.join(format!("weight_{dtype}.safetensors"));
    write(&path, &tensors(&[(NAME, values)], dtype), None);
    Checkpoint::open(&path).expect("a file")
}

fn merged(checkpoint: &Checkpoint, loras: &[ScaledLora]) -> (DType, Array2<f32>) {
    let found = updates(loras, Component::Transformer, NAME);
    let view = checkpoint.get_float(NAME).expect("a weight");
    let merged = merge(&view, None, MergeOrder::Exact, &found).expect("merges");
    (merged.dtype(), matrix(merged.as_ref(), merged.dtype(), [48, 40]))
}

#[needs(nothing)]
fn exact_merge_rounds_the_sum_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let w = scattered(48, 40, 1).mapv(|v| bf16::from_f32(v).to_f32());
    let (a, b) = (scattered(6, 40, 2), scattered(48, 6, 3).mapv(|v| v * 0.2));
    let (a, b) = (a.mapv(|v| bf16::from_f32(v).to_f32()), b.mapv(|v| bf16::from_f32(v).to_f32()));
    let names = ["transformer.blocks.0.to_q.lora_A.weight", "transformer.blocks.0.to_q.lora_B.weight"];
    let file = file(&dir.path().join("a.safetensors"), &tensors(&[(names[0], &a), (names[1], &b)], DType::BF16));
    let strength = 0.7;
    let loras = [ScaledLora { file, strength }];
    let wide = |m: &Array2<f32>| m.mapv(f64::from);
    let delta = wide(&b).dot(&wide(&a)) * strength;
    let exact = wide(&w) + &delta;

    let (dtype, in_f32) = merged(&weight(dir.path(), &w, DType::F32), &loras);
    assert_eq!(dtype, DType::F32);
    assert!(in_f32.iter().zip(&exact).all(|(got, want)| (f64::from(*got) - want).abs() <= 2e-6 * want.abs().max(1.0)));

    let (dtype, in_bf16) = merged(&weight(dir.path(), &w, DType::BF16), &loras);
    assert_eq!(dtype, DType::BF16);
    let round = |v: f32| bf16::from_f32(v).to_f32();
    assert_eq!(in_bf16, in_f32.mapv(round), "the sum in f32, rounded once");
}

#[needs(nothing)]
fn lora_updates_commute_and_are_scaled_by_alpha() {
    let dir = tempfile::tempdir().expect("a folder");
    let w = scattered(48, 40, 1);
    let pair = |module: &str, rank: usize, seed: u64, alpha: Option<f32>| {
        let (a, b) = (scattered(rank, 40, seed), scattered(48, rank, seed + 1));
        let names = [format!("{module}.lora_down.weight"), format!("{module}.lora_up.weight")];
        let mut all = tensors(&[(&names[0], &a), (&names[1], &b)], DType::F32);
        if let Some(alpha) = alpha {
            all.insert(format!("{module}.alpha"), (Dtype::F32, vec![], alpha.to_le_bytes().to_vec()));
        }
        (all, b.mapv(f64::from).dot(&a.mapv(f64::from)))
    };
    let (first, one) = pair("transformer.blocks.0.to_q", 4, 5, Some(2.0));
    let (second, two) = pair("diffusion_model.blocks.0.to_q", 3, 9, None);
    let first = ScaledLora { file: file(&dir.path().join("1.safetensors"), &first), strength: 0.5 };
    let second = ScaledLora { file: file(&dir.path().join("2.safetensors"), &second), strength: -1.5 };
    let checkpoint = weight(dir.path(), &w, DType::F32);
    let (_, forth) = merged(&checkpoint, &[first.clone(), second.clone()]);
    let (_, back) = merged(&checkpoint, &[second, first.clone()]);
    // 0.5 * (2 / 4) and -1.5.
    let want = w.mapv(f64::from) + one * 0.25 - two * 1.5;
    for ((forth, back), want) in forth.iter().zip(&back).zip(&want) {
        assert!((forth - back).abs() <= 4e-6 * forth.abs().max(1.0), "{forth} and {back}");
        assert!((f64::from(*forth) - want).abs() <= 2e-5 * want.abs().max(1.0), "{forth}, {want}");
    }
    let off = [ScaledLora { strength: 0.0, ..first }];
    assert!(updates(&off, Component::Transformer, NAME).is_empty());
}

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/lora");

/// A weight merged by a reference's own loader, and the LoRAs merged into it.
struct Reference {
    order: MergeOrder,
    dtype: DType,
    case: String,
    name: String,
    loras: Vec<ScaledLora>,
    merged: Vec<f32>,
}

/// Returns every merged weight of the fixtures: `loader/type/case/name`.
fn references() -> Vec<Reference> {
    let path = |name: &str| format!("{FIXTURES}/{name}.safetensors");
    let fixtures = Checkpoint::open(Path::new(&path("merged"))).expect("fixtures");
    let mut files: BTreeMap<String, Arc<LoraFile>> = BTreeMap::new();
    let mut of_case = |case: &str| -> Vec<ScaledLora> {
        let listed = fixtures.metadata(case).expect("a case");
        let listed: Vec<(String, f64)> = serde_json::from_str(listed).expect("files and strengths");
        let mut open = |name: String| {
            files
                .entry(name.clone())
                .or_insert_with(|| Arc::new(LoraFile::open(&path(&name)).expect("updates")))
                .clone()
        };
        listed.into_iter().map(|(name, strength)| ScaledLora { file: open(name), strength }).collect()
    };
    let names = fixtures.names().map(|key| (key, key.splitn(4, '/').collect::<Vec<_>>()));
    names
        .map(|(key, parts)| Reference {
            order: serde_json::from_value(parts[0].into()).expect("an order"),
            dtype: if parts[1] == "bf16" { DType::BF16 } else { DType::F32 },
            case: parts[2].to_string(),
            name: parts[3].to_string(),
            loras: of_case(parts[2]),
            merged: fixtures
                .get_float(key)
                .expect("a weight")
                .to_tensor()
                .expect("numbers")
                .into_f32()
                .into_iter()
                .collect(),
        })
        .collect()
}

/// Merges the weight of a reference case.
fn merged_as(order: MergeOrder, reference: &Reference, weights: &Checkpoint) -> Vec<f32> {
    let view = weights.get_float(&reference.name).expect("a weight");
    let found = updates(&reference.loras, Component::Transformer, &reference.name);
    assert_eq!(found.len(), reference.loras.len(), "{}", reference.name);
    let merged = merge(&view, None, order, &found).expect("merges");
    assert_eq!(merged.dtype(), reference.dtype);
    let shape = weights.shape(&reference.name).expect("a matrix");
    matrix(merged.as_ref(), merged.dtype(), [shape[0], shape[1]]).into_iter().collect()
}

/// Covers both key conventions, a different rank for each module, alphas in the header and in tensors, several LoRAs,
/// and both weight types. A sum near the midpoint of two bf16 numbers depends on the order of its terms, which differs
/// from that of the references, so the adjacent number is accepted too.
#[needs(nothing)]
fn merges_match_the_reference_loaders() {
    let dir = tempfile::tempdir().expect("a folder");
    let narrow = model(Path::new(TINY)).checkpoint(Component::Transformer).expect("weights");
    let references = references();
    assert_eq!(references.len(), 3 * (3 * 4 + 3), "loaders, cases, types and modules");
    let path = dir.path().join("wide.safetensors");
    let widened = references.iter().map(|r| {
        let shape = narrow.shape(&r.name).expect("a matrix");
        let view = narrow.get_float(&r.name).expect("a weight").to_tensor().expect("numbers").into_f32();
        (
            r.name.clone(),
            stored_tensor(&view.into_shape_with_order((shape[0], shape[1])).expect("a matrix"), DType::F32),
        )
    });
    write(&path, &widened.collect(), None);
    let wide = Checkpoint::open(&path).expect("a file");

    // Elements that are one bf16 step away, all elements, and elements for which the exact order gives the same value.
    let (mut off, mut count, mut alike) = (0, 0, 0);
    for r in &references {
        let weights = if r.dtype == DType::BF16 { &narrow } else { &wide };
        let got = merged_as(r.order, r, weights);
        // Lightricks' loader rounds to bf16 whatever the weight type.
        if r.dtype == DType::F32 && r.order == MergeOrder::Diffusers {
            for (got, want) in got.iter().zip(&r.merged) {
                assert!((got - want).abs() <= 1e-6 * want.abs().max(1.0), "{} {}: {got}, not {want}", r.case, r.name);
            }
            continue;
        }
        let exact = merged_as(MergeOrder::Exact, r, weights);
        for ((got, want), exact) in got.iter().zip(&r.merged).zip(&exact) {
            let steps = (i64::from(got.to_bits() >> 16) - i64::from(want.to_bits() >> 16)).abs();
            assert!(steps <= 1 && got.to_bits() & 0xffff == 0, "{} {}: {got}, not {want}", r.case, r.name);
            off += steps;
            count += 1;
            alike += i64::from(exact == want);
        }
    }
    eprintln!("{off} of {count} elements a step of bf16 away; of the exact order {}", count - alike);
    assert!(off * 1000 < count, "{off} of {count} elements differ");
    assert!((count - alike) * 20 > count, "the orders can be told apart by {} of {count}", count - alike);
}

/// Infers from the size of the update whether alpha was applied. Lightricks' loader ignores alphas of tensors whose key
/// names it supports.
#[needs(nothing)]
fn official_merge_ignores_alpha_of_lightricks_key_names() {
    let dir = tempfile::tempdir().expect("a folder");
    let w = Array2::zeros((48, 40));
    let (a, b) = (scattered(4, 40, 5), scattered(48, 4, 6));
    let checkpoint = weight(dir.path(), &w, DType::F32);
    let size = |module: &str, names: [&str; 2], order: MergeOrder| {
        let keys = names.map(|name| format!("{module}.{name}.weight"));
        let mut all = tensors(&[(&keys[0], &a), (&keys[1], &b)], DType::F32);
        all.insert(format!("{module}.alpha"), (Dtype::F32, vec![], 1f32.to_le_bytes().to_vec()));
        let lora = ScaledLora { file: file(&dir.path().join("a.safetensors"), &all), strength: 1.0 };
        let warned =
            lora.file.unused_alpha(order).is_some_and(|said| said.contains(&keys[0]) && said.contains("alpha 1"));
        let view = checkpoint.get_float(NAME).expect("a weight");
        let merged = merge(&view, None, order, &updates(&[lora], Component::Transformer, NAME)).expect("merges");
        let got = matrix(merged.as_ref(), merged.dtype(), [48, 40]);
        let whole = b.dot(&a);
        (warned, (got.mapv(|v| v * v).sum() / whole.mapv(|v| v * v).sum()).sqrt())
    };
    let (peft, kohya) = (["lora_A", "lora_B"], ["lora_down", "lora_up"]);
    let (theirs, ours) = ("diffusion_model.blocks.0.to_q", "transformer.blocks.0.to_q");
    for (module, names, order, want) in [
        (theirs, peft, MergeOrder::Official, 1.0),
        (theirs, peft, MergeOrder::Diffusers, 0.25),
        (theirs, peft, MergeOrder::Exact, 0.25),
        (theirs, kohya, MergeOrder::Official, 0.25),
        (ours, peft, MergeOrder::Official, 0.25),
    ] {
        let (warned, got) = size(module, names, order);
        assert!((got - want).abs() < 1e-2, "{module} {names:?} {order:?}: {got}");
        assert_eq!(warned, want == 1.0, "{module} {names:?} {order:?}");
    }
}

/// Times each merge order on a matrix of a published size: the rounding steps of the reference orders cost little
/// compared with the matmul.
#[needs(cpu, full)]
fn merge_orders_take_similar_time() {
    let dir = tempfile::tempdir().expect("a folder");
    let (width, rank) = (4096, 384);
    let (w, a, b) = (scattered(width, width, 1), scattered(rank, width, 2), scattered(width, rank, 3));
    let names = ["diffusion_model.blocks.0.to_q.lora_A.weight", "diffusion_model.blocks.0.to_q.lora_B.weight"];
    let file = file(&dir.path().join("a.safetensors"), &tensors(&[(names[0], &a), (names[1], &b)], DType::BF16));
    let loras = [ScaledLora { file, strength: 0.7 }];
    let view = weight(dir.path(), &w, DType::BF16).get_float(NAME).expect("a weight");
    let seconds = |order: MergeOrder| {
        let each = (0..5).map(|_| {
            let start = std::time::Instant::now();
            merge(&view, None, order, &updates(&loras, Component::Transformer, NAME)).expect("merges");
            start.elapsed().as_secs_f64()
        });
        each.fold(f64::INFINITY, f64::min)
    };
    let [exact, official, diffusers] = [MergeOrder::Exact, MergeOrder::Official, MergeOrder::Diffusers].map(seconds);
    eprintln!("seconds: exact {exact:.3}, official {official:.3}, diffusers {diffusers:.3}");
    assert!(official < 2.0 * exact && diffusers < 2.0 * exact, "{exact} s, {official} s, {diffusers} s");
}

/// Each row of 8-bit floats has a separate scale, which must be used also in row blocks after the first.
#[needs(nothing)]
fn merge_uses_the_scale_of_each_8_bit_row() {
    let dir = tempfile::tempdir().expect("a folder");
    let (rows, columns) = (300, 8);
    let narrow = scattered(rows, columns, 4).mapv(|v| F8::from_f32(100.0 * v));
    let scales: Vec<f32> = (0..rows).map(|row| 0.001 * (row + 1) as f32).collect();
    let weight = dir.path().join("weight.safetensors");
    let bytes = narrow.iter().map(|v| v.0).collect();
    write(&weight, &[(NAME.to_string(), (Dtype::F8_E4M3, vec![rows, columns], bytes))].into(), None);
    let (a, b) = (scattered(2, columns, 5), scattered(rows, 2, 6));
    let names = ["transformer.blocks.0.to_q.lora_A.weight", "transformer.blocks.0.to_q.lora_B.weight"];
    let file = file(&dir.path().join("a.safetensors"), &tensors(&[(names[0], &a), (names[1], &b)], DType::F32));
    let loras = [ScaledLora { file, strength: 0.5 }];
    let view = Checkpoint::open(&weight).expect("a file").get_float(NAME).expect("a weight");
    let merged =
        merge(&view, Some(&scales), MergeOrder::Exact, &updates(&loras, Component::Transformer, NAME)).expect("merges");
    let got = matrix(merged.as_ref(), merged.dtype(), [rows, columns]);
    let delta = b.mapv(f64::from).dot(&a.mapv(f64::from)) * 0.5;
    for ((row, column), got) in got.indexed_iter() {
        let want = f64::from(f32::from(narrow[[row, column]]) * scales[row]) + delta[[row, column]];
        assert!((f64::from(*got) - want).abs() <= 0.005 * want.abs() + 1e-5, "row {row}: {got}, {want}");
    }
}
