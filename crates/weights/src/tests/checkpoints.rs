//! Tests of valid and damaged safetensors files and indices.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::super::validate::first_non_finite;
use super::super::*;
use super::{fails, put, safetensors};
use crate::tensor::Tensor;
use ltx2_stablehlo::DType;

#[test]
fn single_file_is_opened_and_read() {
    let dir = TempDir::new().expect("dir");
    let mut bytes = safetensors(&[("a.weight", "F32", &[2, 2]), ("b", "BF16", &[3])], json!({"note": "x"}));
    let start = bytes.len() - 22;
    bytes[start..start + 4].copy_from_slice(&1.5f32.to_le_bytes());
    let path = put(dir.path().join("m.safetensors"), bytes);
    let checkpoint = Checkpoint::open(&path).expect("opens");
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a.weight", "b"]);
    assert_eq!(checkpoint.metadata("note"), Some("x"));
    let view = checkpoint.get_float("a.weight").expect("there");
    drop(checkpoint);
    assert_eq!((view.dtype(), view.shape(), view.file()), (DType::F32, [2, 2].as_slice(), path.as_path()));
    assert_eq!(view.to_tensor().expect("f32").to_f32()[[0, 0]], 1.5);
    fails(view.expect_shape(&[4]), &["m.safetensors", "a.weight", "[2, 2]", "[4]"]);
}

#[test]
fn damaged_file_errors_contain_path() {
    let dir = TempDir::new().expect("dir");
    let whole = safetensors(&[("w", "F32", &[4])], Value::Null);
    let open = |bytes: &[u8]| Checkpoint::open(&put(dir.path().join("x.safetensors"), bytes));
    fails(open(b""), &["x.safetensors", "the file is empty"]);
    fails(open(b"short"), &["x.safetensors", "5 bytes"]);
    fails(open(b"<html>not a model</html>"), &["not a safetensors file"]);
    fails(open(&whole[..20]), &["truncated", "the file has 20"]);
    let want = format!("requires {} bytes, the file has {}", whole.len(), whole.len() - 5);
    fails(open(&whole[..whole.len() - 5]), &["truncated", &want]);
    fails(open(&[&whole[..], b"xy"].concat()), &["2 bytes after the last tensor"]);
    let mut garbled = whole.clone();
    garbled[12] = b'\n';
    fails(open(&garbled), &["x.safetensors", "damaged header"]);
    fails(Checkpoint::open(&dir.path().join("none.safetensors")), &["none.safetensors", "cannot open"]);
}

#[test]
fn file_changed_while_open_is_an_error() {
    let dir = TempDir::new().expect("dir");
    let whole = safetensors(&[("w", "F32", &[4])], Value::Null);
    let path = put(dir.path().join("x.safetensors"), &whole);
    let checkpoint = Checkpoint::open(&path).expect("opens");
    // Replacing or removing the path does not affect the open file.
    put(dir.path().join("y"), b"other");
    fs::rename(dir.path().join("y"), &path).expect("renamed");
    assert_eq!(checkpoint.get("w").expect("there").read().expect("whole").len(), 16);

    let path = put(dir.path().join("z.safetensors"), &whole);
    let checkpoint = Checkpoint::open(&path).expect("opens");
    let view = checkpoint.get("w").expect("whole");
    fs::OpenOptions::new().write(true).open(&path).and_then(|f| f.set_len(20)).expect("cut short");
    // A read returns an error; a memory mapping would crash the process with a signal.
    fails(view.read(), &["z.safetensors", "while it was in use"]);
    fails(checkpoint.get("w"), &["z.safetensors", "while it was in use", &format!("{} bytes, now 20", whole.len())]);

    // The file is rewritten in place with other weights of the same size.
    let path = put(dir.path().join("rewritten.safetensors"), &whole);
    let checkpoint = Checkpoint::open(&path).expect("opens");
    let before = fs::metadata(&path).and_then(|about| about.modified()).expect("a time");
    let mut other = whole.clone();
    let last = other.len() - 1;
    other[last] ^= 1;
    // Modification times have a resolution of some milliseconds.
    while fs::metadata(&path).and_then(|about| about.modified()).expect("a time") == before {
        put(path.clone(), &other);
    }
    fails(checkpoint.get("w"), &["rewritten.safetensors", "while it was in use"]);
    assert!(Checkpoint::open(&path).expect("opens").get("w").is_ok(), "it is a model as good as the first");
}

