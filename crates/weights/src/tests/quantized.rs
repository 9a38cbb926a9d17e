//! Tests of quantized files: values of comfy-kitchen 0.2.40 and gguf 0.19.0 (`scripts/oracle/quantized.py`).

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::quantize::{Quantized, QuantizedForm, quantize};
use super::super::*;
use super::{fails, put, safetensors};
use ltx2_stablehlo::DType;

pub(super) fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/quantized")).join(name)
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap_or_else(|e| panic!("{e}"))
}

fn bits(view: &TensorView) -> Vec<u32> {
    view.to_tensor().expect("readable").to_f32().iter().map(|value| value.to_bits()).collect()
}

/// Checks that reading a part of a tensor gives the same bytes as reading the whole tensor.
fn check_parts(view: &TensorView) {
    let (size, whole) = (view.dtype().size(), view.read().expect("readable"));
    for (from, count) in [(0, 1), (1, 33), (31, 2), (250, 13), (511, 1)] {
        let (from, to) = (from * size, ((from + count) * size).min(whole.len()));
        if from < to {
            let mut part = vec![0; to - from];
            view.read_at(from, &mut part).expect("readable");
            assert_eq!(part, whole[from..to], "{} from {from}", view.key());
        }
    }
}

#[test]
fn decoded_values_equal_those_of_comfy_kitchen_bit_for_bit() {
    let (file, values) = (open(&fixture("comfy.safetensors")), open(&fixture("comfy_values.safetensors")));
    assert!(!file.names().any(|name| name.ends_with(".comfy_quant")), "markers are read");
    let want = |name: &str| bits(&values.get(name).expect("a value"));
    for name in ["e5m2", "int8", "convrot"] {
        let view = file.get_float(&format!("{name}.weight")).expect("floats");
        assert_eq!(view.dtype(), DType::F32, "{name}");
        assert_eq!(bits(&view), want(name), "{name}");
        assert!(!file.contains(&format!("{name}.weight_scale")), "{name}");
        check_parts(&view);
    }
    // e4m3 weights keep their bytes and scales, which the fp8 programs use.
    let view = file.get_float("e4m3.weight").expect("floats");
    let scale = file.scales_of("e4m3.weight").expect("one").expect("there").to_tensor().expect("readable").to_f32()[[]];
    let product = view.to_tensor().expect("readable").to_f32().mapv(|value| (value * scale).to_bits());
    assert_eq!((view.dtype(), product.into_iter().collect::<Vec<_>>()), (DType::F8E4M3FN, want("e4m3")));
    // Rounding to bf16 gives the reference's bf16 values.
    let view = file.get("convrot.weight").expect("there").converted(DType::BF16);
    assert_eq!((view.dtype(), bits(&view)), (DType::BF16, want("convrot.bf16")));
    assert_eq!(file.get("e4m3.weight").expect("there").converted(DType::BF16).dtype(), DType::F8E4M3FN);
    let view = file.get_float("nvfp4.weight").expect("floats");
    assert_eq!(view.shape(), [144, 80]);
    let all = bits(&view);
    let rows = [0, 31, 32, 127, 128, 143].map(|row| &all[row * 80..][..80]).concat();
    assert_eq!(rows, want("nvfp4"));
    check_parts(&view);
    let kinds: Vec<String> =
        file.headers().filter(|(name, ..)| name.ends_with(".weight")).map(|(_, kind, _)| kind).collect();
    assert_eq!(kinds, ["int8-convrot", "f8_e4m3", "f32", "int8", "nvfp4"]);
}

