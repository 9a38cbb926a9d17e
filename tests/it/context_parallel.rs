//! Context-parallel attention: every kind of collective gives the result of one device.

use std::collections::BTreeMap;

use crate::support::passes::scattered;
use crate::support::{cpu, cudnn, full, lowering_of, needs, quick, relative_l2};
use ltx2::hlo::{Comparison, DType, DeviceMesh, Program, Type, Value};
use ltx2::kernels::Kernel;
use ltx2::models::Network;
use ltx2::nn::{
    Attention, Axis, Build, ContextParallelKind, ContextParallelPolicy, Layout, Lowering, Params, Rule, padding_mask,
};
use ltx2::runtime::{Engine, ShardedTensor};
use ltx2::tensor::Tensor;

const ROWS: usize = 2;
const DIM: usize = 8;
const SCALE: f64 = 0.6;

/// An attention layer.
#[derive(Clone, Copy, Debug)]
struct Layer {
    /// Sequence axes of queries and keys.
    sequence: [Axis; 2],
    tokens: [usize; 2],
    heads: usize,
    bias: Bias,
}

#[derive(Clone, Copy, Debug)]
enum Bias {
    /// Only the mask of padded keys.
    None,
    /// A bias for each query and key.
    Each,
    /// A causal mask.
    Causal,
}

fn layout(mesh: &[(&str, usize)], split: &[(Axis, &str)], policy: ContextParallelPolicy) -> Layout {
    let rules = split.iter().map(|(axis, mesh_axis)| Rule {
        axis: *axis,
        mesh_axes: vec![(*mesh_axis).to_string()],
        place: "test".into(),
    });
    Layout::new(DeviceMesh::new(mesh), rules.collect(), vec![], vec![], policy).expect("valid")
}

fn policy(kind: ContextParallelKind, outer: ContextParallelKind) -> ContextParallelPolicy {
    ContextParallelPolicy { kind, outer, ulysses: Some(2) }
}

/// Builds independent layers that compute in `dtype` with f32 inputs and results; the names of layer 0 end in `0`.
fn network(layers: &[Layer], layout: Layout, kernel: Kernel, dtype: DType) -> Network {
    let lowering = Lowering { attention: kernel, ..lowering_of("cpu") };
    let p = Params::new("attention", "transformer", &Build { layout, lowering, ..Build::new(DType::F32) });
    let results = layers.iter().enumerate().map(|(n, layer)| {
        let input = |name: &str, i: usize| -> Value {
            let ty = Type::new(DType::F32, [ROWS, layer.tokens[i], layer.heads, DIM]);
            p.input(&format!("{name}{n}"), ty, &[Axis::CfgBatch, layer.sequence[i], Axis::Heads, Axis::HeadDim])
        };
        let [q, k, v] = [input("q", 0), input("k", 1), input("v", 1)].map(|x| x.to(dtype));
        let ty = Type::new(DType::F32, [1, 1, q.dim(1), k.dim(1)]);
        let bias = match layer.bias {
            Bias::None => padding_mask(p.builder(), k.dim(1), layer.tokens[1]),
            Bias::Each => Some(p.input(&format!("bias{n}"), ty, &[Axis::Replicated; 4])),
            Bias::Causal => {
                let [query, key] = [2, 3].map(|axis| p.builder().iota(ty.clone(), axis));
                let later = key.compare(Comparison::Gt, &query);
                Some(later.select(&key.like(-1e30), &key.like(0.0)))
            }
        };
        let y = Attention { q: &q, k: &k, v: &v, bias: bias.as_ref(), scale: SCALE, sequence: layer.sequence }.run(&p);
        let axes = [Axis::CfgBatch, layer.sequence[0], Axis::Heads, Axis::HeadDim];
        let content = [ROWS, layer.tokens[0], layer.heads, DIM];
        p.output(&format!("y{n}"), &y.to(DType::F32), &axes, &content)
    });
    Network::finish(&p, results.collect()).expect("builds")
}

fn run(engine: &Engine, program: &Program) -> Vec<Tensor> {
    let executable = engine.compile("attention", program).expect("compiles");
    let upload =
        |name: &str, shape: &[usize]| engine.upload(&executable, name, &scattered(name, shape)).expect("uploads");
    let given: BTreeMap<&str, ShardedTensor> =
        executable.arguments().iter().map(|a| (a.name.as_str(), upload(&a.name, &a.logical_dims))).collect();
    let outputs = engine.run(&executable, |name| given.get(name)).expect("runs");
    (0..program.results.len()).map(|n| outputs.tensor(&format!("y{n}")).expect("a result")).collect()
}

/// Compares layers under named layouts with one device.
fn agree(engine: &Engine, layers: &[Layer], layouts: &[(String, Layout)]) {
    let whole = run(engine, &network(layers, Layout::default(), Kernel::Plain, DType::F32).program);
    for (name, layout) in layouts {
        let got = run(engine, &network(layers, layout.clone(), Kernel::Plain, DType::F32).program);
        for ((layer, got), whole) in layers.iter().zip(&got).zip(&whole) {
            let distance = relative_l2(got, whole);
            eprintln!("{name} {layer:?}: {distance:.1e}");
            assert!(distance <= 1e-6, "{name} {layer:?}: {distance:e}");
        }
    }
}