#[test]
fn huge_offsets_are_an_error() {
    let dir = TempDir::new().expect("dir");
    let mut header = Map::new();
    let part = 1u64 << 60;
    for i in 0..15u64 {
        let info = json!({"dtype": "U8", "shape": [part], "data_offsets": [i * part, (i + 1) * part]});
        header.insert(format!("t{i:02}"), info);
    }
    header.insert("z".into(), json!({"dtype": "U8", "shape": [part - 1], "data_offsets": [15 * part, u64::MAX]}));
    let text = Value::Object(header).to_string();
    let bytes = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    fails(Checkpoint::open(&put(dir.path().join("x.safetensors"), bytes)), &["x.safetensors"]);
}

#[test]
fn header_with_100_000_tensors_opens_and_oversized_header_fails() {
    let dir = TempDir::new().expect("dir");
    let tensor = |i: usize| format!("\"t{i}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}");
    let text = format!("{{{}}}", (0..100_000).map(tensor).collect::<Vec<_>>().join(","));
    let bytes = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let checkpoint = Checkpoint::open(&put(dir.path().join("x.safetensors"), bytes)).expect("opens");
    assert_eq!(checkpoint.names().count(), 100_000);
    let claims = [&(1u64 << 60).to_le_bytes()[..], b"{}"].concat();
    fails(Checkpoint::open(&put(dir.path().join("y.safetensors"), claims)), &["y.safetensors"]);
}

#[test]
fn unsupported_element_type_fails_on_access() {
    let dir = TempDir::new().expect("dir");
    let bytes = safetensors(&[("f", "BF16", &[1]), ("q", "I8", &[4]), ("e", "F8_E8M0", &[4])], Value::Null);
    let checkpoint = Checkpoint::open(&put(dir.path().join("x.safetensors"), bytes)).expect("opens");
    assert!(checkpoint.get("q").is_ok());
    fails(checkpoint.get_float("q"), &["x.safetensors", "`q` is i8", "bf16, f16, f32 or f8_e4m3"]);
    fails(checkpoint.get("e"), &["`e` is f8_e8m0"]);
    fails(checkpoint.get("gone"), &["x.safetensors", "`gone` is missing"]);
}

/// Writes two shards and their index.
fn sharded(dir: &Path, index: Value) -> PathBuf {
    put(dir.join("model-00001-of-00002.safetensors"), safetensors(&[("a", "F32", &[1])], Value::Null));
    put(dir.join("model-00002-of-00002.safetensors"), safetensors(&[("b", "F32", &[2])], Value::Null));
    put(dir.join("model.safetensors.index.json"), index.to_string())
}

