//! Computes a lower bound of a program's step time from its StableHLO, without compiling.
//!
//! | part | what is counted |
//! |---|---|
//! | compute | matmuls of one device, sharded as their operands are |
//! | memory | one read of every parameter per step |
//! | links | all-gathers of FSDP-sharded weights, context-parallel attention, all-reduces over sharded heads and MLP widths |
//!
//! The three parts may overlap, so the bound is the longest of them. Memory and links are the minimum that any compiler
//! needs; where a compiler can choose between collectives, the cheapest is counted. Matmuls are counted with the
//! declared sharding; a compiler that shards a matmul further could be faster than the bound.

use crate::analysis::{Chip, CollectiveKind, Work};
use crate::hlo::{DeviceMesh, MemorySpace, Sharding, Type};
use crate::models::Network;
use crate::nn::{Axis, ContextParallelKind, ContextParallelPolicy, Layout, Quantization, Role, ValuePlacement};
use crate::runtime::shards;

/// Lower bounds of a step's time, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bound {
    pub compute: f64,
    pub(crate) memory: f64,
    /// Time of the collectives; received bytes if the chip is unknown.
    pub links: f64,
    /// Part of `links` that is spent on gathering weights.
    pub(super) weights: f64,
}

impl Bound {
    /// Returns the lower bound of the step time: the longest of the three parts.
    pub(crate) fn cost(&self) -> f64 {
        self.compute.max(self.memory).max(self.links)
    }
}

/// Fraction of the matmul FLOPs that the bound counts. The compiler may convert a matmul with a single row to a
/// reduction, which needs no matmul FLOPs.
const KEPT: f64 = 0.98;

/// A collective that a layout requires.
struct RequiredCollective {
    kind: CollectiveKind,
    /// Bytes that a device receives per step.
    wire: f64,
    axes: Vec<String>,
}

/// Returns the lower bounds for a program on a layout's mesh. All FLOPs of a device are counted at the rate of
/// `quantization`, although attention never uses 8-bit matmuls. If `chip` is `None`, only the received bytes are
/// returned.
pub fn bound(
    network: &Network,
    layout: &Layout,
    chip: Option<&Chip>,
    quantization: Quantization,
    blocks: usize,
) -> Bound {
    let mesh = &layout.mesh;
    let (gathered, activations) = (of_weights(network, layout, blocks), of_activations(network, layout, blocks));
    let demands = || gathered.iter().chain(&activations);
    let Some(chip) = chip else {
        return Bound { links: demands().map(|d| d.wire).sum(), ..Bound::default() };
    };
    let seconds = |d: &RequiredCollective| {
        let names: Vec<&str> = d.axes.iter().map(String::as_str).collect();
        let groups: Vec<Vec<i64>> =
            mesh.groups(&names).0.into_iter().map(|g| g.into_iter().map(|d| d as i64).collect()).collect();
        chip.link_seconds(d.kind, d.wire, &groups)
    };
    let read: f64 = weights(network).map(|p| size(&p.ty, &computed(p, layout), mesh) * times(p, blocks)).sum();
    // Attention can be faster than other matmuls. Use its rate for all matmuls, so that the result stays a lower bound.
    let flops = KEPT * network.program.work.flops() / chip.attention_speed();
    let of = |is: bool| if is { flops } else { 0.0 };
    let fp8 = of(quantization == Quantization::Fp8);
    let int8 = of(matches!(quantization, Quantization::Int8 { activations: true, .. }));
    let work = chip.op_time(Work { flops, fp8, int8, bytes: read, ..Work::default() });
    Bound {
        compute: work.compute * 1e3,
        memory: work.memory * 1e3,
        links: demands().map(seconds).sum::<f64>() * 1e3,
        weights: gathered.iter().map(seconds).sum::<f64>() * 1e3,
    }
}

/// Returns the bytes of arguments and results in the memory of the device that holds the most. A result that reuses the
/// buffer of a donated argument is not counted.
pub(crate) fn needed(network: &Network) -> i64 {
    let program = &network.program;
    let mesh = &program.mesh;
    let donated: Vec<usize> = program.arguments.iter().filter_map(|a| a.donated_to).collect();
    let on_device = program.arguments.iter().filter(|a| a.memory == MemorySpace::Device);
    let arguments: usize = on_device.map(|a| local_bytes(&a.ty, mesh, a.sharding.as_ref())).sum();
    let results = program.results.iter().enumerate().filter(|(n, _)| !donated.contains(n));
    let results: usize = results.map(|(_, r)| local_bytes(&r.ty, mesh, r.sharding.as_ref())).sum();
    (arguments + results) as i64
}

