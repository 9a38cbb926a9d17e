//! Built-in samplers, selected by name in the configuration.

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

/// Name of a built-in sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SamplerKind {
    /// First order (Euler).
    #[serde(rename = "euler")]
    Euler,
    /// Second order, two evaluations per step, with noise added at both.
    #[serde(rename = "res_2s")]
    Res2s,
    /// First order, with fresh noise added at each step.
    #[serde(rename = "euler_ancestral")]
    EulerAncestral,
    /// First order, steps away from the negative-prompt prediction (CFG++), with fresh noise added at each step.
    #[serde(rename = "cfg_pp")]
    CfgPlusPlus,
    /// First order, with a velocity extrapolated from the current and the previous step.
    #[serde(rename = "gradient_estimation")]
    GradientEstimation,
}

/// Settings of all samplers; each sampler accepts a subset.
#[derive(Clone, Copy, Debug, Default)]
pub struct SamplerOptions {
    /// Stochasticity, 0 to 1.
    pub eta: Option<f64>,
    /// Seed of the noise added by steps.
    pub noise_seed: Option<u64>,
    /// Weight of the current velocity relative to that of the previous step.
    pub gamma: Option<f64>,
    /// Generator and type of the noise added by ancestral samplers.
    pub draws: StepDraws,
}

impl SamplerOptions {
    /// Builds the ancestral Euler sampler and removes its options from `self`.
    fn ancestral(&mut self) -> EulerAncestral {
        let (eta, noise_seed) = (self.eta.take().unwrap_or(1.0), self.noise_seed.take());
        let blends_every_step = self.draws == StepDraws::Continued;
        EulerAncestral { eta, noise_seed, seed_offset: SEED_OFFSET, draws: self.draws, blends_every_step }
    }
}

impl SamplerKind {
    /// Builds the sampler from its options.
    ///
    /// # Errors
    /// Returns the key and the value of an option that this sampler does not support.
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