#[test]
fn shards_are_opened_through_index() {
    let dir = TempDir::new().expect("dir");
    let map = |b: &str| json!({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": b}});
    sharded(dir.path(), map("model-00002-of-00002.safetensors"));
    let checkpoint = Checkpoint::open(dir.path()).expect("opens");
    assert_eq!((checkpoint.shape("a"), checkpoint.shape("b")), (Some([1].as_slice()), Some([2].as_slice())));
    assert_eq!(checkpoint.files().count(), 2);
    sharded(dir.path(), map("model-00001-of-00002.safetensors"));
    fails(Checkpoint::open(dir.path()), &["index.json", "`b`", "model-00001-of-00002", "is not in"]);
    sharded(dir.path(), map("model-00003-of-00003.safetensors"));
    fails(Checkpoint::open(dir.path()), &["index.json", "shard `model-00003-of-00003.safetensors` is missing", "`b`"]);
    sharded(dir.path(), map("../other.safetensors"));
    fails(Checkpoint::open(dir.path()), &["outside the folder"]);
    put(dir.path().join("model.safetensors.index.json"), "{");
    fails(Checkpoint::open(dir.path()), &["index.json", "not JSON"]);
}

#[test]
fn folder_weights_are_selected_by_name() {
    let dir = TempDir::new().expect("dir");
    fails(Checkpoint::open(dir.path()), &["no safetensors or GGUF file"]);
    let packed = dir.path().join("model.flashpack");
    put(packed.clone(), "x");
    let advice = "FlashPack weights, which this program does not read; get the model's safetensors files";
    fails(Checkpoint::open(dir.path()), &["model.flashpack", advice]);
    fails(Checkpoint::open(&packed), &["model.flashpack", advice]);
    fs::remove_file(&packed).expect("removed");
    put(dir.path().join("pytorch_model.bin"), "x");
    fails(Checkpoint::open(dir.path()), &["only pickled weights"]);
    let file = |name: &str, tensor: &str| {
        put(dir.path().join(name), safetensors(&[(tensor, "F32", &[1])], Value::Null));
    };
    let first = || Checkpoint::open(dir.path()).expect("opens").names().next().map(String::from);
    file("one.safetensors", "one");
    assert_eq!(first().as_deref(), Some("one"));
    file("two.safetensors", "two");
    fails(Checkpoint::open(dir.path()), &["one.safetensors, two.safetensors", "specify one of them"]);
    file("diffusion_pytorch_model.bf16.safetensors", "bf16");
    assert_eq!(first().as_deref(), Some("bf16"));
    file("diffusion_pytorch_model.safetensors", "plain");
    assert_eq!(first().as_deref(), Some("plain"));
}

#[test]
fn validation_lists_differences() {
    let dir = TempDir::new().expect("dir");
    let tensors: [(&str, &str, &[usize]); 4] =
        [("a", "F32", &[2]), ("b", "F32", &[2, 3]), ("q", "I8", &[2]), ("statistics", "F32", &[1])];
    let path = put(dir.path().join("x.safetensors"), safetensors(&tensors, Value::Null));
    let checkpoint = Checkpoint::open(&path).expect("opens");
    let declared: [(&str, &[usize]); 6] =
        [("a", &[2]), ("b", &[3, 2]), ("q", &[2]), ("c.0", &[1]), ("c.1", &[1]), ("c.1", &[1])];
    let report = validate(&checkpoint, Component::Vae, declared);
    assert_eq!((report.matched, report.bytes), (1, 8));
    assert_eq!(report.missing, ["c.0", "c.1"]);
    assert_eq!(report.extra, ["statistics"]);
    assert_eq!(report.lines().len(), 5);
    let text = "2 missing (c.0, c.1); 1 mis-shaped (b: file [2, 3], model [3, 2]); 1 not floating point (q: i8); \
                1 unknown (statistics)";
    assert_eq!(report.to_string(), text);
    fails(report.into_result(Component::Vae, &checkpoint), &["x.safetensors", "the video VAE", text]);
    let names: [(&str, &str, &[usize]); 5] = [
        ("a.weight", "F32", &[2]),
        ("a.weight_scale", "F32", &[]),
        ("a.input_scale", "F32", &[]),
        ("upsampler.blur_down.a", "F32", &[2]),
        ("upsampler.blur_downs", "F32", &[1]),
    ];
    let path = put(dir.path().join("y.safetensors"), safetensors(&names, Value::Null));
    let checkpoint = Checkpoint::open(&path).expect("opens");
    let declared: [(&str, &[usize]); 1] = [("a.weight", &[2])];
    let report = validate(&checkpoint, Component::LatentUpsampler, declared);
    assert_eq!((&report.extra[..], report.inert), (&["upsampler.blur_downs".to_string()][..], 2));
    let why = ["y.safetensors", "1 unknown (upsampler.blur_downs)"];
    fails(report.into_result(Component::LatentUpsampler, &checkpoint), &why);
}

#[test]
fn block_and_integer_scales_fail_validation() {
    let dir = TempDir::new().expect("dir");
    let report = |shape: &[usize], scale: (&str, &[usize])| {
        let tensors = [("a.weight", "F8_E4M3", shape), ("a.weight_scale", scale.0, scale.1)];
        let path = put(dir.path().join("x.safetensors"), safetensors(&tensors, Value::Null));
        let checkpoint = Checkpoint::open(&path).expect("opens");
        let report = validate(&checkpoint, Component::Transformer, [("a.weight", shape)]);
        (report.clone(), report.into_result(Component::Transformer, &checkpoint))
    };
    for (dtype, scale) in [("F32", &[][..]), ("F32", &[1]), ("BF16", &[1, 1]), ("F32", &[4]), ("F16", &[4, 1])] {
        report(&[4, 6], (dtype, scale)).1.unwrap_or_else(|e| panic!("{scale:?}: {e}"));
    }
    // Scales per block or per column, too many scales, and none.
    for (shape, scale) in [([4, 6], &[2, 3][..]), ([4, 6], &[2, 2]), ([4, 4], &[1, 4]), ([4, 6], &[6]), ([4, 6], &[0])]
    {
        let (report, result) = report(&shape, ("F32", scale));
        assert_eq!((report.misscaled.len(), report.lines().len()), (1, 1), "{scale:?}");
        let had = format!("`a.weight_scale` has shape {scale:?}");
        fails(result, &["x.safetensors", &had, "one for each of 4 rows; use bf16 weights"]);
    }
    let (report, result) = report(&[4, 6], ("I8", &[4, 1]));
    assert_eq!(report.wrong_dtype, [("a.weight_scale".to_string(), "i8".to_string())]);
    fails(result, &["x.safetensors", "1 not floating point (a.weight_scale: i8)"]);
}

#[test]
fn first_non_finite_value_is_reported() {
    let dir = TempDir::new().expect("dir");
    let mut bytes = safetensors(&[("w", "BF16", &[2, 3])], Value::Null);
    let path = put(dir.path().join("x.safetensors"), &bytes);
    read_finite(&Checkpoint::open(&path).expect("opens").get("w").expect("there")).expect("zeros are finite");
    let at = bytes.len() - 4;
    bytes[at..at + 2].copy_from_slice(&half::bf16::NEG_INFINITY.to_le_bytes());
    let path = put(dir.path().join("y.safetensors"), &bytes);
    let view = Checkpoint::open(&path).expect("opens").get("w").expect("there");
    fails(read_finite(&view), &["y.safetensors", "`w` is -inf at [1, 1]"]);
    // The index refers to the complete tensor even if a part is checked.
    fails(check_finite(&view, 6, &view.read().expect("whole")[6..]), &["y.safetensors", "`w` is -inf at [1, 1]"]);
    view.read_at(0, &mut [0; 8]).expect("whole");
    let position = |t: Tensor| first_non_finite(t.dtype(), &t.bytes());
    assert_eq!(position(ndarray::arr1(&[1.0f32, f32::MAX, f32::NAN]).into()), Some(2));
    assert_eq!(position(ndarray::arr1(&[f64::MAX, f64::INFINITY]).into()), Some(1));
    assert_eq!(position(ndarray::arr1(&[half::f16::MAX, half::f16::MIN]).into()), None);
    assert_eq!(position(ndarray::arr1(&[-1i32]).into()), None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// A damaged file is an error or readable to its last byte, but never a panic.
    #[test]
    fn damaged_files_never_panic(cut in 0usize..400, flips in prop::collection::vec((0usize..400, any::<u8>()), 0..6)) {
        let mut bytes = safetensors(&[("a.weight", "F32", &[2, 3]), ("b", "BF16", &[7])], json!({"k": "v"}));
        for (at, value) in flips {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        bytes.truncate(cut.max(1));
        read_everything(&bytes);
    }

    /// Headers with arbitrary sizes and offsets.
    #[test]
    fn arbitrary_headers_never_panic(
        infos in prop::collection::vec((any::<u64>(), prop::collection::vec(any::<u64>(), 0..4), any::<u64>()), 0..4),
        length in prop::option::of(any::<u64>()),
        tail in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let mut header = Map::new();
        for (i, (from, shape, to)) in infos.into_iter().enumerate() {
            header.insert(format!("t{i}"), json!({"dtype": "F32", "shape": shape, "data_offsets": [from, to]}));
        }
        let text = Value::Object(header).to_string();
        let mut bytes = length.unwrap_or(text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        bytes.extend(tail);
        read_everything(&bytes);
    }
}

fn read_everything(bytes: &[u8]) {
    let dir = TempDir::new().expect("dir");
    let path = put(dir.path().join("x.safetensors"), bytes);
    match Checkpoint::open(&path) {
        Err(e) => assert!(e.to_string().contains("x.safetensors")),
        Ok(checkpoint) => {
            for name in checkpoint.names() {
                if let Ok(view) = checkpoint.get(name) {
                    let _ = view.read().map(|bytes| first_non_finite(view.dtype(), &bytes));
                }
            }
        }
    }
}
