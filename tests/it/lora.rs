//! Models with LoRAs: merged only into the listed weights, for the selected stages, and removed again.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::support::single_file::{TensorData, read, write};
use crate::support::{self, Case, cases, cpu, dumped, full, lowering_of, needs, quick, relative_l2};
use ltx2::config::{self, Config};
use ltx2::hlo::DType;
use ltx2::nn::{Build, Lowering, Param, Quantization};
use ltx2::pipeline::model::{Component, OpenModel};
use ltx2::pipeline::plan::loras::Loras;
use ltx2::pipeline::plan::origin::Weights;
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pipeline::programs::component::run_component;
use ltx2::pipeline::programs::configs::ModelConfigs;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pipeline::programs::parameters::parameters;
use ltx2::pipeline::runner::Runner;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ltx2::weights::{LoraFile, MergeOrder, ModelSource, Overrides, ScaledLora};
use ndarray::{Array2, Ix2};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

/// Pseudo-random numbers of about unit size.
pub(crate) fn scattered(rows: usize, columns: usize, seed: u64) -> Array2<f32> {
    let mut state = seed;
    Array2::from_shape_simple_fn((rows, columns), || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 22) as f32 - 2.0
    })
}

pub(crate) fn stored_tensor(values: &Array2<f32>, dtype: DType) -> TensorData {
    let tensor = Tensor::from(values.clone()).cast(dtype).expect("a float type");
    let kind = if dtype == DType::BF16 { Dtype::BF16 } else { Dtype::F32 };
    (kind, values.shape().to_vec(), tensor.bytes().into_owned())
}

pub(crate) fn tensors(pairs: &[(&str, &Array2<f32>)], dtype: DType) -> BTreeMap<String, TensorData> {
    pairs.iter().map(|(name, values)| ((*name).to_string(), stored_tensor(values, dtype))).collect()
}

pub(crate) fn file(path: &Path, tensors: &BTreeMap<String, TensorData>) -> Arc<LoraFile> {
    write(path, tensors, None);
    Arc::new(LoraFile::open(path.to_str().expect("UTF-8")).expect("updates"))
}

pub(crate) fn model(path: &Path) -> Arc<ModelSource> {
    Arc::new(ModelSource::open(path.to_str().expect("UTF-8"), &Overrides::default()).expect("a model"))
}

pub(crate) fn matrix(bytes: &[u8], dtype: DType, shape: [usize; 2]) -> Array2<f32> {
    let tensor = Tensor::from_bytes(dtype, &shape, bytes).expect("fits");
    tensor.into_f32().into_dimensionality::<Ix2>().expect("a matrix")
}

/// Writes a LoRA for the given modules of a model's transformer.
pub(crate) fn of_modules(path: &Path, model: &ModelSource, prefix: &str, modules: &[(&str, &str)]) -> Arc<LoraFile> {
    let checkpoint = model.checkpoint(Component::Transformer).expect("a transformer");
    let mut all = BTreeMap::new();
    for (i, (module, name)) in modules.iter().enumerate() {
        let shape = checkpoint.shape(&format!("{name}.weight")).expect("a weight").to_vec();
        let seed = 20 + 2 * i as u64;
        let a = scattered(2, shape[1], seed);
        let b = scattered(shape[0], 2, seed + 1).mapv(|v| v * 0.1);
        all.insert(format!("{prefix}.{module}.lora_A.weight"), stored_tensor(&a, DType::F32));
        all.insert(format!("{prefix}.{module}.lora_B.weight"), stored_tensor(&b, DType::F32));
    }
    file(path, &all)
}

pub(crate) const MODULES: [(&str, &str); 3] = [
    ("adaln_single.linear", "time_embed.linear"),
    ("transformer_blocks.0.attn1.to_q", "transformer_blocks.0.attn1.to_q"),
    ("transformer_blocks.1.audio_ff.net.0.proj", "transformer_blocks.1.audio_ff.net.0.proj"),
];

fn case(name: &str) -> Case {
    cases("transformer").into_iter().find(|c| c.name == format!("transformer/{name}")).expect("a case")
}

fn build(dtype: DType) -> Build {
    Build { lowering: lowering_of("cpu"), ..Build::new(dtype) }
}

fn run(executor: &mut Executor, case: &Case, configs: &ModelConfigs, build: &Build) -> Vec<(String, Tensor)> {
    run_component(ProgramKind::Transformer, configs, executor, case.inputs.clone(), &case.scalars, build).expect("runs")
}

