//! LoRA: merged as the reference merges, into what they name alone, and away again.

use ltx2::request::{RefinePass, Request};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::support::single_file::{Stored, read, write};
use crate::support::{self, Case, cases, cpu, dumped, needs, quick, relative_l2};
use half::bf16;
use ltx2::config;
use ltx2::hlo::{DType, F8};
use ltx2::models::transformer::CrossTimestep;
use ltx2::nn::{Build, Lowering, Param, Quantization};
use ltx2::pipeline::component::run_component;
use ltx2::pipeline::configs::ModelConfigs;
use ltx2::pipeline::executor::Executor;
use ltx2::pipeline::loras::Loras;
use ltx2::pipeline::model::{Component, Model};
use ltx2::pipeline::origin::Weights;
use ltx2::pipeline::parameters::parameters;
use ltx2::pipeline::programs::ProgramKind;
use ltx2::pipeline::runner::Runner;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ltx2::weights::lora::{merge, updates};
use ltx2::weights::{Checkpoint, Lora, LoraFile, ModelSource, Overrides};
use ndarray::{Array2, Ix2};
use safetensors::Dtype;

/// Numbers without a pattern, about 1 in size.
fn scattered(rows: usize, columns: usize, seed: u64) -> Array2<f32> {
    let mut state = seed;
    Array2::from_shape_simple_fn((rows, columns), || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 22) as f32 - 2.0
    })
}

fn stored(values: &Array2<f32>, dtype: DType) -> Stored {
    let tensor = Tensor::from(values.clone()).cast(dtype).expect("a float type");
    let kind = if dtype == DType::BF16 { Dtype::BF16 } else { Dtype::F32 };
    (kind, values.shape().to_vec(), tensor.bytes().into_owned())
}

fn tensors(pairs: &[(&str, &Array2<f32>)], dtype: DType) -> BTreeMap<String, Stored> {
    pairs.iter().map(|(name, values)| ((*name).to_string(), stored(values, dtype))).collect()
}

fn file(path: &Path, tensors: &BTreeMap<String, Stored>) -> Rc<LoraFile> {
    write(path, tensors, None);
    Rc::new(LoraFile::open(path.to_str().expect("UTF-8")).expect("updates"))
}

fn model(path: &Path) -> Rc<ModelSource> {
    Rc::new(ModelSource::open(path.to_str().expect("UTF-8"), &Overrides::default()).expect("a model"))
}

fn matrix(bytes: &[u8], dtype: DType, shape: [usize; 2]) -> Array2<f32> {
    let tensor = Tensor::from_bytes(dtype, &shape, bytes).expect("fits");
    tensor.into_f32().into_dimensionality::<Ix2>().expect("a matrix")
}

/// A weight `[48, 40]` in a file, and the name it has in a model.
const NAME: &str = "blocks.0.to_q.weight";

fn weight(dir: &Path, values: &Array2<f32>, dtype: DType) -> Checkpoint {
    let path = dir.join(format!("weight_{dtype}.safetensors"));
    write(&path, &tensors(&[(NAME, values)], dtype), None);
    Checkpoint::open(&path).expect("a file")
}

fn merged(checkpoint: &Checkpoint, loras: &[Lora]) -> (DType, Array2<f32>) {
    let found = updates(loras, Component::Transformer, NAME);
    let view = checkpoint.get_float(NAME).expect("a weight");
    let merged = merge(&view, None, &found).expect("merges");
    (merged.dtype(), matrix(merged.as_ref(), merged.dtype(), [48, 40]))
}

