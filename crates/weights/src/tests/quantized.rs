//! Tests of quantized files: values of comfy-kitchen 0.2.40 (`scripts/oracle/quantized.py`).

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::*;
use super::{fails, put, safetensors};
use ltx2_stablehlo::DType;

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/quantized")).join(name)
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap_or_else(|e| panic!("{e}"))
}

fn bits(view: &TensorView) -> Vec<u32> {
    view.to_tensor().expect("readable").to_f32().iter().map(|value| value.to_bits()).collect()
}

/// Any part of a tensor, read by itself, has the values of the whole.
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
fn comfy_kitchen_values_are_equal_in_every_bit() {
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
    let rounded = file.get("convrot.weight").expect("there").to_tensor().expect("readable");
    let rounded = rounded.cast(DType::BF16).expect("floats").to_f32();
    assert_eq!(rounded.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), want("convrot.bf16"));
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

/// A file with one weight that is marked as quantized.
fn marked(
    dir: &Path,
    weight: (&str, &[usize]),
    more: &[(&str, &str, &[usize])],
    conf: &Value,
) -> Result<Checkpoint, WeightsError> {
    let text = conf.to_string();
    let marker = [text.len()];
    let mut tensors = vec![("a.weight", weight.0, weight.1)];
    tensors.extend(more);
    tensors.push(("a.comfy_quant", "U8", &marker));
    let mut bytes = safetensors(&tensors, Value::Null);
    let at = bytes.len() - text.len();
    bytes[at..].copy_from_slice(text.as_bytes());
    Checkpoint::open(&put(dir.join("x.safetensors"), bytes))
}

#[test]
fn unsupported_comfy_formats_are_refused() {
    let dir = TempDir::new().expect("dir");
    let cure = ["x.safetensors", "`a.weight`", "use the bf16 file", "int8-convrot"];
    let refused = |weight, more: &[(&str, &str, &[usize])], conf: Value, what: &str| {
        fails(marked(dir.path(), weight, more, &conf), &[&cure[..], &[what]].concat());
    };
    let scale: (&str, &str, &[usize]) = ("a.weight_scale", "F32", &[2, 1]);
    let int8 = |more: Value| {
        let mut conf = json!({"format": "int8_tensorwise", "convrot": true});
        conf.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
        conf
    };
    refused(
        ("U8", &[2, 4]),
        &[],
        json!({"format": "mxfp8"}),
        r#"quantized as {"format":"mxfp8"}, which is not supported"#,
    );
    refused(("BF16", &[2, 4]), &[], json!({"format": "nvfp4"}), "but is bf16");
    refused(("I8", &[2, 256]), &[scale], int8(json!({"convrot_groupsize": 64})), "groups of 64");
    refused(("I8", &[2, 300]), &[scale], int8(Value::Null), "300 columns in groups of 256");
    refused(("I8", &[3, 256]), &[scale], int8(Value::Null), "`a.weight_scale` is f32 of shape [2, 1]");
    refused(("I8", &[256]), &[scale], int8(Value::Null), "has shape [256]");
    fails(marked(dir.path(), ("I8", &[2, 256]), &[], &int8(Value::Null)), &["`a.weight_scale` is missing"]);
    let blocks: (&str, &str, &[usize]) = ("a.weight_scale", "F8_E4M3", &[2, 4]);
    let whole: (&str, &str, &[usize]) = ("a.weight_scale_2", "F32", &[]);
    refused(
        ("U8", &[2, 8]),
        &[blocks, whole],
        json!({"format": "nvfp4"}),
        "`a.weight_scale` is f8_e4m3 of shape [2, 4]",
    );
    let read = marked(dir.path(), ("I8", &[2, 256]), &[scale], &int8(Value::Null)).expect("256 by default");
    assert_eq!(read.names().collect::<Vec<_>>(), ["a.weight"]);
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
