//! 8-bit transformers on the CPU plugin: their distance from wider ones, random and stored weights, and sharding.

use std::path::Path;
use std::sync::Arc;

use crate::support::{Case, cases, cpu, full, needs, quick, relative_l2};
use ltx2::hlo::{DType, DeviceMesh, F8};
use ltx2::models::transformer::{self, ForwardShape, TransformerConfig};
use ltx2::nn::{Axis, Build, ContextParallelPolicy, Layout, Lowering, Quantization, Rule};
use ltx2::pipeline::output::tensors;
use ltx2::pipeline::plan::origin::Weights;
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pipeline::programs::component::run_component;
use ltx2::pipeline::programs::configs::ModelConfigs;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pjrt::Client;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ltx2::weights::{ModelSource, Overrides};

/// Maximum distance of a transformer's results from f32.
const NEAR: f64 = 0.06;
/// The same for 8-bit integers, for every oracle.
const NEAR_OF_INTEGERS: f64 = 0.03;
/// Maximum distance from bf16. The largest of all oracles is 0.0217, where the distance from f32 is 0.0139, and that of
/// bf16 from f32 is 0.0116.
const NEAR_BF16: f64 = 0.025;
const WEIGHTS: Quantization = Quantization::Int8 { activations: false };
pub(crate) const INTEGERS: Quantization = Quantization::Int8 { activations: true };
/// Minimum error of weights and activations rounded to three mantissa bits; bf16 is far below.
const FAR: f64 = 0.01;

pub(crate) fn build(dtype: DType, quantization: Quantization) -> Build {
    let lowering = Lowering { unroll_layers: true, ..Lowering::cpu() };
    Build { lowering, quantization, ..Build::new(dtype) }
}

fn source(model: &Path) -> Arc<ModelSource> {
    Arc::new(ModelSource::open(model.to_str().expect("a path"), &Overrides::default()).expect("a model"))
}

/// Returns the transformer's results `[video, audio]` on a case's inputs.
pub(crate) fn run(
    client: &Client,
    case: &Case,
    model: &Arc<ModelSource>,
    weights: Weights,
    build: &Build,
) -> [Tensor; 2] {
    let mut executor = Executor::new(Engine::new(client.clone(), quick()), weights);
    let (configs, inputs) = (ModelConfigs::from_source(model), case.inputs.clone());
    let results = run_component(ProgramKind::Transformer, &configs, &mut executor, inputs, &case.scalars, build);
    let mut results = results.unwrap_or_else(|e| panic!("{}: {e}", case.name)).into_iter();
    ["video", "audio"].map(|name| {
        let (got, tensor) = results.next().expect("two results");
        assert_eq!(got, name);
        tensor
    })
}

fn distances(got: &[Tensor; 2], want: &[Tensor; 2]) -> [f64; 2] {
    [0, 1].map(|i| relative_l2(&got[i], &want[i]))
}

pub(crate) fn case(name: &str) -> Case {
    cases("transformer").into_iter().find(|c| c.name == format!("transformer/{name}")).expect("a case")
}

#[needs(cpu)]
fn fp8_transformer_is_close_to_reference() {
    let client = cpu(1);
    let all = [("tiny_v2_5", &[DType::BF16][..]), ("tiny_a", &[DType::BF16, DType::F32]), ("tiny_b", &[DType::BF16])];
    for (case, dtypes) in all.into_iter().take(if full() { 3 } else { 1 }) {
        let case = self::case(case);
        let model = source(&case.model);
        let far = |dtype, quantization| {
            let got = run(&client, &case, &model, model.clone().into(), &build(dtype, quantization));
            [("video", &got[0]), ("audio", &got[1])].map(|(name, t)| case.distance(name, t))
        };
        let bf16 = far(DType::BF16, Quantization::None);
        for &dtype in dtypes {
            let fp8 = far(dtype, Quantization::Fp8);
            eprintln!("{} {dtype}: fp8 {fp8:.4?}, bf16 {bf16:.4?}", case.name);
            for (fp8, bf16) in fp8.into_iter().zip(bf16) {
                assert!(fp8 < NEAR && fp8 > FAR.max(bf16), "{} {dtype}: fp8 {fp8}, bf16 {bf16}", case.name);
            }
        }
    }
}