#[needs(cpu)]
fn merged_weights_are_exact_to_one_rounding_and_the_reference_s() {
    let dir = tempfile::tempdir().expect("a folder");
    let w = scattered(48, 40, 1).mapv(|v| bf16::from_f32(v).to_f32());
    let (a, b) = (scattered(6, 40, 2), scattered(48, 6, 3).mapv(|v| v * 0.2));
    let (a, b) = (a.mapv(|v| bf16::from_f32(v).to_f32()), b.mapv(|v| bf16::from_f32(v).to_f32()));
    let names = ["transformer.blocks.0.to_q.lora_A.weight", "transformer.blocks.0.to_q.lora_B.weight"];
    let file = file(&dir.path().join("a.safetensors"), &tensors(&[(names[0], &a), (names[1], &b)], DType::BF16));
    let strength = 0.7f32;
    let loras = [Lora { file, strength }];
    let wide = |m: &Array2<f32>| m.mapv(f64::from);
    let delta = wide(&b).dot(&wide(&a)) * f64::from(strength);
    let exact = wide(&w) + &delta;

    let (dtype, in_f32) = merged(&weight(dir.path(), &w, DType::F32), &loras);
    assert_eq!(dtype, DType::F32);
    assert!(in_f32.iter().zip(&exact).all(|(got, want)| (f64::from(*got) - want).abs() <= 2e-6 * want.abs().max(1.0)));

    let (dtype, in_bf16) = merged(&weight(dir.path(), &w, DType::BF16), &loras);
    assert_eq!(dtype, DType::BF16);
    let round = |v: f32| bf16::from_f32(v).to_f32();
    assert_eq!(in_bf16, in_f32.mapv(round), "the sum in f32, rounded once");

    // The reference: strength into B, rounded; the product, rounded; the sum, rounded.
    let product = wide(&b.mapv(|v| round(v * strength))).dot(&wide(&a)).mapv(|v| round(v as f32));
    let reference = (product + &w).mapv(round);
    // No rounding is of more than all terms by their size; ours has one, the reference three.
    let sizes = wide(&b.mapv(f32::abs)).dot(&wide(&a.mapv(f32::abs))) * f64::from(strength) + wide(&w.mapv(f32::abs));
    for ((got, want), size) in in_bf16.iter().zip(&reference).zip(&sizes) {
        assert!(f64::from((got - want).abs()) <= 4.0 * size * 2f64.powi(-9), "{got} and {want}, {size}");
    }
    let apart = relative_l2(&Tensor::from(in_bf16), &Tensor::from(reference));
    assert!(apart < 4e-3, "{apart:e}, a rounding is 2e-3");
}

#[needs(cpu)]
fn updates_commute_and_alpha_scales() {
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
    let first = Lora { file: file(&dir.path().join("1.safetensors"), &first), strength: 0.5 };
    let second = Lora { file: file(&dir.path().join("2.safetensors"), &second), strength: -1.5 };
    let checkpoint = weight(dir.path(), &w, DType::F32);
    let (_, forth) = merged(&checkpoint, &[first.clone(), second.clone()]);
    let (_, back) = merged(&checkpoint, &[second, first.clone()]);
    // 0.5 * (2 / 4) and -1.5.
    let want = w.mapv(f64::from) + one * 0.25 - two * 1.5;
    for ((forth, back), want) in forth.iter().zip(&back).zip(&want) {
        assert!((forth - back).abs() <= 4e-6 * forth.abs().max(1.0), "{forth} and {back}");
        assert!((f64::from(*forth) - want).abs() <= 2e-5 * want.abs().max(1.0), "{forth}, {want}");
    }
    let off = [Lora { strength: 0.0, ..first }];
    assert!(updates(&off, Component::Transformer, NAME).is_empty());
}

/// An update of each named module of `tiny_a`'s or `tiny_b`'s transformer.
fn of_modules(path: &Path, model: &ModelSource, prefix: &str, modules: &[(&str, &str)]) -> Rc<LoraFile> {
    let checkpoint = model.checkpoint(Component::Transformer).expect("a transformer");
    let mut all = BTreeMap::new();
    for (i, (module, name)) in modules.iter().enumerate() {
        let shape = checkpoint.shape(&format!("{name}.weight")).expect("a weight").to_vec();
        let seed = 20 + 2 * i as u64;
        let a = scattered(2, shape[1], seed);
        let b = scattered(shape[0], 2, seed + 1).mapv(|v| v * 0.1);
        all.insert(format!("{prefix}.{module}.lora_A.weight"), stored(&a, DType::F32));
        all.insert(format!("{prefix}.{module}.lora_B.weight"), stored(&b, DType::F32));
    }
    file(path, &all)
}

const MODULES: [(&str, &str); 3] = [
    ("adaln_single.linear", "time_embed.linear"),
    ("transformer_blocks.0.attn1.to_q", "transformer_blocks.0.attn1.to_q"),
    ("transformer_blocks.1.audio_ff.net.0.proj", "transformer_blocks.1.audio_ff.net.0.proj"),
];

fn case(name: &str) -> Case {
    cases("transformer").into_iter().find(|c| c.name == format!("transformer/{name}")).expect("a case")
}

fn build(dtype: DType) -> Build {
    Build { lowering: Lowering::of("cpu", ""), ..Build::new(dtype) }
}

fn run(executor: &mut Executor, case: &Case, configs: &ModelConfigs, build: &Build) -> Vec<(String, Tensor)> {
    run_component(ProgramKind::Transformer, configs, executor, case.inputs.clone(), &case.scalars, build).expect("runs")
}

