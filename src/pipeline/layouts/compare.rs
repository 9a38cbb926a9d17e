//! A layout compared with the shipped ones on the same devices: a faster one, and rules that it lacks.

use super::missing::{Lack, Lacking, lack, rules_text, with_rules};
use super::space::{file_mesh, has_groups};
use super::{Devices, Estimate, Estimator, Point, REPEATED, Ranking, ranking_by};
use crate::config::{Config, LayoutSource, read_layout_source, resolve_mesh};
use crate::hlo::Mesh;
use crate::pipeline::error::Result;
use crate::pipeline::programs::ProgramKind;

/// Fraction of the time that a faster layout must save to be named.
const WORTH_NAMING: f64 = 0.03;

/// The same of rules that a layout lacks.
const WORTH_ADDING: f64 = 0.01;

/// Largest number of additions.
const MOST: usize = 3;

/// Rules that a layout lacks, with the estimate of the layout that has them.
#[derive(Clone, Debug)]
pub(crate) struct Addition {
    pub(crate) lacking: Lacking,
    pub(crate) estimate: Estimate,
    /// Fraction of the time that they save, or of the work where times are unknown.
    pub(crate) saved: f64,
}

/// A layout compared with the shipped ones.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    pub(crate) own: Estimate,
    ranking: Ranking,
    /// Rules that the layout lacks and that make it faster, or without which it does not fit; the best first.
    pub(crate) additions: Vec<Addition>,
    /// Shipped layout of which it is a part, with the rules that it lacks.
    pub(crate) nearest: Option<Lacking>,
}

/// Compares a configuration's layout on its mesh with the shipped layouts on all meshes of the devices, without compiling: by
/// all loops of its first request, or by the program `only`. `None`: a layout that has no program on the mesh.
///
/// # Errors
/// A configuration whose programs cannot be written.
pub(crate) fn compare(config: &Config, devices: Devices, only: Option<ProgramKind>) -> Result<Option<Comparison>> {
    let source = read_layout_source(&config.layout)?;
    let mesh = resolve_mesh(config.mesh.as_ref().unwrap_or(&source.file.mesh), devices.count)?;
    let estimator = Estimator::new(config, devices, only)?;
    let ranking = ranking_by(&estimator, config, None)?;
    compare_source(&estimator, &ranking, &config.layout, &source, &mesh)
}

fn compare_source(
    estimator: &Estimator,
    ranking: &Ranking,
    name: &str,
    source: &LayoutSource,
    mesh: &Mesh,
) -> Result<Option<Comparison>> {
    // Also of a layout that leaves an axis of the mesh unused: it repeats the work.
    let point = |source: &LayoutSource| {
        let mut source = source.clone();
        source.file.mesh = file_mesh(mesh);
        Point { label: name.into(), named: None, source, mesh: mesh.clone() }
    };
    if !has_groups(source, mesh) {
        return Ok(None);
    }
    let own_point = point(source);
    let Ok((mut own, _)) = estimator.estimate(&own_point) else { return Ok(None) };
    // Bytes of a run take longer to count than its loops take to estimate.
    let fits = |e: &Estimate, at: &Point| estimator.devices.capacity.is_none() || estimator.fits(e, at);
    own.fits = fits(&own, &own_point);
    let Lack { candidates, nearest } = lack(source, mesh)?;
    let mut additions = Vec::new();
    for lacking in candidates {
        let point = point(&with_rules(source, &lacking.rules));
        let Ok((estimate, _)) = estimator.estimate(&point) else { continue };
        let saved = ranking.saved(&own, &estimate);
        // Where the layout does not fit, whatever does is better.
        if saved < WORTH_ADDING && own.fits {
            continue;
        }
        additions.push((Addition { lacking, estimate, saved }, point));
    }
    // Of equal ones that of fewer rules.
    let rules = |addition: &Addition| addition.lacking.rules.len();
    additions.sort_by(|(a, _), (b, _)| b.saved.total_cmp(&a.saved).then(rules(a).cmp(&rules(b))));
    let additions = additions.into_iter().filter(|(addition, point)| fits(&addition.estimate, point));
    let additions = additions.map(|(addition, _)| addition).take(MOST).collect();
    Ok(Some(Comparison { own, ranking: ranking.clone(), additions, nearest }))
}

