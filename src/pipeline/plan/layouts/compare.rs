//! Compares a layout with the shipped layouts on the same devices. Reports a shipped layout that is faster, and
//! sharding rules that the layout lacks.

use super::missing::{MissingRuleReport, MissingRules, lack, rules_text, with_rules};
use super::space::{file_mesh, has_groups};
use super::{Estimate, Estimator, MAX_REPEATED_WORK, Point, Ranking, RankingDevices, ranking_by};
use crate::config::{Config, LayoutSource, read_layout_source, resolve_mesh};
use crate::hlo::DeviceMesh;
use crate::pipeline::error::Result;
use crate::pipeline::programs::build::ProgramKind;

/// A shipped layout is reported if it saves more than this fraction of the time.
const MIN_SAVING: f64 = 0.03;

/// Missing rules are reported if they save at least this fraction of the time.
const MIN_RULE_SAVING: f64 = 0.01;

/// Maximum number of [`Addition`]s that a comparison returns.
const MOST: usize = 3;

/// Rules that could be added to a layout, and the estimate of the layout with these rules.
#[derive(Clone, Debug)]
pub(crate) struct Addition {
    pub(crate) lacking: MissingRules,
    pub(crate) estimate: Estimate,
    /// Fraction of the time that the rules save. If the chip is unknown: fraction of the received bytes or, if the
    /// rules only avoid repeated work, of the FLOPs.
    pub(crate) saved: f64,
}

/// Result of comparing a layout with the shipped ones.
#[derive(Clone, Debug)]
pub(crate) struct LayoutComparison {
    pub(crate) own: Estimate,
    ranking: Ranking,
    /// Missing rules that make the layout faster, or with which it fits in memory; the largest saving first.
    pub(crate) additions: Vec<Addition>,
    /// The shipped layout that contains all rules of this layout and the fewest additional rules, with the additional
    /// rules. `None`: no shipped layout contains all rules, or this layout equals a shipped one.
    pub(crate) nearest: Option<MissingRules>,
}

/// Compares the layout of a configuration, on its mesh, with the shipped layouts on all meshes, without compiling.
/// Compares all denoising loops of the first request, or only the program `only`. `None`: no program can be built for
/// the layout on this mesh.
pub(crate) fn compare(
    config: &Config,
    devices: RankingDevices,
    only: Option<ProgramKind>,
) -> Result<Option<LayoutComparison>> {
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
    mesh: &DeviceMesh,
) -> Result<Option<LayoutComparison>> {
    // Unlike `placed`, this also accepts a layout that does not use every mesh axis, so that devices repeat each
    // other's work.
    let point = |source: &LayoutSource| {
        let mut source = source.clone();
        source.file.mesh = file_mesh(mesh);
        Point { label: name.into(), named: None, source, mesh: mesh.clone() }
    };
    if !has_groups(source, mesh) {
        return Ok(None);
    }
    let own_point = point(source);
    let Ok((own, _)) = estimator.estimate(&own_point) else { return Ok(None) };
    // Without a memory limit every layout fits. Skip the check then: it builds all programs of the run, which takes
    // longer than estimating the denoising loops.
    let fits = |e: &Estimate, at: &Point| estimator.limits.device.is_none() || estimator.fits(e, at);
    let own = if fits(&own, &own_point) { own } else { estimator.adjusted(own, &own_point) };
    let MissingRuleReport { candidates, nearest } = lack(source, mesh)?;
    let mut additions = Vec::new();
    for lacking in candidates {
        let point = point(&with_rules(source, &lacking.rules));
        let Ok((estimate, _)) = estimator.estimate(&point) else { continue };
        let saved = ranking.saved(&own, &estimate);
        // If the layout does not fit in memory, consider all additions, also those that save no time.
        if saved < MIN_RULE_SAVING && own.fits {
            continue;
        }
        additions.push((Addition { lacking, estimate, saved }, point));
    }
    // If savings are equal, prefer the addition with fewer rules.
    let rules = |addition: &Addition| addition.lacking.rules.len();
    additions.sort_by(|(a, _), (b, _)| b.saved.total_cmp(&a.saved).then(rules(a).cmp(&rules(b))));
    let additions = additions.into_iter().filter(|(addition, point)| fits(&addition.estimate, point));
    let additions = additions.map(|(addition, _)| addition).take(MOST).collect();
    Ok(Some(LayoutComparison { own, ranking: ranking.clone(), additions, nearest }))
}

