//! CFG++ (Chung et al. 2024): ancestral Euler that steps away from the negative-prompt prediction (Lightricks' ltx-core
//! 1.2.0).

use ndarray::Array3;

use crate::hlo::Value;
use crate::sampling::sampler::{Evaluation, Sampler, Schedule, StepNoise, StreamState};
use crate::sampling::samplers::EulerAncestral;
use crate::sampling::step_record::{StepRecord, StepWeights};

/// Ancestral Euler with the noise direction `(x - (1 - σ)·u) / σ`, where `u` is the negative-prompt prediction. Each
/// step first goes below the next noise-to-signal ratio, by an amount that grows with `eta`. Fresh noise then raises
/// the latents to that ratio.
#[derive(Debug, PartialEq)]
pub struct CfgPlusPlus(
    /// Settings of the noise: `eta` and generator.
    pub EulerAncestral,
);

impl CfgPlusPlus {
    /// Returns the factors of `x`, the clean prediction, the negative prediction and the noise for a step from level
    /// `sigma` to `next`. The last value is 1 if noise changed the conditioned tokens, so that they must be blended in
    /// again.
    fn coefficients(&self, sigma: f64, next: f64) -> [f64; 5] {
        // The first level may be pure noise (no signal).
        let signal = |level: f64| (1.0 - level).max(f64::from(f32::EPSILON));
        let (from, to) = (signal(sigma), signal(next));
        let (ratio, wanted) = (sigma / from, next / to);
        let variance = wanted.powi(2) * (ratio.powi(2) - wanted.powi(2)).max(0.0) / ratio.powi(2);
        let up = (self.0.eta * variance.sqrt()).min(wanted);
        let down = (wanted.powi(2) - up.powi(2)).max(0.0).sqrt();
        let disturbed = if self.0.eta > 0.0 && next > 0.0 { 1.0 } else { 0.0 };
        [to * down / sigma, to, -to * down * from / sigma, to * up, disturbed]
    }
}

impl Sampler for CfgPlusPlus {
    fn schedule(&self, sigmas: &[f32]) -> Schedule {
        let row = |pair: &[f32]| self.coefficients(pair[0].into(), pair[1].into()).map(|k| k as f32).to_vec();
        Schedule { levels: sigmas.to_vec(), coefficients: sigmas.windows(2).map(row).collect() }
    }

    fn coefficients(&self) -> usize {
        5
    }

    fn noises(&self) -> usize {
        1
    }

    fn reads_negative(&self) -> bool {
        true
    }

    fn continues_request(&self) -> bool {
        self.0.continues_request()
    }

    fn generator(&self, seed: u64) -> StepNoise {
        self.0.generator(seed)
    }

    fn step(&self, at: &Evaluation, stream: &StreamState) -> Vec<Value> {
        let row = at.row();
        let k = |i: usize| row.at(0, i);
        let next = stream.latents * k(0) + stream.clean * k(1) + stream.negative() * k(2) + stream.noise(at) * k(3);
        vec![match stream.conditioned(&next) {
            None => next,
            Some(conditioned) => &conditioned * k(4) + &next * (k(4).like(1.0) - k(4)),
        }]
    }

    /// Exact for the last step. An earlier step combines the clean and the negative-prompt prediction, which cannot be
    /// separated; the result is then the clean prediction moved further away from the negative-prompt one, as with a
    /// larger guidance scale.
    fn clean_prediction(&self, record: &StepRecord) -> Array3<f32> {
        let row = &record.coefficients;
        record.solve(StepWeights { latents: row[0], clean: row[1] + row[2], noise: row[3] }, row[4] == 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::samplers::{SEED_OFFSET, StepDraws};

    /// Expected values: the reference's step for x = 1, clean = 0.25, negative = 0.1, noise = 0.3.
    #[test]
    fn coefficients_match_reference_steps() {
        for (eta, sigma, next, want) in [
            (0.0, 0.8, 0.5, 0.7375),
            (0.5, 0.8, 0.5, 0.733_555_9),
            (1.0, 0.8, 0.5, 0.423_361_8),
            (1.0, 1.0, 0.8, 0.29),
            (1.0, 0.8, 0.0, 0.25),
        ] {
            let noise = EulerAncestral {
                eta,
                noise_seed: None,
                seed_offset: SEED_OFFSET,
                draws: StepDraws::Own,
                blends_every_step: false,
            };
            let [x, clean, negative, noise, _] = CfgPlusPlus(noise).coefficients(sigma, next);
            let got = x + 0.25 * clean + 0.1 * negative + 0.3 * noise;
            assert!((got - want).abs() < 1e-6, "eta {eta}, {sigma} to {next}: {got}, want {want}");
        }
    }
}
