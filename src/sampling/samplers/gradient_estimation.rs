//! Euler's method along an estimate of the flow's gradient from two evaluations (Permenter & Yuan 2024, "Interpreting and
//! Improving Diffusion Models from an Optimization Perspective"; Lightricks' ltx-pipelines).

use crate::hlo::Value;
use crate::sampling::sampler::{Evaluation, Sampler, Schedule, StreamState};

/// Euler's method along `γ·v + (1 - γ)·v'`, of the velocity `v` and that of the step before, `v'`. The first step has none
/// before it, and the last ends at its own prediction: both are Euler's.
#[derive(Debug)]
pub struct GradientEstimation {
    /// Weight of the step's own velocity; 1 is [`Euler`](super::Euler).
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
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The loop on one number whose prediction is `x²/2`, as the reference's own does it.
    #[test]
    fn a_loop_of_one_number_is_the_references() {
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
