//! The second-order sampler of the HQ pipelines: an exponential Runge-Kutta step with a midpoint, with noise added at
//! both evaluations (`res_2s` of Lightricks' ltx-pipelines).
//!
//! Between two evaluations of the transformer, everything is linear in the latents, the anchor (the point from which a
//! step starts), the clean predictions and the noise. The refinement of the anchor, 100 rounds of a linear map, is a
//! geometric sum. The host therefore computes nine coefficients per evaluation in double precision, and the loop
//! combines f32 tensors with them. This is as exact as an f64 state that is rounded to f32 at each evaluation, and it
//! gives the same result on platforms without f64.

use ndarray::{Array3, Axis as Dim};

use crate::hlo::Value;
use crate::sampling::noise::TorchRng;
use crate::sampling::sampler::{Evaluation, Sampler, Schedule, StepNoise, StreamState};
use crate::sampling::step_record::StepRecord;

/// Coefficients per evaluation.
const COEFFICIENTS: usize = 9;
/// Noise tensors per call of the loop: one for each of the two evaluations of a step.
const NOISES: usize = 2;
/// Replaces a final noise level of 0, whose logarithm is not finite.
const LAST: f64 = 0.0011;
/// Position of the midpoint as a fraction of the step.
const C2: f64 = 0.5;
/// Fraction of the target noise level that is fresh noise.
const ETA: f64 = 0.5;
/// Number of rounds that refine the anchor. Only steps that reduce `ln σ` by less than `LARGEST_STEP` and start above
/// `SMALLEST_SIGMA` refine it.
const ROUNDS: i32 = 100;
const LARGEST_STEP: f64 = 0.5;
const SMALLEST_SIGMA: f64 = 0.03;
/// Seeds of the noise at step ends (torch's -1) and at midpoints.
const STEP_SEED: u64 = u64::MAX;
const MIDPOINT_SEED: u64 = 9999;