#[needs(cpu, full)]
fn fp8_random_weights_are_the_rounded_f32_weights() {
    let client = cpu(1);
    let case = case("tiny_a");
    let model = source(&case.model);
    let of = |quantization| run(&client, &case, &model, Weights::Random(7), &build(DType::F32, quantization));
    let distances = distances(&of(Quantization::Fp8), &of(Quantization::None));
    eprintln!("{distances:.4?}");
    assert!(distances.iter().all(|d| *d > FAR && *d < NEAR), "{distances:?}");
}

/// Writes a copy of a model whose blocks from the second one on are stored like Lightricks' 8-bit models: with a scale
/// tensor for each weight and an unused one for activations.
fn stored_narrow(model: &Path, folder: &Path) {
    let wide = source(model).checkpoint(ltx2::weights::Component::Transformer).expect("weights");
    let is_map = |name: &str| [".to_q.", ".to_k.", ".to_v.", ".to_out.", ".net."].iter().any(|m| name.contains(m));
    let mut all = Vec::new();
    for name in wide.names() {
        let tensor = wide.get(name).and_then(|v| v.to_tensor()).expect("a tensor");
        let first = !name.starts_with("transformer_blocks.") || name.starts_with("transformer_blocks.0.");
        let Some(map) = name.strip_suffix(".weight").filter(|n| !first && is_map(&format!("{n}."))) else {
            all.push((name.to_string(), tensor));
            continue;
        };
        let values = tensor.to_f32();
        let scale = values.iter().fold(0f32, |m, v| m.max(v.abs())) / F8::MAX;
        let narrow = Tensor::F32(values / scale).cast(DType::F8E4M3FN).expect("floats");
        let scalar = |v: f32| Tensor::from(ndarray::arr0(v));
        all.push((name.to_string(), narrow));
        all.push((format!("{map}.weight_scale"), scalar(scale)));
        all.push((format!("{map}.input_scale"), scalar(1.0)));
    }
    let transformer = folder.join("transformer");
    std::fs::create_dir_all(&transformer).expect("a folder");
    std::fs::copy(model.join("model_index.json"), folder.join("model_index.json")).expect("copied");
    std::fs::copy(model.join("transformer/config.json"), transformer.join("config.json")).expect("copied");
    tensors::write(&transformer.join("diffusion_pytorch_model.safetensors"), &all).expect("written");
}

#[needs(cpu)]
fn stored_fp8_weights_run_with_wide_and_fp8_activations() {
    let client = cpu(1);
    let case = case("tiny_a");
    let folder = tempfile::tempdir().expect("a folder");
    stored_narrow(&case.model, folder.path());
    let model = source(folder.path());
    let of = |quantization| run(&client, &case, &model, model.clone().into(), &build(DType::F32, quantization));
    let (wide, narrow) = (of(Quantization::None), of(Quantization::Fp8));
    for (what, got) in [("weights", &wide), ("weights and activations", &narrow)] {
        let far = [("video", &got[0]), ("audio", &got[1])].map(|(name, t)| case.distance(name, t));
        eprintln!("8-bit {what}: {far:.4?}");
        assert!(far.iter().all(|d| *d > FAR / 2.0 && *d < NEAR), "{what}: {far:?}");
    }
    assert!(distances(&narrow, &wide).iter().all(|d| *d > FAR / 2.0), "activations are 8-bit floats too");
}

/// Maximum relative L2 distance between two layouts with 8-bit activations: another order of summation may round an
/// activation to the adjacent value, and the following blocks amplify the difference.
const LAYOUTS_OF_8_BITS: f64 = 1e-2;

#[needs(cpu, full)]
fn quantized_layouts_differ_only_by_activation_rounding() {
    layouts_agree(&build(DType::F32, Quantization::Fp8), LAYOUTS_OF_8_BITS);
    layouts_agree(&looped(DType::F32, INTEGERS), LAYOUTS_OF_8_BITS);
    // Weights are scaled before they are sharded: without 8-bit activations nothing else is rounded.
    layouts_agree(&looped(DType::F32, WEIGHTS), 1e-5);
}

