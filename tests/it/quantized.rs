//! 8-bit transformers on the CPU plugin: their distance from wider ones, random and stored weights, and sharding.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use ndarray::Array2;
use safetensors::Dtype;
use serde_json::json;

use crate::support::passes::scattered;
use crate::support::{Case, cases, cpu, full, lowering_of, needs, quick, relative_l2, single_file};
use ltx2::analysis::{Module, report};
use ltx2::av::Av;
use ltx2::config::{Config, parse_mesh};
use ltx2::hlo::{DType, DeviceMesh, F8, Type};
use ltx2::models::connectors::{self, ConnectorsConfig};
use ltx2::models::presets::Preset;
use ltx2::models::transformer::{self, ForwardShape, TransformerConfig};
use ltx2::models::{Network, families, gemma3};
use ltx2::nn::{
    Axis, Build, ContextParallelPolicy, Layout, Lowering, Param, Params, Quantization, ROTATED_INPUTS, Rule, Source,
    Weight, linear,
};
use ltx2::pipeline::output::tensors;
use ltx2::pipeline::plan::origin::Weights;
use ltx2::pipeline::plan::setup::describe_convrot;
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pipeline::programs::component::run_component;
use ltx2::pipeline::programs::configs::ModelConfigs;
use ltx2::pipeline::programs::executor::{Executor, Inputs};
use ltx2::pjrt::Client;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ltx2::weights::quantize::{QuantizedForm, quantize};
use ltx2::weights::{Component, ModelSource, Overrides};

/// Maximum distance of a transformer's results from f32.
const NEAR: f64 = 0.06;
/// The same for 8-bit integers, for every oracle.
const NEAR_OF_INTEGERS: f64 = 0.03;
/// Maximum distance from bf16. The largest of all oracles is 0.0217, where the distance from f32 is 0.0139, and that of
/// bf16 from f32 is 0.0116.
const NEAR_BF16: f64 = 0.025;
const WEIGHTS: Quantization = Quantization::Int8 { activations: false, rotated: false };
pub(crate) const INTEGERS: Quantization = Quantization::Int8 { activations: true, rotated: false };
/// Minimum error of weights and activations rounded to three mantissa bits; bf16 is far below.
const FAR: f64 = 0.01;

