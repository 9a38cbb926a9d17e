//! The samplers that a configuration names.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod cfg_pp;
mod euler;
mod euler_ancestral;
mod gradient_estimation;
mod res2s;

use super::sampler::AnySampler;
pub use cfg_pp::CfgPlusPlus;
pub use euler::Euler;
pub use euler_ancestral::{EulerAncestral, SEED_OFFSET, StepDraws};
pub use gradient_estimation::GradientEstimation;
pub use res2s::Res2s;

/// A sampler by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SamplerKind {
    /// First order.
    #[serde(rename = "euler")]
    Euler,
    /// Second order, with noise put back in.
    #[serde(rename = "res_2s")]
    Res2s,
    /// First order, with noise drawn anew at each step.
    #[serde(rename = "euler_ancestral")]
    EulerAncestral,
    /// First order, away from the prediction on the negative prompt, with noise drawn anew at each step (CFG++).
    #[serde(rename = "cfg_pp")]
    CfgPlusPlus,
    /// First order, along an estimate of the gradient from this step and the one before.
    #[serde(rename = "gradient_estimation")]
    GradientEstimation,
}

/// Settings of samplers; each takes those it knows.
#[derive(Clone, Copy, Debug, Default)]
pub struct SamplerOptions {
    /// Part of each step's noise that is drawn anew, 0 to 1.
    pub eta: Option<f64>,
    /// Seed of the noise that steps draw.
    pub noise_seed: Option<u64>,
    /// Weight of a step's own velocity against that of the step before.
    pub gamma: Option<f64>,
    /// Generator and type of that noise, where the sampler has no rule of its own.
    pub draws: StepDraws,
}

impl SamplerOptions {
    /// Takes the settings of ancestral noise.
    fn ancestral(&mut self) -> EulerAncestral {
        let (eta, noise_seed) = (self.eta.take().unwrap_or(1.0), self.noise_seed.take());
        let blends_every_step = self.draws == StepDraws::Continued;
        EulerAncestral { eta, noise_seed, seed_offset: SEED_OFFSET, draws: self.draws, blends_every_step }
    }
}

impl SamplerKind {
    /// The sampler, with its settings.
    ///
    /// # Errors
    /// Key and value of a setting that it does not take.
    pub fn sampler(self, mut options: SamplerOptions) -> Result<AnySampler, (&'static str, String)> {
        let sampler: AnySampler = match self {
            SamplerKind::Euler => Euler.into(),
            SamplerKind::Res2s => Res2s.into(),
            SamplerKind::GradientEstimation => GradientEstimation { gamma: options.gamma.take().unwrap_or(2.0) }.into(),
            SamplerKind::EulerAncestral => options.ancestral().into(),
            SamplerKind::CfgPlusPlus => CfgPlusPlus(options.ancestral()).into(),
        };
        if let Some(eta) = options.eta.take() {
            return Err(("sampler.eta", eta.to_string()));
        }
        if let Some(gamma) = options.gamma.take() {
            return Err(("sampler.gamma", gamma.to_string()));
        }
        if let Some(seed) = options.noise_seed.take() {
            return Err(("sampler.noise_seed", seed.to_string()));
        }
        Ok(sampler)
    }
}
