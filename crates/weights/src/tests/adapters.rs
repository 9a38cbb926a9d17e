//! Adapters by PEFT and LyCORIS: weights merged with them, all naming schemes, and damaged files.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::bf16;
use ltx2_stablehlo::DType;
use ndarray::Array2;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::lora::{lora_fingerprint, updates};
use super::super::lora_add::{AddedMatrix, LoraRanks, LoraSide, program_rank};
use super::super::lora_merge::{MergedTensor, memory, merge};
use super::super::*;
use super::{fails, open, put};

/// Files that `scripts/oracle/adapters.py` wrote with PEFT 0.21.2 and LyCORIS 4.1.3.
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/lora/adapters");
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/models/tiny_a");
const Q: &str = "transformer_blocks.0.attn1.to_q";

/// Tensors by name: type, shape and bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn write(path: &Path, tensors: &Tensors, metadata: &[(&str, &str)]) -> PathBuf {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let metadata: HashMap<String, String> = metadata.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    put(path.to_path_buf(), safetensors::serialize(views, Some(metadata)).unwrap())
}

/// Returns f32 tensors of these shapes; each tensor has different values.
fn tensors(shapes: &[(&str, &[usize])]) -> Tensors {
    let values = |seed: usize, count: usize| (0..count).map(move |i| ((i * 7 + seed * 3) % 11) as f32 * 0.25 - 1.25);
    let tensor = |(seed, (name, shape)): (usize, &(&str, &[usize]))| {
        let bytes = values(seed, shape.iter().product()).flat_map(f32::to_le_bytes).collect();
        ((*name).to_string(), (Dtype::F32, shape.to_vec(), bytes))
    };
    shapes.iter().enumerate().map(tensor).collect()
}

/// Writes a model whose only component is a transformer with these tensors.
fn model_of(dir: &Path, tensors: &Tensors) -> ModelSource {
    put(dir.join("transformer/config.json"), json!({"num_layers": 1}).to_string());
    write(&dir.join("transformer/diffusion_pytorch_model.safetensors"), tensors, &[]);
    open(dir).unwrap()
}

fn lora(path: &Path) -> Result<LoraFile, WeightsError> {
    LoraFile::open(path.to_str().unwrap())
}

fn numbers(merged: &MergedTensor) -> Vec<f32> {
    match merged {
        MergedTensor::Half(DType::BF16, words) => words.iter().map(|word| bf16::from_bits(*word).to_f32()).collect(),
        MergedTensor::Half(dtype, _) => panic!("{dtype}"),
        MergedTensor::Single(words) => words.clone(),
    }
}

fn merged(model: &ModelSource, name: &str, loras: &[ScaledLora], order: MergeOrder) -> Result<Vec<f32>, WeightsError> {
    loras.iter().try_for_each(|lora| lora.file.check(model))?;
    let view = model.checkpoint(Component::Transformer)?.get_float(name)?;
    let found = updates(loras, Component::Transformer, name);
    merge(&view, None, order, &found).map(|merged| numbers(&merged))
}

#[test]
fn ranks_are_read_again_only_from_changed_files() {
    let dir = TempDir::new().unwrap();
    let [a, b] = ["A", "B"].map(|matrix| format!("transformer.{Q}.lora_{matrix}.weight"));
    let path = dir.path().join("lora.safetensors");
    let put = |rank: usize| write(&path, &tensors(&[(&a, &[rank, 8]), (&b, &[6, rank])]), &[]);
    let open = || std::fs::File::options().write(true).open(&path).unwrap();
    let (ranks, name) = (LoraRanks::default(), path.to_str().unwrap());
    put(3);
    let time = open().metadata().unwrap().modified().unwrap();
    let size = open().metadata().unwrap().len();
    assert_eq!(ranks.largest(name).unwrap(), 3);
    // Other contents of the same size and time are not read.
    std::fs::write(&path, vec![0; size as usize]).unwrap();
    open().set_modified(time).unwrap();
    assert_eq!(ranks.largest(name).unwrap(), 3);
    open().set_modified(time + std::time::Duration::from_secs(9)).unwrap();
    assert!(ranks.largest(name).unwrap_err().to_string().contains("lora.safetensors"));
    put(5);
    assert_eq!(ranks.largest(name).unwrap(), 5);
    std::fs::remove_file(&path).unwrap();
    assert!(ranks.largest(name).is_err());
}

