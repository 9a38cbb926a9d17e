//! Sizes and choices of the denoising loop's programs.

use super::MAX_STEPS;
use super::guidance::{Branch, RescaleScope};
use super::guidance_steps::BranchSet;
use super::guiders::GuiderKind;
use super::sampler::AnySampler;
use super::samplers::Euler;
use crate::av::Av;
use crate::hlo::{DType, Type, Value};
use crate::models::transformer::CrossTimestep;
use crate::nn::{Axis, Params};

/// Name of the guided prediction that steps take over.
const TAKEN_OVER: &str = "prediction";

/// Role of a stream in a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamRole {
    /// Denoised: its latents change from step to step.
    #[default]
    Denoised,
    /// Frozen: known, clean at every step and left as it is; the other stream attends to it.
    Kept,
    /// None: the other stream attends to nothing.
    Absent,
}

/// Noise level that turns the velocity of a conditioned token into its prediction of the clean latents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CleanPrediction {
    /// The token's own: the step's times 1 minus the token's strength (Lightricks).
    #[default]
    Token,
    /// The step's, for every token (diffusers).
    Step,
}

/// Sizes and choices that fix both programs; everything else is their input.
#[derive(Clone, Debug, PartialEq)]
pub struct DenoiseShape {
    /// Videos denoised together.
    pub(crate) batch: usize,
    /// Predictions a step, the conditional one first; where steps differ, those of all.
    pub(crate) branches: Vec<Branch>,
    /// The different sets of branches that steps run; none where all run the same.
    pub(crate) sets: Vec<BranchSet>,
    /// Whether each step has scales of its own.
    pub(crate) scales_by_step: bool,
    /// Makes the term of the negative prompt.
    pub(crate) guider: GuiderKind,
    /// Latent tokens.
    pub(crate) tokens: Av<usize>,
    /// Text tokens.
    pub(crate) text: usize,
    /// Channels of the text embeddings.
    pub(crate) text_channels: Av<usize>,
    /// Layers that the perturbed branch perturbs in each stream.
    pub(crate) stg_blocks: Av<Vec<usize>>,
    /// Scope of the rescale term's standard deviations.
    pub(crate) rescale: RescaleScope,
    /// Number of noise levels that tokens have in a step: the step's own, and one for each strength of a condition.
    pub(crate) levels: usize,
    /// Streams with tokens of several levels.
    pub(crate) conditioned: Av<bool>,
    /// Whether the loop has a mask of the video tokens that are a single frame each.
    pub keyframes: bool,
    /// Whether the attention among the video's tokens is weighed.
    pub(crate) self_mask: bool,
    /// Role of each stream.
    pub(crate) roles: Av<StreamRole>,
    /// Noise level that the attention between the streams sees.
    pub(crate) cross: CrossTimestep,
    /// Noise level that turns velocities of conditioned tokens into clean predictions.
    pub(crate) clean_prediction: CleanPrediction,
    pub(crate) sampler: AnySampler,
}

impl DenoiseShape {
    /// One video by Euler's steps, nothing perturbed and nothing conditioned.
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
            rescale: RescaleScope::PerSample,
            levels: 1,
            conditioned: Av::default(),
            keyframes: false,
            self_mask: false,
            roles: Av::default(),
            cross: CrossTimestep::Own,
            clean_prediction: CleanPrediction::Token,
            sampler: Euler.into(),
        }
    }

    /// Number of noise levels of a part of a stream's modulation.
    pub(super) fn levels_of(&self, part: &str, conditioned: bool) -> usize {
        let own = match part {
            "cross" => self.cross != CrossTimestep::Cross,
            "gate" => self.cross == CrossTimestep::Own,
            "prompt" => false,
            _ => true,
        };
        if own && conditioned { self.levels } else { 1 }
    }

    /// Streams that there are.
    pub(super) fn present(&self) -> Av<bool> {
        self.roles.map(|role| role != StreamRole::Absent)
    }

    /// Streams whose latents change.
    pub(super) fn denoised(&self) -> Av<bool> {
        self.roles.map(|role| role == StreamRole::Denoised)
    }

    /// Names of the tensors that the loop carries for each stream.
    pub(crate) fn carried(&self) -> impl Iterator<Item = &str> {
        std::iter::once("latents").chain(self.sampler.state().iter().copied()).chain(self.guidance_state())
    }

    /// Those of them that are guidance's: the guider's, and the last prediction, where steps take it over.
    pub(super) fn guidance_state(&self) -> impl Iterator<Item = &str> {
        let takes_over = self.takes_over().then_some(TAKEN_OVER);
        self.guider.state().iter().copied().chain(takes_over)
    }

    /// Whether steps take over the prediction of an earlier one.
    pub(super) fn takes_over(&self) -> bool {
        self.sets.iter().any(|set| set.predicted != Av::both(true))
    }

    /// Declares the guidance scales, and behind them the guider's parameters: `scales [2, 4]`, or of each step.
    pub(super) fn scales_input(&self, p: &Params) -> Value {
        let own = [2, 4 + self.guider.parameters()];
        let dims = if self.scales_by_step { vec![MAX_STEPS + 1, own[0], own[1]] } else { own.to_vec() };
        let axes = vec![Axis::Replicated; dims.len()];
        p.input("scales", Type::new(DType::F32, dims), &axes)
    }

    /// Declares the parts of a step's noise level, `levels [k]`, where there are several.
    pub(super) fn levels_input(&self, p: &Params) -> Option<Value> {
        (self.levels > 1).then(|| p.input("levels", Type::new(DType::F32, [self.levels]), &[Axis::Replicated]))
    }
}

/// Name, size and axes of a stream's latents `[b, n, c]`.
#[derive(Clone, Copy)]
pub(super) struct Latents {
    pub(crate) name: &'static str,
    pub(crate) content: [usize; 3],
    pub(crate) axes: [Axis; 3],
}
