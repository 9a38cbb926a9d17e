//! Euler's method with fresh noise at each step, for rectified flow.

use ndarray::Array3;

use crate::hlo::{Comparison, Value};
use crate::sampling::noise::TorchRng;
use crate::sampling::sampler::{Evaluation, Sampler, Schedule, StepNoise, StreamState};
use crate::sampling::step_record::{StepRecord, StepWeights};

/// Default of [`EulerAncestral::seed_offset`] (Lightricks' ltx-pipelines).
pub const SEED_OFFSET: u64 = 10_000;

/// Generator and type of the noise of ancestral steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StepDraws {
    /// A separate generator that draws f32 noise, as in Lightricks' code on f32 latents.
    #[default]
    Own,
    /// A separate generator that draws bf16 noise, as in Lightricks' code on bf16 latents.
    OwnBf16,
    /// The request's generator, which draws the f32 noise of all passes in turn, as in diffusers.
    Continued,
}

/// Ancestral Euler: each step first goes below the next noise level, by an amount that grows with `eta`. Fresh noise
/// then raises the latents to that level.
#[derive(Debug, PartialEq)]
pub struct EulerAncestral {
    /// Stochasticity, 0 to 1; 0 is [`Euler`](super::Euler).
    pub eta: f64,
    /// Seed of the noise; `None`: the request's seed plus `seed_offset`.
    pub noise_seed: Option<u64>,
    /// Offset that is added to the request's seed if `noise_seed` is `None`.
    pub seed_offset: u64,
    pub draws: StepDraws,
    /// Whether to blend in conditioned tokens after every step, as diffusers does. Lightricks' loop blends only after
    /// steps whose noise changed these tokens.
    pub blends_every_step: bool,
}

impl EulerAncestral {
    /// Returns the factors of `x`, the clean prediction and the noise for a step from level `sigma` to `next`.
    fn coefficients(&self, sigma: f64, next: f64) -> [f64; 3] {
        if next == 0.0 {
            return [0.0, 1.0, 0.0];
        }
        let down = next * (1.0 + (next / sigma - 1.0) * self.eta);
        let (ratio, scale) = (down / sigma, (1.0 - next) / (1.0 - down));
        let noise = (next.powi(2) - (down * scale).powi(2)).max(0.0).sqrt();
        [scale * ratio, scale * (1.0 - ratio), noise]
    }
}

impl Sampler for EulerAncestral {
    fn schedule(&self, sigmas: &[f32]) -> Schedule {
        let row = |pair: &[f32]| self.coefficients(pair[0].into(), pair[1].into()).map(|k| k as f32).to_vec();
        Schedule { levels: sigmas.to_vec(), coefficients: sigmas.windows(2).map(row).collect() }
    }

    fn coefficients(&self) -> usize {
        3
    }

    fn noises(&self) -> usize {
        1
    }

    /// Returns true for [`StepDraws::Continued`], unless a noise seed is set, or `eta` is 0 and no noise is drawn.
    fn continues_request(&self) -> bool {
        self.draws == StepDraws::Continued && self.noise_seed.is_none() && self.eta != 0.0
    }

    /// Draws video noise before audio noise, in row-major order of `[n, c]`.
    fn generator(&self, seed: u64) -> StepNoise {
        let draws = self.draws;
        let mut rng = TorchRng::new(self.noise_seed.unwrap_or_else(|| seed.wrapping_add(self.seed_offset)));
        Box::new(move |tokens| {
            tokens.map(|[n, c]| {
                let values = if draws == StepDraws::OwnBf16 { rng.normal_bf16(n * c) } else { rng.normal(n * c) };
                Array3::from_shape_vec((1, n, c), values).expect("n * c values")
            })
        })
    }

    fn step(&self, at: &Evaluation, stream: &StreamState) -> Vec<Value> {
        let row = at.row();
        let next = stream.latents * row.at(0, 0) + stream.clean * row.at(0, 1) + stream.noise(at) * row.at(0, 2);
        let Some(conditioned) = stream.conditioned(&next) else { return vec![next] };
        if self.eta == 0.0 {
            return vec![next];
        }
        if self.blends_every_step {
            return vec![conditioned];
        }
        // The last step (factor 0 for the latents) returns the prediction, which is already blended.
        let last = row.at(0, 0).compare(Comparison::Eq, &row.at(0, 0).like(0.0));
        vec![last.select(&next, &conditioned)]
    }

