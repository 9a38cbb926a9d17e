//! Context-parallel attention: with every kind of collective, the result is that of one device.

use std::collections::BTreeMap;

use crate::support::passes::scattered;
use crate::support::{cpu, full, needs, quick, relative_l2};
use ltx2::hlo::{DType, Mesh, Type, Value};
use ltx2::kernels::Kernel;
use ltx2::models::Network;
use ltx2::nn::{
    Attention, Axis, Build, ContextParallelKind, ContextParallelPolicy, Layout, Lowering, Params, Rule, padding_mask,
};
use ltx2::runtime::{Engine, ShardedTensor};
use ltx2::tensor::Tensor;

const ROWS: usize = 2;
const DIM: usize = 4;

/// One attention.
#[derive(Clone, Copy, Debug)]
struct Layer {
    /// Of queries and keys.
    sequence: [Axis; 2],
    tokens: [usize; 2],
    heads: usize,
    /// Whether each query has a bias of its own for each key.
    biased: bool,
}

fn layout(mesh: &[(&str, usize)], split: &[(Axis, &str)], policy: ContextParallelPolicy) -> Layout {
    let rules = split.iter().map(|(axis, mesh_axis)| Rule {
        axis: *axis,
        mesh_axes: vec![(*mesh_axis).to_string()],
        place: "test".into(),
    });
    Layout::new(Mesh::new(mesh), rules.collect(), vec![], vec![], policy).expect("valid")
}

fn policy(kind: ContextParallelKind, outer: ContextParallelKind) -> ContextParallelPolicy {
    ContextParallelPolicy { kind, outer, ulysses: Some(2) }
}

/// Layers side by side: inputs and result of the first end in `0`.
fn network(layers: &[Layer], layout: Layout, kernel: Kernel) -> Network {
    let lowering = Lowering { attention: kernel, ..Lowering::of("cpu", "") };
    let p = Params::new("attention", "transformer", &Build { layout, lowering, ..Build::new(DType::F32) });
    let results = layers.iter().enumerate().map(|(n, layer)| {
        let input = |name: &str, i: usize| -> Value {
            let ty = Type::new(DType::F32, [ROWS, layer.tokens[i], layer.heads, DIM]);
            p.input(&format!("{name}{n}"), ty, &[Axis::CfgBatch, layer.sequence[i], Axis::Heads, Axis::HeadDim])
        };
        let (q, k, v) = (input("q", 0), input("k", 1), input("v", 1));
        let bias = match layer.biased {
            true => {
                let ty = Type::new(DType::F32, [1, 1, q.dim(1), k.dim(1)]);
                Some(p.input(&format!("bias{n}"), ty, &[Axis::Replicated; 4]))
            }
            false => padding_mask(p.builder(), k.dim(1), layer.tokens[1]),
        };
        let y = Attention { q: &q, k: &k, v: &v, bias: bias.as_ref(), scale: 0.6, sequence: layer.sequence }.run(&p);
        let axes = [Axis::CfgBatch, layer.sequence[0], Axis::Heads, Axis::HeadDim];
        let content = [ROWS, layer.tokens[0], layer.heads, DIM];
        p.output(&format!("y{n}"), &y, &axes, &content)
    });
    Network::finish(&p, results.collect()).expect("builds")
}

fn run(engine: &Engine, network: &Network) -> Vec<Tensor> {
    let executable = engine.compile("attention", &network.program).expect("compiles");
    let upload =
        |name: &str, shape: &[usize]| engine.upload(&executable, name, &scattered(name, shape)).expect("uploads");
    let given: BTreeMap<&str, ShardedTensor> =
        executable.arguments().iter().map(|a| (a.name.as_str(), upload(&a.name, &a.logical_dims))).collect();
    let outputs = engine.run(&executable, |name| given.get(name)).expect("runs");
    (0..network.program.results.len()).map(|n| outputs.tensor(&format!("y{n}")).expect("a result")).collect()
}

/// Layers under layouts, each with its name and kernel, against one device.
fn agree(engine: &Engine, layers: &[Layer], layouts: &[(String, Layout, Kernel)]) {
    let whole = run(engine, &network(layers, Layout::default(), Kernel::Plain));
    for (name, layout, kernel) in layouts {
        let got = run(engine, &network(layers, layout.clone(), *kernel));
        for ((layer, got), whole) in layers.iter().zip(&got).zip(&whole) {
            let distance = relative_l2(got, whole);
            eprintln!("{name} {layer:?}: {distance:.1e}");
            assert!(distance <= 1e-6, "{name} {layer:?}: {distance:e}");
        }
    }
}

/// Tokens and heads that divide, with a bias for each query, and that do not, with what hides the filling.
#[needs(cpu)]
fn a_split_sequence_meets_itself() {
    use ContextParallelKind::{GatherKv, Hybrid, Ring, Ulysses};
    let engine = Engine::new(cpu(8), quick());
    let policies = [(GatherKv, Ring), (Ulysses, Ring), (Ring, Ring), (Hybrid, Ring), (Hybrid, GatherKv)];
    let split = [(Axis::VideoSequence, "context"), (Axis::Heads, "tensor")];
    let layers = [(12, 4, true), (10, 6, false)].map(|(tokens, heads, biased)| Layer {
        sequence: [Axis::VideoSequence; 2],
        tokens: [tokens; 2],
        heads,
        biased,
    });
    // Heads that are split too; whole ones in full, and under the shipped layouts (`layouts`).
    for tensor in if full() { vec![1, 2] } else { vec![2] } {
        let mesh = [("context", 4), ("tensor", tensor)];
        let layouts = policies.map(|(kind, outer)| {
            (format!("{kind:?}, {outer:?} {mesh:?}"), layout(&mesh, &split, policy(kind, outer)), Kernel::Plain)
        });
        agree(&engine, &layers, &layouts);
    }
}

/// Queries that every device has, and queries of another sequence, with keys that are split. cuDNN's way of trading keys
/// for heads computes in XLA's own operations here.
#[needs(cpu)]
fn split_keys_meet_queries_of_another_sequence() {
    let engine = Engine::new(cpu(4), quick());
    let mesh = [("context", 4)];
    let one = [(Axis::VideoSequence, "context")];
    let both = [(Axis::VideoSequence, "context"), (Axis::AudioSequence, "context")];
    let policy = ContextParallelPolicy::default();
    let layouts = [(&one[..], Kernel::Plain), (&one[..], Kernel::Cudnn), (&both[..], Kernel::Plain)]
        .map(|(split, kernel)| (format!("{} split, {kernel:?}", split.len()), layout(&mesh, split, policy), kernel));
    let layers = [([8, 12], true), ([8, 12], false), ([5, 10], false), ([8, 3], false)].map(|(tokens, biased)| {
        let (audio, video) = (Axis::AudioSequence, Axis::VideoSequence);
        [[audio, video], [video, audio]].map(|sequence| Layer { sequence, tokens, heads: 8, biased })
    });
    agree(&engine, layers.as_flattened(), &layouts);
}