/// Compares `tensor` and `sequence` on two devices with one device.
fn layouts_agree(single: &Build, limit: f64) {
    let (one, two) = (cpu(1), cpu(2));
    let case = case("tiny_a");
    let model = source(&case.model);
    let whole = run(&one, &case, &model, model.clone().into(), single);
    let far = |got: &[Tensor; 2]| [("video", &got[0]), ("audio", &got[1])].map(|(name, t)| case.distance(name, t));
    let splits: [(&str, &[Axis]); 2] =
        [("tensor", &[Axis::Heads, Axis::Mlp]), ("context", &[Axis::VideoSequence, Axis::AudioSequence])];
    for (mesh_axis, axes) in splits {
        let rule = |axis: &Axis| Rule { axis: *axis, mesh_axes: vec![mesh_axis.into()], place: "test".into() };
        let (mesh, rules) = (DeviceMesh::new(&[(mesh_axis, 2)]), axes.iter().map(rule).collect());
        let layout = Layout::new(mesh, rules, vec![], vec![], ContextParallelPolicy::default()).expect("valid");
        let parts = run(&two, &case, &model, model.clone().into(), &Build { layout, ..single.clone() });
        let apart = distances(&parts, &whole);
        eprintln!(
            "{:?} {mesh_axis}: {apart:?} apart, {:.4?} and {:.4?} from f32",
            single.quantization,
            far(&parts),
            far(&whole)
        );
        assert!(apart.iter().all(|d| *d < limit), "{mesh_axis}: {apart:?}");
        // Neither is closer to the unrounded result.
        for (parts, whole) in far(&parts).into_iter().zip(far(&whole)) {
            assert!((parts / whole - 1.0).abs() < 0.2, "{mesh_axis}: {parts} and {whole} from f32");
        }
    }
}

#[needs(nothing)]
fn only_linear_layers_of_blocks_are_quantized() {
    let c = TransformerConfig { gated_attn: true, audio_gated_attn: true, ..TransformerConfig::default() };
    let narrow: Vec<usize> = (0..c.num_layers).filter(|l| c.quantizes(*l)).collect();
    assert_eq!(narrow, (1..43).collect::<Vec<_>>());
    let shape = ForwardShape::default();
    let network = transformer::program(&c, &shape, &build(DType::BF16, Quantization::Fp8)).expect("builds");
    let count = |dtype| network.params.iter().filter(|p| p.ty.dtype == dtype).count();
    // Linear layers of a block, for each stream: two of self-attention (queries, keys and values are one), three of
    // text attention, three of cross-modal attention, two of the feed-forward layer.
    assert_eq!((count(DType::F8E4M3FN), count(DType::F32)), (42 * 20, 42 * 20));
    let blocks = network.params.iter().filter(|p| p.name.contains("transformer_blocks.7."));
    let plain = blocks.filter(|p| p.ty.rank() > 1 && p.ty.dtype == DType::BF16);
    let plain: Vec<&str> = plain.map(|p| p.name.rsplit("transformer_blocks.7.").next().unwrap_or_default()).collect();
    let maps = plain.iter().filter(|n| n.ends_with("weight") && !n.contains("norm"));
    assert!(maps.clone().all(|n| n.contains("to_gate_logits")), "{:?}", maps.collect::<Vec<_>>());
}

/// Loops over equal layers, as on TPU.
pub(crate) fn looped(dtype: DType, quantization: Quantization) -> Build {
    Build { lowering: Lowering::cpu(), quantization, ..Build::new(dtype) }
}

/// The first block and the last five have separate loops and stacks.
#[needs(nothing)]
fn equal_layers_share_a_loop_and_stacked_weights() {
    let c = TransformerConfig::default();
    let network = transformer::program(&c, &ForwardShape::default(), &looped(DType::BF16, INTEGERS)).expect("builds");
    let q = |name: &str| network.params.iter().find(|p| p.name.ends_with(&format!("{name}.attn2.to_q.weight")));
    let of = |name: &str| q(name).map(|p| (p.ty.dtype, p.ty.dims[0]));
    let blocks = |numbers: &str| of(&format!("transformer_blocks.{numbers}"));
    assert_eq!(blocks("0-0"), Some((DType::BF16, 1)));
    assert_eq!(blocks("1-42"), Some((DType::I8, 42)));
    assert_eq!(blocks("43-47"), Some((DType::BF16, 5)));
    let read: Vec<String> = q("1-42").expect("a stack").source.names();
    assert_eq!(read[0], "transformer_blocks.1.attn2.to_q.weight");
    assert_eq!((read.len(), read[41].as_str()), (42, "transformer_blocks.42.attn2.to_q.weight"));
    let narrow = network.params.iter().filter(|p| p.ty.dtype == DType::I8).count();
    let scales = network.params.iter().filter(|p| p.name.ends_with("weight_scale")).count();
    assert_eq!((narrow, scales), (20, 20));
}

