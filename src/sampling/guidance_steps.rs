//! Guidance that varies by step: scales by noise level, steps that reuse a prediction, and the resulting branch sets
//! (`MultiModalGuiderFactory` and `skip_step` of Lightricks' ltx-core).

use super::MAX_STEPS;
use super::guidance::{Branch, GuidanceScales};
use super::guiders::GuiderKind;
use crate::av::Av;

/// Guidance of one stream that varies by step. The default is the same guidance at every step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GuidanceSteps {
    /// Number of steps after each predicted step that reuse its guided prediction.
    pub skip: usize,
    /// Guidance by noise level, from the highest bound to the lowest; empty if guidance does not depend on the noise
    /// level.
    pub by_sigma: Vec<SigmaGuidance>,
}

/// Guidance of a stream at noise levels from the next lower bound up to `sigma`. The entry with the highest bound also
/// applies above that bound, the one with the lowest bound down to 0.
#[derive(Clone, Debug, PartialEq)]
pub struct SigmaGuidance {
    /// Upper bound of the noise level.
    pub sigma: f64,
    pub scales: GuidanceScales,
    /// See [`GuidanceSteps::skip`].
    pub skip: usize,
}

impl GuidanceSteps {
    /// Returns the scales and the number of skipped steps at noise level `sigma`. If guidance does not depend on the
    /// noise level, returns `scales` and `self.skip`.
    fn at(&self, scales: GuidanceScales, sigma: f64) -> (GuidanceScales, usize) {
        let within = self.by_sigma.iter().rev().find(|own| own.sigma >= sigma);
        within.or(self.by_sigma.first()).map_or((scales, self.skip), |own| (own.scales, own.skip))
    }

    /// Returns the scales of every entry of `by_sigma`, or `scales` if there are no entries.
    pub(crate) fn all(&self, scales: GuidanceScales) -> Vec<GuidanceScales> {
        if self.by_sigma.is_empty() { vec![scales] } else { self.by_sigma.iter().map(|own| own.scales).collect() }
    }
}

/// The predictions that a step computes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BranchSet {
    /// Branches, the conditional one first; empty if the step reuses the predictions of both streams.
    pub branches: Vec<Branch>,
    /// Streams with a new prediction. The tokens of other streams are not updated in the forward pass.
    pub predicted: Av<bool>,
    /// Streams with perturbed self-attention in the perturbed branch.
    pub perturbed: Av<bool>,
}

/// Guidance of all steps of a pass.
pub(crate) struct GuidancePlan<'a> {
    /// Scales of each stream, used unless the stream's guidance depends on the noise level.
    pub(crate) scales: Av<GuidanceScales>,
    pub(crate) steps: Av<&'a GuidanceSteps>,
    pub(crate) guider: GuiderKind,
    pub(crate) denoised: Av<bool>,
    /// Whether the sampler reads the negative-prompt prediction.
    pub(crate) reads_negative: bool,
}

