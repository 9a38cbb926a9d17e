//! Replication of a sharded tensor over devices, which gives each of several processes the complete tensor.

use crate::support::{cpu, needs, quick};
use ltx2::hlo::{Argument, Builder, DType, DeviceMesh, ProgramOutput, Sharding, Type};
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ndarray::Array2;

#[needs(cpu)]
fn replicating_a_sharded_tensor_keeps_its_values() {
    let engine = Engine::new(cpu(4), quick());
    // Four devices and a tensor in four shards; callers see five of its six columns.
    let mesh = DeviceMesh::new(&[("cfg", 2), ("context", 2)]);
    let (split, ty, content) = (Sharding::new(&[&["cfg"], &["context"]]), Type::new(DType::F32, [4, 6]), vec![4, 5]);

    let b = Builder::new("double").with_mesh(mesh.clone());
    let x = Argument { sharding: Some(split.clone()), logical_dims: content.clone(), ..Argument::new("x", ty.clone()) };
    let x = b.argument_with(x);
    let y = ProgramOutput { sharding: Some(split.clone()), logical_dims: content, ..ProgramOutput::new("y", ty) };
    let program = b.finish_with(vec![(y, (&x + &x).constrain(&split))]).expect("a program");
    let double = engine.compile("double", &program).expect("compiles");
    let values = Array2::from_shape_fn((4, 5), |(i, j)| (5 * i + j) as f32);
    let input = engine.upload(&double, "x", &Tensor::from(values.clone())).expect("uploads");
    let outputs = engine.run(&double, |name| (name == "x").then_some(&input)).expect("runs");

    let y = outputs.get("y").expect("a result");
    let whole = engine.replicate(y, &mesh, Some(&split)).expect("gathers");
    assert!(whole.shards().iter().all(|shard| shard.size == [4, 6]));
    assert_eq!(whole.download().expect("downloads").to_f32(), (values * 2.0).into_dyn());
}