/// The product of the concatenated matrices is the sum of both updates. Rows that are read alone equal those of the
/// whole matrix.
#[test]
fn added_matrices_are_concatenated_and_read_by_rows() {
    let dir = TempDir::new().unwrap();
    let weight = format!("{Q}.weight");
    let zeros = (Dtype::F32, vec![6, 8], vec![0; 4 * 6 * 8]);
    let model = model_of(dir.path(), &BTreeMap::from([(weight.clone(), zeros)]));
    let [a, b] = ["A", "B"].map(|matrix| format!("transformer.{Q}.lora_{matrix}.weight"));
    let file = |name: &str, rank: usize| {
        let path = write(&dir.path().join(name), &tensors(&[(&a, &[rank, 8]), (&b, &[6, rank])]), &[]);
        Arc::new(lora(&path).unwrap())
    };
    let scaled = |file: &Arc<LoraFile>, strength| ScaledLora { file: file.clone(), strength };
    let (one, two) = (file("one.safetensors", 3), file("two.safetensors", 2));
    let ranks = |count: usize| program_rank(vec![one.largest_rank(); count]);
    assert_eq!(
        [0, 1, 5, 6, 11, 22, 43, 86].map(ranks),
        [0, 16, 16, 32, 64, 128, 256, 384].map(|n| (n > 0).then_some(n))
    );
    let loras = [scaled(&one, 0.5), scaled(&two, 0.0), scaled(&two, -2.0)];
    let read = |side| {
        let matrix = AddedMatrix::new(&loras, MergeOrder::Exact, &weight, &[6, 8], 16, side);
        let [rows, columns] = matrix.shape();
        let mut whole = vec![0; 4 * rows * columns];
        matrix.read_at(DType::F32, 0, &mut whole).unwrap();
        for (row, want) in whole.chunks_exact(4 * columns).enumerate() {
            let mut bytes = vec![1; want.len()];
            matrix.read_at(DType::F32, 4 * row * columns, &mut bytes).unwrap();
            assert_eq!(bytes, want, "{side:?}, row {row}");
        }
        let values = whole.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect();
        Array2::from_shape_vec((rows, columns), values).unwrap()
    };
    let sum = read(LoraSide::Up).dot(&read(LoraSide::Down));
    assert_eq!(sum.into_raw_vec_and_offset().0, merged(&model, &weight, &loras, MergeOrder::Exact).unwrap());
}

#[test]
fn memory_of_a_merge_includes_merged_values_adapters_and_blocks() {
    let dir = TempDir::new().unwrap();
    let weight = format!("{Q}.weight");
    let model = model_of(dir.path(), &tensors(&[(&weight, &[8, 16])]));
    let [a, b] = ["A", "B"].map(|matrix| format!("transformer.{Q}.lora_{matrix}.weight"));
    let path = write(&dir.path().join("lora.safetensors"), &tensors(&[(&a, &[4, 16]), (&b, &[8, 4])]), &[]);
    let loras = [ScaledLora { file: Arc::new(lora(&path).unwrap()), strength: 1.0 }];
    let view = model.checkpoint(Component::Transformer).unwrap().get_float(&weight).unwrap();
    let (values, [a, b]) = (8 * 16, [4 * 16, 8 * 4]);
    let want = 4 * values + 4 * (a + b) + 8 * a + 3 * 4 * values;
    assert_eq!(memory(&view, &updates(&loras, Component::Transformer, &weight)), want);
}

