//! Tests of weights quantized by torchao, as diffusers saves them.

use std::path::PathBuf;

use half::bf16;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::*;
use super::{fails, put};
use crate::source::ModelSource;
use ltx2_stablehlo::DType;

/// A tensor of a file: name, element type, shape and bytes.
type TorchaoTensor<'a> = (&'a str, &'a str, &'a [usize], Vec<u8>);

/// Writes a file of these tensors.
fn file(path: PathBuf, tensors: &[TorchaoTensor], metadata: Value) -> PathBuf {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    header.insert("__metadata__".into(), metadata);
    for (name, dtype, shape, bytes) in tensors {
        let range = [data.len(), data.len() + bytes.len()];
        header.insert((*name).into(), json!({"dtype": dtype, "shape": shape, "data_offsets": range}));
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string();
    put(path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat())
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns the safetensors metadata of the quantized weight `a.b.weight`, as torchao 0.18 writes it.
fn metadata(kind: &str, dtype: &str, activations: Value) -> Value {
    let data = json!({"act_quant_kwargs": activations, "block_size": [1, 3],
        "dtype": {"_type": "torch.dtype", "_data": dtype}});
    let form = json!({"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale"]});
    json!({"a.b.weight": form.to_string(), "tensor_names": "[\"a.b.weight\"]"})
}

const NUMBERS: [i8; 6] = [1, -127, 3, 100, 50, -1];
const SCALES: [f32; 2] = [0.0123, 0.5];

fn numbers() -> Vec<u8> {
    NUMBERS.map(|n| n as u8).to_vec()
}

fn int8<'a>(scales: Vec<f32>, shape: &'a [usize]) -> Vec<TorchaoTensor<'a>> {
    vec![
        ("a.b._weight_qdata", "I8", &[2, 3], numbers()),
        ("a.b._weight_scale", "F32", shape, floats(&scales)),
        ("a.b.bias", "BF16", &[2], vec![0; 4]),
    ]
}

#[test]
fn int8_weights_are_dequantized() {
    let dir = TempDir::new().expect("dir");
    let path = |name: &str| dir.path().join(name);
    let read = |path: PathBuf| {
        let checkpoint = Checkpoint::open(&path).expect("opens");
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a.b.bias", "a.b.weight"]);
        checkpoint.get_float("a.b.weight").expect("floats")
    };
    for (dtype, want) in [("bfloat16", DType::BF16), ("float32", DType::F32), ("float16", DType::F16)] {
        let form = metadata("Int8Tensor", dtype, Value::Null);
        let view = read(file(path("rows.safetensors"), &int8(SCALES.into(), &[2, 1]), form));
        assert_eq!((view.dtype(), view.shape(), view.size()), (want, &[2, 3][..], 6 * want.size()));
        let round = |value: f32| match want {
            DType::BF16 => bf16::from_f32(value).to_f32(),
            DType::F16 => half::f16::from_f32(value).to_f32(),
            _ => value,
        };
        let exact = NUMBERS.iter().enumerate().map(|(i, n)| round(f32::from(*n) * SCALES[i / 3]));
        let got: Vec<f32> = view.to_tensor().expect("read").to_f32().into_iter().collect();
        assert_eq!(got, exact.collect::<Vec<_>>(), "{dtype}");
        // Values converted to f32 keep the rounding to the weight's own type.
        let converted = view.clone().converted(DType::F32).to_tensor().expect("read").to_f32();
        assert_eq!(converted.into_iter().collect::<Vec<_>>(), got, "{dtype}");
        // A partial read returns the same values.
        let (whole, mut piece) = (view.read().expect("read"), vec![0; 2 * want.size()]);
        view.read_at(3 * want.size(), &mut piece).expect("read");
        assert_eq!(piece, whole[3 * want.size()..5 * want.size()]);
        // The values are the same in the second of two joined checkpoints.
        let other = file(path("other.safetensors"), &[("c", "F32", &[1], floats(&[1.0]))], json!({}));
        let joined = Checkpoint::open(&other).expect("opens");
        let joined = joined.joined(&Checkpoint::open(&path("rows.safetensors")).expect("opens")).expect("joined");
        assert_eq!(joined.get("a.b.weight").expect("there").read().expect("read"), whole);
        // The values are the same after splitting by rows.
        let mut split = Checkpoint::open(&path("rows.safetensors")).expect("opens");
        split.split_rows("a.b.weight", &["first".into(), "second".into()]).expect("two rows");
        assert_eq!(split.get("second").expect("there").read().expect("read"), whole[whole.len() / 2..]);
        let error = split.split_rows("second", &["a".into(), "b".into()]).expect_err("one row").to_string();
        let reason = "tensor `a.b._weight_qdata` has shape [1, 3]: its rows cannot be divided equally among a, b";
        assert!(error.ends_with(reason), "{error}");
    }
    // A file with one scale for all rows, and with zero points.
    let mut whole = int8(vec![0.25], &[1, 1]);
    whole.push(("a.b._weight_zero_point", "I8", &[2, 1], vec![2, (-3i8) as u8]));
    let view = read(file(path("whole.safetensors"), &whole, metadata("Int8Tensor", "float32", Value::Null)));
    let got: Vec<f32> = view.to_tensor().expect("read").to_f32().into_iter().collect();
    assert_eq!(got, [-0.25, -32.25, 0.25, 25.75, 13.25, 0.5]);
}

