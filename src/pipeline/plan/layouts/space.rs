//! Search space for layouts: all meshes, and layouts composed of the rules of the shipped layouts.

use std::collections::BTreeSet;

use crate::config::{LayoutFile, LayoutSource, Mesh};
use crate::hlo;
use crate::nn::{Axis, ContextParallelKind, ContextParallelPolicy, Override, Rule};

/// A layout on a mesh: a candidate of a search.
#[derive(Clone, Debug)]
pub struct Point {
    pub(crate) label: String,
    /// Name or file of the layout. `None`: the layout is composed by [`composed`].
    pub(crate) named: Option<String>,
    pub source: LayoutSource,
    /// Mesh axes with more than one device, outermost first.
    pub mesh: hlo::DeviceMesh,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Number of devices, all of which a mesh uses.
    pub(crate) devices: usize,
    pub(crate) videos: usize,
    pub(crate) branches: usize,
}

const AXES: [&str; 5] = ["data", "cfg", "fsdp", "context", "tensor"];

/// Returns all factorizations of the number of devices into the five mesh axes. The axis `data` is limited to one
/// device per video, and `cfg` to one device per guidance branch.
pub(crate) fn meshes(extent: Extent) -> Vec<hlo::DeviceMesh> {
    let mut all = vec![Vec::new()];
    for axis in AXES {
        let most = match axis {
            "data" => extent.videos,
            "cfg" => extent.branches,
            _ => extent.devices,
        };
        all = all
            .into_iter()
            .flat_map(|sizes: Vec<usize>| {
                let left = extent.devices / sizes.iter().product::<usize>();
                let fits = move |n: &usize| left.is_multiple_of(*n);
                (1..=left.min(most)).filter(fits).map(move |n| [&sizes[..], &[n]].concat())
            })
            .collect();
    }
    all.retain(|sizes| sizes.iter().product::<usize>() == extent.devices);
    let named = |sizes: Vec<usize>| {
        let axes = AXES.iter().zip(sizes).filter(|(_, n)| *n > 1);
        hlo::DeviceMesh { axes: axes.map(|(a, n)| ((*a).to_string(), n)).collect() }
    };
    all.into_iter().map(named).collect()
}

/// Formats a mesh in the syntax of `--mesh`, e.g. `cfg=2,context=4`.
pub(crate) fn mesh_name(mesh: &hlo::DeviceMesh) -> String {
    match mesh.axes.is_empty() {
        true => "data=1".into(),
        false => mesh.axes.iter().map(|(a, n)| format!("{a}={n}")).collect::<Vec<_>>().join(","),
    }
}

/// Converts a mesh to the type that a layout file uses.
pub(super) fn file_mesh(mesh: &hlo::DeviceMesh) -> Mesh {
    let of = |axis: &str| mesh.size(axis).and_then(|n| i64::try_from(n).ok()).unwrap_or(1);
    let [data, cfg, fsdp, context, tensor] = AXES.map(of);
    Mesh { data, cfg, fsdp, context, tensor, ..Mesh::default() }
}

/// Tensor axes of the transformer. If a mesh axis shards none of them, its devices repeat the same work.
const OWN: [Axis; 9] = [
    Axis::Batch,
    Axis::Branch,
    Axis::VideoSequence,
    Axis::AudioSequence,
    Axis::Embed,
    Axis::Heads,
    Axis::KvHeads,
    Axis::HeadDim,
    Axis::Mlp,
];

fn compute_axes(source: &LayoutSource) -> BTreeSet<&str> {
    // Consider only patterns that may match tensors of the transformer.
    let may = |pattern: &str| pattern.starts_with('*') || pattern.starts_with("transformer");
    let of_patterns = source.overrides.iter().filter(|e| may(&e.pattern)).flat_map(|e| &e.rules);
    let rules = source.rules.iter().chain(of_patterns).filter(|r| OWN.contains(&r.axis));
    rules.flat_map(|r| r.mesh_axes.iter().map(String::as_str)).collect()
}