fn distance(a: &[(String, Tensor)], b: &[(String, Tensor)]) -> f64 {
    a.iter().zip(b).map(|((_, a), (_, b))| relative_l2(a, b)).fold(0.0, f64::max)
}

#[needs(cpu)]
fn a_transformer_with_an_update_is_the_merged_one_and_only_that_is_loaded() {
    let client = cpu(8);
    let dir = tempfile::tempdir().expect("a folder");
    let case = case("tiny_b");
    let source = model(&case.model);
    let configs = ModelConfigs::of(&source);
    let build = build(DType::F32);
    let mut executor = Executor::new(Engine::new(client.clone(), quick()), source.clone());
    let plain = run(&mut executor, &case, &configs, &build);

    let original = of_modules(&dir.path().join("original.safetensors"), &source, "diffusion_model", &MODULES);
    let diffusers = MODULES.map(|(_, name)| (name, name));
    let named = of_modules(&dir.path().join("diffusers.safetensors"), &source, "transformer", &diffusers);
    let parameters: Vec<Param> = parameters(&configs, Component::Transformer).expect("parameters");
    let absent = |executor: &Executor| -> Vec<String> {
        let gone = parameters.iter().filter(|p| executor.parameter(&p.name).is_none());
        gone.map(|p| p.name.clone()).collect()
    };
    let bytes = executor.parameter_bytes();
    assert!(absent(&executor).is_empty(), "everything is loaded");
    executor.set_loras(&[Lora { file: original, strength: 0.5 }]).expect("fits");
    let dropped = absent(&executor);
    assert_eq!(dropped.len(), MODULES.len(), "{dropped:?}");
    assert!(executor.parameter_bytes() < bytes);
    let updated = run(&mut executor, &case, &configs, &build);
    assert_eq!((absent(&executor).len(), executor.parameter_bytes()), (0, bytes));
    assert!(distance(&updated, &plain) > 1e-2);

    // The same weights merged by hand.
    let folder = dir.path().join("merged/transformer");
    std::fs::create_dir_all(&folder).expect("a folder");
    let config = std::fs::read(case.model.join("transformer/config.json")).expect("a file");
    std::fs::write(folder.join("config.json"), config).expect("written");
    let weights: PathBuf = ["transformer", "diffusion_pytorch_model.safetensors"].iter().collect();
    let mut all = read(&case.model.join(&weights));
    let update = read(&dir.path().join("diffusers.safetensors"));
    for (_, name) in MODULES {
        let wide = |(_, shape, bytes): &Stored| matrix(bytes, DType::F32, [shape[0], shape[1]]).mapv(f64::from);
        let [a, b] = ["A", "B"].map(|m| wide(&update[&format!("transformer.{name}.lora_{m}.weight")]));
        let key = format!("{name}.weight");
        let sum = wide(&all[&key]) + b.dot(&a) * 0.5;
        all.insert(key, stored(&sum.mapv(|v| v as f32), DType::F32));
    }
    write(&dir.path().join("merged").join(&weights), &all, None);
    let by_hand = model(&dir.path().join("merged"));
    let mut merged = Executor::new(Engine::new(client, quick()), by_hand.clone());
    let want = run(&mut merged, &case, &ModelConfigs::of(&by_hand), &build);
    assert!(distance(&updated, &want) <= 1e-6, "{:e}", distance(&updated, &want));

    // Another file with the same numbers, then none of it, then nothing: back to the beginning.
    executor.set_loras(&[Lora { file: named.clone(), strength: 0.5 }]).expect("fits");
    assert_eq!(absent(&executor).len(), MODULES.len());
    assert!(distance(&run(&mut executor, &case, &configs, &build), &updated) == 0.0);
    executor.set_loras(&[Lora { file: named.clone(), strength: 0.5 }]).expect("fits");
    assert!(absent(&executor).is_empty(), "nothing changes");
    executor.set_loras(&[Lora { file: named, strength: 0.0 }]).expect("fits");
    assert_eq!(absent(&executor).len(), MODULES.len());
    assert!(distance(&run(&mut executor, &case, &configs, &build), &plain) == 0.0);
    executor.set_loras(&[]).expect("fits");
    assert!(absent(&executor).is_empty(), "strength 0 was none already");
}