fn distance(a: &[(String, Tensor)], b: &[(String, Tensor)]) -> f64 {
    a.iter().zip(b).map(|((_, a), (_, b))| relative_l2(a, b)).fold(0.0, f64::max)
}

#[needs(cpu)]
fn lora_equals_merged_weights_and_reloads_only_changed_weights() {
    for name in ["tiny_b", "tiny_v2_5"].into_iter().take(if full() { 2 } else { 1 }) {
        merged_and_loaded_alone(&case(name));
    }
}

fn merged_and_loaded_alone(case: &Case) {
    let client = cpu(8);
    let dir = tempfile::tempdir().expect("a folder");
    let source = model(&case.model);
    let configs = ModelConfigs::from_source(&source);
    let build = build(DType::F32);
    let executor = Executor::new(Engine::new(client.clone(), quick()), source.clone());
    let mut executor = executor.with_merge_order(MergeOrder::Exact);
    let plain = run(&mut executor, case, &configs, &build);

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
    executor.set_loras(&[ScaledLora { file: original, strength: 0.5 }]).expect("fits");
    let dropped = absent(&executor);
    assert_eq!(dropped.len(), MODULES.len(), "{dropped:?}");
    assert!(executor.parameter_bytes() < bytes);
    let updated = run(&mut executor, case, &configs, &build);
    assert_eq!((absent(&executor).len(), executor.parameter_bytes()), (0, bytes));
    assert!(distance(&updated, &plain) > 1e-2);

    // The same weights merged by hand.
    let mut all = transformer_weights(&case.model);
    let update = read(&dir.path().join("diffusers.safetensors"));
    for (_, name) in MODULES {
        let key = format!("{name}.weight");
        let (kind, shape, bytes) = &all[&key];
        let dtype = if *kind == Dtype::BF16 { DType::BF16 } else { DType::F32 };
        let weight = matrix(bytes, dtype, [shape[0], shape[1]]).mapv(f64::from);
        let sum = weight + delta(&update, &format!("transformer.{name}")) * 0.5;
        all.insert(key, stored_tensor(&sum.mapv(|v| v as f32), dtype));
    }
    let by_hand = model(&with_transformer(&dir.path().join("merged"), &case.model, &all));
    let mut merged = Executor::new(Engine::new(client.clone(), quick()), by_hand.clone());
    let want = run(&mut merged, case, &ModelConfigs::from_source(&by_hand), &build);
    assert!(distance(&updated, &want) <= 1e-6, "{:e}", distance(&updated, &want));
    // The run's merge order determines the result: the default order rounds updates to bf16.
    let mut rounded = Executor::new(Engine::new(client, quick()), source.clone());
    rounded.set_loras(&[ScaledLora { file: named.clone(), strength: 0.5 }]).expect("fits");
    let off = distance(&run(&mut rounded, case, &configs, &build), &updated);
    assert!((1e-5..1e-2).contains(&off), "{off:e}");

    // Another file with the same numbers, then strength 0, then no LoRA: back to the original weights.
    executor.set_loras(&[ScaledLora { file: named.clone(), strength: 0.5 }]).expect("fits");
    assert_eq!(absent(&executor).len(), MODULES.len());
    assert!(distance(&run(&mut executor, case, &configs, &build), &updated) == 0.0);
    executor.set_loras(&[ScaledLora { file: named.clone(), strength: 0.5 }]).expect("fits");
    assert!(absent(&executor).is_empty(), "nothing changes");
    executor.set_loras(&[ScaledLora { file: named, strength: 0.0 }]).expect("fits");
    assert_eq!(absent(&executor).len(), MODULES.len());
    assert!(distance(&run(&mut executor, case, &configs, &build), &plain) == 0.0);
    executor.set_loras(&[]).expect("fits");
    assert!(absent(&executor).is_empty(), "strength 0 already removed it");
}

