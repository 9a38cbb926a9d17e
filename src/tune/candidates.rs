//! Candidate layouts: changes of one rule that may remove collectives, each with an upper bound of the time saved.
//! Nothing is compiled here; arithmetic excludes changes that cannot save time or do not fit into memory.

use std::collections::BTreeSet;

use super::compile_report::{CollectiveEntry, CompileReport, TensorPlacement};
use crate::analysis::LoopLevel;
use crate::config::LayoutSource;
use crate::nn::{Axis, ContextParallelKind, Override, Role, Rule};

/// A layout in which rules, overrides or the context parallelism are changed.
#[derive(Clone, Debug)]
pub(crate) struct LayoutVariant {
    /// The change, in the syntax of a layout file.
    pub(crate) change: String,
    pub(crate) layout: LayoutSource,
    /// Upper bound of the saved cost: the cost per step of all collectives that the change may remove.
    pub(crate) bound: f64,
    /// Number of tensor families (see [`family`]) that the change affects.
    pub(crate) families: usize,
    /// Collectives that the change may remove, as indices into the report's list.
    pub(crate) collectives: Vec<usize>,
}

/// Returns the candidates that may save at least the fraction `least` of a step's cost, in descending order of their
/// bounds.
pub(crate) fn candidates(source: &LayoutSource, base: &CompileReport, least: f64) -> Vec<LayoutVariant> {
    let around = RuleCollectives { source, base };
    let mut all = around.rules();
    all.extend(around.storage());
    all.extend(around.overrides());
    all.extend(around.context_parallel());
    all.retain(|c| c.bound >= least * base.whole_cost());
    all.sort_by(|a, b| b.bound.total_cmp(&a.bound));
    all
}

/// Returns the family of a tensor: a pattern, as in a layout file, that matches all tensors of the same kind. For
/// example, `transformer.*ff*` matches the tensors of all feed-forward layers.
pub(super) fn family(tensor: &str) -> Option<String> {
    let (component, rest) = tensor.split_once('.')?;
    let module = match rest.split_once("*.") {
        // Within the transformer blocks, modules whose names differ only in a prefix or a number form one family.
        Some((_, inner)) => {
            let module = inner.split('.').next()?;
            return Some(format!("{component}.*{}*", kin(module)));
        }
        None => rest.split('.').next()?,
    };
    Some(format!("{component}.{module}*"))
}

/// Returns the base name of a module: `attn` for `audio_attn1`, `ff` for `audio_ff`.
fn kin(module: &str) -> &str {
    let last = module.rsplit('_').next().unwrap_or(module);
    last.trim_end_matches(|c: char| c.is_ascii_digit())
}

/// Returns the family of the tensor that a collective moves. If the tensor is unknown, returns the family of the
/// module in the collective's name scope.
fn family_of(e: &CollectiveEntry) -> Option<String> {
    let by_scope = || {
        let mut parts = e.scope.split('/').skip_while(|p| *p != "blocks").skip(1);
        parts.next().map(|module| format!("transformer.*{}*", kin(module)))
    };
    e.tensor.as_deref().and_then(family).or_else(by_scope)
}

struct RuleCollectives<'a> {
    source: &'a LayoutSource,
    base: &'a CompileReport,
}