#[test]
fn merged_weights_equal_those_of_peft_and_lycoris_bit_for_bit() {
    let folder = Path::new(FIXTURES);
    let weights = Checkpoint::open(&folder.join("weights.safetensors")).unwrap();
    let expected = Checkpoint::open(&folder.join("merged.safetensors")).unwrap();
    let dir = TempDir::new().unwrap();
    let models: BTreeMap<&str, ModelSource> = [("f32", Dtype::F32), ("bf16", Dtype::BF16)]
        .map(|(label, dtype)| {
            let stored = |name: &str| {
                let view = weights.get(name).unwrap();
                let tensor = view.to_tensor().unwrap();
                let narrow = if dtype == Dtype::BF16 { tensor.cast(DType::BF16).unwrap() } else { tensor };
                (name.to_string(), (dtype, view.shape().to_vec(), narrow.bytes().into_owned()))
            };
            (label, model_of(&dir.path().join(label), &weights.names().map(stored).collect()))
        })
        .into();
    let mut cases = BTreeSet::new();
    for key in expected.names() {
        let [case, strength, label, name] = key.splitn(4, '/').collect::<Vec<_>>()[..] else { panic!("{key}") };
        let path = folder.join(case);
        let path = if path.is_dir() { path } else { path.with_extension("safetensors") };
        let file = Arc::new(lora(&path).unwrap());
        let loras = [ScaledLora { file, strength: strength.parse().unwrap() }];
        let want: Vec<f32> = expected.get(key).unwrap().to_tensor().unwrap().into_f32().into_iter().collect();
        // Orders other than `exact` apply only to LoRAs.
        let is_lora = ["peft_lora", "peft_rslora", "lycoris_lora"].contains(&case) && name.ends_with("weight");
        let all = [MergeOrder::Exact, MergeOrder::Official, MergeOrder::Diffusers];
        for order in if is_lora { &all[..1] } else { &all } {
            let got = merged(&models[label], name, &loras, *order).unwrap();
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&got), bits(&want), "{key} {order:?}: {got:?}, not {want:?}");
            cases.insert(case);
        }
    }
    assert_eq!(cases.len(), 14, "{cases:?}");
}

/// The weight has more than one block of rows, and a DoRA follows another update.
#[test]
fn merging_several_row_blocks_matches_f64() {
    let dir = TempDir::new().unwrap();
    let (rows, columns) = (300, 6);
    let name = format!("{Q}.weight");
    let model = model_of(dir.path(), &tensors(&[(&name, &[rows, columns])]));
    let key = |end: &str| format!("{Q}.{end}");
    let kron = tensors(&[(&key("lokr_w1"), &[20, 3]), (&key("lokr_w2"), &[15, 2])]);
    let dora = tensors(&[
        (&key("lora_up.weight"), &[rows, 2]),
        (&key("lora_down.weight"), &[2, columns]),
        (&key("dora_scale"), &[1, columns]),
    ]);
    let loras = [("kron", &kron, 0.5), ("dora", &dora, 1.0)].map(|(name, tensors, strength)| {
        let file = write(&dir.path().join(name).with_extension("safetensors"), tensors, &[]);
        ScaledLora { file: Arc::new(lora(&file).unwrap()), strength }
    });
    let got = merged(&model, &name, &loras, MergeOrder::Exact).unwrap();

    let matrix = |tensors: &Tensors, name: &str| {
        let (_, shape, bytes) = &tensors[name];
        let values = bytes.as_chunks::<4>().0.iter().map(|c| f64::from(f32::from_le_bytes(*c))).collect();
        Array2::from_shape_vec((shape[0], shape[1]), values).unwrap()
    };
    let (one, two) = (matrix(&kron, &key("lokr_w1")), matrix(&kron, &key("lokr_w2")));
    let product = matrix(&dora, &key("lora_up.weight")).dot(&matrix(&dora, &key("lora_down.weight")));
    let before = matrix(&tensors(&[(&name, &[rows, columns])]), &name)
        + Array2::from_shape_fn((rows, columns), |(i, j)| 0.5 * one[[i / 15, j / 2]] * two[[i % 15, j % 2]])
        + product;
    let magnitude = matrix(&dora, &key("dora_scale"));
    for (i, got) in got.iter().enumerate() {
        let (row, column) = (i / columns, i % columns);
        let norm = before.column(column).mapv(|v| v * v).sum().sqrt();
        let want = before[[row, column]] * magnitude[[0, column]] / norm;
        assert!((f64::from(*got) - want).abs() <= 1e-6 * want.abs().max(1.0), "{row} {column}: {got}, {want}");
    }
}

/// PEFT divides by the norms of the stored weight plus the update, whatever was merged before.
#[test]
fn peft_dora_norms_ignore_earlier_updates() {
    let dir = TempDir::new().unwrap();
    let name = format!("{Q}.weight");
    let one = |value: f32, shape: &[usize]| (Dtype::F32, shape.to_vec(), value.to_le_bytes().to_vec());
    let model = model_of(dir.path(), &[(name.clone(), one(3.0, &[1, 1]))].into());
    let dora = [
        (format!("{Q}.lora_A.weight"), one(1.0, &[1, 1])),
        (format!("{Q}.lora_B.weight"), one(1.0, &[1, 1])),
        (format!("{Q}.lora_magnitude_vector"), one(8.0, &[1])),
    ];
    let files = [("diff", [(format!("{Q}.diff"), one(4.0, &[1, 1]))].into()), ("dora", dora.into())];
    let loras = files.map(|(name, tensors)| {
        let file = write(&dir.path().join(name).with_extension("safetensors"), &tensors, &[]);
        ScaledLora { file: Arc::new(lora(&file).unwrap()), strength: 1.0 }
    });
    // (8 / (3 + 1)) * (3 + 4 + 1).
    assert_eq!(merged(&model, &name, &loras, MergeOrder::Exact).unwrap(), [16.0]);
}

