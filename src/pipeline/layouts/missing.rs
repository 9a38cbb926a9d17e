//! Rules that a layout lacks: those by which it differs from a shipped layout on the same mesh.

use std::fmt;

use super::space::placed;
use crate::config::{LayoutSource, read_layout_source, shipped_layouts};
use crate::hlo::Mesh;
use crate::nn::{Override, Rule};
use crate::pipeline::error::Result;

/// Section of a layout file.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Section {
    Rules,
    Storage,
    /// A pattern of `tensors`.
    Tensors(String),
}

/// Rule of a shipped layout that another layout lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MissingRule {
    section: Section,
    rule: Rule,
}

/// In the syntax of a layout file, e.g. `rules: video_sequence: [context]`.
impl fmt::Display for MissingRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rule = format!("{}: [{}]", self.rule.axis.name(), self.rule.mesh_axes.join(", "));
        match &self.section {
            Section::Rules => write!(f, "rules: {rule}"),
            Section::Storage => write!(f, "storage: {rule}"),
            Section::Tensors(pattern) => write!(f, "tensors: \"{pattern}\": {{{rule}}}"),
        }
    }
}

impl MissingRule {
    /// Whether it is a rule of the same section and axis.
    #[cfg(test)]
    pub(super) fn is_of(&self, other: &MissingRule) -> bool {
        self.section == other.section && self.rule.axis == other.rule.axis
    }

    /// Adds the rule to a layout, in place of one of the same section and axis.
    fn add_to(&self, layout: &mut LayoutSource) {
        let rules = match &self.section {
            Section::Rules => &mut layout.rules,
            Section::Storage => &mut layout.storage,
            Section::Tensors(pattern) => {
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

/// The layout with more rules.
pub(crate) fn with_rules(layout: &LayoutSource, rules: &[MissingRule]) -> LayoutSource {
    let mut layout = layout.clone();
    rules.iter().for_each(|rule| rule.add_to(&mut layout));
    layout
}

/// Rules as one text.
pub(crate) fn rules_text(rules: &[MissingRule]) -> String {
    rules.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Rules that a layout lacks on a mesh, with the shipped layout that has them: each on its own, and all of those that the
/// layout is a part of.
#[derive(Clone, Debug)]
pub(crate) struct Lacking {
    pub(crate) shipped: &'static str,
    pub(crate) rules: Vec<MissingRule>,
}

/// What a layout lacks on a mesh.
#[derive(Clone, Debug)]
pub(crate) struct Lack {
    pub(crate) candidates: Vec<Lacking>,
    /// The shipped layout of which it is a part, and that has the fewest rules more; `None`: it is a part of none, or one itself.
    pub(crate) nearest: Option<Lacking>,
}

/// Compares a layout with the shipped ones that use all axes of a mesh. Rules without effect on the mesh do not count.
///
/// # Errors
/// None: shipped layouts are read.
pub(crate) fn lack(own: &LayoutSource, mesh: &Mesh) -> Result<Lack> {
    let mut candidates: Vec<Lacking> = Vec::new();
    let mut parts: Vec<Lacking> = Vec::new();
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
                candidates.push(Lacking { shipped, rules });
            }
        }
        if is_part && own.file.context_parallel == source.file.context_parallel {
            parts.push(Lacking { shipped, rules });
        }
    }
    let nearest = parts.into_iter().min_by_key(|part| part.rules.len()).filter(|part| !part.rules.is_empty());
    Ok(Lack { candidates, nearest })
}

/// Rules of `other` that split an axis of tensors over mesh axes over which `own` does not.
pub(super) fn lacking(own: &LayoutSource, other: &LayoutSource, mesh: &Mesh) -> Vec<MissingRule> {
    let split = |rules: &[Rule], axis| -> Vec<String> {
        let rule = rules.iter().find(|rule| rule.axis == axis);
        rule.into_iter().flat_map(|rule| &rule.mesh_axes).filter(|a| mesh.size(a).is_some()).cloned().collect()
    };
    let mut all = Vec::new();
    for (section, own, other) in
        [(Section::Rules, &own.rules, &other.rules), (Section::Storage, &own.storage, &other.storage)]
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
            // As the general rule has it, an override changes nothing.
            let general = split(&own.rules, rule.axis);
            if !is_given && split(&o.rules, rule.axis) != general {
                all.push(MissingRule { section: Section::Tensors(o.pattern.clone()), rule: rule.clone() });
            }
        }
    }
    all
}