/// Fraction of a number that a smaller one saves.
fn part_saved(own: f64, other: f64) -> f64 {
    if own > 0.0 { 1.0 - other / own } else { 0.0 }
}

impl Ranking {
    /// Fraction of the time that `other` saves of `own`'s, or of the work.
    fn saved(&self, own: &Estimate, other: &Estimate) -> f64 {
        match self.saves_work(own, other) {
            true => part_saved(own.flops, other.flops),
            false => part_saved(own.cost, other.cost),
        }
    }

    /// Whether `other` saves work that `own` repeats, and no bytes: of an unknown chip costs are bytes, which say nothing of it.
    fn saves_work(&self, own: &Estimate, other: &Estimate) -> bool {
        let saves_bytes = part_saved(own.cost, other.cost) > WORTH_NAMING;
        !self.timed && !saves_bytes && own.flops > REPEATED * other.flops
    }

    /// What is saved, in words.
    fn saved_text(&self, own: &Estimate, other: &Estimate, saved: f64) -> String {
        format!("{:.0} %{}", saved * 100.0, if self.saves_work(own, other) { " of the work" } else { "" })
    }
}

impl Comparison {
    /// The fastest shipped layout.
    pub(crate) fn fastest(&self) -> &Estimate {
        &self.ranking.first
    }

    /// Whether estimates are milliseconds, not bytes.
    pub(crate) fn is_timed(&self) -> bool {
        self.ranking.timed
    }

    /// Cost of one evaluation for one video.
    pub(crate) fn per_step(&self, estimate: &Estimate) -> f64 {
        estimate.cost / self.ranking.steps.max(1) as f64
    }

    /// A shipped layout that should save more than 3 % of the steps' time, in words.
    pub(crate) fn faster(&self) -> Option<String> {
        let (ranking, own, best) = (&self.ranking, &self.own, self.fastest());
        let saved = ranking.saved(own, best);
        let is_worth = best.fits && (saved > WORTH_NAMING || !own.fits);
        let saves = if saved > WORTH_NAMING {
            format!("would save {}", ranking.saved_text(own, best, saved))
        } else {
            "would fit".into()
        };
        is_worth.then(|| format!("layout {} predicted; {} {saves}", ranking.said(own), ranking.said(best)))
    }

    /// Rules that the layout lacks, in words: those that help most, and those of the shipped layout that it is a part of.
    pub(crate) fn lacking(&self) -> Vec<String> {
        let (ranking, own) = (&self.ranking, &self.own);
        let mut lines = Vec::new();
        let first = self.additions.first();
        if let Some(Addition { lacking, estimate, saved }) = first {
            let what = match own.fits || *saved > WORTH_ADDING {
                true => {
                    format!("{} would save {}", ranking.figure(estimate), ranking.saved_text(own, estimate, *saved))
                }
                false => format!("{} would fit", ranking.figure(estimate)),
            };
            let (name, rules) = (&own.layout, rules_text(&lacking.rules));
            lines.push(format!("layout {name} lacks `{rules}` of {}: with it, {what}", lacking.shipped));
        }
        let told = first.map(|first| rules_text(&first.lacking.rules));
        if let Some(nearest) = &self.nearest
            && told.as_ref() != Some(&rules_text(&nearest.rules))
        {
            let rules = rules_text(&nearest.rules);
            lines.push(format!("layout {} is {} without `{rules}`", own.layout, nearest.shipped));
        }
        lines
    }

    /// All in words; empty of a layout that is as fast as the fastest, and lacks nothing.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.faster().into_iter().chain(self.lacking()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Chip;
    use crate::config::shipped_layouts;
    use crate::pipeline::layouts::missing::{MissingRule, lacking};
    use crate::pipeline::layouts::placed;
    use crate::runtime::{Target, Toolchain};

