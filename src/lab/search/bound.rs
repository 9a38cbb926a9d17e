//! What a program cannot be faster than, from its declarations: nothing is compiled for it.
//!
//! | part | what is counted |
//! |---|---|
//! | products | those of one device's program, by the parts that the layout makes of the work |
//! | memory | every parameter is read once a step |
//! | links | weights that are kept in pieces, tokens that attention trades, sums that split heads and inner widths leave |
//!
//! The three may run side by side: the bound is the longest. Each is the least that any compiler could do, so what is
//! left out by it is out for good. An exchange that more than one thing could bring about counts as the cheaper.

use crate::analysis::{Chip, Kind, Work};
use crate::hlo::{Mesh, Sharding, Type};
use crate::models::Network;
use crate::nn::{Axis, ContextParallelKind, ContextParallelPolicy, Layout, Placement, Role};

/// The least that a step costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bound {
    /// Milliseconds of products.
    pub compute: f64,
    /// Milliseconds of device memory.
    pub memory: f64,
    /// Milliseconds on links; bytes received where the chip is unknown.
    pub links: f64,
}

impl Bound {
    /// In the unit by which compiled programs are ranked.
    pub fn cost(&self) -> f64 {
        self.compute.max(self.memory).max(self.links)
    }

    /// What a step may come to where nothing runs side by side: the order in which layouts are tried.
    pub fn guess(&self) -> f64 {
        self.compute.max(self.memory) + self.links
    }
}

/// The part of the products that a compiler leaves products: one with a single row it may write as a sum.
const KEPT: f64 = 0.98;

/// An exchange that a layout asks for.
struct Demand {
    kind: Kind,
    /// Bytes a device receives in a step.
    wire: f64,
    /// Devices of a group.
    axes: Vec<String>,
}

/// The bound of a program over a layout's mesh. `products` are the operations of a step in all, `parts` what they are
/// divided into.
pub fn bound(
    network: &Network,
    layout: &Layout,
    chip: Option<&Chip>,
    products: f64,
    parts: usize,
    blocks: usize,
) -> Bound {
    let mesh = &layout.mesh;
    let demands = demands(network, layout, blocks);
    let Some(chip) = chip else {
        return Bound { links: demands.iter().map(|d| d.wire).sum(), ..Bound::default() };
    };
    let seconds = |d: &Demand| {
        let names: Vec<&str> = d.axes.iter().map(String::as_str).collect();
        let groups: Vec<Vec<i64>> =
            mesh.groups(&names).0.into_iter().map(|g| g.into_iter().map(|d| d as i64).collect()).collect();
        chip.link_seconds(d.kind, d.wire, &groups)
    };
    let read: f64 = weights(network).map(|p| size(&computed(p, layout), mesh) * times(p, blocks)).sum();
    let work = chip.seconds(Work { flops: KEPT * products / parts.max(1) as f64, bytes: read, ..Work::default() });
    Bound {
        compute: work.compute * 1e3,
        memory: work.memory * 1e3,
        links: demands.iter().map(seconds).sum::<f64>() * 1e3,
    }
}

/// Parameters, each once.
fn weights(network: &Network) -> impl Iterator<Item = &Placement> {
    let parameter = |p: &&Placement| matches!(p.role, Role::Parameter | Role::Stored);
    let mut seen = std::collections::BTreeSet::new();
    network.placements.iter().filter(parameter).filter(move |p| seen.insert(p.tensor.clone()))
}

/// How many parameters one stands for: where layers are written out, the first one's speak for all.
fn times(p: &Placement, blocks: usize) -> f64 {
    let alone = p.tensor.contains(".*.") && p.axes.first() != Some(&Axis::Layers);
    if alone { blocks as f64 } else { 1.0 }
}

/// The type of a parameter's part while it is computed with: its rules alone, without storage.
fn computed(p: &Placement, layout: &Layout) -> (Type, Sharding) {
    let placed = layout.place(&p.tensor, &p.ty, &p.axes).ok().flatten();
    (p.ty.clone(), placed.map_or_else(|| Sharding(vec![Vec::new(); p.axes.len()]), |p| p.sharding))
}

/// Bytes of a device's part.
fn size((ty, sharding): &(Type, Sharding), mesh: &Mesh) -> f64 {
    sharding.local(ty, mesh).map_or(0.0, |local| local.bytes() as f64)
}

fn demands(network: &Network, layout: &Layout, blocks: usize) -> Vec<Demand> {
    let mut all = stored(network, layout, blocks);
    if let Some(tokens) = VideoTokens::of(network, layout, blocks) {
        all.extend(tokens.attention(&layout.context_parallel, layout));
        all.extend(tokens.sums(layout));
        all.extend(tokens.split_weights(network, layout));
    }
    all
}

/// Weights that lie in pieces come whole once a step.
fn stored(network: &Network, layout: &Layout, blocks: usize) -> Vec<Demand> {
    let mut all: Vec<Demand> = Vec::new();
    for p in weights(network).filter(|p| p.role == Role::Stored) {
        let (whole, kept) = (computed(p, layout), (p.ty.clone(), p.sharding.clone()));
        let wire = (size(&whole, &layout.mesh) - size(&kept, &layout.mesh)) * times(p, blocks);
        let split = |s: &Sharding| s.0.iter().flatten().cloned().collect::<Vec<String>>();
        let own = split(&whole.1);
        let axes: Vec<String> = split(&p.sharding).into_iter().filter(|a| !own.contains(a)).collect();
        match all.iter_mut().find(|d| d.axes == axes) {
            Some(d) => d.wire += wire,
            None => all.push(Demand { kind: Kind::AllGather, wire, axes }),
        }
    }
    all
}

