//! LoRAs that programs add at run time (`apply: add`) give the results of merged ones, and are replaced without
//! loading weights or compiling programs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::lora::{file, model, scattered, stored_tensor, transformer_weights, with_transformer};
use crate::support::single_file::TensorData;
use crate::support::{self, Case, cpu, dumped, full, lowering_of, needs, quick, relative_l2};
use crate::{formats, layouts, quantized};
use ltx2::config::{self, Config, LoraApply};
use ltx2::hlo::DType;
use ltx2::models::transformer::{self, ForwardShape, TransformerConfig};
use ltx2::nn::{Build, Lowering, Quantization, Streaming};
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::plan::loras::Loras;
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pipeline::programs::component::run_component;
use ltx2::pipeline::programs::configs::ModelConfigs;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pipeline::runner::Runner;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ltx2::weights::{Component, MergeOrder, ModelSource, Overrides};
use safetensors::Dtype;

const ADD: LoraApply = LoraApply::Add;
const MERGE: LoraApply = LoraApply::Merge;

/// A LoRA of a test: suffixes of its modules, its rank and its alpha.
struct Written {
    modules: &'static [&'static str],
    rank: usize,
    alpha: Option<f32>,
}

/// Modules of both streams, of all kinds of attention, fused and single projections, of both blocks.
const ONE: Written = Written {
    modules: &[".0.attn1.to_q", ".0.attn1.to_v", ".1.attn2.to_k", ".1.audio_attn1.to_out.0", ".0.ff.net.2"],
    rank: 3,
    alpha: Some(6.0),
};
/// Shares some modules with `ONE`.
const TWO: Written = Written {
    modules: &[
        ".0.attn1.to_q",
        ".0.audio_attn1.to_k",
        ".1.audio_to_video_attn.to_v",
        ".1.video_to_audio_attn.to_q",
        ".0.audio_ff.net.0.proj",
        ".1.ff.net.0.proj",
        ".0.attn2.to_out.0",
        ".1.attn1.to_gate_logits",
    ],
    rank: 2,
    alpha: None,
};

/// Writes a LoRA for the modules that the model has. The rank of the last module is larger by one.
fn written(path: &Path, source: &ModelSource, lora: &Written, seed: u64) -> PathBuf {
    let checkpoint = source.checkpoint(Component::Transformer).expect("a transformer");
    let mut all = BTreeMap::new();
    let names = lora.modules.iter().map(|suffix| format!("transformer_blocks{suffix}"));
    let known: Vec<_> =
        names.filter_map(|name| Some((checkpoint.shape(&format!("{name}.weight"))?.to_vec(), name))).collect();
    assert!(known.len() + 1 >= lora.modules.len(), "only gates may be missing: {known:?}");
    for (i, (shape, name)) in known.iter().enumerate() {
        let rank = lora.rank + usize::from(i + 1 == known.len());
        let a = scattered(rank, shape[1], seed + 2 * i as u64);
        let b = scattered(shape[0], rank, seed + 1 + 2 * i as u64).mapv(|v| v * 0.1);
        all.insert(format!("transformer.{name}.lora_A.weight"), stored_tensor(&a, DType::F32));
        all.insert(format!("transformer.{name}.lora_B.weight"), stored_tensor(&b, DType::F32));
        if let Some(alpha) = lora.alpha {
            let alpha = ndarray::Array2::from_elem((1, 1), alpha);
            let (kind, _, bytes) = stored_tensor(&alpha, DType::F32);
            all.insert(format!("transformer.{name}.alpha"), (kind, Vec::new(), bytes));
        }
    }
    file(path, &all);
    path.to_path_buf()
}

