//! Search space: meshes, and layouts composed of the shipped layouts' rules.

use std::collections::BTreeSet;

use crate::config::{LayoutFile, LayoutSource, Mesh};
use crate::hlo;
use crate::nn::{Axis, ContextParallelKind, ContextParallelPolicy, Override, Rule};

/// Layout and mesh that a search may try.
#[derive(Clone, Debug)]
pub struct Point {
    pub(crate) label: String,
    /// Name or file of the layout, if it is not composed.
    pub(crate) named: Option<String>,
    pub source: LayoutSource,
    /// Mesh axes of more than one device, outermost first.
    pub mesh: hlo::Mesh,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Number of devices, all of which are used.
    pub(crate) devices: usize,
    pub(crate) videos: usize,
    pub(crate) branches: usize,
}

const AXES: [&str; 5] = ["data", "cfg", "fsdp", "context", "tensor"];

/// All factorizations of the device count into the five mesh axes, within the limits.
pub(crate) fn meshes(extent: Extent) -> Vec<hlo::Mesh> {
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
        hlo::Mesh { axes: axes.map(|(a, n)| ((*a).to_string(), n)).collect() }
    };
    all.into_iter().map(named).collect()
}

/// Mesh in the syntax of `--mesh`, e.g. `cfg=2,context=4`.
pub(crate) fn mesh_name(mesh: &hlo::Mesh) -> String {
    match mesh.axes.is_empty() {
        true => "data=1".into(),
        false => mesh.axes.iter().map(|(a, n)| format!("{a}={n}")).collect::<Vec<_>>().join(","),
    }
}

/// Mesh in the form of a layout file.
pub(super) fn file_mesh(mesh: &hlo::Mesh) -> Mesh {
    let of = |axis: &str| mesh.size(axis).and_then(|n| i64::try_from(n).ok()).unwrap_or(1);
    let [data, cfg, fsdp, context, tensor] = AXES.map(of);
    Mesh { data, cfg, fsdp, context, tensor, ..Mesh::default() }
}

/// Dimensions of the transformer's own tensors: what a mesh axis must split one of, or else devices do the same.
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

fn sharing(source: &LayoutSource) -> BTreeSet<&str> {
    // Of patterns, those that may name the transformer's tensors.
    let may = |pattern: &str| pattern.starts_with('*') || pattern.starts_with("transformer");
    let of_patterns = source.overrides.iter().filter(|e| may(&e.pattern)).flat_map(|e| &e.rules);
    let rules = source.rules.iter().chain(of_patterns).filter(|r| OWN.contains(&r.axis));
    rules.flat_map(|r| r.mesh_axes.iter().map(String::as_str)).collect()
}

/// Layout on a mesh, if it uses each mesh axis for work or for weight storage.
pub fn placed(label: String, named: Option<String>, source: &LayoutSource, mesh: &hlo::Mesh) -> Option<Point> {
    let mut used = sharing(source);
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

/// Whether the devices of a sequence divide into the groups of the layout's attention.
pub(super) fn has_groups(source: &LayoutSource, mesh: &hlo::Mesh) -> bool {
    let e = &source.file.context_parallel;
    let tokens = source.rules.iter().find(|r| r.axis == Axis::VideoSequence);
    let own = tokens.into_iter().flat_map(|r| &r.mesh_axes).filter_map(|a| mesh.size(a)).product::<usize>();
    e.kind != ContextParallelKind::Hybrid || own == 1 || own.is_multiple_of(e.ulysses.unwrap_or(1))
}

/// Layouts for a mesh, composed of the shipped layouts' rules: branches over `cfg`, tokens over `context`, heads and MLP
/// widths over `tensor`, weights stored over any of the axes that replicate them; with each kind of attention.
pub(crate) fn composed(mesh: &hlo::Mesh) -> Vec<Point> {
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
        // Text is sharded in the encoder and the connectors, and replicated in the transformer's blocks.
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
    for storage in storages(mesh) {
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

/// Mesh axes for weight storage: all subsets of those that replicate weights, outermost first.
fn storages(mesh: &hlo::Mesh) -> Vec<Vec<&'static str>> {
    let free: Vec<&'static str> =
        ["data", "cfg", "fsdp", "context"].into_iter().filter(|a| mesh.size(a).is_some()).collect();
    let subsets = 0..1usize << free.len();
    let picked = |bits: usize| -> Vec<&'static str> {
        free.iter().enumerate().filter(|(n, _)| bits >> n & 1 == 1).map(|(_, a)| *a).collect()
    };
    // The `fsdp` axis serves storage only.
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
    fn meshes_are_all_factorings() {
        let one = Extent { devices: 8, videos: 1, branches: 2 };
        let all = names(one);
        // cfg of 1 or 2, the rest over three axes: 10 and 6 ways.
        assert_eq!(all.len(), 16, "{all:?}");
        assert!(all.contains(&"cfg=2,fsdp=2,context=2".to_string()) && all.contains(&"tensor=8".to_string()));
        assert!(all.iter().all(|m| !m.contains("data") && !m.contains("cfg=4")));
        assert!(names(Extent { videos: 2, ..one }).contains(&"data=2,cfg=2,context=2".to_string()));
        assert_eq!(names(Extent { devices: 1, ..one }), ["data=1"]);
        assert_eq!(names(Extent { devices: 6, videos: 1, branches: 1 }).len(), 9);
    }

    #[test]
    fn a_layout_takes_meshes_whose_axes_it_uses() {
        let mesh = |axes: &[(&str, usize)]| hlo::Mesh::new(axes);
        let on = |name: &str, m: &hlo::Mesh| {
            let source = read_layout_source(name).unwrap();
            placed(name.into(), Some(name.into()), &source, m).is_some()
        };
        assert!(on("ulysses", &mesh(&[("cfg", 2), ("context", 4)])));
        assert!(!on("ulysses", &mesh(&[("context", 4), ("tensor", 2)])));
        assert!(on("fsdp-ulysses", &mesh(&[("fsdp", 2), ("context", 4)])));
        assert!(on("before-385", &mesh(&[("context", 8)])));
        assert!(on("tensor", &mesh(&[("cfg", 2), ("tensor", 4)])));
        assert!(!on("replicated", &mesh(&[("context", 2)])));
        // Three devices have no groups of two.
        assert!(!on("hybrid", &mesh(&[("context", 3)])));
        assert!(on("hybrid", &mesh(&[("context", 4)])));
    }

    #[test]
    fn shipped_layouts_are_among_the_composed() {
        let mesh = hlo::Mesh::new(&[("cfg", 2), ("context", 4)]);
        let all = composed(&mesh);
        // Four ways to keep weights, five attention schemes.
        assert_eq!(all.len(), 20);
        let labels: Vec<&str> = all.iter().map(|p| p.label.as_str()).collect();
        assert!(labels.contains(&"cfg=2,context=4 ulysses stored over cfg"), "{labels:?}");
        let policy = read_layout_source("cfg-ulysses").unwrap().file.context_parallel;
        assert!(all.iter().any(|p| p.source.file.context_parallel == policy && p.source.storage.is_empty()));
        let fsdp = composed(&hlo::Mesh::new(&[("fsdp", 8)]));
        assert_eq!(fsdp.iter().map(|p| p.label.as_str()).collect::<Vec<_>>(), ["fsdp=8 stored over fsdp"]);
        let text = all[0].source.to_yaml(&[]);
        assert!(text.starts_with("mesh: {cfg: 2, context: 4}\n"), "{text}");
    }
}