/// The residual stream of video tokens on a device, and how often blocks pass it through.
struct VideoTokens {
    /// Bytes of all its features on a device.
    bytes: f64,
    /// The same of the heads that the device has before attention.
    own_heads: f64,
    /// Mesh axes that split the tokens.
    axes: Vec<String>,
    /// Mesh axes that split the heads.
    heads: Vec<String>,
    /// An activation's name in a block's self-attention.
    tensor: String,
    blocks: f64,
}

impl VideoTokens {
    /// From the queries of self-attention.
    fn of(network: &Network, layout: &Layout, blocks: usize) -> Option<VideoTokens> {
        let queries = |p: &&Placement| {
            p.role == Role::Activation
                && p.tensor.contains(".attn1.")
                && p.axes == [Axis::CfgBatch, Axis::VideoSequence, Axis::Heads, Axis::HeadDim]
        };
        let q = network.placements.iter().find(queries)?;
        let own_heads = size(&(q.ty.clone(), q.sharding.clone()), &layout.mesh);
        let mut whole = q.sharding.clone();
        whole.0[2].clear();
        Some(VideoTokens {
            bytes: size(&(q.ty.clone(), whole), &layout.mesh),
            own_heads,
            axes: q.sharding.0[1].clone(),
            heads: q.sharding.0[2].clone(),
            tensor: q.tensor.clone(),
            blocks: blocks as f64,
        })
    }

    fn parts(&self, layout: &Layout) -> f64 {
        self.axes.iter().filter_map(|a| layout.mesh.size(a)).product::<usize>() as f64
    }

    /// Self-attention over tokens that are split.
    fn attention(&self, policy: &ContextParallelPolicy, layout: &Layout) -> Vec<Demand> {
        let (n, part) = (self.parts(layout), self.own_heads * self.blocks);
        let demand = |kind, wire| Demand { kind, wire, axes: self.axes.clone() };
        // Queries, keys, values and what was attended, of which a device keeps its own.
        let trade = |n: f64| demand(Kind::AllToAll, 4.0 * part * (n - 1.0) / n);
        let pass = |kind, n: f64| match kind {
            ContextParallelKind::Ring => demand(Kind::CollectivePermute, 2.0 * part * (n - 1.0)),
            _ => demand(Kind::AllGather, 2.0 * part * (n - 1.0)),
        };
        if n <= 1.0 {
            return Vec::new();
        }
        match policy.kind {
            ContextParallelKind::Ulysses => vec![trade(n)],
            ContextParallelKind::Hybrid => {
                let near = policy.ulysses.unwrap_or(1) as f64;
                // A trade among fewer neighbours: the bytes count, the larger ring does not.
                vec![Demand { kind: Kind::AllGather, ..trade(near) }, pass(policy.outer, n / near)]
            }
            kind => vec![pass(kind, n)],
        }
    }

    /// Products over heads or inner widths that are split leave parts of sums: behind self-attention, attention to text,
    /// and the feed-forward layer.
    fn sums(&self, layout: &Layout) -> Vec<Demand> {
        let inner = layout.mesh_axes(&self.tensor.replace(".attn1.attention", ".ff.hidden"), Axis::Mlp);
        let of = |axes: &[String], times: f64| {
            let n = axes.iter().filter_map(|a| layout.mesh.size(a)).product::<usize>() as f64;
            let wire = times * self.blocks * 2.0 * self.bytes * (n - 1.0) / n;
            (n > 1.0).then(|| Demand { kind: Kind::AllReduce, wire, axes: axes.to_vec() })
        };
        of(&self.heads, 2.0).into_iter().chain(of(&inner, 1.0)).collect()
    }

    /// Weights split over the devices that split the tokens they meet: either the weight travels, or the tokens do.
    fn split_weights(&self, network: &Network, layout: &Layout) -> Option<Demand> {
        let n = self.parts(layout);
        let of_video = |p: &&Placement| p.tensor.contains(".attn1.") || p.tensor.contains("*.ff.");
        let wire: f64 = weights(network)
            .filter(|p| {
                p.role == Role::Parameter && of_video(p) && p.axes.iter().filter(|a| **a != Axis::Layers).count() > 1
            })
            .filter_map(|p| {
                let at = p.axes.iter().position(|a| *a == Axis::Embed)?;
                let same = p.sharding.0[at].iter().any(|a| self.axes.contains(a));
                let own = size(&(p.ty.clone(), p.sharding.clone()), &layout.mesh);
                let travels = own * times(p, self.blocks as usize) * (n - 1.0);
                same.then(|| travels.min(self.blocks * self.bytes * (n - 1.0)))
            })
            .sum();
        (wire > 0.0).then(|| Demand { kind: Kind::AllGather, wire, axes: self.axes.clone() })
    }
}