/// Returns LoRAs for both passes with `model.lora_merge: exact`.
fn loras(entries: &[(&Path, f64, LoraApply)]) -> Loras {
    let entry = |(path, strength, apply): &(&Path, f64, LoraApply)| config::Lora {
        path: path.display().to_string(),
        strength: *strength,
        stages: vec![1, 2],
        apply: *apply,
    };
    let loras = entries.iter().map(entry).collect();
    Loras::open(&config::Model { loras, lora_merge: MergeOrder::Exact, ..config::Model::default() }).expect("LoRAs")
}

fn distance(a: &[(String, Tensor)], b: &[(String, Tensor)]) -> f64 {
    a.iter().zip(b).map(|((_, a), (_, b))| relative_l2(a, b)).fold(0.0, f64::max)
}

/// A transformer whose LoRAs change between runs.
struct Bench {
    case: Case,
    source: Arc<ModelSource>,
    executor: Executor,
    build: Build,
    folder: tempfile::TempDir,
}

impl Bench {
    fn new(case: &str, build: Build) -> Self {
        let case = quantized::case(case);
        let folder = tempfile::tempdir().expect("a folder");
        // Stored in f32, so that merging rounds nothing.
        let mut weights = transformer_weights(&case.model);
        for (kind, shape, bytes) in weights.values_mut().filter(|(kind, ..)| *kind == Dtype::BF16) {
            let wide = Tensor::from_bytes(DType::BF16, shape, bytes).and_then(|t| t.cast(DType::F32)).expect("f32");
            (*kind, *bytes) = (Dtype::F32, wide.bytes().into_owned());
        }
        let source = model(&with_transformer(&folder.path().join("model"), &case.model, &weights));
        Bench { folder, ..Bench::of_source(case, source, build) }
    }

    fn of_source(case: Case, source: Arc<ModelSource>, build: Build) -> Self {
        let executor = Executor::new(Engine::new(cpu(8), quick()), source.clone());
        Bench { case, source, executor, build, folder: tempfile::tempdir().expect("a folder") }
    }

    fn write(&self, name: &str, lora: &Written, seed: u64) -> PathBuf {
        written(&self.folder.path().join(name), &self.source, lora, seed)
    }

    fn run(&mut self, entries: &[(&Path, f64, LoraApply)]) -> Vec<(String, Tensor)> {
        self.executor.keep_loras(loras(entries)).expect("fits");
        let configs = ModelConfigs::from_source(&self.source);
        let (inputs, scalars) = (self.case.inputs.clone(), &self.case.scalars);
        run_component(ProgramKind::Transformer, &configs, &mut self.executor, inputs, scalars, &self.build)
            .expect("runs")
    }
}

fn f32_build() -> Build {
    Build { lowering: lowering_of("cpu"), ..Build::new(DType::F32) }
}

/// Modules of the first block.
const FIRST: Written = Written {
    modules: &[".0.attn1.to_q", ".0.attn1.to_v", ".0.attn2.to_k", ".0.audio_attn1.to_out.0", ".0.ff.net.2"],
    rank: 3,
    alpha: Some(6.0),
};

/// Runs merged LoRAs in the program that adds LoRAs, with matrices of zeros, to compile only one program.
fn added_equals_merged(bench: &mut Bench) -> Vec<(String, Tensor)> {
    let (one, two) = (bench.write("one", &ONE, 40), bench.write("two", &TWO, 80));
    let (one, two) = (one.as_path(), two.as_path());
    let plain = bench.run(&[(one, 0.0, ADD)]);
    for (what, entries) in [
        ("one LoRA", &[(one, 0.5)][..]),
        ("negative strength", &[(two, -1.5)]),
        ("two LoRAs", &[(one, 0.7), (two, 0.4)]),
        ("the same file twice", &[(one, 0.7), (two, 0.0), (one, -0.2)]),
    ] {
        let with = |apply| entries.iter().map(|(path, strength)| (*path, *strength, apply)).collect::<Vec<_>>();
        let added = bench.run(&with(ADD));
        let merged = bench.run(&[&with(MERGE)[..], &[(one, 0.0, ADD)]].concat());
        let (off, moved) = (distance(&added, &merged), distance(&merged, &plain));
        eprintln!("{} {what}: {off:.1e}, moved {moved:.1e}", bench.case.name);
        assert!(off <= 1e-6 && moved > 1e-3, "{what}: {off:e} from merged LoRAs, moved {moved:e}");
    }
    // One merged and one added LoRA.
    let both = bench.run(&[(one, 0.7, ADD), (two, 0.4, ADD)]);
    for mixed in [[(one, 0.7, MERGE), (two, 0.4, ADD)], [(one, 0.7, ADD), (two, 0.4, MERGE)]] {
        let off = distance(&bench.run(&mixed), &both);
        assert!(off <= 1e-6, "a merged and an added LoRA: {off:e}");
    }
    assert!(distance(&bench.run(&[(two, 0.0, ADD)]), &plain) == 0.0, "strength 0 restores the model");
    both
}