    /// Exact: inverts the step.
    fn clean_prediction(&self, record: &StepRecord) -> Array3<f32> {
        let row = &record.coefficients;
        let blended = self.eta != 0.0 && (self.blends_every_step || row[0] != 0.0);
        record.solve(StepWeights { latents: row[0], clean: row[1], noise: row[2] }, blended)
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array3;
    use serde::Deserialize;

    use super::*;
    use crate::av::Av;
    use crate::sampling::noise::step_noise;

    fn sampler(eta: f64, draws: StepDraws) -> EulerAncestral {
        EulerAncestral { eta, noise_seed: None, seed_offset: SEED_OFFSET, draws, blends_every_step: false }
    }

    /// `tests/fixtures/samplers/euler_ancestral.tsv`: noise levels, eta, and the factors of Lightricks' step.
    #[test]
    fn coefficients_match_lightricks() {
        let rows = include_str!("../../../tests/fixtures/samplers/euler_ancestral.tsv").lines();
        let rows = rows.filter(|line| !line.starts_with('#')).map(|line| {
            let numbers: Vec<f64> = line.split('\t').map(|v| v.parse().expect("a number")).collect();
            <[f64; 6]>::try_from(numbers).expect("six columns")
        });
        let mut seen = 0;
        for [eta, sigma, next, x, clean, noise] in rows {
            // Noise levels are f32, as in the reference.
            let [sigma, next] = [sigma, next].map(|level| f64::from(level as f32));
            let got = sampler(eta, StepDraws::Own).coefficients(sigma, next);
            let right = got.iter().zip([x, clean, noise]).all(|(got, want)| (got - want).abs() < 1e-6);
            assert!(right, "eta {eta}, {sigma} to {next}: {got:?}, want {:?}", [x, clean, noise]);
            seen += 1;
        }
        assert_eq!(seen, 10);
        // A step from 0.8 to 0.5 with x = 1, clean = 0.25, noise = 0.3; the last step returns the prediction.
        for (eta, want) in [(0.0, 0.71875), (0.5, 0.640_642_7), (1.0, 0.528_494_9)] {
            let [x, clean, noise] = sampler(eta, StepDraws::Own).coefficients(0.8, 0.5);
            assert!((x + 0.25 * clean + 0.3 * noise - want).abs() < 2e-6, "eta {eta}");
        }
        assert_eq!(sampler(1.0, StepDraws::Own).coefficients(0.4, 0.0), [0.0, 1.0, 0.0]);
    }

    /// Result of a reference loop on the latents of both streams, with velocity = 0.3 * latents.
    #[derive(Deserialize)]
    struct ReferenceLoop {
        draws: String,
        eta: f64,
        seed: u64,
        sigmas: Vec<f32>,
        tokens: [[usize; 2]; 2],
        video: Vec<f64>,
        audio: Vec<f64>,
    }

    /// Fixture written by `scripts/oracle/ancestral.py`.
    #[test]
    fn ancestral_loops_match_references() {
        let loops: Vec<ReferenceLoop> =
            serde_json::from_str(include_str!("../../../tests/fixtures/samplers/ancestral_loops.json"))
                .expect("the fixture parses");
        assert_eq!(loops.len(), 5);
        for case in loops {
            let draws = match &case.draws[..] {
                "official" => StepDraws::Own,
                "official_bf16" => StepDraws::OwnBf16,
                "diffusers" => StepDraws::Continued,
                other => panic!("{other}"),
            };
            let sampler = sampler(case.eta, draws);
            let tokens = Av { video: case.tokens[0], audio: case.tokens[1] };
            let mut start = TorchRng::new(case.seed);
            let wide = |x: Array3<f32>| x.mapv(f64::from);
            let mut latents =
                tokens.map(|[n, c]| wide(start.normal_array(&[1, n, c]).into_dimensionality().expect("3 axes")));
            let mut noise: StepNoise = match sampler.continues_request() {
                true => Box::new(move |tokens| step_noise(&mut start, 1, tokens)),
                false => sampler.generator(case.seed),
            };
            let schedule = sampler.schedule(&case.sigmas);
            for (row, sigma) in schedule.coefficients.iter().zip(&case.sigmas) {
                let [a, b, c] = [0, 1, 2].map(|k| f64::from(row[k]));
                latents = latents.zip(noise(tokens)).map(|(x, noise)| {
                    let clean = &x * (1.0 - 0.3 * f64::from(*sigma));
                    x * a + clean * b + wide(noise) * c
                });
            }
            for (got, want) in latents.into_iter().zip([case.video, case.audio]) {
                // The reference computes its factors in f32, which loses digits at levels near 1.
                let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
                let far = norm(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied());
                assert!(got.len() == want.len() && far < 2e-6, "{} eta {}: {far:e}", case.draws, case.eta);
            }
        }
    }

    #[test]
    fn noise_seed_overrides_request_seed() {
        let draw = |noise_seed, seed| {
            let mut next = EulerAncestral { noise_seed, ..sampler(1.0, StepDraws::Own) }.generator(seed);
            let tokens = Av { video: [5, 4], audio: [3, 6] };
            (next(tokens), next(tokens))
        };
        let (first, second) = draw(None, 1);
        assert_eq!(draw(Some(10_001), 7), (first.clone(), second.clone()));
        assert_ne!(first, second);
        assert_ne!(draw(None, 2).0, first);
        let mut rng = TorchRng::new(10_001);
        let want = [rng.normal_array(&[1, 5, 4]), rng.normal_array(&[1, 3, 6])];
        assert_eq!([first.video.into_dyn(), first.audio.into_dyn()], want);
    }
}