/// The int8 result must be close to the f32 reference and to the bf16 result. Runs every case in the full test, and two
/// in `make test`.
#[needs(cpu)]
fn int8_transformer_is_close_to_reference() {
    let client = cpu(1);
    let some = ["transformer/tiny_b", "transformer/tiny_v2_5"];
    for case in cases("transformer").into_iter().filter(|c| full() || some.contains(&&*c.name)) {
        let model = source(&case.model);
        let of = |dtype, quantization| run(&client, &case, &model, model.clone().into(), &looped(dtype, quantization));
        let from_f32 =
            |got: &[Tensor; 2]| [("video", &got[0]), ("audio", &got[1])].map(|(name, t)| case.distance(name, t));
        let bf16 = of(DType::BF16, Quantization::None);
        let kinds = [(DType::F32, INTEGERS), (DType::BF16, INTEGERS), (DType::F32, WEIGHTS), (DType::BF16, WEIGHTS)];
        let (from, to) = if full() {
            (0, 4)
        } else if case.name.ends_with("tiny_b") {
            (1, 2)
        } else {
            (0, 1)
        };
        for &(dtype, quantization) in &kinds[from..to] {
            let int8 = of(dtype, quantization);
            let (far, apart) = (from_f32(&int8), distances(&int8, &bf16));
            let name = format!("{} {dtype} {quantization:?}", case.name);
            eprintln!("{name}: {far:.4?} from f32, {apart:.4?} from bf16, which is {:.4?} from f32", from_f32(&bf16));
            for (far, apart) in far.into_iter().zip(apart) {
                assert!(far <= NEAR_OF_INTEGERS, "{name}: {far}");
                assert!(apart <= NEAR_BF16, "{name}: {apart} from bf16");
                assert!(far >= 1e-4, "{name}: {far} is not rounded");
            }
        }
    }
}

/// Compares a loop over stacked weights with unrolled layers: with and without integer activations, and for a model
/// with stored 8-bit floats.
#[needs(cpu, full)]
fn looped_int8_matches_unrolled() {
    let client = cpu(1);
    let case = case("tiny_a");
    let model = source(&case.model);
    let of = |build: &Build| run(&client, &case, &model, model.clone().into(), build);
    let loops = of(&looped(DType::F32, INTEGERS));
    let layers = of(&build(DType::F32, INTEGERS));
    let distances = distances(&loops, &layers);
    assert!(distances.iter().all(|d| *d < 5e-3), "{distances:?}");
    let folder = tempfile::tempdir().expect("a folder");
    stored_narrow(&case.model, folder.path());
    let narrow = source(folder.path());
    let got = run(&client, &case, &narrow, narrow.clone().into(), &looped(DType::F32, INTEGERS));
    let far = [("video", &got[0]), ("audio", &got[1])].map(|(name, t)| case.distance(name, t));
    assert!(far.iter().all(|d| *d > FAR / 2.0 && *d < NEAR), "of 8-bit floats: {far:?}");
}

#[needs(cpu, full)]
fn int8_random_weights_are_the_rounded_f32_weights() {
    let client = cpu(1);
    let case = case("tiny_a");
    let model = source(&case.model);
    let of = |quantization| run(&client, &case, &model, Weights::Random(7), &looped(DType::F32, quantization));
    let distances = distances(&of(WEIGHTS), &of(Quantization::None));
    eprintln!("{distances:.4?}");
    assert!(distances.iter().all(|d| *d > 1e-4 && *d < NEAR_OF_INTEGERS), "{distances:?}");
}