#[needs(cpu)]
fn added_loras_equal_exact_merges_and_are_replaced_alone() {
    // Two rows per call: layers of the video add the LoRAs to their weights, layers of the sound to their results.
    let mut bench = Bench::new("tiny_a_batch_masked", f32_build());
    added_equals_merged(&mut bench);

    // Another file and another strength replace the LoRA matrices, and nothing else.
    let (one, other) = (bench.write("one", &ONE, 40), bench.write("other", &TWO, 7));
    bench.run(&[(&one, 1.0, ADD)]);
    let params = bench.executor.parameter_names();
    let matrices = params.iter().filter(|name| name.contains("lora_")).count();
    assert!(matrices > 20 && params.len() > matrices, "{params:?}");
    let programs = bench.executor.program_count();
    for entry in [(one.as_path(), 0.5), (other.as_path(), 1.0)] {
        bench.executor.keep_loras(loras(&[(entry.0, entry.1, ADD)])).expect("fits");
        let left = bench.executor.parameter_names();
        let gone: Vec<_> = params.difference(&left).collect();
        assert!(!gone.is_empty() && gone.iter().all(|name| name.contains("lora_")), "{gone:?}");
        assert!(gone.len() < matrices, "matrices of zeros stay: {gone:?}");
        bench.run(&[(entry.0, entry.1, ADD)]);
        assert_eq!((bench.executor.parameter_names(), bench.executor.program_count()), (params.clone(), programs));
    }
}

/// The second program has sharded weights and matrices. With two rows per call, sharded weights include the LoRAs.
#[needs(cpu)]
fn sharded_added_loras_equal_a_single_device() {
    let all = [
        ("tensor", "cfg=2,context=2,tensor=2"),
        ("tensor", "tensor=2"),
        ("fsdp-ulysses", "fsdp=2,context=2"),
        ("sequence", "context=2"),
    ];
    for case in ["tiny_2_3", "tiny_a_batch_masked"].into_iter().take(if full() { 2 } else { 1 }) {
        let mut whole = Bench::new(case, f32_build());
        let want = added_equals_merged(&mut whole);
        for (layout, mesh) in all.into_iter().take(if full() { 4 } else { 1 }) {
            let mut sharded = Bench::new(case, layouts::build(layout, mesh, 8));
            let (one, two) = (sharded.write("one", &ONE, 40), sharded.write("two", &TWO, 80));
            let off = distance(&sharded.run(&[(&one, 0.7, ADD), (&two, 0.4, ADD)]), &want);
            eprintln!("{case} {layout} {mesh}: {off:.1e}");
            assert!(off <= layouts::limit(layout), "{case} {layout} {mesh}: {off:e}");
        }
    }
}

