//! Tests of writing components.

use std::fs;

use serde_json::json;
use tempfile::TempDir;

use super::super::*;
use super::{fails, open};
use crate::tensor::Tensor;
use ltx2_stablehlo::DType;

fn specs() -> Vec<TensorSpec> {
    let spec = |name: &str, dtype, shape: &[usize]| TensorSpec { name: name.into(), dtype, shape: shape.to_vec() };
    vec![
        spec("a.weight", DType::F32, &[8, 4]),
        spec("b", DType::BF16, &[5]),
        spec("c", DType::F32, &[3]),
        // Larger than the piece that a thread writes at a time.
        spec("large", DType::BF16, &[3, 3 << 20]),
    ]
}

fn make(spec: &TensorSpec) -> Tensor {
    let values = ndarray::ArrayD::from_shape_fn(spec.shape.clone(), |at| {
        ndarray::Dimension::slice(&at).iter().sum::<usize>() as f32 - 1.5
    });
    Tensor::F32(values).cast(spec.dtype).expect("float")
}

fn fill(spec: &TensorSpec, from: usize, into: &mut [u8]) -> Result<(), WeightsError> {
    into.copy_from_slice(&make(spec).bytes()[from..][..into.len()]);
    Ok(())
}

#[test]
fn written_component_reads_back_unchanged() {
    let dir = TempDir::new().expect("dir");
    let model = dir.path().join("new/model");
    let config = json!({"width": 4});
    let write = || write_component(&model, Component::Transformer, &config, &specs(), SHARD_BYTES, None, fill);
    let folder = write().expect("written");
    assert_eq!(folder, model.join("transformer"));
    let source = open(&model).expect("opens");
    assert_eq!(source.config(Component::Transformer).expect("there"), config);
    let checkpoint = source.checkpoint(Component::Transformer).expect("there");
    for spec in specs() {
        assert_eq!(checkpoint.get(&spec.name).expect("there").to_tensor().expect("host"), make(&spec), "{}", spec.name);
    }
    let data = 128 + 10 + 12 + 18 * (1 << 20);
    assert_eq!(checkpoint.files().next().map(|f| (f.1 - data) % 64), Some(0), "data begin at 64 bytes");
    fails(write(), &["transformer", "already exists"]);
    assert_eq!(fs::read_dir(&model).expect("folder").count(), 1, "no temporary folder is left");
}

#[test]
fn sharded_component_reads_back_unchanged() {
    let dir = TempDir::new().expect("dir");
    let folder =
        write_component(dir.path(), Component::TextEncoder, &json!({}), &specs(), 130, None, fill).expect("written");
    assert!(folder.join("model-00003-of-00003.safetensors").is_file());
    let checkpoint = Checkpoint::open(&folder).expect("opens");
    assert_eq!((checkpoint.files().count(), checkpoint.names().count()), (3, 4));
    for spec in specs() {
        assert_eq!(checkpoint.get(&spec.name).expect("there").to_tensor().expect("host"), make(&spec), "{}", spec.name);
    }
    assert!(checkpoint.path().ends_with("model.safetensors.index.json"));
}

#[test]
fn failed_write_leaves_no_folder() {
    let dir = TempDir::new().expect("dir");
    let broken = |spec: &TensorSpec, from: usize, into: &mut [u8]| match (spec.name.as_str(), from) {
        ("large", 16_777_216) => Err(WeightsError::MissingTensor { path: "here".into(), key: "large".into() }),
        _ => fill(spec, from, into),
    };
    let written = write_component(dir.path(), Component::Vae, &json!({}), &specs(), 1 << 30, None, broken);
    fails(written, &["here: tensor `large` is missing"]);
    let twice = [specs(), specs()].concat();
    let written = write_component(dir.path(), Component::Vae, &json!({}), &twice, 1 << 30, None, fill);
    fails(written, &["diffusion_pytorch_model.safetensors", &twice[0].name, "is defined twice"]);
    assert_eq!(fs::read_dir(dir.path()).expect("folder").count(), 0);
}