/// Combines a layout with a mesh. `None`: a mesh axis shards neither the computation nor the stored weights of the
/// layout, or the mesh cannot be divided into the layout's attention groups.
pub fn placed(label: String, named: Option<String>, source: &LayoutSource, mesh: &hlo::DeviceMesh) -> Option<Point> {
    let mut used = compute_axes(source);
    used.extend(source.storage.iter().flat_map(|r| r.mesh_axes.iter().map(String::as_str)));
    if !mesh.axes.iter().all(|(axis, _)| used.contains(axis.as_str())) {
        return None;
    }
    if !has_groups(source, mesh) {
        return None;
    }
    let mut source = source.clone();
    source.file.mesh = file_mesh(mesh);
    Some(Point { label, named, source, mesh: mesh.clone() })
}

/// Returns whether the devices that share a sequence can be divided evenly into the groups that hybrid attention uses.
pub(super) fn has_groups(source: &LayoutSource, mesh: &hlo::DeviceMesh) -> bool {
    let e = &source.file.context_parallel;
    let tokens = source.rules.iter().find(|r| r.axis == Axis::VideoSequence);
    let own = tokens.into_iter().flat_map(|r| &r.mesh_axes).filter_map(|a| mesh.size(a)).product::<usize>();
    e.kind != ContextParallelKind::Hybrid || own == 1 || own.is_multiple_of(e.ulysses.unwrap_or(1))
}

/// Returns layouts for a mesh, composed of the shipped layouts' rules: guidance branches are sharded over `cfg`, tokens
/// over `context`, heads and MLP widths over `tensor`. The layouts differ in the kind of context-parallel attention and
/// in the mesh axes over which weights are stored.
pub(crate) fn composed(mesh: &hlo::DeviceMesh) -> Vec<Point> {
    let has = |axis: &str| mesh.size(axis).is_some();
    let rule = |axis: Axis, mesh_axes: &[&str]| Rule {
        axis,
        mesh_axes: mesh_axes.iter().map(|a| (*a).to_string()).collect(),
        place: String::new(),
    };
    let mut rules = Vec::new();
    if has("data") {
        rules.push(rule(Axis::Batch, &["data"]));
    }
    if has("cfg") {
        rules.push(rule(Axis::Branch, &["cfg"]));
        rules.push(rule(Axis::Width, &["cfg"]));
    }
    let mut overrides = Vec::new();
    if has("context") {
        rules.push(rule(Axis::VideoSequence, &["context"]));
        // Text tokens are sharded in the text encoder and the connectors, and replicated in the transformer's blocks.
        overrides = ["text_encoder.*", "connectors.*"]
            .map(|p| Override { pattern: p.into(), rules: vec![rule(Axis::TextSequence, &["context"])] })
            .into();
    }
    if has("tensor") {
        rules.extend([Axis::Heads, Axis::KvHeads, Axis::Mlp, Axis::Vocab].map(|axis| rule(axis, &["tensor"])));
    }
    let frame_axes: Vec<&str> = ["context", "tensor"].into_iter().filter(|a| has(a)).collect();
    if !frame_axes.is_empty() {
        rules.push(rule(Axis::Height, &frame_axes));
    }
    let mut all = Vec::new();
    for storage in storage_axes(mesh) {
        for (how, policy) in context_parallel_policies(mesh.size("context").unwrap_or(1)) {
            let stored = if storage.is_empty() { String::new() } else { format!(" stored over {}", storage.join("+")) };
            let kept = if storage.is_empty() { vec![] } else { vec![rule(Axis::Embed, &storage)] };
            let file = LayoutFile { context_parallel: policy, ..LayoutFile::default() };
            let (rules, overrides) = (rules.clone(), overrides.clone());
            let source = LayoutSource { file, rules, storage: kept, overrides };
            let how = if how.is_empty() { String::new() } else { format!(" {how}") };
            all.extend(placed(format!("{}{how}{stored}", mesh_name(mesh)), None, &source, mesh));
        }
    }
    all
}

/// Returns the sets of mesh axes over which weights can be stored: all subsets of the axes over which weights are
/// otherwise replicated, each in order from outermost to innermost.
fn storage_axes(mesh: &hlo::DeviceMesh) -> Vec<Vec<&'static str>> {
    let free: Vec<&'static str> =
        ["data", "cfg", "fsdp", "context"].into_iter().filter(|a| mesh.size(a).is_some()).collect();
    let subsets = 0..1usize << free.len();
    let picked = |bits: usize| -> Vec<&'static str> {
        free.iter().enumerate().filter(|(n, _)| bits >> n & 1 == 1).map(|(_, a)| *a).collect()
    };
    // The `fsdp` axis has no other purpose than storage, so it is always included.
    subsets.map(picked).filter(|s| mesh.size("fsdp").is_none() || s.contains(&"fsdp")).collect()
}