/// Each stage has its own matrices, also in the program that computes the text keys and values. If only one stage has
/// LoRAs, the programs of the other have no matrices.
#[needs(cpu)]
fn each_stage_adds_its_own_loras() {
    if !full() {
        return;
    }
    let bench = Bench::new("tiny_a", f32_build());
    let (one, two) = (bench.write("one", &ONE, 40), bench.write("two", &TWO, 80));
    let folder = bench.folder.path().join("model");
    let upsampler = Some("tests/fixtures/models/upsampler_rational".to_string());
    let overrides = Overrides { upsampler, ..Overrides::default() };
    let source = Arc::new(ModelSource::open(folder.to_str().expect("UTF-8"), &overrides).expect("a model"));
    let executor = Executor::new(Engine::new(cpu(8), quick()), source.clone());
    let mut runner = Runner::new(OpenModel::open(&source).expect("complete"), executor, f32_build());
    let set = ["pipeline=two_stage", "request.height=64", "sampler.steps=2"];
    let config = Config::load("tests/fixtures/tiny.yml", set).expect("a configuration");
    let request = runner.model.request(&config, &config.jobs().expect("a job")[0]).expect("a request");
    let mut made = |entries: &[(&Path, f64, &[u8])], apply: LoraApply| {
        let entry = |(path, strength, stages): &(&Path, f64, &[u8])| config::Lora {
            path: path.display().to_string(),
            strength: *strength,
            stages: stages.to_vec(),
            apply,
        };
        let loras = entries.iter().map(entry).collect();
        let model = config::Model { loras, lora_merge: MergeOrder::Exact, ..config::Model::default() };
        runner.executor.keep_loras(Loras::open(&model).expect("LoRAs")).expect("fits");
        let mut video = || {
            let made = support::generate(&mut runner, &request, &support::dumping(None));
            ["stage_1.latents.video", "latents.video"].map(|name| dumped(&made, name).clone())
        };
        let (first, second) = (video(), video());
        assert!(first == second, "the second video has other bits");
        first
    };
    let (one, two) = (one.as_path(), two.as_path());
    let none = made(&[], MERGE);
    for entries in [
        &[(one, 0.5, &[1u8][..])][..],
        &[(two, 0.5, &[2])],
        &[(one, 0.5, &[1]), (two, 0.5, &[2])],
        &[(one, 0.5, &[1]), (one, -0.5, &[2]), (two, 0.3, &[1, 2])],
    ] {
        let (added, merged) = (made(entries, ADD), made(entries, MERGE));
        for i in 0..2 {
            let (off, moved) = (relative_l2(&added[i], &merged[i]), relative_l2(&merged[i], &none[i]));
            eprintln!("{entries:?}, stage {}: {off:.1e}, moved {moved:.1e}", i + 1);
            assert!(off <= 1e-5, "{entries:?}, stage {}: {off:e} from merged LoRAs", i + 1);
        }
    }
    assert!(made(&[], ADD) == none, "the weights are unchanged");
}

/// 8-bit weights stay unchanged; merging LoRAs would quantize them again.
#[needs(cpu)]
fn quantized_weights_stay_unchanged() {
    if !full() {
        return;
    }
    let lowering = Lowering { unroll_layers: true, ..lowering_of("cpu") };
    let narrow = |quantization| Build { lowering, quantization, ..Build::new(DType::BF16) };
    let rotated = Quantization::Int8 { activations: true, rotated: false };
    for quantization in [Quantization::Fp8, rotated] {
        let (mut wide, mut small) =
            (Bench::new("tiny_2_3", narrow(Quantization::None)), Bench::new("tiny_2_3", narrow(quantization)));
        let one = small.write("one", &ONE, 40);
        let [want, got] = [&mut wide, &mut small].map(|bench| {
            let plain = bench.run(&[(&one, 0.0, ADD)]);
            (bench.run(&[(&one, 0.5, ADD)]), plain)
        });
        let names = small.executor.parameter_names();
        let is_narrow = |name: &&String| {
            let ty = small.executor.parameter(name).expect("loaded").ty().dtype;
            matches!(ty, DType::F8E4M3FN | DType::I8)
        };
        assert!(names.iter().filter(is_narrow).count() > 10, "quantized weights: {names:?}");
        let (off, base, moved) = (distance(&got.0, &want.0), distance(&got.1, &want.1), distance(&got.0, &got.1));
        eprintln!("{quantization:?}: {off:.3} from bf16, without LoRAs {base:.3}, moved {moved:.3}");
        assert!(off < 1.5 * base + 0.01 && moved > 0.02, "{off} from bf16, without LoRAs {base}, moved {moved}");
    }
}