#[test]
fn every_naming_scheme_updates_the_same_tensors() {
    let dir = TempDir::new().unwrap();
    let model = ModelSource::open(TINY, &Overrides::default()).unwrap();
    let modules = [
        ("adaln_single.linear", "time_embed.linear", Component::Transformer, [192, 32]),
        ("transformer_blocks.1.ff.net.0.proj", "transformer_blocks.1.ff.net.0.proj", Component::Transformer, [128, 32]),
    ];
    let peft = ["lora_A", "lora_B"];
    let kohya = ["lora_down", "lora_up"];
    let flat = |prefix: &'static str| move |name: &str| format!("{prefix}{}", name.replace('.', "_"));
    let dotted = |prefix: &'static str| move |name: &str| format!("{prefix}{name}");
    type Spelling = Box<dyn Fn(&str) -> String>;
    // Names in a file, whether they are diffusers', names of the matrices, and the end of their names.
    let schemes: [(Spelling, bool, [&str; 2], &str); 11] = [
        (Box::new(dotted("transformer.")), true, peft, "weight"),
        (Box::new(dotted("diffusion_model.")), false, peft, "weight"),
        (Box::new(dotted("diffusion_model.")), false, kohya, "weight"),
        (Box::new(dotted("model.diffusion_model.")), false, peft, "weight"),
        (Box::new(dotted("base_model.model.")), true, peft, "weight"),
        (Box::new(dotted("")), false, peft, "default.weight"),
        (Box::new(dotted("")), true, peft, "weight"),
        (Box::new(flat("lora_unet_")), false, kohya, "weight"),
        (Box::new(flat("lora_unet_model_")), false, kohya, "weight"),
        (Box::new(flat("lora_unet_")), true, kohya, "weight"),
        (Box::new(flat("lycoris_")), true, kohya, "weight"),
    ];
    for (i, (spell, diffusers, [down, up], end)) in schemes.iter().enumerate() {
        let mut all = Tensors::new();
        for (theirs, ours, _, [rows, columns]) in modules {
            let module = spell(if *diffusers { ours } else { theirs });
            all.extend(tensors(&[(&format!("{module}.{down}.{end}"), &[2, columns])]));
            all.extend(tensors(&[(&format!("{module}.{up}.{end}"), &[rows, 2])]));
            if *down == "lora_down" {
                // musubi-tuner stores integers.
                all.insert(format!("{module}.alpha"), (Dtype::I64, vec![], 1i64.to_le_bytes().to_vec()));
            }
        }
        let file = lora(&write(&dir.path().join("a.safetensors"), &all, &[])).unwrap();
        file.check(&model).unwrap_or_else(|error| panic!("{i}: {error}"));
        let want = modules.map(|(_, ours, component, _)| (component, format!("{ours}.weight")));
        let got: Vec<_> = file.targets().map(|(component, name)| (component, name.to_string())).collect();
        assert_eq!(got, want, "{i}");
        for (component, name) in got {
            let factor = file.get(component, &name).unwrap().factor(MergeOrder::Exact, 1.0);
            assert_eq!(factor, if *down == "lora_down" { 0.5 } else { 1.0 }, "{i}");
        }
    }
}