/// Narrow weights are those of the sum, not a sum of narrow weights.
#[needs(cpu)]
fn eight_bit_weights_are_made_of_the_merged() {
    let client = cpu(8);
    let dir = tempfile::tempdir().expect("a folder");
    let case = case("tiny_b");
    let source = model(&case.model);
    let modules = [("transformer_blocks.0.ff.net.0.proj", "transformer_blocks.0.ff.net.0.proj")];
    let file = of_modules(&dir.path().join("a.safetensors"), &source, "transformer", &modules);
    let lowering = Lowering { unroll_layers: true, ..Lowering::of("cpu", "") };
    let narrow = Build { lowering, quantization: Quantization::Fp8, ..Build::new(DType::BF16) };
    let wide = Build { quantization: Quantization::None, ..narrow.clone() };
    let results = |build: &Build, strength: f32| {
        let mut executor = Executor::new(Engine::new(client.clone(), quick()), source.clone());
        executor.set_loras(&[Lora { file: file.clone(), strength }]).expect("fits");
        run(&mut executor, &case, &ModelConfigs::of(&source), build)
    };
    let (plain, updated, want) = (results(&narrow, 0.0), results(&narrow, 1.0), results(&wide, 1.0));
    let (moved, off) = (distance(&updated, &plain), distance(&updated, &want));
    eprintln!("fp8: moved {moved:.3}, {off:.3} from bf16's");
    assert!(off < 0.06 && moved > off, "moved {moved}, {off} from bf16's");
}

fn refused(dir: &Path, tensors: &BTreeMap<String, Stored>) -> String {
    let path = dir.join("bad.safetensors");
    write(&path, tensors, None);
    let opened = LoraFile::open(path.to_str().expect("UTF-8"));
    let error = opened.and_then(|l| l.check(&model(&case("tiny_b").model))).expect_err("refused").to_string();
    assert!(!error.contains('\n') && error.contains("bad.safetensors"), "{error}");
    error
}

#[needs(cpu)]
fn what_does_not_fit_names_file_key_and_shapes() {
    let dir = tempfile::tempdir().expect("a folder");
    let bad = |pairs: &[(&str, [usize; 2])]| {
        let all: BTreeMap<String, Stored> = pairs
            .iter()
            .map(|(name, [rows, columns])| ((*name).to_string(), stored(&scattered(*rows, *columns, 1), DType::F32)))
            .collect();
        refused(dir.path(), &all)
    };
    let q = "transformer.transformer_blocks.0.attn1.to_q";
    let (a, b) = (&format!("{q}.lora_A.weight"), &format!("{q}.lora_B.weight"));
    let says = |error: String, parts: &[&str]| {
        parts.iter().for_each(|part| assert!(error.contains(part), "'{part}' is not in: {error}"));
    };
    says(bad(&[(a, [2, 24])]), &[a, "no counterpart"]);
    says(bad(&[(a, [2, 24]), (b, [24, 3])]), &[a, "[2, 24]", b, "[24, 3]", "rank"]);
    says(bad(&[(a, [2, 30]), (b, [24, 2])]), &[a, "[2, 30]", b, "[24, 2]", "[24, 30]", "[24, 24]", "(LTX-2.0)"]);
    let gate = "diffusion_model.transformer_blocks.0.attn1.to_gate_logits";
    let (ga, gb) = (&format!("{gate}.lora_A.weight"), &format!("{gate}.lora_B.weight"));
    says(bad(&[(ga, [2, 24]), (gb, [4, 2])]), &[ga, "to_gate_logits.weight", "no tensor", "another model version"]);
    says(bad(&[("lora_unet_x.lora_down.weight", [2, 2])]), &["lora_unet_x", "diffusers", "Lightricks"]);
    says(bad(&[(&format!("{q}.dora_scale"), [2, 2])]), &["dora_scale", "only lora_A"]);
}

#[needs(cpu)]
fn random_weights_take_no_updates() {
    let client = cpu(8);
    let dir = tempfile::tempdir().expect("a folder");
    let source = model(&case("tiny_b").model);
    let file = of_modules(&dir.path().join("a.safetensors"), &source, "transformer", &MODULES[1..]);
    let mut executor = Executor::new(Engine::new(client, quick()), Weights::Random(1));
    let error = executor.set_loras(&[Lora { file, strength: 1.0 }]).expect_err("refused").to_string();
    assert!(error.contains("a.safetensors") && error.contains("model.weights is random"), "{error}");
}