/// Adds LoRAs to stored int8-convrot weights, which stay unchanged, and merges them into the values of these weights. The
/// limit is that of `quantized::int8_convrot_matches_dequantized_weights_and_has_smaller_error_than_int8`, without LoRAs.
#[needs(cpu, full)]
fn added_loras_on_int8_convrot_weights_equal_merges_into_their_values() {
    let (config, _) = quantized::wide_transformer();
    let folder = tempfile::tempdir().expect("a folder");
    let c = TransformerConfig::from_json(&config).expect("valid");
    let network = transformer::program(&c, &ForwardShape::default(), &Build::new(DType::F32)).expect("builds");
    let part = Component::Transformer;
    let [_, narrow, values] = quantized::rotated_models(part, &config, &network, folder.path(), |_| true);
    let bench = |source, quantization| {
        Bench::of_source(quantized::wide_transformer().1, source, quantized::looped(DType::F32, quantization))
    };
    let mut narrow = bench(narrow, quantized::ROTATED_WEIGHTS);
    let mut values = bench(values, Quantization::None);
    let one = narrow.write("one", &FIRST, 40);
    let plain = narrow.run(&[(&one, 0.0, ADD)]);
    let added = narrow.run(&[(&one, 0.5, ADD)]);
    let merged = values.run(&[(&one, 0.5, MERGE), (&one, 0.0, ADD)]);
    let is_code = |name: &&String| narrow.executor.parameter(name).expect("loaded").ty().dtype == DType::I8;
    assert!(narrow.executor.parameter_names().iter().filter(is_code).count() > 10);
    let (off, moved) = (distance(&added, &merged), distance(&added, &plain));
    eprintln!("int8-convrot: {off:.1e}, moved {moved:.1e}");
    assert!(off <= 1e-5 && moved > 1e-3, "{off:e} from merged LoRAs, moved {moved:e}");
}

/// The program is that of `added_loras_equal_exact_merges_and_are_replaced_alone`.
#[needs(cpu)]
fn added_loras_on_gguf_weights_equal_merges_into_their_values() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = formats::q8_0_transformer(folder.path());
    let [narrow_bytes, bytes] = files.each_ref().map(|file| std::fs::metadata(file).expect("a file").len());
    assert!(2 * narrow_bytes < bytes, "{narrow_bytes} and {bytes} bytes");
    let [mut narrow, mut values] =
        files.map(|file| Bench::of_source(quantized::case("tiny_a_batch_masked"), model(&file), f32_build()));
    let (one, two) = (narrow.write("one", &ONE, 40), narrow.write("two", &TWO, 80));
    let plain = narrow.run(&[(&one, 0.0, ADD)]);
    let added = narrow.run(&[(&one, 0.7, ADD), (&two, 0.4, ADD)]);
    let merged = values.run(&[(&one, 0.7, MERGE), (&two, 0.4, MERGE), (&one, 0.0, ADD)]);
    let (off, moved) = (distance(&added, &merged), distance(&added, &plain));
    eprintln!("GGUF: {off:.1e}, moved {moved:.1e}");
    assert!(off <= 1e-6 && moved > 1e-3, "{off:e} from merged LoRAs, moved {moved:e}");
}

