//! Helpers for tests with valid and damaged models in temporary folders.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::*;

mod adapters;
mod checkpoints;
mod convert;
mod diffusion_decoder;
mod fingerprint;
mod foreign;
mod gguf_model;
mod ltx2_5;
mod official;
mod quantized;
mod sources;
mod split;
mod strict;
mod torchao;
mod writing;

/// Returns the bytes of a safetensors file in which all values are zero.
fn safetensors(tensors: &[(&str, &str, &[usize])], metadata: Value) -> Vec<u8> {
    let mut header = Map::new();
    if metadata.is_object() {
        header.insert("__metadata__".into(), metadata);
    }
    let mut at = 0;
    for (name, dtype, shape) in tensors {
        let size = match *dtype {
            "F32" | "I32" => 4,
            "I8" | "U8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 1,
            _ => 2,
        };
        let end = at + shape.iter().product::<usize>() * size;
        header.insert((*name).into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let text = Value::Object(header).to_string();
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes.resize(bytes.len() + at, 0);
    bytes
}

fn put(path: PathBuf, bytes: impl AsRef<[u8]>) -> PathBuf {
    fs::create_dir_all(path.parent().expect("a parent")).expect("folder");
    fs::write(&path, bytes).expect("file");
    path
}

fn message<T: std::fmt::Debug>(result: Result<T, WeightsError>) -> String {
    let text = result.expect_err("an error").to_string();
    assert!(!text.contains('\n'), "one line: {text}");
    text
}

/// Checks that a result is an error whose message contains every part.
fn fails<T: std::fmt::Debug>(result: Result<T, WeightsError>, parts: &[&str]) {
    let text = message(result);
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

fn no_cache() -> HubCache {
    HubCache::at("/nonexistent/hub")
}

/// Opens a model by its path, without a cache and without overrides.
fn open(path: &Path) -> Result<ModelSource, WeightsError> {
    open_with(path, &Overrides::default())
}

fn open_with(path: &Path, overrides: &Overrides) -> Result<ModelSource, WeightsError> {
    ModelSource::open_in(path.to_str().expect("utf-8"), overrides, &no_cache())
}

/// Returns the folder of a model's tokenizer.
fn tokenizer(source: &ModelSource) -> PathBuf {
    match source.tokenizer().expect("there") {
        TokenizerFiles::Folder(folder) => folder,
        packed => panic!("{packed:?}"),
    }
}

fn diffusers_folder(root: &Path) {
    put(root.join("model_index.json"), "{}");
    put(root.join("transformer/config.json"), json!({"num_layers": 2}).to_string());
    put(root.join("scheduler/scheduler_config.json"), json!({"shift": 1.0}).to_string());
    put(root.join("text_encoder/config.json"), json!({"model_type": "gemma3"}).to_string());
    put(root.join("tokenizer/tokenizer.json"), "{}");
    let weights = safetensors(&[("proj_in.weight", "BF16", &[4, 2])], Value::Null);
    put(root.join("transformer/diffusion_pytorch_model.safetensors"), weights);
    let gemma = safetensors(&[("model.language_model.norm.weight", "BF16", &[4])], Value::Null);
    put(root.join("text_encoder/model.safetensors"), gemma);
}