pub(crate) fn build(dtype: DType, quantization: Quantization) -> Build {
    let lowering = Lowering { unroll_layers: true, ..lowering_of("cpu") };
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
    let wide = source(model).checkpoint(Component::Transformer).expect("weights");
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
    Build { lowering: lowering_of("cpu"), quantization, ..Build::new(dtype) }
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

/// The int8 result must be close to the f32 reference and to the bf16 result. Runs every case in the full test, and one
/// with 8-bit activations in `make test`.
#[needs(cpu)]
fn int8_transformer_is_close_to_reference() {
    let client = cpu(1);
    for case in cases("transformer").into_iter().filter(|c| full() || c.name == "transformer/tiny_v2_5") {
        let model = source(&case.model);
        let of = |dtype, quantization| run(&client, &case, &model, model.clone().into(), &looped(dtype, quantization));
        let from_f32 =
            |got: &[Tensor; 2]| [("video", &got[0]), ("audio", &got[1])].map(|(name, t)| case.distance(name, t));
        let bf16 = of(DType::BF16, Quantization::None);
        let kinds = [(DType::F32, INTEGERS), (DType::BF16, INTEGERS), (DType::F32, WEIGHTS), (DType::BF16, WEIGHTS)];
        for &(dtype, quantization) in &kinds[..if full() { 4 } else { 2 }] {
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

pub(crate) const ROTATED_WEIGHTS: Quantization = Quantization::Int8 { activations: false, rotated: true };
const ROTATED: Quantization = Quantization::Int8 { activations: true, rotated: true };

/// Returns LTX-2.5's tiny transformer with whole groups of inputs, and a case with inputs of its text width.
pub(crate) fn wide_transformer() -> (serde_json::Value, Case) {
    let mut case = case("tiny_v2_5");
    let config = std::fs::read_to_string(case.model.join("transformer/config.json")).expect("a file");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    config["num_layers"] = 1.into();
    for key in ["attention_head_dim", "audio_attention_head_dim"] {
        config[key] = (ROTATED_INPUTS / 2).into();
    }
    for key in ["cross_attention_dim", "audio_cross_attention_dim"] {
        config[key] = ROTATED_INPUTS.into();
    }
    case.inputs.remove("video_keyframes_mask");
    for name in ["encoder_hidden_states", "audio_encoder_hidden_states"] {
        case.inputs.insert(name.into(), scattered(name, &[1, 8, ROTATED_INPUTS]));
    }
    (config, case)
}

/// Relative error of one product of rotated and rounded weights and activations, both with outliers.
const ERROR_OF_ROTATED: f64 = 0.0135;

/// Returns the configuration of a tiny model's text encoder with whole groups of inputs.
fn wide_text_encoder(model: &str) -> serde_json::Value {
    let config = std::fs::read_to_string(format!("tests/fixtures/models/{model}/text_encoder/config.json"));
    let mut config: serde_json::Value = serde_json::from_str(&config.expect("a file")).expect("JSON");
    let text = &mut config["text_config"];
    for key in ["hidden_size", "intermediate_size"] {
        text[key] = ROTATED_INPUTS.into();
    }
    text["head_dim"] = (ROTATED_INPUTS / 4).into();
    if let Some(full) = text.pointer_mut("/per_layer_config/1/head_dim") {
        *full = (ROTATED_INPUTS / 2).into();
    }
    config
}

/// Writes a component to three folders of `folder`, and opens them: with outliers in some columns of the layers'
/// weights, with those of them as int8-convrot for whose names `is_convrot` returns true, and with the values of the
/// second.
pub(crate) fn rotated_models(
    part: Component,
    config: &serde_json::Value,
    network: &Network,
    folder: &Path,
    is_convrot: impl Fn(&str) -> bool,
) -> [Arc<ModelSource>; 3] {
    let (mut wide, mut narrow) = (BTreeMap::new(), BTreeMap::new());
    for (name, shape) in network.params.iter().flat_map(|p| p.source.tensors()) {
        let columns = shape[shape.len() - 1];
        let mut values = scattered(name, shape).to_f32() / (columns as f32).sqrt().min(32.0);
        if part == Component::TextEncoder && shape.len() == 1 {
            // Scales of norms and layers. Small ones would hide the layers behind the embeddings.
            values = values * 0.1 + 1.0;
        }
        let is_layer = name.contains("transformer_blocks.") || name.contains(".layers.");
        let is_linear = is_layer && shape.len() == 2 && !name.contains("to_gate_logits");
        let layer = name.strip_suffix(".weight").filter(|_| is_linear);
        if layer.is_some() {
            values.indexed_iter_mut().filter(|(at, _)| at[1] % 67 == 5).for_each(|(_, v)| *v *= 12.0);
        }
        let bytes = Tensor::F32(values).bytes().into_owned();
        if let Some(layer) = layer.filter(|_| is_convrot(name)) {
            let mut done = quantize(QuantizedForm::Int8Convrot, DType::F32, columns, &bytes);
            // Codes that do not use the full range, and thus would change if the weights were quantized again.
            done.codes.iter_mut().for_each(|c| *c = ((f32::from(c.cast_signed()) * 0.79) as i8).cast_unsigned());
            let marker = json!({"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}).to_string();
            let scales = done.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            narrow.insert(name.to_string(), (Dtype::I8, shape.to_vec(), done.codes));
            narrow.insert(format!("{layer}.weight_scale"), (Dtype::F32, vec![shape[0], 1], scales));
            narrow.insert(format!("{layer}.comfy_quant"), (Dtype::U8, vec![marker.len()], marker.into_bytes()));
        } else {
            narrow.insert(name.to_string(), (Dtype::F32, shape.to_vec(), bytes.clone()));
        }
        wide.insert(name.to_string(), (Dtype::F32, shape.to_vec(), bytes));
    }
    let write = |name: &str, tensors: &BTreeMap<_, _>| {
        let own = folder.join(name).join(part.folder());
        std::fs::create_dir_all(&own).expect("a folder");
        std::fs::copy("tests/fixtures/models/tiny_2_5/model_index.json", folder.join(name).join("model_index.json"))
            .expect("copied");
        std::fs::write(own.join("config.json"), config.to_string()).expect("written");
        let file = format!("{}.safetensors", part.weights_stem().expect("weights"));
        single_file::write(&own.join(file), tensors, None);
        source(&folder.join(name))
    };
    let [wide, narrow] = [write("wide", &wide), write("narrow", &narrow)];
    let stored = narrow.checkpoint(part).expect("weights");
    let restored = stored.names().map(|name| {
        let view = stored.get(name).expect("there");
        (name.to_string(), (Dtype::F32, view.shape().to_vec(), view.read().expect("readable")))
    });
    [wide, narrow, write("restored", &restored.collect())]
}

/// Returns the result of the layer `transformer_blocks.0.attn1.to_q` for tokens with outliers in some channels.
fn layer_result(client: &Client, model: &Arc<ModelSource>, quantization: Quantization) -> Tensor {
    let p = Params::new("layer", transformer::COMPONENT, &looped(DType::F32, quantization));
    let axes = [Axis::CfgBatch, Axis::VideoSequence, Axis::Replicated];
    let x = p.input("x", Type::new(DType::F32, [1, 64, ROTATED_INPUTS]), &axes);
    let y = p.each_layer_quantized(
        "transformer_blocks",
        1,
        |_| true,
        &[x],
        |p, _, x| vec![linear(&p.pp("attn1.to_q"), &x[0], ROTATED_INPUTS, false, [Axis::Replicated; 2])],
    );
    let network = Network::finish(&p, vec![p.output("y", &y[0], &axes, y[0].dims())]).expect("builds");
    let mut executor = Executor::new(Engine::new(client.clone(), quick()), Weights::from(model.clone()));
    let program = executor.prepare("layer", &network).expect("compiles");
    let mut tokens = scattered("tokens", &[1, 64, ROTATED_INPUTS]).to_f32();
    tokens.indexed_iter_mut().filter(|(at, _)| at[2] % 97 == 11).for_each(|(_, v)| *v *= 20.0);
    let inputs = executor.give_all(&program, Inputs::default(), [("x".into(), tokens.into())]).expect("uploads");
    executor.run(&program, &inputs).and_then(|outputs| outputs.tensor("y").map_err(Into::into)).expect("runs")
}

/// Stored int8-convrot weights are used unchanged, so without rounded activations the results are those of the weights'
/// values. Outliers of weights and activations cause a smaller error than with int8.
#[needs(cpu)]
fn int8_convrot_matches_dequantized_weights_and_has_smaller_error_than_int8() {
    let client = cpu(1);
    let (config, case) = wide_transformer();
    let folder = tempfile::tempdir().expect("a folder");
    let c = TransformerConfig::from_json(&config).expect("valid");
    let network = transformer::program(&c, &ForwardShape::default(), &Build::new(DType::F32)).expect("builds");
    let [wide, narrow, restored] = rotated_models(Component::Transformer, &config, &network, folder.path(), |_| true);
    let of = |model: &Arc<ModelSource>, quantization| {
        run(&client, &case, model, model.clone().into(), &looped(DType::F32, quantization))
    };
    // `make test` compares a file that mixes forms: `transformer_quantizes_only_weights_stored_as_int8_convrot`.
    if full() {
        let apart = distances(&of(&narrow, ROTATED_WEIGHTS), &of(&restored, Quantization::None));
        assert!(apart.iter().all(|d| *d < 1e-5), "{apart:?}");
    }
    let exact = layer_result(&client, &wide, Quantization::None);
    let far = |quantization| relative_l2(&layer_result(&client, &wide, quantization), &exact);
    let [weights, rotated_weights] = [WEIGHTS, ROTATED_WEIGHTS].map(far);
    let [integers, rotated] = [INTEGERS, ROTATED].map(far);
    eprintln!(
        "weights {weights:.4}, rotated {rotated_weights:.4}; activations too {integers:.4}, rotated {rotated:.4}"
    );
    assert!(1e-4 < rotated_weights && rotated_weights < weights, "{rotated_weights}, without rotation {weights}");
    assert!(rotated_weights < rotated && rotated < integers, "{rotated}, without rotation {integers}");
    assert!(rotated < ERROR_OF_ROTATED, "{rotated}");
}

/// Returns the hidden states of a prompt after padding.
fn hidden_states(client: &Client, model: &Arc<ModelSource>, build: &Build) -> Tensor {
    let mut executor = Executor::new(Engine::new(client.clone(), quick()), model.clone());
    let ids = Array2::from_shape_fn((1, 16), |(_, i)| if i < 3 { 0 } else { i as i32 * 37 % 400 });
    let inputs = BTreeMap::from([("input_ids".to_string(), ids.into())]);
    let configs = ModelConfigs::from_source(model);
    let scalars = BTreeMap::from([("output_hidden_states".to_string(), true.into())]);
    let results = run_component(ProgramKind::TextEncoder, &configs, &mut executor, inputs, &scalars, build);
    results.expect("runs").remove(0).1
}

/// Returns the first layer's codes of `mlp.down_proj` on the devices.
fn uploaded_codes(client: &Client, model: &Arc<ModelSource>) -> Tensor {
    let p = Params::new("codes", gemma3::COMPONENT, &looped(DType::F32, ROTATED_WEIGHTS));
    let (shape, axes) = ([ROTATED_INPUTS; 2], [Axis::Replicated; 2]);
    let start = p.builder().full(0.0, Type::new(DType::F32, shape));
    let codes = |p: &Params| match p.pp("mlp").weight(&["down_proj.weight"], &shape, &axes) {
        Weight::Scaled(codes, _) => vec![codes.to(DType::F32)],
        Weight::Plain(_) => panic!("the weight is not quantized"),
    };
    let root = p.pp("language_model.model");
    let codes = root.each_layer_quantized("layers", 1, |_| true, &[start], |p, _, _| codes(p));
    let network = Network::finish(&p, vec![p.output("codes", &codes[0], &axes, &shape)]).expect("builds");
    let mut executor = Executor::new(Engine::new(client.clone(), quick()), Weights::from(model.clone()));
    let program = executor.prepare("codes", &network).expect("compiles");
    let outputs = executor.run(&program, &Inputs::default()).expect("runs");
    outputs.tensor("codes").expect("an output")
}

/// A text encoder whose file stores int8-convrot weights uses them unchanged; one with other weights is not quantized.
/// `make test` builds the programs of one model; the full test runs those of both, also with unrolled and sharded layers and
/// rounded activations, and reads the codes on the devices.
#[needs(cpu)]
fn int8_convrot_text_encoder_matches_dequantized_weights() {
    let client = cpu(1);
    for model in ["tiny_2_5", "tiny_a"].into_iter().take(if full() { 2 } else { 1 }) {
        let (config, folder) = (wide_text_encoder(model), tempfile::tempdir().expect("a folder"));
        let encoder = families::text_encoder(&config).expect("valid");
        let network = encoder.program(None, 1, 8, &Build::new(DType::F32)).expect("builds");
        let [_, narrow, restored] = rotated_models(Component::TextEncoder, &config, &network, folder.path(), |_| true);
        let codes = |model: &Arc<ModelSource>, quantization| {
            let build = looped(DType::F32, quantization);
            let network = ModelConfigs::from_source(model).text_encoder_program(1, 16, false, &build).expect("builds");
            network.params.iter().filter(|p| p.ty.dtype == DType::I8).count()
        };
        // Queries, keys with values, outputs and two of the MLP. In Gemma 4, full-attention layers have their own
        // stacks of the first three.
        assert_eq!(codes(&narrow, ROTATED), if model == "tiny_a" { 5 } else { 8 }, "{model}");
        assert_eq!([codes(&narrow, INTEGERS), codes(&restored, ROTATED)], [0; 2], "{model}");
        if !full() {
            continue;
        }
        let exact = hidden_states(&client, &restored, &looped(DType::F32, Quantization::None));
        let wide_activations = looped(DType::F32, ROTATED_WEIGHTS);
        let apart = relative_l2(&hidden_states(&client, &narrow, &wide_activations), &exact);
        eprintln!("{model}: {apart:.1e}");
        assert!(apart < 1e-5, "{model}: {apart:e}");
        let mesh = Some(parse_mesh("tensor=2").expect("a mesh"));
        let layout = Config { layout: "tensor".into(), mesh, ..Config::default() }.placement(2).expect("a layout");
        for (client, build) in
            [(&client, build(DType::F32, ROTATED_WEIGHTS)), (&cpu(2), Build { layout, ..wide_activations })]
        {
            let apart = relative_l2(&hidden_states(client, &narrow, &build), &exact);
            eprintln!("{model}: {apart:.1e} unrolled or sharded");
            assert!(apart < 1e-5, "{model}: {apart:e}");
        }
        let apart = relative_l2(&hidden_states(&client, &narrow, &looped(DType::F32, ROTATED)), &exact);
        eprintln!("{model}: {apart:.4} with rounded activations");
        // A layer has four products in sequence, whose independent errors add in squares.
        let limit = ERROR_OF_ROTATED * ((4 * encoder.layers()) as f64).sqrt();
        assert!(1e-3 < apart && apart < limit, "{model}: {apart}, at most {limit}");
        let stored = narrow.checkpoint(Component::TextEncoder).expect("weights");
        let stored = stored.get("language_model.model.layers.0.mlp.down_proj.weight").expect("there").rotated_codes();
        let bytes = stored.expect("int8-convrot").read().expect("readable");
        let uploaded = uploaded_codes(&client, &narrow).to_f32();
        assert!(uploaded.iter().copied().eq(bytes.iter().map(|code| f32::from(code.cast_signed()))), "{model}");
    }
}

/// Weights of a text encoder that its file does not store as int8-convrot are not quantized: the results are those of
/// the file's values, and any number of inputs is supported.
#[needs(cpu)]
fn text_encoder_quantizes_only_weights_stored_as_int8_convrot() {
    let client = cpu(1);
    let is_other = |name: &str| {
        [".mlp.down_proj.", ".layers.0.self_attn.o_proj.", ".layers.1.self_attn.k_proj."]
            .iter()
            .any(|n| name.contains(n))
    };
    for model in ["tiny_2_5", "tiny_a"] {
        let (mut config, folder) = (wide_text_encoder(model), tempfile::tempdir().expect("a folder"));
        config["text_config"]["intermediate_size"] = 20.into();
        let encoder = families::text_encoder(&config).expect("valid");
        let network = encoder.program(None, 1, 8, &Build::new(DType::F32)).expect("builds");
        let part = Component::TextEncoder;
        let [_, narrow, restored] = rotated_models(part, &config, &network, folder.path(), |name| !is_other(name));
        let exact = hidden_states(&client, &restored, &looped(DType::F32, Quantization::None));
        // A quick run loops over the layers of one model and unrolls those of the other.
        let forms: [fn(DType, Quantization) -> Build; 2] = [looped, build];
        for of in
            forms.into_iter().enumerate().filter(|(n, _)| full() || (*n == 0) == (model == "tiny_a")).map(|(_, of)| of)
        {
            let apart = relative_l2(&hidden_states(&client, &narrow, &of(DType::F32, ROTATED_WEIGHTS)), &exact);
            eprintln!("{model}: {apart:.1e}");
            assert!(apart < 1e-5, "{model}: {apart:e}");
            let network = ModelConfigs::from_source(&narrow)
                .text_encoder_program(1, 16, false, &of(DType::BF16, ROTATED))
                .expect("builds");
            let mut quantized = 0;
            for param in network.params.iter().filter(|p| p.name.contains("_proj.weight")) {
                let tensors = param.source.tensors();
                // Fused keys and values are quantized only if both are.
                match tensors.iter().any(|(name, _)| is_other(name)) {
                    true => assert!(param.ty.dtype == DType::BF16 && matches!(param.source, Source::Stack { .. })),
                    false if param.name.ends_with("_scale") => {}
                    false => {
                        assert_eq!(param.ty.dtype, DType::I8, "{}", param.name);
                        quantized += tensors.len();
                    }
                }
            }
            // Of each layer: queries, keys, values, outputs, and two of the MLP. Gemma 4's full-attention layer, 1, has
            // no values.
            assert_eq!(quantized, if model == "tiny_a" { 7 * 6 - 3 } else { 6 + 5 - 2 }, "{model}");
        }
    }
}

#[needs(nothing)]
fn int8_convrot_error_lists_layers_with_indivisible_inputs() {
    let c = TransformerConfig { attention_head_dim: 68, ..TransformerConfig::default() };
    let built = transformer::program(&c, &ForwardShape::default(), &looped(DType::BF16, ROTATED));
    let said = built.map(drop).expect_err("4096 text channels, but 2176 video channels").to_string();
    let words = ["transformer.transformer_blocks.*.attn", "has 2176 inputs", "a multiple of 256", "use int8 instead"];
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
    let mut config = wide_text_encoder("tiny_2_5");
    config["text_config"]["intermediate_size"] = 20.into();
    let encoder = families::text_encoder(&config).expect("valid");
    let said = encoder.program(None, 1, 8, &looped(DType::BF16, ROTATED)).map(drop).expect_err("20 inputs").to_string();
    let words = ["text_encoder.language_model.model.layers.*.mlp.down_proj.weight", "has 20 inputs"];
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
}

/// All blocks share one loop, and the loader reads the weights as int8-convrot.
#[needs(nothing)]
fn int8_convrot_quantizes_all_blocks_in_one_loop() {
    let c = TransformerConfig { gated_attn: true, audio_gated_attn: true, ..TransformerConfig::default() };
    let network = transformer::program(&c, &ForwardShape::default(), &looped(DType::BF16, ROTATED)).expect("builds");
    let narrow: Vec<_> = network.params.iter().filter(|p| p.ty.dtype == DType::I8).collect();
    assert_eq!(narrow.len(), 20);
    assert!(narrow.iter().all(|p| p.ty.dims[0] == 48 && matches!(p.source, Source::Rotated { .. })));
    let is_gate = |p: &&Param| p.name.contains("to_gate_logits.weight");
    assert!(network.params.iter().filter(is_gate).all(|p| p.ty.dtype == DType::BF16));
}

/// At the published widths, every device has whole groups of inputs, so rotation moves nothing between devices.
#[needs(cpu, full)]
fn rotation_adds_no_collectives_at_published_widths() {
    let preset = Preset::named("ltx2_5").expect("a preset");
    let mut c = TransformerConfig::from_json(preset.config("transformer").expect("a transformer")).expect("valid");
    c.num_layers = 1;
    let channels = Av { video: c.cross_attention_dim, audio: c.audio_cross_attention_dim };
    let (tokens, text) = (Av::both(64), Av::both(64));
    let shape = ForwardShape { batch: 2, tokens, text, text_channels: channels, ..ForwardShape::default() };
    let engine = Engine::new(cpu(8), quick());
    let layouts = [("tensor-sequence", "cfg=2,context=2,tensor=2"), ("tensor", "tensor=8")];
    for (layout, mesh) in layouts {
        let mesh = Some(parse_mesh(mesh).expect("a mesh"));
        let placement = Config { layout: layout.into(), mesh, ..Config::default() }.placement(8).expect("a layout");
        let of = |quantization| {
            let build = Build { layout: placement.clone(), ..looped(DType::BF16, quantization) };
            let network = transformer::program(&c, &shape, &build).expect("builds");
            let executable = engine.compile(layout, &network.program).expect("compiles");
            let optimized = executable.compiled().optimized_program().expect("an optimized program");
            let module = Module::decode(&optimized.format, &optimized.bytes).expect("a module");
            let report = report(&module, &network.program.mesh.axes, &[1], None);
            let all =
                report.collectives.iter().map(|c| format!("{} {:?} {} x {}", c.kind.name(), c.axes, c.times, c.bytes));
            let mut all: Vec<String> = all.collect();
            all.sort();
            all
        };
        let rotated = of(ROTATED_WEIGHTS);
        assert!(rotated.len() > 3, "{rotated:?}");
        assert_eq!(rotated, of(Quantization::None), "{layout}");
    }
}

/// Weights of a transformer that its file stores in another form, in some layers of a block or in a whole block, are not
/// quantized: the results are those of the file's values. Others are, as the error of rounded activations shows.
#[needs(cpu)]
fn transformer_quantizes_only_weights_stored_as_int8_convrot() {
    let client = cpu(1);
    let (mut config, case) = wide_transformer();
    config["num_layers"] = 2.into();
    let folder = tempfile::tempdir().expect("a folder");
    let c = TransformerConfig::from_json(&config).expect("valid");
    let network = transformer::program(&c, &ForwardShape::default(), &Build::new(DType::F32)).expect("builds");
    let is_other = |name: &str| name.contains("blocks.1.") || name.contains(".ff.net.2.");
    let part = Component::Transformer;
    let [_, narrow, restored] = rotated_models(part, &config, &network, folder.path(), |name| !is_other(name));
    let others = narrow.non_convrot_weights(part).expect("int8-convrot weights");
    assert!(others.len() > 10 && others.iter().all(|name| is_other(name) || name.contains("to_gate_logits")));
    assert_eq!(restored.non_convrot_weights(part), None);
    let (gates, count) = (|name: &&String| name.contains("to_gate_logits"), others.len());
    let only_gates: BTreeSet<String> = others.iter().filter(gates).cloned().collect();
    assert!(!only_gates.is_empty());
    let unchanged = "transformer: int8-convrot weights are used unchanged";
    assert_eq!(describe_convrot(part, &only_gates), unchanged);
    let counted = format!("; {} weights in other forms are not quantized", count - only_gates.len());
    assert!(describe_convrot(part, &others).ends_with(&counted));
    let of = |model: &Arc<ModelSource>, build: &Build| run(&client, &case, model, model.clone().into(), build);
    let exact = of(&restored, &looped(DType::F32, Quantization::None));
    let builds = [looped(DType::F32, ROTATED_WEIGHTS), build(DType::F32, ROTATED_WEIGHTS)];
    for build in builds.iter().take(if full() { 2 } else { 1 }) {
        let apart = distances(&of(&narrow, build), &exact);
        assert!(apart.iter().all(|d| *d < 1e-5), "{apart:?}");
    }
    let rounded = distances(&of(&narrow, &looped(DType::F32, ROTATED)), &exact);
    assert!(rounded.iter().all(|some| 1e-4 < *some), "{rounded:?}");
    if full() {
        let all = distances(&of(&restored, &looped(DType::F32, ROTATED)), &exact);
        assert!(rounded.iter().zip(all).all(|(some, all)| *some < all), "{rounded:?}, all: {all:?}");
    }
}

/// Blocks of connectors whose file stores int8-convrot weights use them unchanged, and do not quantize others.
#[needs(cpu)]
fn int8_convrot_connectors_match_dequantized_weights() {
    let client = cpu(1);
    let config = std::fs::read_to_string("tests/fixtures/models/tiny_2_5/connectors/config.json").expect("a file");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    for stream in ["video", "audio"] {
        config[format!("{stream}_connector_attention_head_dim")] = (ROTATED_INPUTS / 2).into();
        config[format!("{stream}_hidden_dim")] = ROTATED_INPUTS.into();
    }
    let c = ConnectorsConfig::from_json(&config).expect("valid");
    let input = connectors::Input::PromptEmbeds;
    let network = connectors::program(&c, 1, 8, input, &Build::new(DType::F32)).expect("builds");
    let all: [fn(&str) -> bool; 2] = [|_| true, |name| !name.contains(".ff.net.2.")];
    // Only mixed files if not in full.
    for is_convrot in all.into_iter().rev().take(if full() { 2 } else { 1 }) {
        let folder = tempfile::tempdir().expect("a folder");
        let part = Component::Connectors;
        let [_, narrow, restored] = rotated_models(part, &config, &network, folder.path(), is_convrot);
        let of = |model: &Arc<ModelSource>, quantization| {
            let mut executor = Executor::new(Engine::new(client.clone(), quick()), Weights::from(model.clone()));
            let inputs = [("prompt_embeds".to_string(), scattered("prompts", &[1, 8, c.text_width()]))].into();
            let (configs, build) = (ModelConfigs::from_source(model), looped(DType::F32, quantization));
            let results =
                run_component(ProgramKind::Connectors, &configs, &mut executor, inputs, &BTreeMap::new(), &build);
            let mut results = results.expect("runs").into_iter().map(|(_, tensor)| tensor);
            [results.next().expect("video"), results.next().expect("audio")]
        };
        let exact = of(&restored, Quantization::None);
        let apart = distances(&of(&narrow, ROTATED_WEIGHTS), &exact);
        assert!(apart.iter().all(|d| *d < 1e-5), "{apart:?}");
        let rounded = distances(&of(&narrow, ROTATED), &exact);
        assert!(rounded.iter().all(|d| *d > 1e-4), "{rounded:?}");
    }
}