#[test]
fn fp8_weights_keep_their_bytes_and_scales() {
    let dir = TempDir::new().expect("dir");
    let tensors: [TorchaoTensor; 2] = [
        ("a.b._weight_qdata", "F8_E4M3", &[2, 3], vec![0x38, 0x40, 0xb8, 0x30, 0, 0x7e]),
        ("a.b._weight_scale", "F32", &[2, 1], floats(&SCALES)),
    ];
    let form = metadata("Float8Tensor", "bfloat16", Value::Null);
    let checkpoint = Checkpoint::open(&file(dir.path().join("x.safetensors"), &tensors, form)).expect("opens");
    let scales = checkpoint.scales_of("a.b.weight").expect("one a row").expect("there");
    assert_eq!((scales.key(), scales.read().expect("read")), ("a.b._weight_scale", floats(&SCALES)));
    let view = checkpoint.get_float("a.b.weight").expect("8-bit floats");
    assert_eq!((view.dtype(), view.read().expect("read")), (DType::F8E4M3FN, tensors[0].3.clone()));
    let declared: [(&str, &[usize]); 1] = [("a.b.weight", &[2, 3])];
    assert!(validate(&checkpoint, Component::Transformer, declared).is_ok());
}

#[test]
fn other_torchao_formats_are_refused() {
    let dir = TempDir::new().expect("dir");
    let open = |tensors: &[TorchaoTensor], form: Value| {
        Checkpoint::open(&file(dir.path().join("x.safetensors"), tensors, form))
    };
    let dynamic = metadata("Int8Tensor", "bfloat16", json!({"_type": "QuantizeTensorToInt8Kwargs", "_data": {}}));
    let refused = open(&int8(SCALES.into(), &[2, 1]), dynamic);
    fails(refused, &["x.safetensors", "a.b.weight", "torchao as Int8Tensor with quantized activations"]);
    let plain = || metadata("Int8Tensor", "bfloat16", Value::Null);
    let blocks = open(&int8(vec![0.5; 6], &[2, 3]), plain());
    fails(blocks, &["a.b.weight", "of shape [2, 3] with scales of f32 and shape [2, 3]", "Int8WeightOnlyConfig"]);
    fails(open(&int8(SCALES.into(), &[2, 1]), metadata("Int4Tensor", "bfloat16", Value::Null)), &["as Int4Tensor"]);
    let mut more = int8(SCALES.into(), &[2, 1]);
    more.push(("a.b._weight_act_pre_scale", "F32", &[1], floats(&[1.0])));
    fails(open(&more, plain()), &["with `a.b._weight_act_pre_scale`"]);
    fails(open(&int8(SCALES.into(), &[2, 1])[..1], plain()), &["without a scale"]);
    let mut twice = int8(SCALES.into(), &[2, 1]);
    twice.push(("a.b.weight", "BF16", &[2, 3], vec![0; 12]));
    fails(open(&twice, plain()), &["`a.b._weight_qdata` is defined twice"]);
}

#[test]
fn unsupported_quantization_error_contains_tool() {
    let dir = TempDir::new().expect("dir");
    let config = |quantization: Value| {
        let text =
            json!({"_class_name": "LTX2VideoTransformer3DModel", "num_layers": 2, "quantization_config": quantization});
        put(dir.path().join("transformer/config.json"), text.to_string());
        let source = ModelSource::open(dir.path().to_str().expect("UTF-8"), &Overrides::default()).expect("a folder");
        source.config(Component::Transformer)
    };
    let torchao = |name: &str, data: Value| {
        let kind = json!({"default": {"_type": name, "_version": 2, "_data": data}});
        config(json!({"quant_method": "torchao", "quant_type": kind, "modules_to_not_convert": null}))
    };
    for name in ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"] {
        let read = torchao(name, json!({"group_size": null})).expect("read");
        assert!(read.get("quantization_config").is_none() && read["num_layers"] == 2, "{read}");
    }
    assert!(config(Value::Null).is_ok());
    let cure = ["config.json", "quantization_config", "use the bf16 weights"];
    fails(torchao("Int4WeightOnlyConfig", json!({})), &[&cure[..], &["by torchao (Int4WeightOnlyConfig)"]].concat());
    fails(torchao("Int8WeightOnlyConfig", json!({"group_size": 32})), &["Int8WeightOnlyConfig with group_size 32"]);
    for (quantization, tool) in [
        (json!({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}), "by bitsandbytes (nf4), which"),
        (json!({"_load_in_8bit": true}), "by bitsandbytes, which"),
        (json!({"quant_method": "quanto", "weights_dtype": "int8"}), "by optimum-quanto (int8), which"),
        (json!({"quant_method": "gguf", "compute_dtype": "bfloat16"}), "by GGUF, which"),
        (json!({"quant_method": "modelopt", "quant_type": "NVFP4"}), "by NVIDIA ModelOpt (NVFP4), which"),
        (json!({"quant_method": "torchao", "quant_type": "int4wo"}), "by torchao (int4wo), which"),
        (json!({"quant_method": "fp8", "weight_block_size": [128, 128]}), "fine-grained fp8, which"),
        (json!({"quant_method": "gptq", "bits": 4}), "by gptq (4), which"),
        (json!({}), "by an unnamed tool, which"),
    ] {
        let refused = config(quantization);
        let text = refused.as_ref().expect_err(tool).to_string();
        assert!(!text.contains("newer") && !text.contains('{'), "{text}");
        fails(refused, &[&cure[..], &[tool]].concat());
    }
}