/// Returns the bytes of the largest shard of a value.
pub(super) fn local_bytes(ty: &Type, mesh: &DeviceMesh, sharding: Option<&Sharding>) -> usize {
    let sizes = shards(ty, mesh, sharding).into_iter().map(|p| p.size.iter().product::<usize>());
    sizes.max().unwrap_or(0) * ty.dtype.size()
}

fn weights(network: &Network) -> impl Iterator<Item = &ValuePlacement> {
    let parameter = |p: &&ValuePlacement| matches!(p.role, Role::Parameter | Role::FsdpSharded);
    let mut seen = std::collections::BTreeSet::new();
    network.placements.iter().filter(parameter).filter(move |p| seen.insert(p.tensor.clone()))
}

/// Returns how many parameters a placement represents. If layers are unrolled, only the placements of the first layer
/// are recorded, and each represents all layers.
fn times(p: &ValuePlacement, blocks: usize) -> f64 {
    let alone = p.tensor.contains(".*.") && p.axes.first() != Some(&Axis::Layers);
    if alone { blocks as f64 } else { 1.0 }
}

/// Returns the sharding that a parameter has during compute, according to the layout's `rules` and regardless of
/// `storage`.
fn computed(p: &ValuePlacement, layout: &Layout) -> Sharding {
    let placed = layout.place(&p.tensor, &p.ty, &p.axes).ok().flatten();
    placed.map_or_else(|| Sharding(vec![Vec::new(); p.axes.len()]), |p| p.sharding)
}

fn size(ty: &Type, sharding: &Sharding, mesh: &DeviceMesh) -> f64 {
    sharding.local(ty, mesh).map_or(0.0, |local| local.bytes() as f64)
}

/// Returns the collectives that move weights.
fn of_weights(network: &Network, layout: &Layout, blocks: usize) -> Vec<RequiredCollective> {
    let split =
        VideoTokens::from_network(network, layout, blocks).and_then(|tokens| tokens.split_weights(network, layout));
    fsdp_gathers(network, layout, blocks).into_iter().chain(split).collect()
}

/// Returns the collectives that move activations.
fn of_activations(network: &Network, layout: &Layout, blocks: usize) -> Vec<RequiredCollective> {
    let of = |tokens: VideoTokens| {
        let mut all = tokens.attention(&layout.context_parallel, layout);
        all.extend(tokens.sums(layout));
        all
    };
    VideoTokens::from_network(network, layout, blocks).map(of).unwrap_or_default()
}

/// Returns the all-gathers of FSDP-sharded weights; each weight is gathered once per step.
fn fsdp_gathers(network: &Network, layout: &Layout, blocks: usize) -> Vec<RequiredCollective> {
    let mut all: Vec<RequiredCollective> = Vec::new();
    for p in weights(network).filter(|p| p.role == Role::FsdpSharded) {
        let whole = computed(p, layout);
        let wire = (size(&p.ty, &whole, &layout.mesh) - size(&p.ty, &p.sharding, &layout.mesh)) * times(p, blocks);
        let split = |s: &Sharding| s.0.iter().flatten().cloned().collect::<Vec<String>>();
        let own = split(&whole);
        let axes: Vec<String> = split(&p.sharding).into_iter().filter(|a| !own.contains(a)).collect();
        match all.iter_mut().find(|d| d.axes == axes) {
            Some(d) => d.wire += wire,
            None => all.push(RequiredCollective { kind: CollectiveKind::AllGather, wire, axes }),
        }
    }
    all
}

/// Activations of the video tokens (residual stream) on one device.
struct VideoTokens {
    /// Bytes of the tokens on a device, with all features.
    bytes: f64,
    /// Bytes of the queries on a device before attention: those of the heads that the device computes.
    own_heads: f64,
    /// Mesh axes that shard the tokens.
    axes: Vec<String>,
    /// Mesh axes that shard the heads.
    heads: Vec<String>,
    /// Mesh axes that shard the inner width of the feed-forward layer; empty if they do not divide it evenly.
    inner: Vec<String>,
    blocks: f64,
}

