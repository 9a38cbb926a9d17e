//! Guidance: several predictions of the clean latents, combined.

pub use super::counted::Counted;
use super::guiders::{GuiderKind, Term};
use crate::hlo::{Comparison, Value};

/// One prediction a step. Branches are rows of one batch, the conditional one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Branch {
    /// On the prompt.
    Conditional,
    /// On the negative prompt.
    Negative,
    /// On the prompt, self-attention perturbed in some layers.
    Perturbed,
    /// On the prompt, the streams not attending to each other.
    Isolated,
}

/// One stream's scales. A neutral value switches its term off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales {
    /// Away from the negative prompt; neutral at 1.
    pub cfg: f32,
    /// Away from the perturbed prediction; neutral at 0.
    pub stg: f32,
    /// Away from the isolated prediction; neutral at 1.
    pub modality: f32,
    /// Part of the conditional prediction's standard deviation that the guided one takes over; neutral at 0.
    pub rescale: f32,
}

impl Scales {
    /// No guidance.
    pub const NEUTRAL: Scales = Scales { cfg: 1.0, stg: 0.0, modality: 1.0, rescale: 0.0 };

    /// The program's input row.
    pub fn row(self) -> [f32; 4] {
        [self.cfg, self.stg, self.modality, self.rescale]
    }
}

/// Scope of the standard deviations of the rescale term.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum RescaleScope {
    /// Each sample for itself (diffusers).
    #[default]
    PerSample,
    /// All samples together (the official code).
    Batch,
}

/// How a stream's predictions are combined.
pub struct Guidance<'a> {
    /// The predictions' branches, in their order.
    pub branches: &'a [Branch],
    /// Makes the term of the negative prompt.
    pub guider: GuiderKind,
    pub rescale: RescaleScope,
    pub counted: &'a Counted,
}

/// Combines the branches' clean predictions `[samples, n, channels]`, f32, with `scales [4]`:
/// `c + (cfg-1)(c-u) + stg(c-p) + (modality-1)(c-m)`, then the rescale. A guider may have another term than `(cfg-1)(c-u)`,
/// parameters behind the scales, and a state `[samples, n, channels]`, whose next value comes second.
pub fn combine(
    guidance: &Guidance,
    predictions: &[Value],
    scales: &Value,
    state: Option<&Value>,
) -> (Value, Option<Value>) {
    let Guidance { branches, guider, rescale: scope, counted } = *guidance;
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
                let (term, after) = guider.term(&Term {
                    conditional,
                    negative,
                    scale: &scale,
                    parameters: &parameters,
                    state,
                    counted,
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
    let axes: &[isize] = if scope == RescaleScope::Batch { &[0, 1, 2] } else { &[1, 2] };
    let rescale = scale(3);
    let ratio = counted.deviation(conditional, axes) / counted.deviation(&guided, axes);
    let rescaled = &guided * ratio * &rescale + &guided * (rescale.like(1.0) - &rescale);
    // Selected, so that a neutral factor leaves every bit alone.
    (rescale.compare(Comparison::Ne, &rescale.like(0.0)).select(&rescaled, &guided), next)
}