#[needs(cpu)]
fn eight_bit_weights_are_quantized_after_merging() {
    let client = cpu(8);
    let dir = tempfile::tempdir().expect("a folder");
    // The programs of `quantized`.
    let case = case("tiny_v2_5");
    let source = model(&case.model);
    let modules = [("transformer_blocks.0.ff.net.0.proj", "transformer_blocks.0.ff.net.0.proj")];
    let file = of_modules(&dir.path().join("a.safetensors"), &source, "transformer", &modules);
    let lowering = Lowering { unroll_layers: true, ..lowering_of("cpu") };
    let narrow = Build { lowering, quantization: Quantization::Fp8, ..Build::new(DType::BF16) };
    let wide = Build { quantization: Quantization::None, ..narrow.clone() };
    let results = |build: &Build, strength: f64| {
        let mut executor = Executor::new(Engine::new(client.clone(), quick()), source.clone());
        executor.set_loras(&[ScaledLora { file: file.clone(), strength }]).expect("fits");
        run(&mut executor, &case, &ModelConfigs::from_source(&source), build)
    };
    let (plain, updated, want) = (results(&narrow, 0.0), results(&narrow, 1.0), results(&wide, 1.0));
    let (moved, off) = (distance(&updated, &plain), distance(&updated, &want));
    eprintln!("fp8: moved {moved:.3}, {off:.3} from bf16's");
    assert!(off < 0.06 && moved > off, "moved {moved}, {off} from bf16's");
}

fn refused(dir: &Path, tensors: &BTreeMap<String, TensorData>) -> String {
    let path = dir.join("bad.safetensors");
    write(&path, tensors, None);
    let opened = LoraFile::open(path.to_str().expect("UTF-8"));
    let error = opened.and_then(|l| l.check(&model(&case("tiny_b").model))).expect_err("refused").to_string();
    assert!(!error.contains('\n') && error.contains("bad.safetensors"), "{error}");
    error
}

#[needs(cpu)]
fn mismatched_lora_error_has_file_key_and_shapes() {
    let dir = tempfile::tempdir().expect("a folder");
    let bad = |pairs: &[(&str, [usize; 2])]| {
        let all: BTreeMap<String, TensorData> = pairs
            .iter()
            .map(|(name, [rows, columns])| {
                ((*name).to_string(), stored_tensor(&scattered(*rows, *columns, 1), DType::F32))
            })
            .collect();
        refused(dir.path(), &all)
    };
    let q = "transformer.transformer_blocks.0.attn1.to_q";
    let (a, b) = (&format!("{q}.lora_A.weight"), &format!("{q}.lora_B.weight"));
    let says = |error: String, parts: &[&str]| {
        parts.iter().for_each(|part| assert!(error.contains(part), "'{part}' is not in: {error}"));
    };
    says(bad(&[(a, [2, 24])]), &[a, "without its counterpart"]);
    says(bad(&[(a, [2, 24]), (b, [24, 3])]), &[a, "[2, 24]", b, "[24, 3]", "rank"]);
    says(bad(&[(a, [2, 30]), (b, [24, 2])]), &[a, "[2, 30]", b, "[24, 2]", "[24, 30]", "[24, 24]", "(LTX-2.0)"]);
    let gate = "diffusion_model.transformer_blocks.0.attn1.to_gate_logits";
    let (ga, gb) = (&format!("{gate}.lora_A.weight"), &format!("{gate}.lora_B.weight"));
    says(bad(&[(ga, [2, 24]), (gb, [4, 2])]), &[ga, "to_gate_logits.weight", "not a tensor", "another model version"]);
    let flat = [("lora_unet_x.lora_down.weight", [2, 24]), ("lora_unet_x.lora_up.weight", [24, 2])];
    says(bad(&flat), &["lora_unet_x", "not a module", "the most similar name is `"]);
    let [x_a, x_b] = ["A", "B"].map(|matrix| format!("model.diffusion_model.x.lora_{matrix}.weight"));
    says(bad(&[(&x_a, [2, 24]), (&x_b, [24, 2])]), &["`x.weight`", "not a tensor", "the most similar name is `"]);
    for (part, said) in [
        ("dora_scale", "24 rows and 24 columns"),
        ("lora_magnitude_vector", "24 rows and 24 columns"),
        ("hada_w1_a", "LoHa matrix without its counterpart"),
        ("lokr_w1", "LoKr matrix without its counterpart"),
        ("lora_mid.weight", "LoCon"),
        ("lora_B.bias", "update of shape [2, 2]"),
        ("diff", "updates the same weight as"),
    ] {
        says(bad(&[(a, [2, 24]), (b, [24, 2]), (&format!("{q}.{part}"), [2, 2])]), &[part, said]);
    }
}