    fn compared(set: &[&str], target: &str) -> Comparison {
        let config = Config::load("ltx2", set.iter().copied()).unwrap();
        let target: Target = target.parse().unwrap();
        let (toolchain, count, capacity) = target.described();
        let chip = target.chip();
        let devices = Devices { toolchain: &toolchain, count, capacity, chip: chip.as_ref() };
        compare(&config, devices, None).unwrap().unwrap()
    }

    /// A shipped layout without one of its rules, as a file.
    fn without(folder: &std::path::Path, name: &str, removed: impl Fn(&str) -> bool) -> String {
        let text = read_layout_source(name).unwrap().to_yaml(&[]);
        let kept: String = text.lines().filter(|line| !removed(line)).map(|line| format!("{line}\n")).collect();
        assert_ne!(kept, text);
        let path = folder.join(format!("{name}.yml"));
        std::fs::write(&path, kept).unwrap();
        path.to_str().unwrap().into()
    }

    #[test]
    fn a_faster_layout_is_named_and_a_fast_one_is_not() {
        let of = |layout: &str| compared(&[&format!("layout={layout}")], "cuda:h200:1x1x2");
        let slow = of("tensor").faster().unwrap();
        assert!(slow.starts_with("layout tensor (tensor=2), ") && slow.contains("; cfg (cfg=2), "), "{slow}");
        assert_eq!(of("cfg").lines(), Vec::<String>::new());
        // A layout that leaves devices unused repeats their work.
        let alone = compared(&["layout=replicated"], "tpu:v5p:2x2x1").lines();
        assert!(alone.len() == 1 && alone[0].contains(" would save "), "{alone:?}");
    }

    #[test]
    fn a_rule_that_is_missing_is_named_with_what_it_saves() {
        let folder = tempfile::tempdir().unwrap();
        let tokens = without(folder.path(), "ulysses", |line| line.contains("video_sequence"));
        let lines = compared(&[&format!("layout={tokens}")], "tpu:v5p:2x2x1").lines();
        assert!(lines[0].contains(" would save "), "{lines:?}");
        assert!(
            lines[1].contains(" lacks `rules: video_sequence: [context]` of ") && lines[1].contains(" would save ")
        );
        let mlp = without(folder.path(), "tensor", |line| line.starts_with("  mlp:"));
        let lines = compared(&[&format!("layout={mlp}")], "tpu:v5p:2x2x1").lines();
        assert!(lines.iter().any(|line| line.contains(" lacks `rules: mlp: [tensor]` of tensor")), "{lines:?}");
        // The video decoder's rule changes no step.
        let rows = without(folder.path(), "ulysses", |line| line.starts_with("  height:"));
        let lines = compared(&[&format!("layout={rows}")], "tpu:v5p:2x2x1").lines();
        assert!(lines.iter().any(|line| line.ends_with(" is ulysses without `rules: height: [context]`")), "{lines:?}");
    }

    #[test]
    fn of_an_unknown_chip_repeated_work_counts() {
        let config = Config::load("ltx2", ["layout=replicated"]).unwrap();
        let toolchain = Toolchain { platform: "cuda".into(), kind: "NVIDIA X1".into(), version: String::new() };
        let devices = Devices { toolchain: &toolchain, count: 4, capacity: None, chip: None };
        let faster = compare(&config, devices, None).unwrap().unwrap().faster().unwrap();
        assert!(faster.ends_with(" % of the work"), "{faster}");
    }

    #[test]
    fn more_than_three_percent_are_worth_naming() {
        let config = Config::load("ltx2", ["layout=cfg"]).unwrap();
        let chip = Chip::named("h200").unwrap();
        let toolchain = Toolchain { platform: "cuda".into(), kind: "NVIDIA H200".into(), version: String::new() };
        let devices = Devices { toolchain: &toolchain, count: 2, capacity: None, chip: Some(chip) };
        let same = compare(&config, devices, None).unwrap().unwrap();
        let named = |factor: f64| {
            let own = Estimate { cost: same.own.cost * factor, ..same.own.clone() };
            Comparison { own, ..same.clone() }.faster().is_some()
        };
        assert_eq!([named(0.9), named(1.0), named(1.03), named(1.04)], [false, false, false, true]);
    }