#[test]
fn int8_convrot_codes_are_read_unchanged_and_equal_those_of_comfy_kitchen() {
    let mut file = open(&fixture("comfy.safetensors"));
    let codes_of = |file: &Checkpoint, name: &str| {
        let view = file.get(name).expect("there");
        let found = view.rotated_codes().zip(view.rotated_scales().expect("readable"));
        found.map(|(codes, scales)| (codes.shape().to_vec(), codes.read().expect("readable"), scales))
    };
    let (shape, codes, scales) = codes_of(&file, "convrot.weight").expect("int8-convrot");
    assert_eq!((shape, codes.len(), scales.len()), (vec![4, 512], 2048, 4));
    let original = open(&fixture("comfy_values.safetensors")).get("original").expect("there").read().expect("readable");
    assert_eq!(
        quantize(QuantizedForm::Int8Convrot, DType::F32, 512, &original),
        Quantized { codes: codes.clone(), scales: scales.clone() }
    );
    file.split_rows("convrot.weight", &["a", "b"].map(String::from)).expect("even rows");
    assert_eq!(codes_of(&file, "b"), Some((vec![2, 512], codes[1024..].to_vec(), scales[2..].to_vec())));
    assert!(["int8.weight", "e4m3.weight", "nvfp4.weight"].iter().all(|name| codes_of(&file, name).is_none()));
    file.add_to_all("b", 1.0).expect("there");
    assert_eq!(codes_of(&file, "b"), None, "the values are computed");
}

#[test]
fn splitting_rows_also_splits_their_scales() {
    let dir = TempDir::new().expect("dir");
    // 1, 1.125, … in e4m3.
    let codes: Vec<u8> = (0x38..0x40).chain(0x38..0x3c).collect();
    let numbers = |i: usize| 1.0 + (i % 8) as f32 / 8.0;
    for (shape, scales) in [(&[][..], &[0.3f32][..]), (&[6], &[2.0, 3.0, 5.0, 7.0, 11.0, 0.3]), (&[6, 1], &[0.5; 6])] {
        for (whole, parts) in [
            ("attention_pooler.in_proj_weight", ["q", "k", "v"].map(|part| format!("attention_pooler.to_{part}"))),
            ("decoder.0.attn.qkv.weight", ["q", "k", "v"].map(|part| format!("decoder.0.attn.to_{part}"))),
        ] {
            let (scale, input) = (format!("{whole}_scale"), whole.replace("weight", "input_scale"));
            let tensors = [(&*scale, "F32", shape), (&*input, "F32", &[]), (whole, "F8_E4M3", &[6, 2])];
            let mut bytes = safetensors(&tensors, Value::Null);
            let at = bytes.len() - 4 * (scales.len() + 1) - codes.len();
            let floats = scales.iter().chain(&[1.0]).flat_map(|scale| scale.to_le_bytes());
            bytes.splice(at.., floats.chain(codes.iter().copied()));
            let file = open(&put(dir.path().join("head.safetensors"), bytes));
            let file = keys::split_attention(file).and_then(official_diffusion::tensors).expect("splits");
            let values = |view: TensorView| view.to_tensor().expect("reads").to_f32().into_iter().collect::<Vec<f32>>();
            let mut got = Vec::new();
            for part in &parts {
                let weight = format!("{part}.weight");
                let own = values(file.scales_of(&weight).expect("fits").expect("there"));
                let weights = values(file.get(&weight).expect("there"));
                got.extend(weights.iter().enumerate().map(|(i, number)| number * own[(i / 2).min(own.len() - 1)]));
            }
            let want = (0..12).map(|i| numbers(i) * scales[(i / 2).min(scales.len() - 1)]).collect::<Vec<_>>();
            assert_eq!(got, want, "{whole}");
            let mut names = parts.map(|p| ["input_scale", "weight", "weight_scale"].map(|leaf| format!("{p}.{leaf}")));
            names.sort();
            assert_eq!(file.names().collect::<Vec<_>>(), names.as_flattened());
        }
    }
}

#[test]
fn rows_of_quantized_weights_can_be_split_and_scaled() {
    let mut file = open(&fixture("comfy.safetensors"));
    let whole = bits(&file.get("convrot.weight").expect("there"));
    file.split_rows("convrot.weight", &["a", "b"].map(String::from)).expect("even rows");
    let [a, b] = ["a", "b"].map(|part| file.get(part).expect("there"));
    assert_eq!([bits(&a), bits(&b)].concat(), whole);
    check_parts(&b);
    let dir = TempDir::new().expect("dir");
    let mut gates = safetensors(&[("gate", "F32", &[2])], Value::Null);
    let at = gates.len() - 8;
    gates[at..].copy_from_slice(&[2f32.to_le_bytes(), (-0.5f32).to_le_bytes()].concat());
    let gates = open(&put(dir.path().join("gates.safetensors"), gates));
    let mut file = file.joined(&gates).expect("other names");
    file.scale_rows("b", "gate").expect("one a row");
    let scaled = bits(&file.get("b").expect("there"));
    let factor = |i: usize| if i < 512 { 2.0 } else { -0.5 };
    let want: Vec<u32> =
        whole[1024..].iter().enumerate().map(|(i, v)| (f32::from_bits(*v) * factor(i)).to_bits()).collect();
    assert_eq!(scaled, want);
}