/// The diffusers metadata of a LoRA file may request features that are not supported.
#[needs(nothing)]
fn unsupported_lora_metadata_is_rejected() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("a.safetensors");
    let q = "transformer.transformer_blocks.0.attn1.to_q";
    let (a, b) = (&format!("{q}.lora_A.weight"), &format!("{q}.lora_B.weight"));
    let all = tensors(&[(a, &scattered(2, 24, 1)), (b, &scattered(24, 2, 2))], DType::F32);
    let opened = |metadata: serde_json::Value| {
        let header = HashMap::from([("lora_adapter_metadata".to_string(), metadata.to_string())]);
        let views = all.iter().map(|(k, (d, s, b))| (k, TensorView::new(*d, s.clone(), b).expect("a tensor")));
        std::fs::write(&path, safetensors::serialize(views, Some(header)).expect("bytes")).expect("written");
        LoraFile::open(path.to_str().expect("UTF-8"))
    };
    opened(json!({"transformer.use_rslora": false, "transformer.alpha_pattern": {"^a.to_q": 1}})).expect("a LoRA");
    for (metadata, said) in [
        (json!({"transformer.use_qalora": true}), "use_qalora, which is not supported"),
        (json!({"fan_in_fan_out": true}), "fan_in_fan_out, which is not supported"),
        (json!({"connectors.modules_to_save": ["a"]}), "modules_to_save, which is not supported"),
        (json!({"transformer.alpha_pattern": {"blocks.[0-9]+": 1}}), "alpha_pattern `blocks.[0-9]+`"),
        (json!({"lora_alpha": "12"}), "the alpha \"12\", which is not a number"),
        (json!({"transformer.alpha_pattern": {"^a.to_q": [1]}}), "the alpha [1], which is not a number"),
    ] {
        let error = opened(metadata).expect_err("refused").to_string();
        assert!(error.contains("a.safetensors") && error.contains(said), "{error}");
    }
}

#[needs(cpu)]
fn loras_are_rejected_with_random_weights() {
    let client = cpu(8);
    let dir = tempfile::tempdir().expect("a folder");
    let source = model(&case("tiny_b").model);
    let file = of_modules(&dir.path().join("a.safetensors"), &source, "transformer", &MODULES[1..]);
    let mut executor = Executor::new(Engine::new(client, quick()), Weights::Random(1));
    let error = executor.set_loras(&[ScaledLora { file, strength: 1.0 }]).expect_err("refused").to_string();
    assert!(error.contains("a.safetensors") && error.contains("model.weights is random"), "{error}");
}