/// Weights and LoRA matrices of all blocks but one are in host memory.
#[needs(cpu, full)]
fn streamed_blocks_with_added_loras_have_the_same_bits() {
    let bench = |streaming| {
        let lowering = Lowering { unroll_layers: true, ..lowering_of("cpu") };
        Bench::new("tiny_a_batch_masked", Build { lowering, streaming, ..Build::new(DType::F32) })
    };
    let mut whole = bench(None);
    let mut streamed = bench(Some(Streaming { component: "transformer", resident: 1, min_bytes: 1 << 10 }));
    let (one, two) = (whole.write("one", &ONE, 40), whole.write("two", &TWO, 80));
    let (one, two) = (one.as_path(), two.as_path());
    let plain = whole.run(&[(one, 0.0, ADD)]);
    for entries in [&[(one, 0.5)][..], &[(one, 0.7), (two, 0.4)], &[(two, -1.5)]] {
        let with = |apply| entries.iter().map(|(path, strength)| (*path, *strength, apply)).collect::<Vec<_>>();
        let added = whole.run(&with(ADD));
        assert!(streamed.run(&with(ADD)) == added, "{entries:?}");
        let merged = streamed.run(&[&with(MERGE)[..], &[(one, 0.0, ADD)]].concat());
        let (off, moved) = (distance(&added, &merged), distance(&added, &plain));
        eprintln!("{entries:?}: {off:.1e}, moved {moved:.1e}");
        assert!(off <= 1e-6 && moved > 1e-3, "{off:e} from merged LoRAs, moved {moved:e}");
    }
    let [all, some] = [&whole, &streamed].map(|bench| bench.executor.parameter_bytes());
    assert!(some < all, "{some} of {all} bytes in device memory");
}

#[needs(cpu)]
fn unsupported_updates_are_rejected_with_tensor_and_remedy() {
    let mut bench = Bench::new("tiny_a", f32_build());
    let q = "transformer.transformer_blocks.0.attn1.to_q";
    let pair = |module: &str, [out, inner]: [usize; 2]| {
        let a = stored_tensor(&scattered(2, inner, 1), DType::F32);
        let b = stored_tensor(&scattered(out, 2, 2), DType::F32);
        BTreeMap::from([(format!("{module}.lora_A.weight"), a), (format!("{module}.lora_B.weight"), b)])
    };
    let source = bench.source.clone();
    let shape = |name: &str| -> [usize; 2] {
        let checkpoint = source.checkpoint(Component::Transformer).expect("a transformer");
        checkpoint.shape(name).expect("a weight").try_into().expect("a matrix")
    };
    let width = shape("transformer_blocks.0.attn1.to_q.weight");
    let embed = pair("transformer.proj_in", shape("proj_in.weight"));
    let difference =
        BTreeMap::from([(format!("{q}.diff"), stored_tensor(&scattered(width[0], width[1], 1), DType::F32))]);
    let mut dora = pair(q, width);
    let (kind, _, bytes) = stored_tensor(&scattered(1, width[0], 1), DType::F32);
    dora.insert(format!("{q}.lora_magnitude_vector"), (kind, vec![width[0]], bytes));
    let mut refused = |tensors: &BTreeMap<String, TensorData>| {
        let path = bench.folder.path().join("bad.safetensors");
        file(&path, tensors);
        let error = bench.executor.keep_loras(loras(&[(&path, 1.0, ADD)])).expect_err("refused").to_string();
        assert!(!error.contains('\n') && error.contains("bad.safetensors"), "{error}");
        assert!(error.contains("use apply: merge"), "{error}");
        bench.executor.keep_loras(loras(&[(&path, 1.0, MERGE)])).expect("merges");
        error
    };
    assert!(refused(&embed).contains("`proj_in.weight` of the transformer, which is not in a transformer block"));
    for other in [difference, dora] {
        let error = refused(&other);
        assert!(error.contains("`transformer_blocks.0.attn1.to_q.weight` by other means than a LoRA"), "{error}");
    }
}