#[test]
fn decoded_values_equal_those_of_the_gguf_package_bit_for_bit() {
    let (file, values) = (open(&fixture("types.gguf")), open(&fixture("types_values.safetensors")));
    assert_eq!(file.metadata("general.architecture"), Some("ltxv"));
    assert_eq!(values.names().count(), 15);
    for name in values.names() {
        let view = file.get_float(&format!("{name}.weight")).expect("floats");
        assert_eq!(view.shape(), [2, 256], "{name}");
        assert_eq!(bits(&view), bits(&values.get(name).expect("a value")), "{name}");
        check_parts(&view);
    }
    let kinds: Vec<String> = file.headers().map(|(_, kind, _)| kind).collect();
    assert!(kinds.contains(&"q4_k".to_string()) && kinds.contains(&"bf16".to_string()), "{kinds:?}");
    let reshaped = file.get("reshaped.weight").expect("there");
    assert_eq!(reshaped.shape(), [4, 2, 64]);
    assert_eq!(bits(&reshaped), bits(&values.get("q4_k").expect("a value")));
}

#[test]
fn damaged_gguf_files_are_errors() {
    let dir = TempDir::new().expect("dir");
    let path = dir.path().join("x.gguf");
    let whole = std::fs::read(fixture("types.gguf")).expect("a fixture");
    let open = |bytes: &[u8]| Checkpoint::open(&put(path.clone(), bytes));
    for size in (4..whole.len() - 32).step_by(61) {
        fails(open(&whole[..size]), &["x.gguf", "truncated: the header requires"]);
    }
    let with = |at: usize, value: u64| {
        let mut bytes = whole.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        open(&bytes)
    };
    fails(open(&gguf(&[("split.count", "3")], &[])), &["x.gguf", "one of 3 parts of a model", "llama-gguf-split"]);
    // Numbers of tensors and of metadata values, and the length of the first key.
    for at in [8, 16, 24] {
        for count in [u64::MAX, 1 << 40] {
            fails(with(at, count), &["x.gguf"]);
        }
    }
    let mut old = whole.clone();
    old[4] = 1;
    fails(open(&old), &["x.gguf", "version 1, but only 2 and 3 are supported"]);
    let find =
        |text: &str| whole.windows(text.len()).position(|part| part == text.as_bytes()).expect("there") + text.len();
    // After a tensor's name: the number of dimensions, two dimensions, the type and the offset.
    let info = find("q8_0.weight");
    let mut other = whole.clone();
    other[info + 20] = 16;
    fails(open(&other), &["x.gguf", "`q8_0.weight`", "GGUF type iq2_xxs, which is not supported", "q4_k"]);
    fails(with(info + 24, u64::MAX - 7), &["x.gguf", "`q8_0.weight`", "offset that overflows"]);
    fails(with(info + 4, 250), &["x.gguf", "[2, 250]", "not divisible into q8_0 blocks"]);
    fails(with(info + 4, 48), &["x.gguf", "[2, 48]", "not divisible into q8_0 blocks"]);
    fails(with(info + 12, 0), &["x.gguf", "[0, 256]", "not divisible into q8_0 blocks"]);
    fails(with(info + 12, 1 << 62), &["x.gguf"]);
    let shape = find("orig_shape.reshaped.weight");
    fails(with(shape + 4 + 4 + 8, 5), &["`reshaped.weight`", "cannot have the original shape [5,0,64]"]);
}

fn weight<'a>(dtype: &'a str, shape: &'a [usize]) -> (&'a str, &'a str, &'a [usize]) {
    ("a.weight", dtype, shape)
}

