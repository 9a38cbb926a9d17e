//! Guidance scales and branches of each denoising step.

use ndarray::{Array1, ArrayD, IxDyn};

use super::Request;
use crate::av::Av;
use crate::config::ConfigErrorKind::Unsupported;
use crate::config::{Config, ConfigError, Reference, VideoUse};
use crate::sampling::denoise::StreamRole;
use crate::sampling::guidance::{Branch, GuidanceScales};
use crate::sampling::guiders::Guider;
use crate::sampling::{BranchSet, GuidancePlan, GuidanceSteps, MAX_STEPS, SigmaGuidance};

/// Returns the guidance scales of each stream, without the overrides in `by_sigma`. The scales of input audio are
/// neutral.
pub(super) fn scales(config: &Config) -> Av<GuidanceScales> {
    let scales = config.scales().map(|s| GuidanceScales {
        cfg: s.cfg as f32,
        stg: s.stg as f32,
        modality: s.modality as f32,
        rescale: s.rescale as f32,
    });
    match config.given_sound() {
        Some(_) => Av { audio: GuidanceScales::NEUTRAL, ..scales },
        None => scales,
    }
}

/// Returns the `by_sigma` entries and `skip` (the number of steps after each predicted step that reuse its prediction) of
/// each stream. A stream without its own value uses the other stream's. Input audio has no guidance, so it gets the
/// default.
fn guidance_steps(config: &Config) -> Av<GuidanceSteps> {
    let (video, audio) = (&config.guidance.video, &config.guidance.audio);
    let both = Av { video: (video, audio), audio: (audio, video) };
    let given = Av { video: false, audio: config.given_sound().is_some() };
    both.zip(scales(config)).zip(given).map(|(((own, other), scales), given)| {
        if given {
            return GuidanceSteps::default();
        }
        let skip = own.skip.or(other.skip).unwrap_or(0);
        let bounds = own.by_sigma.as_ref().or(other.by_sigma.as_ref());
        let by_sigma = bounds.into_iter().flatten().map(|at| SigmaGuidance {
            sigma: at.sigma,
            scales: GuidanceScales {
                cfg: at.cfg.map_or(scales.cfg, |v| v as f32),
                stg: at.stg.map_or(scales.stg, |v| v as f32),
                modality: at.modality.map_or(scales.modality, |v| v as f32),
                rescale: at.rescale.map_or(scales.rescale, |v| v as f32),
            },
            skip: at.skip.unwrap_or(skip),
        });
        GuidanceSteps { skip, by_sigma: by_sigma.collect() }
    })
}

/// Returns the roles of both streams.
pub(super) fn roles(config: &Config) -> Av<StreamRole> {
    let given = match config.conditioning.given_stream {
        // The stream is denoised at the step's noise level, but all of its tokens are conditions without noise.
        Reference::Official1 => StreamRole::Denoised,
        Reference::Official | Reference::Diffusers => StreamRole::Kept,
    };
    let audio = if config.given_sound().is_some() { given } else { StreamRole::Denoised };
    let spec = config.pipeline.spec();
    match (spec.video, &config.request.retake) {
        (Some(VideoUse::Whole), _) => Av { video: given, audio },
        (Some(VideoUse::Region), _) => {
            let is_new = config.request.inpaint.as_ref().is_some_and(|own| own.audio);
            Av { video: StreamRole::Denoised, audio: if is_new { StreamRole::Denoised } else { given } }
        }
        _ if spec.hdr => Av { video: StreamRole::Denoised, audio: StreamRole::Absent },
        _ if !spec.has_video() => Av { video: StreamRole::Absent, audio },
        (Some(VideoUse::Span), Some(span)) => Av { video: span.video, audio: span.audio }
            .map(|regenerated| if regenerated { StreamRole::Denoised } else { given }),
        _ => Av { video: StreamRole::Denoised, audio },
    }
}

/// Returns the guidance scales and the skipped steps of streams with these roles, and the overrides by noise level.
pub(super) fn guidance(config: &Config, roles: Av<StreamRole>) -> (Av<GuidanceScales>, Av<GuidanceSteps>) {
    let alone = roles.into_iter().any(|role| role == StreamRole::Absent);
    let both =
        scales(config).zip(guidance_steps(config)).zip(roles).map(|((mut scales, mut steps), role)| match role {
            StreamRole::Denoised => {
                if alone {
                    // Without the other stream, there is no guidance branch that omits it.
                    let own = std::iter::once(&mut scales).chain(steps.by_sigma.iter_mut().map(|own| &mut own.scales));
                    own.for_each(|own| own.modality = GuidanceScales::NEUTRAL.modality);
                }
                (scales, steps)
            }
            // A stream that is not denoised has no guidance.
            StreamRole::Kept | StreamRole::Absent => (GuidanceScales::NEUTRAL, GuidanceSteps::default()),
        });
    (Av { video: both.video.0, audio: both.audio.0 }, Av { video: both.video.1, audio: both.audio.1 })
}

/// Returns the guidance branches that at least one step of the first pass runs.
pub(crate) fn branches(config: &Config) -> Vec<Branch> {
    let roles = roles(config);
    let (scales, steps) = guidance(config, roles);
    let reads_negative = config.samplers().is_ok_and(|(first, _)| first.reads_negative());
    let (guider, denoised) = (config.guidance.kind, roles.map(|role| role == StreamRole::Denoised));
    GuidancePlan { scales, steps: steps.as_ref(), guider, denoised, reads_negative }.branches()
}

