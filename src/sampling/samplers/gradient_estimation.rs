//! Gradient estimation: Euler's method with a velocity extrapolated from two evaluations (Permenter & Yuan 2024,
//! "Interpreting and Improving Diffusion Models from an Optimization Perspective"; Lightricks' ltx-pipelines).

use ndarray::{Array3, Zip};

use crate::hlo::Value;
use crate::sampling::sampler::{Evaluation, Sampler, Schedule, StreamState};
use crate::sampling::step_record::StepRecord;

/// Euler's method along `γ·v + (1 - γ)·v'`, with the velocity `v` of this step and `v'` of the previous one. The first
/// step, which has no previous velocity, and the last step, which ends at its prediction, are plain Euler steps.
#[derive(Debug, PartialEq)]
pub struct GradientEstimation {
    /// Weight of the current velocity; 1 is [`Euler`](super::Euler).
    pub gamma: f64,
}

impl Sampler for GradientEstimation {
    fn state(&self) -> &[&'static str] {
        &["velocity"]
    }

    fn schedule(&self, sigmas: &[f32]) -> Schedule {
        let row = |(i, pair): (usize, &[f32])| {
            let gamma = if i == 0 || pair[1] == 0.0 { 1.0 } else { self.gamma };
            vec![gamma as f32]
        };
        Schedule { levels: sigmas.to_vec(), coefficients: sigmas.windows(2).enumerate().map(row).collect() }
    }

    fn coefficients(&self) -> usize {
        1
    }

    fn step(&self, at: &Evaluation, stream: &StreamState) -> Vec<Value> {
        let (gamma, x, before) = (at.row().at(0, 0), stream.latents, stream.state[0]);
        let velocity = (x - stream.clean) / at.sigma;
        let estimate = (&velocity - before) * gamma + before;
        vec![x + estimate * at.change(), velocity]
    }

    /// Exact: the state contains the velocity of the last step.
    fn clean_prediction(&self, record: &StepRecord) -> Array3<f32> {
        Zip::from(&record.before).and(&record.state[0]).map_collect(|x, velocity| x - record.sigma * velocity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A scalar loop with prediction `x²/2`; expected values from the reference.
    #[test]
    fn scalar_loop_matches_reference() {
        let sigmas = [1.0f32, 0.8, 0.5, 0.25, 0.0];
        for (gamma, want) in
            [(2.0, [0.9, 0.67875, 0.385_038_3, 0.074_127_2]), (1.0, [0.9, 0.714_375, 0.484_770_4, 0.117_501_1])]
        {
            let Schedule { levels, coefficients } = GradientEstimation { gamma }.schedule(&sigmas);
            let (mut x, mut before) = (1.0, 0.0);
            for ((pair, row), want) in levels.windows(2).zip(&coefficients).zip(want) {
                let [sigma, next] = [0, 1].map(|i| f64::from(pair[i]));
                let velocity = (x - 0.5 * x * x) / sigma;
                x += ((velocity - before) * f64::from(row[0]) + before) * (next - sigma);
                before = velocity;
                assert!((x - want).abs() < 1e-6, "gamma {gamma}, level {sigma}: {x}, want {want}");
            }
        }
    }
}