/// Opens a file with these tensors, in which `a.weight` is marked as quantized.
fn marked(dir: &Path, tensors: &[(&str, &str, &[usize])], conf: &Value) -> Result<Checkpoint, WeightsError> {
    let text = conf.to_string();
    let marker = [text.len()];
    let mut tensors = tensors.to_vec();
    tensors.push(("a.comfy_quant", "U8", &marker));
    let mut bytes = safetensors(&tensors, Value::Null);
    let at = bytes.len() - text.len();
    bytes[at..].copy_from_slice(text.as_bytes());
    Checkpoint::open(&put(dir.join("x.safetensors"), bytes))
}

#[test]
fn unsupported_comfy_formats_are_refused() {
    let dir = TempDir::new().expect("dir");
    let cure = ["x.safetensors", "`a.weight`", "use the bf16 file of the same component"];
    let refused = |tensors: &[(&str, &str, &[usize])], conf: Value, what: &str| {
        fails(marked(dir.path(), tensors, &conf), &[&cure[..], &[what]].concat());
    };
    let scale: (&str, &str, &[usize]) = ("a.weight_scale", "F32", &[2, 1]);
    let int8 = |more: Value| {
        let mut conf = json!({"format": "int8_tensorwise", "convrot": true});
        conf.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
        conf
    };
    refused(
        &[weight("U8", &[2, 4])],
        json!({"format": "mxfp8"}),
        r#"quantized as {"format":"mxfp8"}, which is not supported"#,
    );
    refused(&[weight("BF16", &[2, 4])], json!({"format": "nvfp4"}), "but is bf16");
    refused(&[weight("I8", &[2, 256]), scale], int8(json!({"convrot_groupsize": 64})), "groups of 64");
    refused(&[weight("I8", &[2, 300]), scale], int8(Value::Null), "300 columns in groups of 256");
    refused(&[weight("I8", &[3, 256]), scale], int8(Value::Null), "`a.weight_scale` is f32 of shape [2, 1]");
    refused(&[weight("I8", &[256]), scale], int8(Value::Null), "has shape [256]");
    fails(marked(dir.path(), &[weight("I8", &[2, 256])], &int8(Value::Null)), &["`a.weight_scale` is missing"]);
    let blocks: (&str, &str, &[usize]) = ("a.weight_scale", "F8_E4M3", &[2, 4]);
    let whole: (&str, &str, &[usize]) = ("a.weight_scale_2", "F32", &[]);
    refused(
        &[weight("U8", &[2, 8]), blocks, whole],
        json!({"format": "nvfp4"}),
        "`a.weight_scale` is f8_e4m3 of shape [2, 4]",
    );
    let read = marked(dir.path(), &[weight("I8", &[2, 256]), scale], &int8(Value::Null)).expect("256 by default");
    assert_eq!(read.names().collect::<Vec<_>>(), ["a.weight"]);
}

/// Writes two shards with their index; the second contains `tensors`, the last of which has these bytes.
fn in_second_shard(dir: &Path, tensors: &[(&str, &str, &[usize])], last: &str) -> PathBuf {
    let shard = |i: usize| format!("model-0000{i}-of-00002.safetensors");
    put(dir.join(shard(1)), safetensors(&[("first", "BF16", &[4])], Value::Null));
    let mut bytes = safetensors(tensors, Value::Null);
    let at = bytes.len() - last.len();
    bytes[at..].copy_from_slice(last.as_bytes());
    put(dir.join(shard(2)), bytes);
    let mut map = json!({"first": shard(1)});
    tensors.iter().for_each(|(name, ..)| map[*name] = json!(shard(2)));
    put(dir.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string())
}

