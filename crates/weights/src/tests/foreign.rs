//! Tests of files that are not safetensors files, of e5m2 weights, and of incomplete sets of shards.

use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::*;
use super::{diffusers_folder, fails, message, open, open_with, put, safetensors};
use ltx2_stablehlo::DType;

const LFS: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 46149344974\n";

/// First bytes of files, and the expected description of each.
const FILES: [(&[u8], &str); 8] = [
    (LFS, "a git-LFS pointer"),
    (b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>", "an HTML page"),
    (b"\n<HTML lang=\"en\">not found</HTML>", "an HTML page"),
    (b"{\"error\": \"Repository not found\"}", "JSON"),
    (b"PK\x03\x04\0\0\x08\x08archive/data.pkl", "torch.save"),
    (b"\x80\x02}q\0X\x05\0\0\0stateq\x01.", "torch.save"),
    (b"\x1f\x8b\x08\0\0\0\0\0\0\x03packed bytes", "a compressed archive"),
    (&[0; 64], "a file that begins with zeros"),
];

#[test]
fn foreign_file_types_are_identified() {
    let dir = TempDir::new().expect("dir");
    diffusers_folder(dir.path());
    for (bytes, kind) in FILES {
        let file = put(dir.path().join("foreign.safetensors"), bytes);
        let name = file.to_str().expect("utf-8").to_string();
        let words = ["foreign.safetensors: not a safetensors file: the file is ", kind];
        fails(Checkpoint::open(&file), &words);
        fails(open(&file), &words);
        fails(LoraFile::open(&name), &words);
        let encoder = Overrides { text_encoder: Some(name), ..Overrides::default() };
        fails(open_with(dir.path(), &encoder), &words);
        put(dir.path().join("transformer/diffusion_pytorch_model.safetensors"), bytes);
        fails(open(dir.path()).expect("opens").checkpoint(Component::Transformer), &["the file is ", kind]);
    }
    let file = dir.path().join("foreign.safetensors");
    fails(Checkpoint::open(&put(file.clone(), b"")), &["the file is empty"]);
    // An impossible length field and unknown contents.
    fails(Checkpoint::open(&put(file, [0xfe; 64])), &["the file is in another format or damaged"]);
}

#[test]
fn git_lfs_pointer_config_is_identified() {
    let dir = TempDir::new().expect("dir");
    diffusers_folder(dir.path());
    put(dir.path().join("transformer/config.json"), LFS);
    let words = ["transformer/config.json: not JSON: the file is a git-LFS pointer", "git lfs pull"];
    fails(open(dir.path()).expect("opens").config(Component::Transformer), &words);
    let index = put(dir.path().join("model.safetensors.index.json"), LFS);
    fails(Checkpoint::open(&index), &["index.json: not JSON: the file is a git-LFS pointer"]);
}

#[test]
fn lone_gguf_file_of_a_folder_is_opened() {
    let dir = TempDir::new().expect("dir");
    put(dir.path().join("model-Q4_K.gguf"), b"GGUF\x03\0\0\0\x05\x02\0\0\0\0\0\0 and more");
    fails(Checkpoint::open(dir.path()), &["model-Q4_K.gguf: truncated"]);
    put(dir.path().join("model-Q6_K.gguf"), b"GGUF");
    fails(Checkpoint::open(dir.path()), &["2 GGUF files", "model-Q4_K.gguf, model-Q6_K.gguf", "specify one of them"]);
}

#[test]
fn complete_shard_set_without_index_opens() {
    let dir = TempDir::new().expect("dir");
    let shard = |number: usize, name: &str| {
        let file = dir.path().join(format!("model-0000{number}-of-00003.safetensors"));
        put(file, safetensors(&[(name, "BF16", &[4])], Value::Null))
    };
    shard(1, "a");
    let words = ["1 of 3 shards and no index", "model-00002-of-00003.safetensors, model-00003-of-00003.safetensors"];
    fails(Checkpoint::open(dir.path()), &words);
    let last = shard(3, "c");
    fails(
        Checkpoint::open(dir.path()),
        &["2 of 3 shards", "index; model-00002-of-00003.safetensors and model.safetensors"],
    );
    shard(2, "b");
    let whole = Checkpoint::open(dir.path()).expect("opens");
    assert_eq!(whole.names().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(whole.get("c").expect("there").file(), last);
    shard(2, "a");
    fails(Checkpoint::open(dir.path()), &["model-00002-of-00003.safetensors: tensor `a` is defined twice"]);
    // Files that do not form one set of shards.
    put(dir.path().join("other.safetensors"), safetensors(&[("d", "BF16", &[4])], Value::Null));
    fails(Checkpoint::open(dir.path()), &["4 safetensors files without an index", "specify one of them"]);
}

#[test]
fn lora_file_as_model_is_identified() {
    let dir = TempDir::new().expect("dir");
    for key in
        ["diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight", "lora_unet_x.lora_down.weight", "x.diff"]
    {
        let file = put(dir.path().join("style.safetensors"), safetensors(&[(key, "BF16", &[4, 2])], Value::Null));
        fails(open(&file), &["style.safetensors", key, "is part of a LoRA, which is not a model", "--lora"]);
    }
    let other = safetensors(&[("weight", "BF16", &[4])], Value::Null);
    let said = message(open(&put(dir.path().join("other.safetensors"), other)));
    assert!(said.contains("`config` is missing") && !said.contains("LoRA"), "{said}");
}

/// Returns the bytes of a safetensors file with e5m2 weights, given as bytes, and optional scales.
fn e5m2(numbers: &[u8], scales: Option<(&[usize], &[f32])>) -> Vec<u8> {
    let rows = numbers.len() / 4;
    let mut header = json!({"w.weight": {"dtype": "F8_E5M2", "shape": [rows, 4], "data_offsets": [0, numbers.len()]}});
    let mut data = numbers.to_vec();
    if let Some((shape, scales)) = scales {
        let start = data.len();
        data.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
        header["w.weight_scale"] = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
    }
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

#[test]
fn e5m2_weights_are_converted_exactly() {
    let dir = TempDir::new().expect("dir");
    let file = dir.path().join("w.safetensors");
    let open = |bytes: Vec<u8>| Checkpoint::open(&put(file.clone(), bytes)).expect("opens");
    // 1, the next larger value, the smallest and the largest value, negatives, and both zeros.
    let numbers = [0x3c, 0x3d, 0x01, 0x7b, 0xbc, 0xbd, 0x80, 0x00];
    let values = [1.0, 1.25, 2f32.powi(-16), 57344.0, -1.0, -1.25, -0.0, 0.0];
    let plain = open(e5m2(&numbers, None));
    let view = plain.get_float("w.weight").expect("floats");
    assert_eq!((view.dtype(), view.size()), (DType::BF16, 16));
    assert_eq!(view.to_tensor().expect("read").to_f32().into_iter().collect::<Vec<_>>(), values);
    let mut piece = [0; 4];
    view.read_at(8, &mut piece).expect("read");
    assert_eq!(piece, view.read().expect("read")[8..12]);
    for (shape, scales) in [(&[][..], &[0.3][..]), (&[2], &[0.3, 7.0]), (&[2, 1], &[0.3, 7.0])] {
        let scaled = open(e5m2(&numbers, Some((shape, scales))));
        assert_eq!(scaled.names().collect::<Vec<_>>(), ["w.weight"]);
        let of_row = |i: usize| scales[if scales.len() == 1 { 0 } else { i / 4 }];
        let wanted: Vec<f32> = values.iter().enumerate().map(|(i, value)| value * of_row(i)).collect();
        let view = scaled.get_float("w.weight").expect("floats");
        let got: Vec<f32> = view.to_tensor().expect("read").to_f32().into_iter().collect();
        assert_eq!((view.dtype(), got), (DType::F32, wanted));
    }
    // Block scales are kept and reported.
    let blocks = open(e5m2(&numbers, Some((&[2, 2], &[1.0; 4]))));
    fails(blocks.scales_of("w.weight"), &["w.weight_scale", "[2, 2]"]);
}