/// Covers numbers of tokens and heads that the devices divide evenly, with a bias for each query, and numbers that they
/// do not, with a mask for the padding.
#[needs(cpu)]
fn sharded_self_attention_matches_single_device() {
    use ContextParallelKind::{GatherKv, Hybrid, Ring, Ulysses};
    let engine = Engine::new(cpu(8), quick());
    // The cross-attention test and most shipped layouts gather keys and values.
    // A hybrid of Ulysses and ring runs both.
    let policies = [(Ulysses, Ring), (Hybrid, Ring), (Ring, Ring), (Hybrid, GatherKv), (GatherKv, Ring)];
    let policies = &policies[..if full() { 5 } else { 2 }];
    let split = [(Axis::VideoSequence, "context"), (Axis::Heads, "tensor")];
    let layers = [(12, 4, Bias::Each), (10, 6, Bias::None)].map(|(tokens, heads, bias)| Layer {
        sequence: [Axis::VideoSequence; 2],
        tokens: [tokens; 2],
        heads,
        bias,
    });
    // Sharded heads too; replicated heads in the full test, and with the shipped layouts in `layouts`.
    for tensor in if full() { vec![1, 2] } else { vec![2] } {
        let mesh = [("context", 4), ("tensor", tensor)];
        let placed = |&(kind, outer): &(ContextParallelKind, ContextParallelKind)| {
            (format!("{kind:?}, {outer:?} {mesh:?}"), layout(&mesh, &split, policy(kind, outer)))
        };
        agree(&engine, &layers, &policies.iter().map(placed).collect::<Vec<_>>());
    }
}

/// Attention between the streams, in both directions: with both streams sharded, in the full test also with only the video
/// sharded.
#[needs(cpu)]
fn sharded_cross_attention_matches_single_device() {
    let engine = Engine::new(cpu(4), quick());
    let mesh = [("context", 4)];
    let one = [(Axis::VideoSequence, "context")];
    let both = [(Axis::VideoSequence, "context"), (Axis::AudioSequence, "context")];
    let policy = ContextParallelPolicy::default();
    let layouts = [&both[..], &one[..]].map(|split| (format!("{} split", split.len()), layout(&mesh, split, policy)));
    let layers = [([8, 12], Bias::Each), ([8, 12], Bias::None), ([5, 10], Bias::None), ([8, 3], Bias::None)];
    let layers = layers.map(|(tokens, bias)| {
        let (audio, video) = (Axis::AudioSequence, Axis::VideoSequence);
        [[audio, video], [video, audio]].map(|sequence| Layer { sequence, tokens, heads: 8, bias })
    });
    agree(&engine, layers.as_flattened(), &layouts[..if full() { 2 } else { 1 }]);
}

/// A plain function replaces the bf16 cuDNN calls. The merged partial results must be as close to the f32 result as
/// unsharded attention is, even if a query sees no key of one part.
#[needs(cpu)]
fn merged_partial_attention_is_as_accurate_as_unsharded() {
    use ContextParallelKind::{Hybrid, Ring};
    let engine = Engine::new(cpu(4), quick());
    let mesh = [("context", 4)];
    let split = [(Axis::VideoSequence, "context")];
    let (audio, video) = (Axis::AudioSequence, Axis::VideoSequence);
    let layer = |sequence, tokens, bias| Layer { sequence, tokens, heads: 4, bias };
    let layers = [
        layer([video; 2], [64; 2], Bias::None),
        layer([video; 2], [64; 2], Bias::Each),
        layer([video; 2], [64; 2], Bias::Causal),
        layer([video; 2], [61; 2], Bias::None),
        layer([audio, video], [6, 64], Bias::None),
        layer([audio, video], [6, 61], Bias::None),
    ];
    let one = |dtype| run(&engine, &network(&layers, Layout::default(), Kernel::Plain, dtype).program);
    let (exact, rounded) = (one(DType::F32), one(DType::BF16));
    // First, next and last keys of a ring of four, and first and last of a ring of two, for four layers; two more
    // parts.
    for (policy, ring) in
        [(policy(Ring, Ring), 3), (policy(Hybrid, Ring), 3)].into_iter().take(if full() { 2 } else { 1 })
    {
        let network = network(&layers, layout(&mesh, &split, policy), Kernel::Cudnn { required: true }, DType::BF16);
        let (program, calls) = cudnn::replace_cudnn_calls(&network.program, SCALE);
        assert_eq!(calls, 4 * ring + 2);
        for (((layer, got), exact), rounded) in layers.iter().zip(run(&engine, &program)).zip(&exact).zip(&rounded) {
            let (distance, limit) = (relative_l2(&got, exact), 1.5 * relative_l2(rounded, exact));
            eprintln!("{policy:?} {layer:?}: {distance:.1e} of {limit:.1e}");
            assert!(distance <= limit, "{policy:?} {layer:?}: {distance:e} of {limit:e}");
        }
    }
}
