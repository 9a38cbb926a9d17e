//! Candidate layouts: single-rule changes that could remove collectives, each with an upper bound of its gain. Nothing is
//! compiled here; changes that cannot gain or cannot fit are pruned by arithmetic.

use std::collections::BTreeSet;

use super::compile_report::{CollectiveEntry, CompileReport, TensorPlacement};
use crate::analysis::LoopLevel;
use crate::config::LayoutSource;
use crate::nn::{Axis, ContextParallelKind, Override, Role, Rule};

/// Layout with one rule changed.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    /// Change in the syntax of a layout file.
    pub(crate) change: String,
    pub(crate) layout: LayoutSource,
    /// Upper bound of the gain: cost in a step of the collectives that the change could remove.
    pub(crate) bound: f64,
    /// Number of tensor families that the change reaches.
    pub(crate) families: usize,
    /// Collectives that the change could remove, as indices into the report's list.
    pub(crate) collectives: Vec<usize>,
}

/// Candidates that could save at least the fraction `least` of a step, the most promising first.
pub(crate) fn candidates(source: &LayoutSource, base: &CompileReport, least: f64) -> Vec<Candidate> {
    let around = Around { source, base };
    let mut all = around.rules();
    all.extend(around.storage());
    all.extend(around.overrides());
    all.extend(around.context_parallel());
    all.retain(|c| c.bound >= least * base.whole_cost());
    all.sort_by(|a, b| b.bound.total_cmp(&a.bound));
    all
}

/// Family of a tensor as a pattern of a layout file, e.g. `transformer.*ff*` for all feed-forward layers.
pub(super) fn family(tensor: &str) -> Option<String> {
    let (component, rest) = tensor.split_once('.')?;
    let module = match rest.split_once("*.") {
        // Within a layer stack, modules that differ in prefix and number are one family.
        Some((_, inner)) => {
            let module = inner.split('.').next()?;
            return Some(format!("{component}.*{}*", kin(module)));
        }
        None => rest.split('.').next()?,
    };
    Some(format!("{component}.{module}*"))
}

/// `attn` of `audio_attn1`, `ff` of `audio_ff`.
fn kin(module: &str) -> &str {
    let last = module.rsplit('_').next().unwrap_or(module);
    last.trim_end_matches(|c: char| c.is_ascii_digit())
}

/// Family that a collective serves, by its tensor, else by its name scope among the blocks.
fn family_of(e: &CollectiveEntry) -> Option<String> {
    let by_scope = || {
        let mut parts = e.scope.split('/').skip_while(|p| *p != "blocks").skip(1);
        parts.next().map(|module| format!("transformer.*{}*", kin(module)))
    };
    e.tensor.as_deref().and_then(family).or_else(by_scope)
}

struct Around<'a> {
    source: &'a LayoutSource,
    base: &'a CompileReport,
}