/// Returns noise levels and coefficients of the evaluations of a schedule that ends at 0.
///
/// `x' ← k₀·x + k₁·anchor + k₂·first + k₃·clean + k₄·noise`, then conditioned tokens are blended in if `k₅` is 1, then
/// `anchor ← k₆·x' + k₇·clean + k₈·x` and `first ← clean`, where `x` is the old and `x'` the new value.
fn schedule(sigmas: &[f32]) -> Schedule {
    let mut sigmas: Vec<f32> = sigmas.to_vec();
    if let Some(last) = sigmas.last_mut().filter(|s| **s == 0.0) {
        *last = LAST as f32;
    }
    let (mut levels, mut all) = (Vec::new(), Vec::<[f64; COEFFICIENTS]>::new());
    for pair in sigmas.windows(2) {
        let [sigma, next] = [pair[0], pair[1]].map(f64::from);
        let h = -(next / sigma).ln();
        let b2 = phi2(-h) / C2;
        let b1 = phi1(-h) - b2;
        // First evaluation, to the midpoint: y = x + r (clean - x), plus noise from the level of x to that of the
        // midpoint.
        let r = h * C2 * phi1(-h * C2);
        let middle = (sigma * next).sqrt();
        let NoisedLatents { alpha, g, up } = NoisedLatents::new(sigma, middle);
        let anchor = if h < LARGEST_STEP && sigma > SMALLEST_SIGMA {
            // e ← clean - x' + r e, starting with e = clean - x; anchor = x' - r e after ROUNDS - 1 rounds.
            let (last, sum) = (r.powi(ROUNDS), (1.0 - r.powi(ROUNDS - 1)) / (1.0 - r));
            [1.0 + r * sum, -(r * sum + last), last]
        } else {
            [0.0, 0.0, 1.0]
        };
        levels.push(sigma as f32);
        all.push([alpha + g * r, 0.0, 0.0, -g * r, up, 1.0, anchor[0], anchor[1], anchor[2]]);
        // Second evaluation, from the anchor with both predictions: y = a + h (b1 (first - a) + b2 (clean - a)).
        let NoisedLatents { alpha, g, up } = NoisedLatents::new(sigma, next);
        levels.push(middle as f32);
        all.push([0.0, alpha + g * h * (b1 + b2), -g * h * b1, -g * h * b2, up, 1.0, 1.0, 0.0, 0.0]);
    }
    levels.extend(sigmas.last());
    all.push([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
    let coefficients = all.into_iter().map(|row| row.iter().map(|k| *k as f32).collect()).collect();
    Schedule { levels, coefficients }
}

/// Coefficients of the noise injection for a step from level `sigma` to `t`: `(α + g)·a - g·y + up·noise`, with
/// anchor `a` and next point `y`.
struct NoisedLatents {
    alpha: f64,
    g: f64,
    up: f64,
}

impl NoisedLatents {
    fn new(sigma: f64, t: f64) -> Self {
        let up = ETA * t;
        let kept = (t * t - up * up).sqrt();
        let alpha = (1.0 - t) + kept;
        let down = kept / alpha;
        NoisedLatents { alpha, g: alpha * (down - sigma) / (sigma - t), up }
    }
}

/// Returns `(e^z - 1) / z`.
fn phi1(z: f64) -> f64 {
    if z.abs() < 1e-10 { 1.0 } else { z.exp_m1() / z }
}

/// Returns `(e^z - 1 - z) / z²`.
fn phi2(z: f64) -> f64 {
    if z.abs() < 1e-10 { 0.5 } else { (z.exp_m1() - z) / (z * z) }
}

/// Returns the noise source for the two evaluations of a step: `[2, n, c]` per stream, with mean 0 and unit variance.
/// Midpoints and step ends use separate generators with fixed seeds; the request's seed has no effect. Video noise is
/// drawn before audio noise.
fn noise() -> StepNoise {
    let mut generators = [MIDPOINT_SEED, STEP_SEED].map(TorchRng::new);
    Box::new(move |tokens| {
        let mut all = tokens.map(|[n, c]| Array3::zeros((NOISES, n, c)));
        for (at, generator) in generators.iter_mut().enumerate() {
            for stream in [&mut all.video, &mut all.audio] {
                let mut place = stream.index_axis_mut(Dim(0), at);
                let mut values = generator.normal_f64(place.len());
                // The reference normalizes over the batch, then over tokens and channels; with one video both are the
                // same.
                for _ in 0..2 {
                    normalize(&mut values);
                }
                place.iter_mut().zip(values).for_each(|(to, v)| *to = v as f32);
            }
        }
        all
    })
}

/// Normalizes to mean 0 and unbiased standard deviation 1.
fn normalize(values: &mut [f64]) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    let scale = variance.sqrt().recip();
    values.iter_mut().for_each(|v| *v = (*v - mean) * scale);
}

/// The second-order sampler `res_2s`.
#[derive(Debug, PartialEq)]
pub struct Res2s;

impl Sampler for Res2s {
    fn state(&self) -> &[&'static str] {
        &["anchor", "first"]
    }

    fn evaluations(&self, steps: usize) -> usize {
        2 * steps + 1
    }

    fn schedule(&self, sigmas: &[f32]) -> Schedule {
        schedule(sigmas)
    }

    fn coefficients(&self) -> usize {
        COEFFICIENTS
    }

    fn noises(&self) -> usize {
        NOISES
    }

    fn generator(&self, _seed: u64) -> StepNoise {
        noise()
    }

    fn step(&self, at: &Evaluation, stream: &StreamState) -> Vec<Value> {
        let row = at.row();
        let k = |i: usize| row.at(0, i);
        let noise = stream.noise(at);
        let StreamState { latents: x, clean, .. } = *stream;
        let (anchor, first) = (stream.state[0], stream.state[1]);
        let next = x * k(0) + anchor * k(1) + first * k(2) + clean * k(3) + noise * k(4);
        let next = match stream.conditioned(&next) {
            None => next,
            Some(conditioned) => &conditioned * k(5) + &next * (k(5).like(1.0) - k(5)),
        };
        let anchor = &next * k(6) + clean * k(7) + x * k(8);
        vec![next, anchor, clean.clone()]
    }

    /// Exact: the state contains the clean prediction of the last evaluation.
    fn clean_prediction(&self, record: &StepRecord) -> Array3<f32> {
        record.state[1].clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::av::Av;

    /// Returns a linear function of its arguments in place of the network's clean prediction.
    fn predicted(x: f64, sigma: f64) -> f64 {
        0.3 * x + 0.2 * sigma - 0.1
    }

    /// Applies the reference's step function: from `anchor` towards `next`, with fresh noise.
    fn stepped(anchor: f64, next: f64, sigma: f64, to: f64, noise: f64) -> f64 {
        let up = 0.5 * to;
        let kept = (to.powi(2) - up.powi(2)).sqrt();
        let signal = 1.0 - to + kept;
        let slope = (anchor - next) / (sigma - to);
        let clean = anchor - sigma * slope;
        signal * (clean + kept / signal * slope) + up * noise
    }

    /// Runs the reference's loop on a scalar, with all 100 refinement rounds; returns the value after each evaluation.
    fn iterated_reference(sigmas: &[f64], start: f64, mut noise: impl FnMut() -> f64) -> Vec<f64> {
        let (mut x, mut all) = (start, Vec::new());
        for pair in sigmas.windows(2) {
            let [sigma, next] = [pair[0], pair[1]];
            let h = (sigma / next).ln();
            let a21 = (1.0 - (-h / 2.0).exp()) / h;
            let b2 = 2.0 * ((-h).exp() - 1.0 + h) / h.powi(2);
            let b1 = (1.0 - (-h).exp()) / h - b2;
            let first = predicted(x, sigma);
            let (mut anchor, mut slope) = (x, first - x);
            let middle = (sigma * next).sqrt();
            let x_middle = stepped(anchor, anchor + h * a21 * slope, sigma, middle, noise());
            if h < 0.5 && sigma > 0.03 {
                for _ in 0..100 {
                    anchor = x_middle - h * a21 * slope;
                    slope = first - anchor;
                }
            }
            let second = predicted(x_middle, middle);
            let y = anchor + h * (b1 * slope + b2 * (second - anchor));
            x = stepped(anchor, y, sigma, next, noise());
            all.extend([x_middle, x]);
        }
        all.push(predicted(x, sigmas[sigmas.len() - 1]));
        all
    }

    #[test]
    fn coefficients_match_reference_loop() {
        // Covers a step just short enough to be refined, a long step, a step from a low level and the final step.
        let sigmas = [1.0f32, 0.62, 0.4, 0.025, 0.02, 0.0];
        let noise = || (1..).map(|i| (f64::from(i) * 1.7).sin());
        let mut own = noise();
        let ends: Vec<f64> =
            sigmas.iter().map(|s| if *s == 0.0 { f64::from(0.0011f32) } else { f64::from(*s) }).collect();
        let want = iterated_reference(&ends, 0.8, || own.next().expect("endless"));

        let Schedule { levels, coefficients: rows } = schedule(&sigmas);
        assert_eq!((levels.len(), rows.len()), (11, 11));
        let (mut x, mut anchor, mut first) = (0.8, 0.0, 0.0);
        for (((sigma, row), noise), want) in levels.iter().zip(&rows).zip(noise()).zip(&want) {
            let k: Vec<f64> = row.iter().copied().map(f64::from).collect();
            let clean = predicted(x, f64::from(*sigma));
            let next = x * k[0] + anchor * k[1] + first * k[2] + clean * k[3] + noise * k[4];
            anchor = next * k[6] + clean * k[7] + x * k[8];
            (x, first) = (next, clean);
            assert!((x - want).abs() < 1e-6, "level {sigma}: {x}, by rounds {want}");
        }
        assert_eq!(want.len(), rows.len());
    }

    #[test]
    fn midpoint_and_step_noise_use_separate_generators() {
        let mut generators = [9999, u64::MAX].map(TorchRng::new);
        let mut noise = noise();
        for _ in 0..2 {
            let got: Vec<_> = noise(Av { video: [5, 4], audio: [3, 6] }).into_iter().collect();
            for (at, generator) in generators.iter_mut().enumerate() {
                for stream in &got {
                    let place = stream.index_axis(Dim(0), at);
                    let drawn = generator.normal_f64(place.len());
                    let n = drawn.len() as f64;
                    let mean = drawn.iter().sum::<f64>() / n;
                    let deviation = (drawn.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt();
                    let want = drawn.iter().map(|v| (v - mean) / deviation);
                    assert!(place.iter().zip(want).all(|(got, want)| (f64::from(*got) - want).abs() < 1e-6));
                }
            }
        }
    }
}