fn context_parallel_policies(devices: usize) -> Vec<(String, ContextParallelPolicy)> {
    let of = |kind| ContextParallelPolicy { kind, ..ContextParallelPolicy::default() };
    if devices == 1 {
        return vec![(String::new(), of(ContextParallelKind::GatherKv))];
    }
    let mut all = vec![
        ("ulysses".to_string(), of(ContextParallelKind::Ulysses)),
        ("gather_kv".to_string(), of(ContextParallelKind::GatherKv)),
        ("ring".to_string(), of(ContextParallelKind::Ring)),
    ];
    for inner in (2..devices).filter(|n| devices.is_multiple_of(*n)) {
        for (name, outer) in [("gather_kv", ContextParallelKind::GatherKv), ("ring", ContextParallelKind::Ring)] {
            let hybrid = ContextParallelPolicy { ulysses: Some(inner), outer, ..of(ContextParallelKind::Hybrid) };
            all.push((format!("ulysses of {inner}, {name} between"), hybrid));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::read_layout_source;

    fn names(extent: Extent) -> Vec<String> {
        meshes(extent).iter().map(mesh_name).collect()
    }

    #[test]
    fn meshes_are_all_factorizations() {
        let one = Extent { devices: 8, videos: 1, branches: 2 };
        let all = names(one);
        // `cfg` can be 1 or 2; the remaining devices can be divided among three axes in 10 and in 6 ways.
        assert_eq!(all.len(), 16, "{all:?}");
        assert!(all.contains(&"cfg=2,fsdp=2,context=2".to_string()) && all.contains(&"tensor=8".to_string()));
        assert!(all.iter().all(|m| !m.contains("data") && !m.contains("cfg=4")));
        assert!(names(Extent { videos: 2, ..one }).contains(&"data=2,cfg=2,context=2".to_string()));
        assert_eq!(names(Extent { devices: 1, ..one }), ["data=1"]);
        assert_eq!(names(Extent { devices: 6, videos: 1, branches: 1 }).len(), 9);
    }

    #[test]
    fn layout_accepts_only_meshes_whose_axes_it_uses() {
        let mesh = |axes: &[(&str, usize)]| hlo::DeviceMesh::new(axes);
        let on = |name: &str, m: &hlo::DeviceMesh| {
            let source = read_layout_source(name).unwrap();
            placed(name.into(), Some(name.into()), &source, m).is_some()
        };
        assert!(on("ulysses", &mesh(&[("cfg", 2), ("context", 4)])));
        assert!(!on("ulysses", &mesh(&[("context", 4), ("tensor", 2)])));
        assert!(on("fsdp-ulysses", &mesh(&[("fsdp", 2), ("context", 4)])));
        assert!(on("before-385", &mesh(&[("context", 8)])));
        assert!(on("tensor", &mesh(&[("cfg", 2), ("tensor", 4)])));
        assert!(!on("replicated", &mesh(&[("context", 2)])));
        // Three devices cannot be divided evenly into groups of two.
        assert!(!on("hybrid", &mesh(&[("context", 3)])));
        assert!(on("hybrid", &mesh(&[("context", 4)])));
    }

    #[test]
    fn composed_layouts_include_the_shipped_ones() {
        let mesh = hlo::DeviceMesh::new(&[("cfg", 2), ("context", 4)]);
        let all = composed(&mesh);
        // There are four ways to store weights, and five kinds of attention.
        assert_eq!(all.len(), 20);
        let labels: Vec<&str> = all.iter().map(|p| p.label.as_str()).collect();
        assert!(labels.contains(&"cfg=2,context=4 ulysses stored over cfg"), "{labels:?}");
        let policy = read_layout_source("cfg-ulysses").unwrap().file.context_parallel;
        assert!(all.iter().any(|p| p.source.file.context_parallel == policy && p.source.storage.is_empty()));
        let fsdp = composed(&hlo::DeviceMesh::new(&[("fsdp", 8)]));
        assert_eq!(fsdp.iter().map(|p| p.label.as_str()).collect::<Vec<_>>(), ["fsdp=8 stored over fsdp"]);
        let text = all[0].source.to_yaml(&[]);
        assert!(text.starts_with("mesh: {cfg: 2, context: 4}\n"), "{text}");
    }
}
