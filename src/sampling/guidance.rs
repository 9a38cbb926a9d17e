//! Guidance: combines several predictions of the clean latents into one.

use super::guiders::{GuiderKind, TermArguments};
pub use super::masked_stats::MaskedStatistics;
use crate::hlo::{Comparison, Value};

/// One of the predictions that guidance combines. Branches are rows of one batch, the conditional one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Branch {
    /// Prediction on the prompt.
    Conditional,
    /// Prediction on the negative prompt.
    Negative,
    /// Prediction on the prompt with perturbed self-attention in some layers (STG).
    Perturbed,
    /// Prediction on the prompt without attention between the streams.
    Isolated,
}

/// Guidance scales of one stream. A neutral value disables the term.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuidanceScales {
    /// Classifier-free guidance scale; neutral at 1.
    pub cfg: f32,
    /// Spatiotemporal guidance scale, away from the perturbed prediction; neutral at 0.
    pub stg: f32,
    /// Modality guidance scale, away from the isolated prediction; neutral at 1.
    pub modality: f32,
    /// Strength, 0 to 1, of rescaling the guided prediction to the standard deviation of the conditional one; neutral
    /// at 0.
    pub rescale: f32,
}

impl GuidanceScales {
    /// No guidance.
    pub const NEUTRAL: GuidanceScales = GuidanceScales { cfg: 1.0, stg: 0.0, modality: 1.0, rescale: 0.0 };

    /// Returns the scales as a row of the program's `scales` input.
    pub fn row(self) -> [f32; 4] {
        [self.cfg, self.stg, self.modality, self.rescale]
    }
}

/// Values over which guidance rescale computes standard deviations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum RescaleExtent {
    /// The values of each sample separately, as in diffusers.
    #[default]
    PerSample,
    /// The values of all samples of a batch together, as in Lightricks' code.
    Batch,
}

/// Settings with which [`combine`] combines the predictions of a stream.
pub struct StreamGuidance<'a> {
    /// Branch of each prediction.
    pub branches: &'a [Branch],
    /// Guider that computes the negative-prompt term.
    pub guider: GuiderKind,
    pub rescale: RescaleExtent,
    pub statistics: &'a MaskedStatistics,
}

/// Combines the clean predictions `[samples, n, channels]`, f32, of the branches with `scales [4]`: `c + (cfg-1)(c-u) +
/// stg(c-p) + (modality-1)(c-m)` with the conditional (c), negative (u), perturbed (p) and isolated (m) predictions,
/// then rescales. A guider other than CFG replaces the term `(cfg-1)(c-u)`; its parameters follow the scales. Returns
/// the guided prediction and the guider's next state `[samples, n, channels]`, if it has one.
pub fn combine(
    guidance: &StreamGuidance,
    predictions: &[Value],
    scales: &Value,
    state: Option<&Value>,
) -> (Value, Option<Value>) {
    let StreamGuidance { branches, guider, rescale: scope, statistics } = *guidance;
    let _scope = scales.builder().scope("guidance");
    let mut next = state.cloned();
    let conditional = &predictions[0];
    let scale = |i: usize| scales.at(0, i);
    let mut guided = conditional.clone();
    for (branch, prediction) in branches.iter().zip(predictions) {
        let factor = match branch {
            Branch::Conditional => continue,
            Branch::Negative if guider != GuiderKind::Cfg => {
                let (scale, parameters) = (scale(0), scales.slice(0, 4, scales.dim(0)));
                let negative = prediction;
                let (term, after) = guider.term(&TermArguments {
                    conditional,
                    negative,
                    scale: &scale,
                    parameters: &parameters,
                    state,
                    statistics,
                });
                next = after;
                guided = guided + term;
                continue;
            }
            Branch::Negative => scale(0) - 1.0,
            Branch::Perturbed => scale(1),
            Branch::Isolated => scale(2) - 1.0,
        };
        guided = guided + (conditional - prediction) * factor;
    }
    if branches.len() == 1 {
        return (guided, next);
    }
    let axes: &[isize] = if scope == RescaleExtent::Batch { &[0, 1, 2] } else { &[1, 2] };
    let rescale = scale(3);
    let ratio = statistics.deviation(conditional, axes) / statistics.deviation(&guided, axes);
    let rescaled = &guided * ratio * &rescale + &guided * (rescale.like(1.0) - &rescale);
    // A select, so that a neutral rescale returns the guided prediction bit for bit.
    (rescale.compare(Comparison::Ne, &rescale.like(0.0)).select(&rescaled, &guided), next)
}