/// Each row of 8-bit floats has a scale of its own, also in the blocks of rows behind the first.
#[needs(nothing)]
fn rows_of_eight_bit_weights_keep_their_scales() {
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
    let loras = [Lora { file, strength: 0.5 }];
    let view = Checkpoint::open(&weight).expect("a file").get_float(NAME).expect("a weight");
    let merged = merge(&view, Some(&scales), &updates(&loras, Component::Transformer, NAME)).expect("merges");
    let got = matrix(merged.as_ref(), merged.dtype(), [rows, columns]);
    let delta = b.mapv(f64::from).dot(&a.mapv(f64::from)) * 0.5;
    for ((row, column), got) in got.indexed_iter() {
        let want = f64::from(f32::from(narrow[[row, column]]) * scales[row]) + delta[[row, column]];
        assert!((f64::from(*got) - want).abs() <= 0.005 * want.abs() + 1e-5, "row {row}: {got}, {want}");
    }
}

/// A second stage is made with its own updates, and the first one of the next video with the first one's again.
#[needs(cpu)]
fn stages_have_updates_of_their_own() {
    let client = cpu(8);
    let dir = tempfile::tempdir().expect("a folder");
    // Sizes and guidance of this case: its programs.
    let all = cases("stages");
    let case = all.iter().find(|c| c.name.ends_with("/distilled")).expect("a case");
    let upsampler = Some("tests/fixtures/models/upsampler_rational".to_string());
    let overrides = Overrides { upsampler, ..Overrides::default() };
    let source = Rc::new(ModelSource::open(case.model.to_str().expect("UTF-8"), &overrides).expect("a model"));
    let model = || Model::open(&source).expect("complete");
    let path = dir.path().join("a.safetensors");
    of_modules(&path, &source, "diffusion_model", &MODULES);
    let refine = RefinePass { sigmas: vec![0.9, 0.5, 0.0], keeps_audio: true, adain: 0.0, tone_map: 0.0 };
    let cross = CrossTimestep::Own;
    let request = Request { refine: Some(refine), cross, ..support::request(case, &model()) };
    // The latents of both stages, of a first and a second video.
    let made = |stages: &[u8]| {
        let entry =
            |stages: &[u8]| config::Lora { path: path.display().to_string(), strength: 1.0, stages: stages.to_vec() };
        let entries: Vec<config::Lora> = [stages].into_iter().filter(|s| !s.is_empty()).map(entry).collect();
        let mut loaded = Executor::new(Engine::new(client.clone(), quick()), source.clone());
        loaded.keep_loras(Loras::open(&entries).expect("updates")).expect("fits");
        let mut runner = Runner::new(model(), loaded, build(DType::F32));
        let mut video = || {
            let made = support::generate(&mut runner, &request, &support::dumping(None));
            ["stage_1.latents.video", "latents.video"].map(|name| dumped(&made, name).clone())
        };
        let (first, second) = (video(), video());
        assert!(first == second, "{stages:?}: the second video has other bits");
        first
    };
    let (none, one, two, both) = (made(&[]), made(&[1]), made(&[2]), made(&[1, 2]));
    assert!(two[0] == none[0], "the first stage has none of the second one's updates");
    assert!(both[0] == one[0]);
    for (what, a, b) in [
        ("the first stage has its updates", &one[0], &none[0]),
        ("the second stage has its updates", &two[1], &none[1]),
        ("the second stage has them too", &both[1], &one[1]),
    ] {
        assert!(relative_l2(a, b) > 1e-3, "{what}: {:e}", relative_l2(a, b));
    }
}

/// The command: a strength of 0 changes no bit, another does.
#[needs(cpu)]
fn generate_takes_updates() {
    let dir = tempfile::tempdir().expect("a folder");
    let tiny = Path::new("tests/fixtures/models/tiny_a");
    let lora = dir.path().join("a.safetensors");
    of_modules(&lora, &model(tiny), "diffusion_model", &MODULES);
    let video = |name: &str, more: &[String]| {
        let out = dir.path().join(name);
        let base = ["generate", "-c", "nano_2_0", "--model", "tests/fixtures/models/tiny_a", "--platform", "cpu"];
        let small = ["--width", "64", "--height", "96", "--num-frames", "9", "--steps", "2"];
        let rest = ["--max-sequence-length", "64", "--reference", "diffusers", "--set", support::QUICK];
        let mut command = support::ltx2();
        command.args(base).args(["-p", "a red ball"]).args(small).args(rest).arg("-o").arg(&out).args(more);
        let done = command.output().expect("the binary runs");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let text = std::fs::read_to_string(out.with_extension("json")).expect("a sidecar");
        serde_json::from_str::<serde_json::Value>(&text).expect("JSON")["sha256"].clone()
    };
    let with = |strength: &str| ["--lora".to_string(), format!("{}{strength}", lora.display())];
    let plain = video("plain.mp4", &[]);
    assert_eq!(video("off.mp4", &with("=0")), plain);
    assert_ne!(video("on.mp4", &with("")), plain);
}