impl RuleCollectives<'_> {
    fn by_rule(&self, rule: &Rule) -> Vec<usize> {
        let prefix = format!("{}: {}:", rule.place, rule.axis.name());
        self.picked(|e| e.rule.iter().flatten().any(|r| r.starts_with(&prefix)))
    }

    fn picked(&self, keep: impl Fn(&CollectiveEntry) -> bool) -> Vec<usize> {
        let list = self.base.collectives.list.iter().enumerate();
        list.filter(|(_, e)| keep(e)).map(|(n, _)| n).collect()
    }

    fn cost(&self, collectives: &[usize]) -> f64 {
        // If only some blocks were compiled, scale to all of them.
        let blocks = self.base.needed.layers as f64 / self.base.layers.max(1) as f64;
        let each = collectives.iter().map(|&n| &self.base.collectives.list[n]);
        each.map(|e| e.step_cost() * if e.per == LoopLevel::Block { blocks } else { 1.0 }).sum()
    }

    fn families(&self, collectives: &[usize]) -> BTreeSet<String> {
        collectives.iter().filter_map(|&n| family_of(&self.base.collectives.list[n])).collect()
    }

    fn candidate(&self, change: String, layout: LayoutSource, collectives: Vec<usize>) -> LayoutVariant {
        let families = self.families(&collectives);
        LayoutVariant { change, layout, bound: self.cost(&collectives), families: families.len().max(1), collectives }
    }

    fn parts(&self, rule: &Rule) -> usize {
        rule.mesh_axes.iter().filter_map(|a| self.base.mesh.get(a)).product()
    }

    /// Returns whether removing a rule would make several devices repeat too much work: the rule shards activations,
    /// and the repeated matmuls alone would take at least as long as the step. If the chip is unknown, this time is not
    /// checked.
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

    /// Returns whether the program fits into device memory if the parameters that `covers` selects are not sharded by
    /// the rule.
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

    /// Returns changes of the rules in the `rules` section: a rule removed for one family, a rule removed completely,
    /// or a rule mapped to a different mesh axis.
    fn rules(&self) -> Vec<LayoutVariant> {
        let mut all = Vec::new();
        for (n, rule) in self.source.rules.iter().enumerate() {
            let touched = self.by_rule(rule);
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
                // Insert it first, because the first matching override applies.
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

    /// Returns the collectives in `touched` and all others along the rule's mesh axes except those of attention. The
    /// rule may cause these too: the partitioner propagates a weight's sharding to unannotated tensors that are
    /// computed from it.
    fn carried(&self, rule: &Rule, touched: Vec<usize>) -> Vec<usize> {
        let along = |e: &CollectiveEntry| e.axes.iter().any(|a| rule.mesh_axes.contains(a));
        let all = self.picked(|e| along(e) && !e.is_attention()).into_iter().chain(touched);
        all.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Returns the layout without one rule of the `rules` section. If no override maps the rule's axis to a mesh axis,
    /// also removes the overrides that replicate this axis.
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

    fn storage(&self) -> Vec<LayoutVariant> {
        let rules = self.source.storage.iter().enumerate();
        rules
            .filter(|(_, rule)| self.has_room(rule, |_| true))
            .map(|(n, rule)| {
                let mut layout = self.source.clone();
                layout.storage.remove(n);
                self.candidate(format!("storage: without {}", rule.axis.name()), layout, self.by_rule(rule))
            })
            .collect()
    }

    /// Returns layouts without one override, and layouts without all of the overrides for the same families and axes.
    fn overrides(&self) -> Vec<LayoutVariant> {
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

    fn context_parallel(&self) -> Vec<LayoutVariant> {
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
        // On n devices, an all-to-all that exchanges a token shard for a head shard moves 2 / n of the bytes of
        // gathering keys and values, so changing from it to a gather cannot gain. A ring moves as many bytes as a
        // gather, but over one link of a torus instead of two. With a switch, a ring may gain. Only a search tries it:
        // in a diagnosis, a gain from it would distract from the rule that causes the collective.
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
    fn modules_of_the_same_kind_form_one_family() {
        let blocks = "transformer.transformer_blocks.*.";
        let of = |name: &str| family(&format!("{blocks}{name}")).unwrap();
        assert_eq!(of("audio_to_video_attn.to_k.weight+to_v.weight"), "transformer.*attn*");
        assert_eq!(of("attn1.to_q.weight"), "transformer.*attn*");
        assert_eq!(of("audio_ff.net.0.proj.weight"), "transformer.*ff*");
        assert_eq!(family("transformer.proj_in.weight").unwrap(), "transformer.proj_in*");
        assert_eq!(family("text_encoder.layers.*.mlp.up_proj.weight").unwrap(), "text_encoder.*mlp*");
        assert_eq!(family("latents"), None);
    }

    /// Returns a report on a weight that is sharded over the same devices as the tokens that it is multiplied with. Two
    /// families of weights are gathered.
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
        base.predicted_ms =
            Some(Predicted { compute: 2.0, memory: 2.0, collective: 6.0, step: 10.0, ..Predicted::default() });
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
    fn candidates_that_save_nothing_or_do_not_fit_are_pruned() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("l.yml").to_str().unwrap().to_string();
        let text = "mesh: {context: -1}\nrules:\n  video_sequence: [context]\n  embed: [context]\n\
                    tensors:\n  \"*none*\": {embed: []}\ncontext_parallel: {kind: gather_kv}\n";
        std::fs::write(&path, text).unwrap();
        let source = crate::config::read_layout_source(&path).unwrap();
        let changes = |base: &CompileReport| {
            candidates(&source, base, 0.01).into_iter().map(|c| (c.change, c.bound, c.families)).collect::<Vec<_>>()
        };
        // No candidate replicates the tokens: the matmuls, repeated on eight devices, would take longer than the step.
        let named = |change: &str, bound, families| (change.to_string(), bound, families);
        assert_eq!(
            changes(&base(&path, 3.0)),
            [
                // Removing the rule may also remove the sharding that was propagated to the audio stream.
                named("rules: without embed", 5.5, 3),
                named("tensors: \"transformer.*ff*\": {embed: []}", 3.0, 1),
                named("tensors: \"transformer.*attn*\": {embed: []}", 2.0, 1),
                named("context_parallel: kind: ulysses", 1.0, 1),
            ]
        );
        // Rejected candidates: the collective costs less than 1 % of the step, or a device has no room for the
        // replicated weight.
        assert!(!changes(&base(&path, 0.09)).iter().any(|c| c.0.contains("*ff*")));
        let mut full = base(&path, 3.0);
        full.memory.capacity = Some(89);
        assert!(!changes(&full).iter().any(|c| c.0.contains("*ff*") || c.0.contains("without")));
        // A collective in the compiled block counts once for each block of the model.
        let mut deep = base(&path, 3.0);
        deep.needed.layers = 16 * deep.layers;
        assert_eq!(changes(&deep)[0], named("rules: without embed", 16.0 * 5.5, 3));
        // The override that only replicated the rule's axis is removed with the rule.
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