#[test]
fn refusal_contains_shard_tensor_format_and_remedy() {
    let dir = TempDir::new().expect("dir");
    let open = |tensors: &[(&str, &str, &[usize])], last: &str| {
        Checkpoint::open(&in_second_shard(dir.path(), tensors, last)).map(drop)
    };
    let shard = "model-00002-of-00002.safetensors: ";
    let marker = json!({"format": "mxfp8"}).to_string();
    let marked = |weight: &str, marks: &str| open(&[(weight, "U8", &[2, 4]), (marks, "U8", &[marker.len()])], &marker);
    let block = "transformer_blocks.0.attn1.to_q";
    let said = marked(&format!("{block}.weight"), &format!("{block}.comfy_quant"));
    let forms = ["published fp8, int8-convrot, nvfp4 or GGUF files", "`ltx2 convert --weights int8-convrot`"];
    fails(said, &[&[shard, "`transformer_blocks.0.attn1.to_q.weight`", "mxfp8", "bf16 file"], &forms[..]].concat());
    let said = super::message(marked("decoder.conv_in.weight", "decoder.conv_in.comfy_quant"));
    assert!(said.contains(shard) && said.ends_with("not supported; use the bf16 file of the same component"), "{said}");
    let blocks = [("a.weight", "F8_E4M3", &[2, 4][..]), ("a.weight_scale", "F32", &[2, 2])];
    let blocks = Checkpoint::open(&in_second_shard(dir.path(), &blocks, "")).expect("opens");
    let declared: [(&str, &[usize]); 2] = [("a.weight", &[2, 4]), ("first", &[4])];
    let report = validate(&blocks, Component::Transformer, declared);
    assert!(report.lines()[0].contains(shard), "{:?}", report.lines());
    let words = [shard, "`a.weight_scale` has shape [2, 2]", "8-bit weights need one scale", "use bf16 weights"];
    fails(report.into_result(Component::Transformer, &blocks), &words);
    let torchao = open(&[("a._weight_scale", "F32", &[2, 4]), ("a._weight_qdata", "I8", &[2, 4])], "");
    fails(torchao, &[shard, "`a.weight`", "torchao", "Int8WeightOnlyConfig"]);
}

#[test]
fn unmarked_quantized_weights_are_refused_in_folders_and_by_conversions() {
    let dir = TempDir::new().expect("dir");
    super::diffusers_folder(dir.path());
    let folder = dir.path().join("transformer");
    std::fs::remove_file(folder.join("diffusion_pytorch_model.safetensors")).expect("removed");
    let name = "transformer_blocks.0.attn1.to_q.weight";
    let scales = format!("{name}_scale");
    for (dtype, scale, words) in [
        ("F8_E4M3", "F8_E8M0", [&*scales, "is f8_e8m0", "mxfp8 is not supported"]),
        ("U8", "F8_E8M0", [name, "is u8", "mxfp4 is not supported"]),
        ("I8", "F32", [name, "is i8, without a `comfy_quant` tensor", "int8 or int8-convrot"]),
    ] {
        in_second_shard(&folder, &[(name, dtype, &[32, 32]), (&scales, scale, &[32])], "");
        let remedy = ["model-00002-of-00002.safetensors: ", "bf16 file", "`ltx2 convert --weights int8-convrot`"];
        let words = [&words[..], &remedy].concat();
        let model = super::open(dir.path()).expect("opens");
        fails(model.checkpoint(Component::Transformer), &words);
        let plan = Conversion::plan(&folder, Some(QuantizedForm::Int8)).map(drop);
        fails(plan, &words);
    }
}

#[test]
fn formats_in_metadata_and_old_names_are_read() {
    let dir = TempDir::new().expect("dir");
    let path = dir.path().join("x.safetensors");
    let layers =
        json!({"format_version": "1.0", "layers": {"a": {"format": "float8_e4m3fn"}, "gone": {"format": "x"}}});
    let header = json!({"_quantization_metadata": layers.to_string()});
    let tensors: [(&str, &str, &[usize]); 2] = [("a.weight", "F8_E4M3", &[2, 4]), ("a.weight_scale", "F32", &[])];
    let file = open(&put(path.clone(), safetensors(&tensors, header)));
    assert!(file.scales_of("a.weight").expect("one").is_some());
    let bad = json!({"_quantization_metadata": json!({"layers": {"a": {"format": "mxfp8"}}}).to_string()});
    fails(Checkpoint::open(&put(path.clone(), safetensors(&tensors, bad))), &["`a.weight`", "mxfp8"]);
    let old: [(&str, &str, &[usize]); 5] = [
        ("a.weight", "F8_E4M3", &[2, 4]),
        ("a.scale_weight", "F32", &[1]),
        ("a.scale_input", "F32", &[1]),
        ("model.scaled_fp8", "F8_E4M3", &[2]),
        ("b.scale_weight", "F32", &[1]),
    ];
    let file = open(&put(path, safetensors(&old, Value::Null)));
    assert_eq!(file.names().collect::<Vec<_>>(), ["a.weight", "a.weight_scale", "b.scale_weight"]);
}

