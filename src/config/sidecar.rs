//! Values of a sidecar under values that override them.

use serde_json::Value;

use super::effect::RULES;
use super::effect_facts::Facts;
use super::error::ValueOrigin;
use super::schema::Config;
use super::tree::Tree;
use super::yaml::{Data, Node};
use crate::weights::Version;

/// The configuration of a sidecar, which holds it under `config`, and whether the file is one. Its output path is left out:
/// repeating a run never aims at the first one's file.
pub(super) fn unwrap(root: Node) -> (Node, bool) {
    let Data::Map(entries) = root.data else { return (root, false) };
    let Some(at) = entries.iter().position(|(k, n)| k == "config" && matches!(n.data, Data::Map(_))) else {
        return (Node { line: root.line, data: Data::Map(entries) }, false);
    };
    let mut config = entries.into_iter().nth(at).map_or(Node::from_value(Value::Null), |(_, n)| n);
    if let Data::Map(sections) = &mut config.data {
        for (_, section) in sections.iter_mut().filter(|(k, _)| k == "output") {
            if let Data::Map(keys) = &mut section.data {
                keys.retain(|(k, _)| k != "path");
            }
        }
    }
    (config, true)
}

/// Whether the value at a key is a sidecar's.
pub(super) fn holds(tree: &Tree, key: &str) -> bool {
    matches!(tree.origin(key), ValueOrigin::Sidecar { .. })
}

/// The number of frames that a sidecar among these layers says.
pub(super) fn frames(layers: &[Tree]) -> Option<usize> {
    let of = |layer: &Tree| layer.leaf("request.num_frames").map(|(value, origin)| (value.clone(), origin.clone()));
    let found = layers.iter().filter_map(of).find(|(_, origin)| matches!(origin, ValueOrigin::Sidecar { .. }))?;
    found.0.as_u64().and_then(|frames| usize::try_from(frames).ok())
}

/// Puts what holds without the sidecar in the place of its values that have no effect, where something overrides the sidecar:
/// the span of a retake under another pipeline, a setting of another sampler.
pub(super) fn prune(merged: &mut Tree, below: &Tree, config: &Config, version: Version) {
    let has = |is: &dyn Fn(&str, &ValueOrigin) -> bool| {
        let mut leaves = Vec::new();
        merged.leaves(String::new(), &mut leaves);
        leaves.iter().any(|(path, origin)| is(path, origin))
    };
    let is_overridden =
        has(&|path, origin| matches!(origin, ValueOrigin::Set | ValueOrigin::Flag(_)) && !path.starts_with("output."));
    if !is_overridden || !has(&|_, origin| matches!(origin, ValueOrigin::Sidecar { .. })) {
        return;
    }
    let facts = Facts { config, version };
    for rule in RULES {
        for key in rule.keys {
            let all = {
                let mut own = Vec::new();
                merged.get(key).into_iter().for_each(|tree| tree.leaves((*key).into(), &mut own));
                !own.is_empty() && own.iter().all(|(_, origin)| matches!(origin, ValueOrigin::Sidecar { .. }))
            };
            let base = below.get(key).cloned().unwrap_or(Tree::Leaf(Value::Null, ValueOrigin::Default));
            let value = merged.get(key).map(Tree::to_value);
            if !all || value == Some(base.to_value()) {
                continue;
            }
            if let Some(why) = (rule.reason)(&facts, key) {
                tracing::info!("{key} of {} is left out: {why}", merged.origin(key));
                merged.replace(key, base);
            }
        }
    }
}