/// Returns the saving `own - other` as a fraction of `own`.
fn part_saved(own: f64, other: f64) -> f64 {
    if own > 0.0 { 1.0 - other / own } else { 0.0 }
}

impl Ranking {
    /// Returns the fraction of the time, or of the FLOPs, of `own` that `other` saves.
    fn saved(&self, own: &Estimate, other: &Estimate) -> f64 {
        match self.saves_work(own, other) {
            true => part_saved(own.flops, other.flops),
            false => part_saved(own.cost, other.cost),
        }
    }

    /// Returns whether savings are measured in FLOPs: if the chip is unknown, and `other` avoids repeated work but
    /// saves no bytes. For an unknown chip, costs are received bytes, which do not include work.
    fn saves_work(&self, own: &Estimate, other: &Estimate) -> bool {
        let saves_bytes = part_saved(own.cost, other.cost) > MIN_SAVING;
        !self.timed && !saves_bytes && own.flops > MAX_REPEATED_WORK * other.flops
    }

    /// Formats a saving, e.g. `12 %` or `50 % of the work`.
    fn saved_text(&self, own: &Estimate, other: &Estimate, saved: f64) -> String {
        format!("{:.0} %{}", saved * 100.0, if self.saves_work(own, other) { " of the work" } else { "" })
    }
}

impl LayoutComparison {
    /// Returns the estimate of the fastest shipped layout.
    pub(crate) fn fastest(&self) -> &Estimate {
        &self.ranking.first
    }

    /// Returns whether costs are milliseconds. Otherwise, they are received bytes.
    pub(crate) fn is_timed(&self) -> bool {
        self.ranking.timed
    }

    /// Returns the cost of one transformer evaluation per video.
    pub(crate) fn per_step(&self, estimate: &Estimate) -> f64 {
        estimate.cost / self.ranking.steps.max(1) as f64
    }

    /// Describes the fastest shipped layout if it should save more than 3 % of the time of all steps, or if it fits in
    /// memory and this layout does not.
    pub(crate) fn faster(&self) -> Option<String> {
        let (ranking, own, best) = (&self.ranking, &self.own, self.fastest());
        let saved = ranking.saved(own, best);
        let is_worth = best.fits && (saved > MIN_SAVING || !own.fits);
        let saves = if saved > MIN_SAVING {
            format!("would save {}", ranking.saved_text(own, best, saved))
        } else {
            "would fit in memory".into()
        };
        is_worth.then(|| {
            format!(
                "layout {} (predicted); the shipped layout {}, {saves}",
                ranking.describe(own),
                ranking.describe(best)
            )
        })
    }

    /// Describes the missing rules: those that save the most time, and those that the nearest shipped layout has.
    pub(crate) fn lacking(&self) -> Vec<String> {
        let (ranking, own) = (&self.ranking, &self.own);
        let mut lines = Vec::new();
        let first = self.additions.first();
        if let Some(Addition { lacking, estimate, saved }) = first {
            let what = match own.fits || *saved > MIN_RULE_SAVING {
                true => {
                    format!(
                        "which would save {} ({})",
                        ranking.saved_text(own, estimate, *saved),
                        ranking.figure(estimate)
                    )
                }
                false => format!("with which it would fit in memory ({})", ranking.figure(estimate)),
            };
            let (name, rules) = (&own.layout, rules_text(&lacking.rules));
            lines.push(format!("layout {name} lacks `{rules}` of {}, {what}", lacking.shipped));
        }
        let first_rules = first.map(|first| rules_text(&first.lacking.rules));
        if let Some(nearest) = &self.nearest
            && first_rules.as_ref() != Some(&rules_text(&nearest.rules))
        {
            let rules = rules_text(&nearest.rules);
            lines
                .push(format!("layout {} equals the shipped layout {} without `{rules}`", own.layout, nearest.shipped));
        }
        lines
    }