impl VideoTokens {
    /// Derives how the video tokens are sharded from the queries of self-attention. `None`: the program has no
    /// self-attention of video tokens.
    fn from_network(network: &Network, layout: &Layout, blocks: usize) -> Option<VideoTokens> {
        let queries = |p: &&ValuePlacement| {
            p.role == Role::Activation
                && p.tensor.contains(".attn1.")
                && p.axes == [Axis::CfgBatch, Axis::VideoSequence, Axis::Heads, Axis::HeadDim]
        };
        let q = network.placements.iter().find(queries)?;
        let own_heads = size(&q.ty, &q.sharding, &layout.mesh);
        let name = q.tensor.replace(".attn1.attention", ".ff.hidden");
        let hidden = network.placements.iter().find(|p| p.role == Role::Activation && p.tensor == name);
        let inner = hidden.and_then(|p| Some(p.sharding.0[p.axes.iter().position(|a| *a == Axis::Mlp)?].clone()));
        let mut whole = q.sharding.clone();
        whole.0[2].clear();
        Some(VideoTokens {
            bytes: size(&q.ty, &whole, &layout.mesh),
            own_heads,
            axes: q.sharding.0[1].clone(),
            heads: q.sharding.0[2].clone(),
            inner: inner.unwrap_or_default(),
            blocks: blocks as f64,
        })
    }

    fn parts(&self, layout: &Layout) -> f64 {
        self.axes.iter().filter_map(|a| layout.mesh.size(a)).product::<usize>() as f64
    }

    fn attention(&self, policy: &ContextParallelPolicy, layout: &Layout) -> Vec<RequiredCollective> {
        let (n, part) = (self.parts(layout), self.own_heads * self.blocks);
        let demand = |kind, wire| RequiredCollective { kind, wire, axes: self.axes.clone() };
        // Queries, keys, values and output are exchanged; each device keeps its own shard.
        let trade = |n: f64| demand(CollectiveKind::AllToAll, 4.0 * part * (n - 1.0) / n);
        let pass = |kind, n: f64| match kind {
            ContextParallelKind::Ring => demand(CollectiveKind::CollectivePermute, 2.0 * part * (n - 1.0)),
            _ => demand(CollectiveKind::AllGather, 2.0 * part * (n - 1.0)),
        };
        if n <= 1.0 {
            return Vec::new();
        }
        match policy.kind {
            ContextParallelKind::Ulysses => vec![trade(n)],
            ContextParallelKind::Hybrid => {
                let near = policy.ulysses.unwrap_or(1) as f64;
                // The all-to-all runs within small groups of adjacent devices; its bytes are counted at the rate of an
                // all-gather.
                vec![
                    RequiredCollective { kind: CollectiveKind::AllGather, ..trade(near) },
                    pass(policy.outer, n / near),
                ]
            }
            kind => vec![pass(kind, n)],
        }
    }

    /// Returns the all-reduces that sum partial results over sharded heads or MLP widths: after self-attention, after
    /// text cross-attention, and after the feed-forward layer.
    fn sums(&self, layout: &Layout) -> Vec<RequiredCollective> {
        let of = |axes: &[String], times: f64| {
            let n = axes.iter().filter_map(|a| layout.mesh.size(a)).product::<usize>() as f64;
            let wire = times * self.blocks * 2.0 * self.bytes * (n - 1.0) / n;
            (n > 1.0).then(|| RequiredCollective { kind: CollectiveKind::AllReduce, wire, axes: axes.to_vec() })
        };
        of(&self.heads, 2.0).into_iter().chain(of(&self.inner, 1.0)).collect()
    }

    /// Returns the all-gathers that are needed if a weight is sharded over the same devices as the tokens that it
    /// multiplies. Either the weight or the tokens can be gathered; the cheaper of the two is counted.
    fn split_weights(&self, network: &Network, layout: &Layout) -> Option<RequiredCollective> {
        let n = self.parts(layout);
        let of_video = |p: &&ValuePlacement| p.tensor.contains(".attn1.") || p.tensor.contains("*.ff.");
        let wire: f64 = weights(network)
            .filter(|p| {
                p.role == Role::Parameter && of_video(p) && p.axes.iter().filter(|a| **a != Axis::Layers).count() > 1
            })
            .filter_map(|p| {
                let at = p.axes.iter().position(|a| *a == Axis::Embed)?;
                let same = p.sharding.0[at].iter().any(|a| self.axes.contains(a));
                let own = size(&p.ty, &p.sharding, &layout.mesh);
                let travels = own * times(p, self.blocks as usize) * (n - 1.0);
                same.then(|| travels.min(self.blocks * self.bytes * (n - 1.0)))
            })
            .sum();
        (wire > 0.0).then(|| RequiredCollective { kind: CollectiveKind::AllGather, wire, axes: self.axes.clone() })
    }
}
