//! Components that are written here.

use std::fs;

use serde_json::json;
use tempfile::TempDir;

use super::super::write::ComponentWriter;
use super::super::*;
use super::{fails, open};
use crate::hlo::DType;
use crate::tensor::Tensor;

fn specs() -> Vec<TensorSpec> {
    let spec = |name: &str, dtype, shape: &[usize]| TensorSpec { name: name.into(), dtype, shape: shape.to_vec() };
    vec![spec("a.weight", DType::F32, &[8, 4]), spec("b", DType::BF16, &[5]), spec("c", DType::F32, &[3])]
}

fn make(spec: &TensorSpec) -> Tensor {
    let values = ndarray::ArrayD::from_shape_fn(spec.shape.clone(), |at| {
        ndarray::Dimension::slice(&at).iter().sum::<usize>() as f32 - 1.5
    });
    Tensor::F32(values).cast(spec.dtype).expect("float")
}

#[test]
fn a_written_component_reads_back() {
    let dir = TempDir::new().expect("dir");
    let model = dir.path().join("new/model");
    let config = json!({"width": 4});
    let write =
        || write_component::<WeightsError>(&model, Component::Transformer, &config, specs(), |spec| Ok(make(spec)));
    let folder = write().expect("written");
    assert_eq!(folder, model.join("transformer"));
    let source = open(&model).expect("opens");
    assert_eq!(source.config(Component::Transformer).expect("there"), config);
    let checkpoint = source.checkpoint(Component::Transformer).expect("there");
    for spec in specs() {
        assert_eq!(checkpoint.get(&spec.name).expect("there").to_tensor().expect("host"), make(&spec));
    }
    assert_eq!(checkpoint.files().next().map(|f| (f.1 - 128 - 10 - 12) % 64), Some(0), "data begin at 64 bytes");
    fails(write(), &["transformer", "already exists"]);
    assert_eq!(fs::read_dir(&model).expect("folder").count(), 1, "no temporary folder is left");
}

#[test]
fn a_sharded_component_reads_back() {
    let dir = TempDir::new().expect("dir");
    let mut writer =
        ComponentWriter::create(dir.path(), Component::TextEncoder, &json!({}), specs(), 130).expect("created");
    for spec in specs() {
        writer.write(&spec.name, &make(&spec)).expect("written");
    }
    let folder = writer.finish().expect("renamed");
    assert!(folder.join("model-00002-of-00002.safetensors").is_file());
    let checkpoint = Checkpoint::open(&folder).expect("opens");
    assert_eq!((checkpoint.files().count(), checkpoint.names().count()), (2, 3));
    assert!(checkpoint.path().ends_with("model.safetensors.index.json"));
}

#[test]
fn an_unfinished_component_leaves_nothing() {
    let dir = TempDir::new().expect("dir");
    let create = || ComponentWriter::create(dir.path(), Component::Vae, &json!({}), specs(), 1 << 20).expect("created");
    let mut writer = create();
    fails(writer.write("b", &make(&specs()[1])), &["`b` (bf16 [5])", "declared `a.weight` (f32 [8, 4])"]);
    writer.write("a.weight", &make(&specs()[0])).expect("written");
    fails(writer.finish(), &["`b` was declared and not written"]);
    drop(create());
    assert_eq!(fs::read_dir(dir.path()).expect("folder").count(), 0);
}
