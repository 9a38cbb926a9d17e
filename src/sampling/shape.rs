//! Static configuration of the denoising programs.

use super::MAX_STEPS;
use super::guidance::{Branch, RescaleExtent};
use super::guidance_steps::BranchSet;
use super::guiders::GuiderKind;
use super::sampler::AnySampler;
use super::samplers::Euler;
use super::step_cache::StepCacheKind;
use crate::av::Av;
use crate::hlo::{DType, Type, Value};
use crate::models::transformer::CrossModalTimestep;
use crate::nn::{Axis, Params};

/// Name of the carried tensor with the last guided prediction.
const REUSED_PREDICTION: &str = "prediction";

/// Role of a stream in a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StreamRole {
    /// The latents are denoised.
    #[default]
    Denoised,
    /// The latents are fixed and clean at every step; the other stream attends to them.
    Kept,
    /// The stream does not exist; the other stream has no cross-stream attention.
    Absent,
}

/// Noise level used to convert the velocity of a conditioned token into its clean prediction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CleanPrediction {
    /// The token's noise level: the step's sigma times (1 - the token's conditioning strength), as in Lightricks' code.
    #[default]
    Token,
    /// The step's sigma for every token (diffusers).
    Step,
}

/// Properties of a request that determine the `prepare` and `denoise` programs; all other values of a request are
/// program inputs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DenoiseShape {
    /// Videos per batch.
    pub(crate) batch: usize,
    /// Guidance branches, the conditional one first; if steps differ, the union over all steps.
    pub(crate) branches: Vec<Branch>,
    /// The distinct branch sets of the steps; empty if all steps run the same branches.
    pub(crate) sets: Vec<BranchSet>,
    /// Whether guidance scales vary by step.
    pub(crate) scales_by_step: bool,
    /// Guider that computes the negative-prompt term of guidance.
    pub(crate) guider: GuiderKind,
    /// Latent tokens.
    pub(crate) tokens: Av<usize>,
    /// Text tokens.
    pub(crate) text: usize,
    /// Channels of the text embeddings.
    pub(crate) text_channels: Av<usize>,
    /// Layers with perturbed self-attention in the perturbed branch (STG), per stream.
    pub(crate) stg_blocks: Av<Vec<usize>>,
    /// Values over which guidance rescale computes standard deviations.
    pub(crate) rescale: RescaleExtent,
    /// Number of distinct noise levels of tokens in a step: the step's sigma, plus one for each conditioning strength.
    pub(crate) levels: usize,
    /// Whether each stream has conditioned tokens, so that noise levels differ between tokens.
    pub(crate) conditioned: Av<bool>,
    /// Whether the loop has an input that marks video tokens that represent a single frame.
    pub keyframes: bool,
    /// Whether the video self-attention has an additive mask.
    pub(crate) self_mask: bool,
    pub(crate) roles: Av<StreamRole>,
    /// Noise levels that modulate the cross-stream attention.
    pub(crate) cross: CrossModalTimestep,
    /// Noise level used to convert the velocities of conditioned tokens into clean predictions.
    pub(crate) clean_prediction: CleanPrediction,
    pub(crate) sampler: AnySampler,
    /// Step cache. `None`: every step runs the transformer.
    pub(crate) cache: Option<StepCacheKind>,
}

impl DenoiseShape {
    /// Returns the shape for one video, sampled with Euler, without perturbed layers or conditioning.
    pub fn plain(branches: Vec<Branch>, tokens: Av<usize>, text: usize, text_channels: Av<usize>) -> Self {
        DenoiseShape {
            batch: 1,
            branches,
            sets: Vec::new(),
            scales_by_step: false,
            guider: GuiderKind::Cfg,
            tokens,
            text,
            text_channels,
            stg_blocks: Av::default(),
            rescale: RescaleExtent::PerSample,
            levels: 1,
            conditioned: Av::default(),
            keyframes: false,
            self_mask: false,
            roles: Av::default(),
            cross: CrossModalTimestep::Own,
            clean_prediction: CleanPrediction::Token,
            sampler: Euler.into(),
            cache: None,
        }
    }