impl Around<'_> {
    fn of(&self, rule: &Rule) -> Vec<usize> {
        let prefix = format!("{}: {}:", rule.place, rule.axis.name());
        self.picked(|e| e.rule.iter().flatten().any(|r| r.starts_with(&prefix)))
    }

    fn picked(&self, keep: impl Fn(&CollectiveEntry) -> bool) -> Vec<usize> {
        let list = self.base.collectives.list.iter().enumerate();
        list.filter(|(_, e)| keep(e)).map(|(n, _)| n).collect()
    }

    fn cost(&self, collectives: &[usize]) -> f64 {
        // Of all blocks, whatever part of them was compiled.
        let blocks = self.base.needed.layers as f64 / self.base.layers.max(1) as f64;
        let each = collectives.iter().map(|&n| &self.base.collectives.list[n]);
        each.map(|e| e.step_cost() * if e.per == LoopLevel::Block { blocks } else { 1.0 }).sum()
    }

    fn families(&self, collectives: &[usize]) -> BTreeSet<String> {
        collectives.iter().filter_map(|&n| family_of(&self.base.collectives.list[n])).collect()
    }

    fn candidate(&self, change: String, layout: LayoutSource, collectives: Vec<usize>) -> Candidate {
        let families = self.families(&collectives);
        Candidate { change, layout, bound: self.cost(&collectives), families: families.len().max(1), collectives }
    }

    fn parts(&self, rule: &Rule) -> usize {
        rule.mesh_axes.iter().filter_map(|a| self.base.mesh.get(a)).product()
    }

    /// Whether replicating an axis would repeat work, because activations are sharded along it. Such a change helps only
    /// where the repeated matmuls take less time than the step.
    fn repeats_work(&self, rule: &Rule) -> bool {
        let name = rule.axis.name();
        let rows = matches!(rule.axis, Axis::Batch | Axis::Branch);
        let computes = |t: &TensorPlacement| {
            let split = |(axis, mesh): (&String, &Vec<String>)| {
                (*axis == name || (rows && axis == "rows")) && mesh.iter().any(|m| rule.mesh_axes.contains(m))
            };
            t.role == Role::Activation && t.axes.iter().zip(&t.sharding).any(split)
        };
        let repeated = self.base.predicted_ms.map(|p| p.compute * self.parts(rule) as f64 >= p.step);
        self.base.tensors.iter().any(computes) && repeated.unwrap_or(true)
    }

    /// Whether the parameters that a pattern names fit into memory once they are replicated along an axis.
    fn has_room(&self, rule: &Rule, covers: impl Fn(&str) -> bool) -> bool {
        let Some(capacity) = self.base.memory.capacity else { return true };
        let name = rule.axis.name();
        let grown: f64 = self
            .base
            .tensors
            .iter()
            .filter(|t| t.role != Role::Activation && covers(&t.tensor))
            .filter_map(|t| {
                let at = t.axes.iter().position(|a| *a == name)?;
                let own = t.sharding[at].iter().filter(|m| rule.mesh_axes.contains(m));
                let parts: usize = own.filter_map(|m| self.base.mesh.get(m)).product();
                let stacked = t.axes.first().is_some_and(|a| a == "layers");
                let all = if stacked { self.base.needed.layers as f64 / self.base.layers.max(1) as f64 } else { 1.0 };
                Some(t.bytes as f64 * parts.saturating_sub(1) as f64 * all)
            })
            .sum();
        self.base.needed.bytes as f64 + grown <= capacity as f64
    }

    /// Changes of general rules: dropped for one family, dropped, or mapped to another mesh axis.
    fn rules(&self) -> Vec<Candidate> {
        let mut all = Vec::new();
        for (n, rule) in self.source.rules.iter().enumerate() {
            let touched = self.of(rule);
            if touched.is_empty() || rule.mesh_axes.is_empty() {
                continue;
            }
            let axis = rule.axis.name();
            for other in self.base.mesh.iter().filter(|(a, size)| **size > 1 && !rule.mesh_axes.contains(a)) {
                let mut layout = self.source.clone();
                layout.rules[n].mesh_axes = vec![other.0.clone()];
                all.push(self.candidate(format!("rules: {axis}: [{}]", other.0), layout, touched.clone()));
            }
            if self.repeats_work(rule) {
                continue;
            }
            let families = self.families(&touched);
            for pattern in &families {
                let own = |e: &CollectiveEntry| family_of(e).as_ref() == Some(pattern);
                let collectives: Vec<usize> =
                    touched.iter().copied().filter(|&e| own(&self.base.collectives.list[e])).collect();
                let rule_of_none = Rule { mesh_axes: Vec::new(), ..rule.clone() };
                let replicated = Override { pattern: pattern.clone(), rules: vec![rule_of_none] };
                if !self.has_room(rule, |t| replicated.covers(t)) {
                    continue;
                }
                let mut layout = self.source.clone();
                // The first override that matches wins.
                layout.overrides.insert(0, replicated);
                all.push(self.candidate(format!("tensors: \"{pattern}\": {{{axis}: []}}"), layout, collectives));
            }
            if families.len() > 1 && self.has_room(rule, |_| true) {
                let collectives = self.carried(rule, touched);
                all.push(self.candidate(format!("rules: without {axis}"), self.without(n), collectives));
            }
        }
        all
    }

    /// Collectives of a rule, and those it may cause where no tensor is annotated: the partitioner propagates a weight's
    /// sharding to what is computed with it.
    fn carried(&self, rule: &Rule, touched: Vec<usize>) -> Vec<usize> {
        let along = |e: &CollectiveEntry| e.axes.iter().any(|a| rule.mesh_axes.contains(a));
        let all = self.picked(|e| along(e) && !e.is_attention()).into_iter().chain(touched);
        all.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Layout without a general rule, and without the overrides that only replicated its axis.
    fn without(&self, rule: usize) -> LayoutSource {
        let mut layout = self.source.clone();
        let axis = layout.rules.remove(rule).axis;
        if layout.overrides.iter().flat_map(|e| &e.rules).any(|r| r.axis == axis && !r.mesh_axes.is_empty()) {
            return layout;
        }
        layout.overrides.iter_mut().for_each(|e| e.rules.retain(|r| r.axis != axis));
        layout.overrides.retain(|e| !e.rules.is_empty());
        layout
    }

    fn storage(&self) -> Vec<Candidate> {
        let rules = self.source.storage.iter().enumerate();
        rules
            .filter(|(_, rule)| self.has_room(rule, |_| true))
            .map(|(n, rule)| {
                let mut layout = self.source.clone();
                layout.storage.remove(n);
                self.candidate(format!("storage: without {}", rule.axis.name()), layout, self.of(rule))
            })
            .collect()
    }

    /// Overrides, each dropped alone and with the others of the same family and axes.
    fn overrides(&self) -> Vec<Candidate> {
        let axes = |e: &Override| e.rules.iter().map(|r| r.axis).collect::<Vec<_>>();
        let reach = |e: &Override| -> BTreeSet<String> {
            self.base.tensors.iter().filter(|t| e.covers(&t.tensor)).filter_map(|t| family(&t.tensor)).collect()
        };
        let mut groups: Vec<(Vec<usize>, BTreeSet<String>)> = Vec::new();
        for (n, e) in self.source.overrides.iter().enumerate() {
            let families = reach(e);
            if families.is_empty() {
                continue;
            }
            groups.push((vec![n], families.clone()));
            let kin =
                |m: usize| axes(&self.source.overrides[m]) == axes(e) && reach(&self.source.overrides[m]) == families;
            let together: Vec<usize> = (0..self.source.overrides.len()).filter(|&m| kin(m)).collect();
            if together.len() > 1 && together[0] == n {
                groups.push((together, families));
            }
        }
        groups
            .into_iter()
            .map(|(left_out, families)| {
                let collectives = self.picked(|e| family_of(e).is_some_and(|f| families.contains(&f)));
                let names: Vec<String> =
                    left_out.iter().map(|&n| format!("\"{}\"", self.source.overrides[n].pattern)).collect();
                let mut layout = self.source.clone();
                let kept = layout.overrides.iter().enumerate().filter(|(n, _)| !left_out.contains(n));
                layout.overrides = kept.map(|(_, e)| e.clone()).collect();
                self.candidate(format!("tensors: without {}", names.join(", ")), layout, collectives)
            })
            .collect()
    }

    fn context_parallel(&self) -> Vec<Candidate> {
        let now = self.source.file.context_parallel;
        let collectives = self.picked(|e| {
            let attention = e.scope.split('/').any(|s| s.contains("attn"));
            attention && e.role == Some(Role::Activation)
        });
        let split = |t: &TensorPlacement| {
            let mut dims = t.axes.iter().zip(&t.sharding);
            t.role == Role::Activation && dims.any(|(axis, mesh)| axis.ends_with("_sequence") && !mesh.is_empty())
        };
        if collectives.is_empty() || !self.base.tensors.iter().any(split) {
            return Vec::new();
        }
        let with = |change: &str, policy| {
            let mut layout = self.source.clone();
            layout.file.context_parallel = policy;
            self.candidate(format!("context_parallel: {change}"), layout, collectives.clone())
        };
        let mut all = Vec::new();
        let kind = |kind| crate::nn::ContextParallelPolicy { kind, ..crate::nn::ContextParallelPolicy::default() };
        // On n devices, an all-to-all of tokens for heads moves 2 / n of what gathering keys and values does, so the way
        // back cannot gain. A ring moves as much as gathering, over one link of a torus instead of two; behind a switch it may
        // gain, which a search finds: here it would hide the rule that is wrong.
        if now.kind != ContextParallelKind::Ulysses {
            all.push(with("kind: ulysses", kind(ContextParallelKind::Ulysses)));
        }
        if matches!(now.kind, ContextParallelKind::Ring | ContextParallelKind::Hybrid) {
            all.push(with("kind: gather_kv", kind(ContextParallelKind::GatherKv)));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Predicted;
    use crate::tune::compile_report::tests::{gather, placed, report};

    #[test]
    fn modules_of_one_kind_are_one_family() {
        let blocks = "transformer.transformer_blocks.*.";
        let of = |name: &str| family(&format!("{blocks}{name}")).unwrap();
        assert_eq!(of("audio_to_video_attn.to_k.weight+to_v.weight"), "transformer.*attn*");
        assert_eq!(of("attn1.to_q.weight"), "transformer.*attn*");
        assert_eq!(of("audio_ff.net.0.proj.weight"), "transformer.*ff*");
        assert_eq!(family("transformer.proj_in.weight").unwrap(), "transformer.proj_in*");
        assert_eq!(family("text_encoder.layers.*.mlp.up_proj.weight").unwrap(), "text_encoder.*mlp*");
        assert_eq!(family("latents"), None);
    }

    /// A weight sharded over the devices that shard the tokens it is used with, gathered by two families.
    fn base(place: &str, gathered: f64) -> CompileReport {
        let embed = format!("{place}:4: embed: [context]");
        let tokens = format!("{place}:3: video_sequence: [context]");
        let collective = |tensor: &str, role, scope: &str, ms, rule: &str| CollectiveEntry {
            rule: Some(vec![rule.into()]),
            role: Some(role),
            ..gather(scope, Some(tensor), ms)
        };
        let mut base = report("tpu:v5p:2x2x2");
        base.mesh = [("context".to_string(), 8)].into();
        base.needed.bytes = 20;
        base.predicted_ms = Some(Predicted { compute: 2.0, memory: 2.0, launch: 0.0, collective: 6.0, step: 10.0 });
        let (parameter, activation) = (Role::Parameter, Role::Activation);
        base.collectives.list = vec![
            collective("transformer.blocks.*.ff.net.2.weight", parameter, "blocks/ff", gathered, &embed),
            collective("transformer.blocks.*.attn1.to_q.weight", parameter, "blocks/attn1", 2.0, &embed),
            collective("transformer.blocks.*.attn1.attention", activation, "blocks/attn1/sdpa", 1.0, &tokens),
            collective("transformer.audio_state", activation, "blocks/audio_ff", 0.5, &tokens),
        ];
        base.tensors = vec![
            placed("transformer.blocks.*.ff.net.2.weight", parameter, ["mlp", "embed"]),
            placed("transformer.blocks.*.ff.out", activation, ["rows", "video_sequence"]),
        ];
        base
    }

    #[test]
    fn what_cannot_gain_or_has_no_room_is_not_compiled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("l.yml").to_str().unwrap().to_string();
        let text = "mesh: {context: -1}\nrules:\n  video_sequence: [context]\n  embed: [context]\n\
                    tensors:\n  \"*none*\": {embed: []}\ncontext_parallel: {kind: gather_kv}\n";
        std::fs::write(&path, text).unwrap();
        let source = crate::config::read_layout_source(&path).unwrap();
        let changes = |base: &CompileReport| {
            candidates(&source, base, 0.01).into_iter().map(|c| (c.change, c.bound, c.families)).collect::<Vec<_>>()
        };
        // Tokens stay sharded: eight times the matmuls would take longer than the step.
        let named = |change: &str, bound, families| (change.to_string(), bound, families);
        assert_eq!(
            changes(&base(&path, 3.0)),
            [
                // The sharding that was propagated to the audio may end with it.
                named("rules: without embed", 5.5, 3),
                named("tensors: \"transformer.*ff*\": {embed: []}", 3.0, 1),
                named("tensors: \"transformer.*attn*\": {embed: []}", 2.0, 1),
                named("context_parallel: kind: ulysses", 1.0, 1),
            ]
        );
        // A collective of less than a hundredth of the step; then a device with no room for the replicated weight.
        assert!(!changes(&base(&path, 0.09)).iter().any(|c| c.0.contains("*ff*")));
        let mut full = base(&path, 3.0);
        full.memory.capacity = Some(89);
        assert!(!changes(&full).iter().any(|c| c.0.contains("*ff*") || c.0.contains("without")));
        // Of a block they count as often as the model has blocks.
        let mut deep = base(&path, 3.0);
        deep.needed.layers = 16 * deep.layers;
        assert_eq!(changes(&deep)[0], named("rules: without embed", 16.0 * 5.5, 3));
        // Without the rule its overrides are empty.
        let without = candidates(&source, &base(&path, 3.0), 0.01).remove(0).layout;
        assert_eq!(
            without.to_yaml(&[]),
            text.lines()
                .filter(|l| !l.contains("embed") && !l.contains("tensors"))
                .map(|l| format!("{l}\n"))
                .collect::<String>()
        );
    }
}