impl GuidancePlan<'_> {
    /// Returns the scales and the branch set of a step at a noise level.
    pub(crate) fn at(&self, step: usize, sigma: f64) -> (Av<GuidanceScales>, BranchSet) {
        let own = self.steps.zip(self.scales).map(|(steps, scales)| steps.at(scales, sigma));
        let predicted = own.map(|(_, skip)| step.is_multiple_of(skip + 1));
        let scales = own.map(|(scales, _)| scales);
        (scales, self.set(scales, predicted))
    }

    fn set(&self, scales: Av<GuidanceScales>, predicted: Av<bool>) -> BranchSet {
        // A frozen stream needs no prediction of its own, although the other stream attends to it.
        if !predicted.zip(self.denoised).into_iter().any(|(predicted, denoised)| predicted && denoised) {
            return BranchSet { branches: Vec::new(), predicted: Av::both(false), perturbed: Av::both(false) };
        }
        let own = scales.zip(predicted).into_iter().filter(|(_, predicted)| *predicted);
        let own: Vec<GuidanceScales> = own.map(|(scales, _)| scales).collect();
        let any = |f: &dyn Fn(&GuidanceScales) -> bool| own.iter().any(f);
        let needed = [
            (Branch::Conditional, true),
            (Branch::Negative, self.reads_negative || any(&|s| s.cfg != self.guider.off())),
            (Branch::Perturbed, any(&|s| s.stg != 0.0)),
            (Branch::Isolated, any(&|s| s.modality != 1.0)),
        ];
        let branches: Vec<Branch> = needed.into_iter().filter(|(_, needed)| *needed).map(|(b, _)| b).collect();
        // A stream whose STG scale is 0 at every noise level is perturbed together with the other stream. This has an
        // effect only if the stream has STG blocks.
        let perturbs = branches.contains(&Branch::Perturbed);
        let ever = self.steps.zip(self.scales).map(|(steps, own)| steps.all(own).iter().any(|s| s.stg != 0.0));
        let perturbed = scales.zip(ever).zip(predicted);
        let perturbed = perturbed.map(|((s, ever), predicted)| perturbs && predicted && (s.stg != 0.0 || !ever));
        BranchSet { branches, predicted, perturbed }
    }

    /// Returns the branches that at least one step runs.
    pub(crate) fn branches(&self) -> Vec<Branch> {
        let sets = self.all_sets();
        let order = [Branch::Conditional, Branch::Negative, Branch::Perturbed, Branch::Isolated];
        order.into_iter().filter(|branch| sets.iter().any(|set| set.branches.contains(branch))).collect()
    }

    /// Returns whether scales or branches depend on the step.
    pub(crate) fn varies(&self) -> bool {
        self.steps.into_iter().any(|own| *own != GuidanceSteps::default())
    }

    /// Returns the distinct branch sets over all noise levels and step numbers, independent of the schedule; empty if
    /// all steps run the same branches.
    pub(crate) fn sets(&self) -> Vec<BranchSet> {
        let sets = self.all_sets();
        if sets.len() > 1 { sets } else { Vec::new() }
    }

    fn all_sets(&self) -> Vec<BranchSet> {
        let mut bounds: Vec<f64> =
            self.steps.into_iter().flat_map(|s| s.by_sigma.iter().map(|own| own.sigma)).collect();
        bounds.push(f64::INFINITY);
        bounds.sort_by(f64::total_cmp);
        bounds.dedup();
        // Skips are periodic: MAX_STEPS steps contain every combination.
        let steps = if self.varies() { MAX_STEPS } else { 1 };
        let mut sets = Vec::new();
        for (sigma, step) in bounds.iter().rev().flat_map(|sigma| (0..steps).map(move |step| (*sigma, step))) {
            let (_, set) = self.at(step, sigma);
            if !sets.contains(&set) {
                sets.push(set);
            }
        }
        // Sort the sets, so that their order does not depend on the steps in which they first occur.
        let place = |set: &BranchSet| {
            let bits = |own: Av<bool>| own.into_iter().fold(0, |bits, on| bits << 1 | u8::from(on));
            let number = set.branches.iter().fold(0u8, |all, branch| all | 1 << *branch as u8);
            (number, bits(set.predicted), bits(set.perturbed))
        };
        sets.sort_by_key(|set| std::cmp::Reverse(place(set)));
        sets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scales(cfg: f32) -> GuidanceScales {
        GuidanceScales { cfg, ..GuidanceScales::NEUTRAL }
    }

    fn plan<'a>(video: &'a GuidanceSteps, audio: &'a GuidanceSteps) -> GuidancePlan<'a> {
        let steps = Av { video, audio };
        let scales = Av { video: scales(3.0), audio: scales(7.0) };
        GuidancePlan { scales, steps, guider: GuiderKind::Cfg, denoised: Av::both(true), reads_negative: false }
    }

    #[test]
    fn only_needed_branches_run() {
        use Branch::*;
        let none = GuidanceSteps::default();
        let of = |video, audio| GuidancePlan { scales: Av { video, audio }, ..plan(&none, &none) }.branches();
        assert_eq!(of(GuidanceScales::NEUTRAL, GuidanceScales::NEUTRAL), [Conditional]);
        assert_eq!(of(GuidanceScales::NEUTRAL, scales(4.0)), [Conditional, Negative]);
        let full = GuidanceScales { cfg: 3.0, stg: 1.0, modality: 3.0, rescale: 0.7 };
        assert_eq!(of(full, scales(4.0)), [Conditional, Negative, Perturbed, Isolated]);
        // A sampler that reads the negative prediction, and the legacy guider, whose neutral scale is 0.
        let neutral = || GuidancePlan { scales: Av::both(GuidanceScales::NEUTRAL), ..plan(&none, &none) };
        assert_eq!(GuidancePlan { reads_negative: true, ..neutral() }.branches(), [Conditional, Negative]);
        assert_eq!(GuidancePlan { guider: GuiderKind::LegacyApg, ..neutral() }.branches(), [Conditional, Negative]);
    }

    #[test]
    fn stream_that_never_has_stg_is_perturbed_with_the_other() {
        let none = GuidanceSteps::default();
        let stg = GuidanceScales { stg: 1.0, ..GuidanceScales::NEUTRAL };
        let perturbed = |audio: &GuidanceSteps| {
            let scales = Av { video: stg, audio: GuidanceScales::NEUTRAL };
            GuidancePlan { scales, ..plan(&none, audio) }.at(0, 0.5).1.perturbed
        };
        assert_eq!(perturbed(&none), Av::both(true));
        // At another noise level, the audio has STG.
        let by_sigma = [(1.0, stg), (0.6, GuidanceScales::NEUTRAL)];
        let by_sigma = by_sigma.map(|(sigma, scales)| SigmaGuidance { sigma, scales, skip: 0 }).to_vec();
        assert_eq!(perturbed(&GuidanceSteps { skip: 0, by_sigma }), Av { video: true, audio: false });
    }

    /// Expected values from the reference, with bounds {1: cfg 5, 0.9: cfg 3, 0.5: cfg 1}.
    #[test]
    fn smallest_bound_above_sigma_applies() {
        let by_sigma = [(1.0, 5.0), (0.9, 3.0), (0.5, 1.0)];
        let by_sigma = by_sigma.map(|(sigma, cfg)| SigmaGuidance { sigma, scales: scales(cfg), skip: 0 }).to_vec();
        let steps = GuidanceSteps { skip: 0, by_sigma };
        for (sigma, cfg) in [(1.2, 5.0), (0.95, 5.0), (0.9, 3.0), (0.7, 3.0), (0.5, 1.0), (0.0, 1.0)] {
            assert_eq!(steps.at(GuidanceScales::NEUTRAL, sigma).0.cfg, cfg, "{sigma}");
        }
        let plan = GuidancePlan { scales: Av::both(GuidanceScales::NEUTRAL), ..plan(&steps, &steps) };
        let [guided, alone] = [plan.at(0, 0.7).1, plan.at(3, 0.2).1];
        assert_eq!(
            (&guided.branches[..], &alone.branches[..]),
            (&[Branch::Conditional, Branch::Negative][..], &[Branch::Conditional][..])
        );
        assert_eq!(plan.sets(), [guided, alone]);
        assert_eq!(plan.branches(), [Branch::Conditional, Branch::Negative]);
    }

    #[test]
    fn skipped_steps_run_no_branches() {
        let every = |skip| GuidanceSteps { skip, by_sigma: Vec::new() };
        let (none, one, two) = (every(0), every(1), every(2));
        assert!(plan(&none, &none).sets().is_empty());
        let both = plan(&two, &two);
        let runs = |step| both.at(step, 0.5).1.predicted.video;
        assert_eq!([0, 1, 2, 3, 4].map(runs), [true, false, false, true, false]);
        // The branch sets do not depend on the number of skipped steps, so the program does not change.
        assert_eq!(both.sets(), plan(&one, &one).sets());
        assert_eq!(both.sets().len(), 2);
        assert_eq!(both.sets()[1].branches, []);
        // Streams may skip different numbers of steps.
        let apart = plan(&one, &none);
        assert_eq!(apart.at(1, 0.5).1.predicted, Av { video: false, audio: true });
        assert_eq!((apart.sets().len(), plan(&one, &two).sets().len()), (2, 4));
        // A frozen stream alone does not cause a forward pass.
        let kept = GuidancePlan { denoised: Av { video: true, audio: false }, ..plan(&one, &none) };
        assert_eq!(kept.at(1, 0.5).1.branches, []);
    }
}