    /// Returns all findings as lines of text; empty if no shipped layout is faster and no rules are missing.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.faster().into_iter().chain(self.lacking()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::analysis::Chip;
    use crate::config::shipped_layouts;
    use crate::pipeline::plan::layouts::missing::{MissingRule, lacking};
    use crate::pipeline::plan::layouts::placed;
    use crate::runtime::{Target, Toolchain};

    fn compared(set: &[&str], target: &str) -> LayoutComparison {
        let config = Config::load("ltx2", set.iter().copied()).unwrap();
        let target: Target = target.parse().unwrap();
        let (toolchain, count, capacity) = target.described();
        let chip = target.chip();
        let devices = RankingDevices { toolchain: &toolchain, count, capacity, chip: chip.as_ref() };
        compare(&config, devices, None).unwrap().unwrap()
    }

    /// Writes a shipped layout to a file, without the lines for which `removed` returns true. Returns the path.
    fn without(folder: &std::path::Path, name: &str, removed: impl Fn(&str) -> bool) -> String {
        let text = read_layout_source(name).unwrap().to_yaml(&[]);
        let kept: String = text.lines().filter(|line| !removed(line)).map(|line| format!("{line}\n")).collect();
        assert_ne!(kept, text);
        let path = folder.join(format!("{name}.yml"));
        std::fs::write(&path, kept).unwrap();
        path.to_str().unwrap().into()
    }

    #[test]
    fn only_a_faster_layout_is_reported() {
        let of = |layout: &str| compared(&[&format!("layout={layout}")], "cuda:h200:1x1x2");
        let slow = of("tensor").faster().unwrap();
        assert!(
            slow.starts_with("layout tensor (tensor=2), ") && slow.contains("; the shipped layout cfg (cfg=2), "),
            "{slow}"
        );
        assert_eq!(of("cfg").lines(), Vec::<String>::new());
        // If a layout does not use all devices, the other devices repeat the same work.
        let alone = compared(&["layout=replicated"], "tpu:v5p:2x2x1").lines();
        assert!(alone.len() == 1 && alone[0].contains(" would save "), "{alone:?}");
    }

    #[test]
    fn missing_rule_is_reported_with_saving() {
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
        // `height` shards only the video decoder, so removing it does not affect the denoising loops.
        let rows = without(folder.path(), "ulysses", |line| line.starts_with("  height:"));
        let lines = compared(&[&format!("layout={rows}")], "tpu:v5p:2x2x1").lines();
        let height = " equals the shipped layout ulysses without `rules: height: [context]`";
        assert!(lines.iter().any(|line| line.ends_with(height)), "{lines:?}");
    }

    #[test]
    fn repeated_work_is_reported_for_unknown_chip() {
        let config = Config::load("ltx2", ["layout=replicated"]).unwrap();
        let toolchain = Toolchain::of_kind("cuda", "NVIDIA X1");
        let devices = RankingDevices { toolchain: &toolchain, count: 4, capacity: None, chip: None };
        let faster = compare(&config, devices, None).unwrap().unwrap().faster().unwrap();
        assert!(faster.ends_with(" % of the work"), "{faster}");
    }

    #[test]
    fn only_savings_above_three_percent_are_reported() {
        let config = Config::load("ltx2", ["layout=cfg"]).unwrap();
        let chip = Chip::named("h200").unwrap();
        let toolchain = Toolchain::of_kind("cuda", "NVIDIA H200");
        let devices = RankingDevices { toolchain: &toolchain, count: 2, capacity: None, chip: Some(chip) };
        let same = compare(&config, devices, None).unwrap().unwrap();
        let named = |factor: f64| {
            let own = Estimate { cost: same.own.cost * factor, ..same.own.clone() };
            LayoutComparison { own, ..same.clone() }.faster().is_some()
        };
        assert_eq!([named(0.9), named(1.0), named(1.03), named(1.04)], [false, false, false, true]);
    }