#[test]
fn unknown_module_error_names_the_nearest_tensor() {
    let dir = TempDir::new().unwrap();
    let model = ModelSource::open(TINY, &Overrides::default()).unwrap();
    let error = |module: &str, near: &str| {
        let names = ["lora_down.weight", "lora_up.weight"].map(|end| format!("{module}.{end}"));
        let all = tensors(&[(&names[0], &[2, 32]), (&names[1], &[32, 2])]);
        let file = lora(&write(&dir.path().join("a.safetensors"), &all, &[])).unwrap();
        fails(file.check(&model), &["a.safetensors", &names[0], &format!("the most similar name is `{near}`")]);
    };
    error("diffusion_model.transformer_blocks.0.attn1.to_qq", "transformer_blocks.0.attn1.to_q.weight");
    error("transformer.block.2.attn2.to_k", "transformer_blocks.2.attn2.to_k.weight");
    error("lora_unet_model_transformer_blocks_0_attn1_qkv", "transformer_blocks.0.attn1.to_v.weight");
    error("lora_unet_patchify_projection", "proj_in.weight");

    // Two modules with the same name.
    let model = model_of(dir.path(), &tensors(&[("a.b_c.weight", &[4, 4]), ("a_b.c.weight", &[4, 4])]));
    let all = tensors(&[("lora_unet_a_b_c.lora_down.weight", &[2, 4]), ("lora_unet_a_b_c.lora_up.weight", &[4, 2])]);
    let file = lora(&write(&dir.path().join("a.safetensors"), &all, &[])).unwrap();
    fails(file.check(&model), &["lora_unet_a_b_c.lora_down.weight", "may update `a.b_c.weight` or `a_b.c.weight`"]);
}

#[test]
fn damaged_adapters_are_refused_with_file_and_key() {
    let dir = TempDir::new().unwrap();
    let model = model_of(dir.path(), &tensors(&[("a.weight", &[4, 6]), ("a.bias", &[4])]));
    let refused = |shapes: &[(&str, &[usize])], change: &dyn Fn(&mut Tensors), parts: &[&str]| {
        let mut all = tensors(shapes);
        change(&mut all);
        let file = lora(&write(&dir.path().join("bad.safetensors"), &all, &[]));
        let checked = file.and_then(|file| {
            let loras = [ScaledLora { file: Arc::new(file), strength: 2.0 }];
            merged(&model, "a.weight", &loras, MergeOrder::Exact)
        });
        fails(checked, &[&["bad.safetensors", shapes[0].0], parts].concat());
    };
    let same = |_: &mut Tensors| {};
    let [down, up, scalar]: [(&str, &[usize]); 3] =
        [("a.lora_A.weight", &[2, 6]), ("a.lora_B.weight", &[4, 2]), ("a.alpha", &[])];
    for (shapes, parts) in [
        (&[down][..], &["without its counterpart"][..]),
        (&[("a.hada_w1_a", &[4, 2]), ("a.hada_w1_b", &[2, 6])], &["LoHa", "hada_w2"]),
        (
            &[("a.hada_w2_b", &[2, 6]), ("a.hada_w1_a", &[4, 2]), ("a.hada_w1_b", &[2, 6])],
            &["both hada_w2_a and hada_w2_b"],
        ),
        (
            &[("a.hada_w1_a", &[4, 2]), ("a.hada_w1_b", &[2, 6]), ("a.hada_w2_a", &[4, 3]), ("a.hada_w2_b", &[3, 6])],
            &["hada_w2_a", "[4, 3]", "must be equal"],
        ),
        (&[("a.lokr_w1", &[2, 2])], &["LoKr", "lokr_w2"]),
        (&[("a.lokr_w1", &[2, 2, 1]), ("a.lokr_w2", &[2, 3])], &["two dimensions"]),
        (&[("a.lokr_w1", &[2, 2]), ("a.lokr_w2", &[2, 2])], &["a.lokr_w2", "update of shape [4, 4]", "[4, 6]"]),
        (
            &[("a.lokr_w2_a", &[2, 1]), ("a.lokr_w2_b", &[1, 3]), ("a.lokr_w2", &[2, 3]), ("a.lokr_w1", &[2, 2])],
            &["same weight"],
        ),
        (&[("a.lora_A.weight", &[0, 6]), ("a.lora_B.weight", &[4, 0])], &["greater than 0"]),
        (&[("a.lora_magnitude_vector", &[6]), down, up], &["[6]", "4 rows and 6 columns"]),
        (&[("a.dora_scale", &[1, 4]), down, up], &["[1, 4]", "4 rows and 6 columns"]),
        (&[("a.dora_scale", &[4, 1]), ("a.lora_magnitude_vector", &[4]), down, up], &["same weight"]),
        (&[("a.dora_scale", &[4, 1]), ("a.diff", &[4, 6])], &["no matrices"]),
        (&[("a.alpha", &[])], &["no matrices"]),
        (&[("a.alpha", &[2]), down, up], &["must be one number"]),
        (&[("a.diff", &[4, 6]), down, up], &["updates the same weight as `a.lora_A.weight`"]),
        (&[("a.diff", &[6, 4])], &["update of shape [6, 4]", "[4, 6]"]),
        (&[("a.diff_b", &[6])], &["update of shape [6]", "`a.bias` has shape [4]"]),
        (&[("a.lora_mid.weight", &[2, 2, 3, 3]), down, up], &["LoCon"]),
        (&[("a.lokr_t2", &[2, 2, 3, 3]), down, up], &["LoKr of a convolution"]),
    ] {
        refused(shapes, &same, parts);
    }
    let alpha = |value: f32| move |all: &mut Tensors| all.get_mut("a.alpha").unwrap().2 = value.to_le_bytes().to_vec();
    refused(&[("a.alpha", &[]), down, up], &alpha(f32::NAN), &["NaN", "not a finite number"]);
    refused(&[("a.alpha", &[]), down, up], &alpha(f32::INFINITY), &["not a finite number"]);
    refused(&[down, up, scalar], &alpha(f32::MAX), &["with strength 2 gives values of `a.weight` that are not finite"]);
    let nan = |all: &mut Tensors| all.get_mut("a.lokr_w1").unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(&[("a.lokr_w1", &[2, 2]), ("a.lokr_w2", &[2, 3])], &nan, &["NaN"]);
}