/// ModelOpt's files have the names, types, shapes and formats of ComfyUI's files (findings/nvfp4_nibble_order.sh). They
/// are recognized by the header key `quantization_config`, which ModelOpt 0.47.0 writes when it embeds its
/// configuration.
#[test]
fn nvfp4_of_modelopt_is_refused() {
    let dir = TempDir::new().expect("dir");
    let path = dir.path().join("x.safetensors");
    let tensors: [(&str, &str, &[usize]); 3] =
        [("a.weight", "U8", &[128, 32]), ("a.weight_scale", "F8_E4M3", &[128, 4]), ("a.weight_scale_2", "F32", &[])];
    let tool = |method: &str| json!({"quantization_config": json!({"quant_method": method}).to_string()});
    fails(
        Checkpoint::open(&put(path.clone(), safetensors(&tensors, tool("modelopt")))),
        &["x.safetensors", "`a.weight`", "nvfp4", "NVIDIA ModelOpt", "use the bf16 file"],
    );
    assert_eq!(open(&put(path, safetensors(&tensors, tool("other")))).shape("a.weight"), Some(&[128, 64][..]));
}

#[test]
fn marked_fp8_weight_without_scale_is_refused() {
    let dir = TempDir::new().expect("dir");
    let layers = json!({"format_version": "1.0", "layers": {"x": {"format": "float8_e4m3fn"}}});
    let header = json!({"_quantization_metadata": layers.to_string()});
    let file = put(dir.path().join("x.safetensors"), safetensors(&[("x.weight", "F8_E4M3", &[4, 4])], header));
    fails(Checkpoint::open(&file), &["x.safetensors", "`x.weight`", "float8_e4m3fn", "`x.weight_scale` is missing"]);
}

#[test]
fn split_repository_without_bf16_files_opens() {
    let dir = TempDir::new().expect("dir");
    let transformer = super::ltx2_5::split(dir.path());
    let encoder = dir.path().join("text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors");
    std::fs::remove_file(encoder).expect("removed");
    let quantized = transformer.with_file_name("ltx-2.5-22b-dev-transformer-comfy-int8-convrot.safetensors");
    std::fs::rename(&transformer, &quantized).expect("renamed");
    let source = super::open(dir.path()).expect("opens");
    assert_eq!(source.path(), quantized);
    let encoder = source.checkpoint(Component::TextEncoder).expect("there");
    assert!(encoder.path().ends_with("gemma4-12b-with-proj-ltx-2.5-comfy-int8-convrot.safetensors"));
    let other = dir.path().join("text_encoders/gemma4-12b-with-proj-ltx-2.5-nvfp4.safetensors");
    put(other.clone(), "");
    let what = ["text_encoders", "2 files could be the text encoder", "int8-convrot", "nvfp4", "specify one of them"];
    fails(super::open(dir.path()).expect("opens").require([Component::TextEncoder]), &what);
    std::fs::remove_file(other).expect("removed");
    put(transformer.with_file_name("ltx-2.5-22b-distilled-transformer-nvfp4.safetensors"), "");
    let what = ["2 files could be the transformer", "transformer-nvfp4.safetensors", "specify one of them"];
    fails(super::open(dir.path()), &what);
}