    /// Returns the number of noise levels for which a stream's modulation part `part` is computed.
    pub(super) fn levels_of(&self, part: &str, conditioned: bool) -> usize {
        let own = match part {
            "cross" => self.cross != CrossModalTimestep::Cross,
            "gate" => self.cross == CrossModalTimestep::Own,
            "prompt" => false,
            _ => true,
        };
        if own && conditioned { self.levels } else { 1 }
    }

    /// Returns which streams exist.
    pub(super) fn present(&self) -> Av<bool> {
        self.roles.map(|role| role != StreamRole::Absent)
    }

    pub(super) fn denoised(&self) -> Av<bool> {
        self.roles.map(|role| role == StreamRole::Denoised)
    }

    /// Returns the names of the tensors that the loop carries for each stream.
    pub(crate) fn carried(&self) -> impl Iterator<Item = &str> {
        let cache = self.cache.map_or(&[][..], StepCacheKind::stream_state);
        let sampler = self.sampler.state().iter().copied();
        std::iter::once("latents").chain(sampler).chain(self.guidance_state()).chain(cache.iter().copied())
    }

    /// Returns the names of the tensors that the loop carries for both streams together.
    pub(crate) fn shared(&self) -> &'static [&'static str] {
        self.cache.map_or(&[], StepCacheKind::shared_state)
    }

    /// Returns why the step cache is not supported; `None` if it is supported or off.
    pub(super) fn step_cache_fault(&self) -> Option<&'static str> {
        self.cache?;
        match () {
            () if self.sampler.evaluations(2) != 2 => Some("the sampler has two evaluations per step"),
            () if self.sampler.reads_negative() => Some("the sampler reads the negative prediction of every step"),
            () if self.reuses_predictions() => Some("guidance also skips steps"),
            () => None,
        }
    }

    /// Returns whether the loop carries no tensors of the sampler or of guidance. Then one call may run several
    /// evaluations.
    pub(crate) fn is_stateless(&self) -> bool {
        self.sampler.state().is_empty() && self.guidance_state().next().is_none()
    }

    /// Returns the names of the carried tensors that belong to guidance: the guider's state, and the last prediction if
    /// steps reuse it.
    pub(super) fn guidance_state(&self) -> impl Iterator<Item = &str> {
        let reuses_predictions = self.reuses_predictions().then_some(REUSED_PREDICTION);
        self.guider.state().iter().copied().chain(reuses_predictions)
    }

    /// Returns whether any step reuses an earlier prediction.
    pub(super) fn reuses_predictions(&self) -> bool {
        self.sets.iter().any(|set| set.predicted != Av::both(true))
    }

    /// Declares the input `scales`: the guidance scales of each stream, followed by the guider's parameters. Its shape
    /// is `[2, k]`, or `[MAX_STEPS + 1, 2, k]` if the scales vary by step.
    pub(super) fn scales_input(&self, p: &Params) -> Value {
        let own = [2, 4 + self.guider.parameters()];
        let dims = if self.scales_by_step { vec![MAX_STEPS + 1, own[0], own[1]] } else { own.to_vec() };
        let axes = vec![Axis::Replicated; dims.len()];
        p.input("scales", Type::new(DType::F32, dims), &axes)
    }

    /// Declares the input `levels [k]`: the factors of the step's sigma that tokens use. `None` if there is only one.
    pub(super) fn levels_input(&self, p: &Params) -> Option<Value> {
        (self.levels > 1).then(|| p.input("levels", Type::new(DType::F32, [self.levels]), &[Axis::Replicated]))
    }
}

/// Name, dimensions and axes of a stream's latents `[b, n, c]`.
#[derive(Clone, Copy)]
pub(super) struct Latents {
    pub(crate) name: &'static str,
    pub(crate) content: [usize; 3],
    pub(crate) axes: [Axis; 3],
}
