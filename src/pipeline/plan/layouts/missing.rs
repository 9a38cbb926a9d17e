//! Finds sharding rules that shipped layouts have on a mesh and another layout lacks.

use std::fmt;

use super::space::placed;
use crate::config::{LayoutSource, read_layout_source, shipped_layouts};
use crate::hlo::DeviceMesh;
use crate::nn::{Override, Rule};
use crate::pipeline::error::Result;

/// Section of a layout file.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LayoutSection {
    Rules,
    Storage,
    /// A tensor pattern of the `tensors` section.
    Tensors(String),
}

/// A rule that a shipped layout has and another layout lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MissingRule {
    section: LayoutSection,
    rule: Rule,
}

/// Formats the rule in the syntax of a layout file, e.g. `rules: video_sequence: [context]`.
impl fmt::Display for MissingRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rule = format!("{}: [{}]", self.rule.axis.name(), self.rule.mesh_axes.join(", "));
        match &self.section {
            LayoutSection::Rules => write!(f, "rules: {rule}"),
            LayoutSection::Storage => write!(f, "storage: {rule}"),
            LayoutSection::Tensors(pattern) => write!(f, "tensors: \"{pattern}\": {{{rule}}}"),
        }
    }
}

impl MissingRule {
    /// Returns whether both rules have the same section and tensor axis.
    #[cfg(test)]
    pub(super) fn has_same_target(&self, other: &MissingRule) -> bool {
        self.section == other.section && self.rule.axis == other.rule.axis
    }

    /// Adds the rule to a layout; replaces a rule with the same section and tensor axis.
    fn add_to(&self, layout: &mut LayoutSource) {
        let rules = match &self.section {
            LayoutSection::Rules => &mut layout.rules,
            LayoutSection::Storage => &mut layout.storage,
            LayoutSection::Tensors(pattern) => {
                let at = layout.overrides.iter().position(|o| o.pattern == *pattern).unwrap_or_else(|| {
                    layout.overrides.push(Override { pattern: pattern.clone(), rules: Vec::new() });
                    layout.overrides.len() - 1
                });
                &mut layout.overrides[at].rules
            }
        };
        rules.retain(|rule| rule.axis != self.rule.axis);
        rules.push(self.rule.clone());
    }
}

/// Returns the layout with the rules `rules` added.
pub(crate) fn with_rules(layout: &LayoutSource, rules: &[MissingRule]) -> LayoutSource {
    let mut layout = layout.clone();
    rules.iter().for_each(|rule| rule.add_to(&mut layout));
    layout
}

/// Formats rules as one line.
pub(crate) fn rules_text(rules: &[MissingRule]) -> String {
    rules.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Rules that a layout lacks on a mesh, and the shipped layout that contains them.
#[derive(Clone, Debug)]
pub(crate) struct MissingRules {
    pub(crate) shipped: &'static str,
    pub(crate) rules: Vec<MissingRule>,
}

/// Comparison of a layout with the shipped layouts on a mesh. `candidates`: sets of rules that could be added to the
/// layout. Each missing rule forms a set. For each shipped layout that contains all rules of the layout, its remaining
/// rules form another set.
#[derive(Clone, Debug)]
pub(crate) struct MissingRuleReport {
    pub(crate) candidates: Vec<MissingRules>,
    /// The shipped layout that contains all rules of the layout and the fewest additional rules. `None`: no shipped
    /// layout contains all rules, or the layout equals a shipped one.
    pub(crate) nearest: Option<MissingRules>,
}

/// Compares a layout with the shipped layouts that use all axes of a mesh. Ignores rules that have no effect on the
/// mesh.
pub(crate) fn lack(own: &LayoutSource, mesh: &DeviceMesh) -> Result<MissingRuleReport> {
    let mut candidates: Vec<MissingRules> = Vec::new();
    let mut parts: Vec<MissingRules> = Vec::new();
    for shipped in shipped_layouts() {
        let source = read_layout_source(shipped)?;
        if placed(shipped.into(), None, &source, mesh).is_none() {
            continue;
        }
        let rules = lacking(own, &source, mesh);
        let each = rules.iter().map(|rule| vec![rule.clone()]);
        let is_part = lacking(&source, own, mesh).is_empty();
        let whole = (is_part && rules.len() > 1).then(|| rules.clone());
        for rules in each.chain(whole) {
            if !candidates.iter().any(|known| rules_text(&known.rules) == rules_text(&rules)) {
                candidates.push(MissingRules { shipped, rules });
            }
        }
        if is_part && own.file.context_parallel == source.file.context_parallel {
            parts.push(MissingRules { shipped, rules });
        }
    }
    let nearest = parts.into_iter().min_by_key(|part| part.rules.len()).filter(|part| !part.rules.is_empty());
    Ok(MissingRuleReport { candidates, nearest })
}

/// Returns the rules of `other` that shard a tensor axis over a mesh axis over which `own` does not shard that tensor
/// axis.
pub(super) fn lacking(own: &LayoutSource, other: &LayoutSource, mesh: &DeviceMesh) -> Vec<MissingRule> {
    let split = |rules: &[Rule], axis| -> Vec<String> {
        let rule = rules.iter().find(|rule| rule.axis == axis);
        rule.into_iter().flat_map(|rule| &rule.mesh_axes).filter(|a| mesh.size(a).is_some()).cloned().collect()
    };
    let mut all = Vec::new();
    for (section, own, other) in
        [(LayoutSection::Rules, &own.rules, &other.rules), (LayoutSection::Storage, &own.storage, &other.storage)]
    {
        for rule in other {
            let (has, wanted) = (split(own, rule.axis), split(other, rule.axis));
            if wanted.iter().any(|axis| !has.contains(axis)) {
                all.push(MissingRule { section: section.clone(), rule: rule.clone() });
            }
        }
    }
    for o in &other.overrides {
        let same = own.overrides.iter().find(|same| same.pattern == o.pattern);
        for rule in &o.rules {
            let is_given = same.is_some_and(|same| same.rules.iter().any(|given| given.axis == rule.axis));
            // Skip an override that shards the axis in the same way as the layout's general rule.
            let general = split(&own.rules, rule.axis);
            if !is_given && split(&o.rules, rule.axis) != general {
                all.push(MissingRule { section: LayoutSection::Tensors(o.pattern.clone()), rule: rule.clone() });
            }
        }
    }
    all
}