/// Returns the bytes of a GGUF file with the given metadata strings and tensors. A tensor is its name, type number,
/// dimensions (outermost first) and codes.
pub(super) fn gguf(texts: &[(&str, &str)], tensors: &[(&str, u32, &[u64], &[u8])]) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut bytes = [&b"GGUF\x03\0\0\0"[..], &(tensors.len() as u64).to_le_bytes()].concat();
    bytes.extend((texts.len() as u64).to_le_bytes());
    texts.iter().for_each(|(key, value)| bytes.extend([text(key), 8u32.to_le_bytes().to_vec(), text(value)].concat()));
    let mut data = Vec::new();
    for (name, kind, shape, codes) in tensors {
        bytes.extend([text(name), (shape.len() as u32).to_le_bytes().to_vec()].concat());
        shape.iter().rev().for_each(|size| bytes.extend(size.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend((data.len() as u64).to_le_bytes());
        data.extend_from_slice(codes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend(data);
    bytes
}

/// Returns the CPU time of this thread in seconds.
fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("a number") / 1e9
}

/// Prints how many bytes of bf16 each decoder produces per second on one core, and the rate of a copy in memory:
/// `LTX2_TEST_FULL=1 cargo test --release -p ltx2-weights --lib rate -- --nocapture`.
#[test]
fn decoding_rate_is_printed() {
    if std::env::var_os("LTX2_TEST_FULL").is_none() {
        return;
    }
    let shared = Path::new("/dev/shm");
    let dir = if shared.is_dir() { TempDir::new_in(shared) } else { TempDir::new() }.expect("dir");
    let codes: Vec<u8> = (0..1u32 << 24).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 & 0x3f).collect();
    let mut files = Vec::new();
    // Name, number, elements and bytes of a block.
    for (name, kind, block, bytes) in [
        ("GGUF F32", 0, 1, 4),
        ("GGUF F16", 1, 1, 2),
        ("GGUF BF16", 30, 1, 2),
        ("GGUF Q8_0", 8, 32, 34),
        ("GGUF Q4_0", 2, 32, 18),
        ("GGUF Q4_1", 3, 32, 20),
        ("GGUF Q5_0", 6, 32, 22),
        ("GGUF Q5_1", 7, 32, 24),
        ("GGUF Q2_K", 10, 256, 84),
        ("GGUF Q3_K", 11, 256, 110),
        ("GGUF Q4_K", 12, 256, 144),
        ("GGUF Q5_K", 13, 256, 176),
        ("GGUF Q6_K", 14, 256, 210),
        ("GGUF IQ4_NL", 20, 32, 18),
        ("GGUF IQ4_XS", 23, 256, 136),
    ] {
        let rows = 4096 * 256 / block;
        let file = gguf(&[], &[("a.weight", kind, &[rows, block * 4], &codes[..(rows * 4 * bytes) as usize])]);
        files.push((name, put(dir.path().join(format!("{kind}.gguf")), file)));
    }
    let by_row: (&str, &str, &[usize]) = ("a.weight_scale", "F32", &[1024, 1]);
    let tiles: [(&str, &str, &[usize]); 2] =
        [("a.weight_scale", "F8_E4M3", &[1024, 256]), ("a.weight_scale_2", "F32", &[])];
    for (name, format, dtype, columns, scales) in [
        ("fp8 e4m3", json!({"format": "float8_e4m3fn"}), "F8_E4M3", 4096, &[by_row][..]),
        ("fp8 e5m2", json!({"format": "float8_e5m2"}), "F8_E5M2", 4096, &[by_row]),
        ("int8", json!({"format": "int8_tensorwise"}), "I8", 4096, &[by_row]),
        ("int8-convrot", json!({"format": "int8_tensorwise", "convrot": true}), "I8", 4096, &[by_row]),
        ("nvfp4", json!({"format": "nvfp4"}), "U8", 2048, &tiles),
    ] {
        marked(dir.path(), &[&[weight(dtype, &[1024, columns])], scales].concat(), &format).expect("opens");
        let path = dir.path().join(format!("{}.safetensors", files.len()));
        std::fs::rename(dir.path().join("x.safetensors"), &path).expect("renamed");
        files.push((name, path));
    }
    let rate = |name: &str, bytes: &mut [u8], fill: &dyn Fn(&mut [u8])| {
        fill(bytes);
        let (start, mut total) = (processor_seconds(), 0);
        while processor_seconds() - start < 0.2 {
            fill(std::hint::black_box(&mut *bytes));
            total += bytes.len();
        }
        println!("{name:14} {:6.2} GB/s", total as f64 / (processor_seconds() - start) / 1e9);
    };
    for (format, path) in files {
        let file = open(&path);
        let view = file.dequantized("a.weight").expect("floats").converted(DType::BF16);
        rate(format, &mut vec![0; view.size()], &|bytes| view.read_at(0, bytes).expect("readable"));
    }
    rate("copy", &mut vec![0; 8 << 20], &|bytes| bytes.copy_from_slice(&codes[..8 << 20]));
}