    /// Prefixes of rules that do not affect the denoising loops.
    const OTHERS: [&str; 5] =
        ["rules: height", "rules: width", "rules: vocab", "tensors: \"text_encoder", "tensors: \"connectors"];

    /// Removes each rule that has an effect from each shipped layout. The rule must be reported as missing, unless the
    /// layout without it equals another shipped layout. If the removal costs time, the best addition must recover it.
    /// Tests only the first target unless `LTX2_TEST_FULL` is set. The last target tests only layouts that need more
    /// than four devices.
    #[test]
    fn every_rule_removed_from_a_shipped_layout_is_reported() {
        let (mut removed, mut slower) = (0, 0);
        let full = std::env::var_os("LTX2_TEST_FULL").is_some();
        let last = "cuda:h100:1x1x8";
        let more = if full { &["tpu:v5p:2x2x1", "tpu:tpu7x:2x2x1", last][..] } else { &[] };
        let mut untested: BTreeSet<&str> = shipped_layouts().collect();
        for &target in ["cuda:h100:1x1x4"].iter().chain(more) {
            let config = Config::load("ltx2", std::iter::empty::<&str>()).unwrap();
            let parsed: Target = target.parse().unwrap();
            let (toolchain, count, _) = parsed.described();
            let chip = parsed.chip();
            // Use no memory limit, so that the comparison depends on time only.
            let devices = RankingDevices { toolchain: &toolchain, count, capacity: None, chip: chip.as_ref() };
            let estimator = Estimator::new(&config, devices, None).unwrap();
            let ranking = ranking_by(&estimator, &config, None).unwrap();
            let names = untested.clone();
            for name in shipped_layouts().filter(|name| target != last || names.contains(name)) {
                let whole = read_layout_source(name).unwrap();
                // Skip layouts that need more devices.
                let Ok(mesh) = resolve_mesh(&whole.file.mesh, count) else { continue };
                if !has_groups(&whole, &mesh) {
                    continue;
                }
                untested.remove(name);
                let of = |source: &LayoutSource| {
                    compare_source(&estimator, &ranking, name, source, &mesh).unwrap().expect("a program")
                };
                let intact = of(&whole).own.cost;
                for (rule, rest) in without_each(&whole, &mesh) {
                    removed += 1;
                    let is_shipped = shipped_layouts().any(|other| is_same(&rest, other, &mesh));
                    let nearest = lack(&rest, &mesh).unwrap().nearest;
                    let is_named =
                        nearest.is_some_and(|lacking| lacking.rules.iter().all(|own| own.has_same_target(&rule)));
                    assert!(is_named || is_shipped, "{target}: {name} without `{rule}`");
                    // Removing a rule of other programs does not change the estimates of the denoising loops.
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
        assert_eq!(Vec::from_iter(untested), if full { &[][..] } else { &["tensor-hybrid"] });
        let least = if full { [100, 20] } else { [30, 5] };
        assert!(removed > least[0] && slower > least[1], "{removed} rules removed, {slower} of them cost time");
    }

    /// Returns each rule that has an effect on the mesh, together with the layout without it.
    fn without_each(whole: &LayoutSource, mesh: &DeviceMesh) -> Vec<(MissingRule, LayoutSource)> {
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

    /// Returns whether a layout equals the shipped layout `shipped`, which must use all axes of the mesh.
    fn is_same(own: &LayoutSource, shipped: &str, mesh: &DeviceMesh) -> bool {
        let other = read_layout_source(shipped).unwrap();
        placed(shipped.into(), None, &other, mesh).is_some()
            && own.file.context_parallel == other.file.context_parallel
            && lacking(own, &other, mesh).is_empty()
            && lacking(&other, own, mesh).is_empty()
    }
}