/// Guidance inputs of the denoising loop.
pub struct GuidanceTables {
    /// Guidance scales and guider parameters of each stream: `[2, k]`, or `[MAX_STEPS + 1, 2, k]` with one entry per
    /// evaluation.
    pub scales: ArrayD<f32>,
    /// Index of the branch set of each evaluation, `[MAX_STEPS + 1]`; `None` if all evaluations use the same set.
    pub sets: Option<Array1<i32>>,
}

impl Request {
    pub(super) fn guidance_plan(&self) -> GuidancePlan<'_> {
        GuidancePlan {
            scales: self.scales,
            steps: self.guidance_steps.as_ref(),
            guider: self.guider.kind(),
            denoised: self.roles.map(|role| role == StreamRole::Denoised),
            reads_negative: self.sampler.reads_negative(),
        }
    }

    /// Returns the guidance branches that at least one step of the pass runs.
    pub fn branches(&self) -> Vec<Branch> {
        self.guidance_plan().branches()
    }

    /// Returns the number of prompts per video: 1, or 2 if any pass reads the negative prompt.
    pub(crate) fn prompts(&self) -> usize {
        let (first, second) = self.passes();
        let reads_negative = |pass: &Request| pass.branches().contains(&Branch::Negative);
        1 + usize::from(reads_negative(&first) || second.as_ref().is_some_and(reads_negative))
    }

    pub(crate) fn all_scales(&self) -> Av<Vec<GuidanceScales>> {
        all_scales(self.scales, &self.guidance_steps)
    }

    /// Returns the guidance tables of this pass.
    pub fn guidance_tables(&self) -> GuidanceTables {
        let plan = self.guidance_plan();
        let parameters = self.guider.parameters();
        let rows = |scales: Av<GuidanceScales>| -> Vec<f32> {
            scales.into_iter().flat_map(|own| own.row().into_iter().chain(parameters.clone())).collect()
        };
        let columns = 4 + parameters.len();
        if !plan.varies() {
            let scales = ArrayD::from_shape_vec(IxDyn(&[2, columns]), rows(self.scales));
            return GuidanceTables { scales: scales.expect("a row of each stream"), sets: None };
        }
        let levels = self.sampler.schedule(&self.sigmas).levels;
        let level = |step: usize| levels.get(step).copied().unwrap_or(0.0).into();
        let steps: Vec<(Av<GuidanceScales>, BranchSet)> =
            (0..=MAX_STEPS).map(|step| plan.at(step, level(step))).collect();
        let scales = steps.iter().flat_map(|(scales, _)| rows(*scales)).collect();
        let scales = ArrayD::from_shape_vec(IxDyn(&[steps.len(), 2, columns]), scales);
        let sets = plan.sets();
        let number = |(step, (_, set)): (usize, &(Av<GuidanceScales>, BranchSet))| {
            let found = sets.iter().position(|known| known == set);
            // The entry after the last step is never evaluated.
            found.or((step == MAX_STEPS).then_some(0)).expect("a set of the plan") as i32
        };
        let numbers = (!sets.is_empty()).then(|| steps.iter().enumerate().map(number).collect());
        GuidanceTables { scales: scales.expect("two rows a step"), sets: numbers }
    }
}

/// Returns, for each stream, the scales of every entry of `by_sigma`, or `scales` if there are no entries.
pub(super) fn all_scales(scales: Av<GuidanceScales>, steps: &Av<GuidanceSteps>) -> Av<Vec<GuidanceScales>> {
    steps.as_ref().zip(scales).map(|(steps, scales)| steps.all(scales))
}

/// Returns the guider of a configuration.
///
/// # Errors
/// Returns an error if the guider does not accept an option.
pub(super) fn guider(config: &Config) -> Result<Guider, ConfigError> {
    let fault = |(key, value): (_, String)| {
        ConfigError::value(Unsupported, key, value, "this guider does not have this option")
    };
    config.guidance.kind.guider(config.guidance.apg).map_err(fault)
}

#[cfg(test)]
mod tests {
    use super::super::tests::config;
    use super::*;

    #[test]
    fn missing_sigma_values_inherit_from_stream_then_other_stream() {
        let by_sigma = "guidance.video.by_sigma=[{sigma: 1.0, cfg: 5}, {sigma: 0.5, cfg: 1, skip: 2}]";
        let config = config(&["guidance.video.cfg=3", "guidance.audio.cfg=7", "guidance.audio.skip=1", by_sigma]);
        let steps = guidance_steps(&config);
        assert_eq!([steps.video.skip, steps.audio.skip], [1, 1]);
        let found = |own: &GuidanceSteps| -> Vec<_> { own.by_sigma.iter().map(|s| (s.scales.cfg, s.skip)).collect() };
        assert_eq!([found(&steps.video), found(&steps.audio)], [[(5.0, 1), (1.0, 2)]; 2]);
        assert_eq!(branches(&config), [Branch::Conditional, Branch::Negative]);
        // Audio-only generation has no modality branch, although its preset sets every guidance term.
        let alone = "pipeline=text_to_audio";
        let all = [Branch::Conditional, Branch::Negative, Branch::Perturbed];
        assert_eq!(branches(&self::config(&[alone])), all);
        let plain = [alone, "guidance.audio.stg=0", "guidance.audio.cfg=1", "guidance.video.cfg=4"];
        assert_eq!(branches(&self::config(&plain)), [Branch::Conditional]);
        assert_eq!(branches(&self::config(&["guidance.video.cfg=1", "guidance.audio.cfg=1"])), [Branch::Conditional]);
        let apg = ["guidance.kind=apg", "guidance.apg.eta=0.5"];
        let found = guider(&self::config(&apg)).expect("a guider");
        assert_eq!(found, Guider::Apg { eta: 0.5, threshold: 0.0 });
    }
}