/// The result equals that of a model with merged weights. Takes seven runs of two stages.
#[needs(cpu)]
fn each_stage_uses_its_own_loras() {
    let client = cpu(8);
    let dir = tempfile::tempdir().expect("a folder");
    let base = Path::new("tests/fixtures/models/tiny_a");
    let path = dir.path().join("a.safetensors");
    of_modules(&path, &model(base), "diffusion_model", &MODULES);
    // Stored in f32, so that merging rounds nothing; the weights of the second model are merged.
    let mut weights = transformer_weights(base);
    let update = read(&path);
    let [plain, merged] = [false, true].map(|merge| {
        for (original, name) in MODULES {
            let key = format!("{name}.weight");
            let (kind, shape, bytes) = &weights[&key];
            let dtype = if *kind == Dtype::BF16 { DType::BF16 } else { DType::F32 };
            let mut sum = matrix(bytes, dtype, [shape[0], shape[1]]).mapv(f64::from);
            if merge {
                sum += &delta(&update, &format!("diffusion_model.{original}"));
            }
            weights.insert(key, stored_tensor(&sum.mapv(|v| v as f32), DType::F32));
        }
        with_transformer(&dir.path().join(if merge { "merged" } else { "plain" }), base, &weights)
    });

    let upsampler = Some("tests/fixtures/models/upsampler_rational".to_string());
    let overrides = Overrides { upsampler, ..Overrides::default() };
    let runner = |folder: &Path| {
        let source = Arc::new(ModelSource::open(folder.to_str().expect("UTF-8"), &overrides).expect("a model"));
        let executor = Executor::new(Engine::new(client.clone(), quick()), source.clone());
        Runner::new(OpenModel::open(&source).expect("complete"), executor, build(DType::F32))
    };
    let (mut plain, mut merged) = (runner(&plain), runner(&merged));
    // The programs of `cli memory` and `cli resume`, except the decoder.
    let set = ["pipeline=two_stage", "request.height=64", "sampler.steps=2"];
    let config = Config::load("tests/fixtures/tiny.yml", set).expect("a configuration");
    let request = plain.model.request(&config, &config.jobs().expect("a job")[0]).expect("a request");
    // Latents of both stages.
    let video = |runner: &mut Runner| {
        let made = support::generate(runner, &request, &support::dumping(None));
        ["stage_1.latents.video", "latents.video"].map(|name| dumped(&made, name).clone())
    };
    let keep = |runner: &mut Runner, path: &Path, stages: &[u8], strength: f64| {
        let entry = config::Lora {
            path: path.display().to_string(),
            strength,
            stages: stages.to_vec(),
            apply: config::LoraApply::Merge,
        };
        let loras = [entry].into_iter().filter(|_| !stages.is_empty()).collect();
        let config = config::Model { loras, lora_merge: MergeOrder::Exact, ..config::Model::default() };
        runner.executor.keep_loras(Loras::open(&config).expect("updates"))
    };
    let made = |runner: &mut Runner, stages: &[u8], strength: f64| {
        keep(runner, &path, stages, strength).expect("fits");
        let (first, second) = (video(runner), video(runner));
        assert!(first == second, "{stages:?}: the second video has other bits");
        first
    };
    let none = made(&mut plain, &[], 1.0);
    // Merged weights are subtracted again for stages without the LoRA.
    for (stages, without) in [(&[1u8, 2][..], &[][..]), (&[1], &[2]), (&[2], &[1])] {
        let got = made(&mut plain, stages, 1.0);
        let want = made(&mut merged, without, -1.0);
        for (i, stage) in ["stage 1", "stage 2"].into_iter().enumerate() {
            let (off, moved) = (relative_l2(&got[i], &want[i]), relative_l2(&got[i], &none[i]));
            eprintln!("{stages:?}, {stage}: {off:.1e} from premerged weights, {moved:.1e} from none");
            assert!(off <= 1e-5, "{stages:?}, {stage}: {off:e} from the same weights merged beforehand");
            let updated = i == 1 || stages.contains(&1);
            assert!(if updated { moved > 1e-3 } else { moved == 0.0 }, "{stages:?}, {stage}: {moved:e} from none");
        }
    }

    // LoRAs that do not fit leave those of both stages as they are.
    let mut tensors = read(&path);
    for end in ["A", "B"] {
        let tensor = tensors[&format!("diffusion_model.transformer_blocks.0.attn1.to_q.lora_{end}.weight")].clone();
        tensors.insert(format!("diffusion_model.transformer_blocks.9.attn1.to_q.lora_{end}.weight"), tensor);
    }
    let unfit = dir.path().join("unfit.safetensors");
    write(&unfit, &tensors, None);
    let before = video(&mut plain);
    for stages in [&[1u8][..], &[2]] {
        let error = keep(&mut plain, &unfit, stages, 1.0).expect_err("block 9 is missing").to_string();
        assert!(error.contains("transformer_blocks.9.attn1.to_q"), "{error}");
        assert!(video(&mut plain) == before, "{stages:?}: the failed change has an effect");
    }
}

/// Returns all tensors of a model's transformer.
pub(crate) fn transformer_weights(folder: &Path) -> BTreeMap<String, TensorData> {
    let files = std::fs::read_dir(folder.join("transformer")).expect("a folder").map(|e| e.expect("a file").path());
    files.filter(|f| f.extension().is_some_and(|e| e == "safetensors")).flat_map(|f| read(&f)).collect()
}

/// Returns the product of a module's LoRA matrices.
fn delta(update: &BTreeMap<String, TensorData>, module: &str) -> Array2<f64> {
    let [a, b] = ["A", "B"].map(|m| {
        let (_, shape, bytes) = &update[&format!("{module}.lora_{m}.weight")];
        matrix(bytes, DType::F32, [shape[0], shape[1]]).mapv(f64::from)
    });
    b.dot(&a)
}

/// Copies a model with symlinks and another transformer.
pub(crate) fn with_transformer(folder: &Path, model: &Path, weights: &BTreeMap<String, TensorData>) -> PathBuf {
    std::fs::create_dir_all(folder.join("transformer")).expect("a folder");
    let model = std::fs::canonicalize(model).expect("a folder");
    for entry in std::fs::read_dir(&model).expect("a folder").map(|e| e.expect("an entry")) {
        if entry.file_name() != "transformer" {
            std::os::unix::fs::symlink(entry.path(), folder.join(entry.file_name())).expect("a link");
        }
    }
    let config = "transformer/config.json";
    std::fs::copy(model.join(config), folder.join(config)).expect("copied");
    write(&folder.join("transformer/diffusion_pytorch_model.safetensors"), weights, None);
    folder.to_path_buf()
}

/// With `ltx2 generate`, a LoRA of strength 0 gives identical bits, and one of the default strength does not.
#[needs(cpu)]
fn generate_applies_loras() {
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