    /// Rules of programs beside the loops.
    const OTHERS: [&str; 5] =
        ["rules: height", "rules: width", "rules: vocab", "tensors: \"text_encoder", "tensors: \"connectors"];

    /// Each rule with an effect removed from each shipped layout: it is named, or the rest is a shipped layout itself. Where
    /// the removal costs time, the first addition gives it back.
    #[test]
    fn every_rule_that_is_removed_from_a_shipped_layout_is_named() {
        let (mut removed, mut slower) = (0, 0);
        for target in ["tpu:v5p:2x2x1", "tpu:tpu7x:2x2x1", "cuda:h100:1x1x4"] {
            let config = Config::load("ltx2", std::iter::empty::<&str>()).unwrap();
            let parsed: Target = target.parse().unwrap();
            let (toolchain, count, _) = parsed.described();
            let chip = parsed.chip();
            // Without the limit of memory: a rule that makes a layout fit is another matter.
            let devices = Devices { toolchain: &toolchain, count, capacity: None, chip: chip.as_ref() };
            let estimator = Estimator::new(&config, devices, None).unwrap();
            let ranking = ranking_by(&estimator, &config, None).unwrap();
            for name in shipped_layouts() {
                let whole = read_layout_source(name).unwrap();
                // Some are for more devices.
                let Ok(mesh) = resolve_mesh(&whole.file.mesh, count) else { continue };
                if !has_groups(&whole, &mesh) {
                    continue;
                }
                let of = |source: &LayoutSource| {
                    compare_source(&estimator, &ranking, name, source, &mesh).unwrap().expect("a program")
                };
                let intact = of(&whole).own.cost;
                for (rule, rest) in without_each(&whole, &mesh) {
                    removed += 1;
                    let is_shipped = shipped_layouts().any(|other| is_same(&rest, other, &mesh));
                    let nearest = lack(&rest, &mesh).unwrap().nearest;
                    let is_named = nearest.is_some_and(|lacking| lacking.rules.iter().all(|own| own.is_of(&rule)));
                    assert!(is_named || is_shipped, "{target}: {name} without `{rule}`");
                    // Other rules change no step: estimates of the loops are equal.
                    if is_shipped || OTHERS.iter().any(|other| rule.to_string().starts_with(other)) {
                        continue;
                    }
                    let found = of(&rest);
                    if found.own.cost > intact * 1.03 {
                        slower += 1;
                        let best = found.additions.first().expect("an addition").estimate.cost;
                        assert!(best < intact * 1.03, "{target}: {name} without `{rule}`: {:?}", found.lines());
                    }
                }
            }
        }
        assert!(removed > 100 && slower > 20, "{removed} rules removed, {slower} of them cost time");
    }

    /// A layout without each of its rules that has an effect on a mesh, with the rule.
    fn without_each(whole: &LayoutSource, mesh: &Mesh) -> Vec<(MissingRule, LayoutSource)> {
        let mut all = Vec::new();
        let mut keep = |remove: &dyn Fn(&mut LayoutSource)| {
            let mut rest = whole.clone();
            remove(&mut rest);
            all.extend(lacking(&rest, whole, mesh).into_iter().next().map(|rule| (rule, rest)));
        };
        (0..whole.rules.len()).for_each(|n| keep(&|rest| drop(rest.rules.remove(n))));
        (0..whole.storage.len()).for_each(|n| keep(&|rest| drop(rest.storage.remove(n))));
        for (n, o) in whole.overrides.iter().enumerate() {
            (0..o.rules.len()).for_each(|rule| keep(&|rest| drop(rest.overrides[n].rules.remove(rule))));
        }
        all
    }

    /// Whether a layout is a shipped one that uses all axes of a mesh.
    fn is_same(own: &LayoutSource, shipped: &str, mesh: &Mesh) -> bool {
        let other = read_layout_source(shipped).unwrap();
        placed(shipped.into(), None, &other, mesh).is_some()
            && own.file.context_parallel == other.file.context_parallel
            && lacking(own, &other, mesh).is_empty()
            && lacking(&other, own, mesh).is_empty()
    }
}