/// Configurations of PEFT and diffusers change the factor, and are part of the fingerprint.
#[test]
fn configurations_set_alpha_and_rank() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("adapter");
    let name = |module: &str, end: &str| format!("base_model.model.{module}.{end}");
    let lokr = [name("a.to_q", "lokr_w1"), name("a.to_q", "lokr_w2"), name("b", "lokr_w1"), name("b", "lokr_w2")];
    let lokr = lokr.iter().map(|name| (&name[..], &[2, 2][..])).collect::<Vec<_>>();
    let weights = write(&folder.join("adapter_model.safetensors"), &tensors(&lokr), &[]);
    write(&folder.join("optimizer.safetensors"), &tensors(&[("state", &[2])]), &[]);
    let factors = |config: Value| {
        put(folder.join("adapter_config.json"), config.to_string());
        let file = lora(&folder)?;
        let factor = |name: &str| file.get(Component::Transformer, name).unwrap().factor(MergeOrder::Official, 1.0);
        Ok([factor("a.to_q.weight"), factor("b.weight")])
    };
    let config = json!({"alpha": 3, "r": 2, "alpha_pattern": {"to_q": 5}, "rank_pattern": {"^a.to_q": 10, "^to_q": 7}});
    assert_eq!(factors(config).unwrap(), [0.5, 1.5]);
    let fingerprint = |path: &Path| lora_fingerprint(path.to_str().unwrap()).unwrap();
    let before = fingerprint(&weights);
    assert_eq!(before, fingerprint(&folder));
    assert_eq!(factors(json!({"alpha": 3, "r": 9, "use_rslora": true})).unwrap(), [1.0, 1.0]);
    assert_ne!(before, fingerprint(&folder));
    for (config, said) in [
        (json!({"alpha": 3}), "no rank (`r`)"),
        (json!({"r": "3"}), "has the r \"3\", which is not a number"),
        (
            json!({"peft_type": "LOKR", "r": 2, "rank_pattern": {"blocks.[0-9]+": 1}}),
            "unsupported rank_pattern `blocks.[0-9]+`",
        ),
        (json!({"use_qalora": true}), "enables use_qalora"),
        (json!({"modules_to_save": ["proj_in"]}), "enables modules_to_save"),
        (
            json!({"init_lora_weights": "pissa_niter_4"}),
            "init_lora_weights pissa_niter_4, which changes the model's weights",
        ),
    ] {
        fails(factors(config), &["adapter_model.safetensors", said]);
    }
    put(folder.join("adapter_config.json"), "{");
    fails(lora(&folder), &["adapter_config.json: not JSON"]);

    let all = tensors(&[("transformer.a.lora_A.weight", &[4, 6]), ("transformer.a.lora_B.weight", &[4, 4])]);
    let header = json!({"transformer.lora_alpha": 6, "transformer.r": 4, "transformer.use_rslora": true}).to_string();
    let file = lora(&write(&dir.path().join("a.safetensors"), &all, &[("lora_adapter_metadata", &header)])).unwrap();
    assert_eq!(file.get(Component::Transformer, "a.weight").unwrap().factor(MergeOrder::Official, 1.0), 3.0);
}
