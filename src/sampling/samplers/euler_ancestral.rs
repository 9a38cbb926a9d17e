//! Euler's method with noise drawn anew at each step, for rectified flow.

use crate::hlo::Value;
use crate::sampling::noise::TorchRng;
use crate::sampling::sampler::{Evaluation, Sampler, Schedule, StepNoise, StreamState};

/// The generator's seed follows the request's at this distance (Lightricks' ltx-pipelines).
const SEED_OFFSET: u64 = 10_000;

/// Ancestral Euler: a step goes below the next noise level, by `eta`, and noise lifts it there.
#[derive(Debug)]
pub struct EulerAncestral {
    /// Part of a step's noise that is drawn anew, 0 to 1; at 0 this is [`Euler`](super::Euler).
    pub eta: f64,
    /// Seed of the generator, in place of one that follows the request's.
    pub noise_seed: Option<u64>,
}

impl EulerAncestral {
    /// Factors of `x`, the clean prediction and the noise on the way from level `sigma` to `next`.
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

    /// Video before audio, each token's channels in turn.
    fn generator(&self, seed: u64) -> StepNoise {
        let mut rng = TorchRng::new(self.noise_seed.unwrap_or(seed.wrapping_add(SEED_OFFSET)));
        Box::new(move |tokens| tokens.map(|[n, c]| rng.normal_array(&[1, n, c]).into_dimensionality().expect("3 axes")))
    }

    fn step(&self, at: &Evaluation, stream: &StreamState) -> Vec<Value> {
        let row = at.row();
        let next = stream.latents * row.at(0, 0) + stream.clean * row.at(0, 1) + stream.noise(at) * row.at(0, 2);
        vec![stream.conditioned(&next).unwrap_or(next)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `tests/fixtures/samplers/euler_ancestral.tsv`: levels, eta, and the factors that Lightricks' own step has.
    #[test]
    fn factors_are_the_references() {
        let rows = include_str!("../../../tests/fixtures/samplers/euler_ancestral.tsv").lines();
        let rows = rows.filter(|line| !line.starts_with('#')).map(|line| {
            let numbers: Vec<f64> = line.split('\t').map(|v| v.parse().expect("a number")).collect();
            <[f64; 6]>::try_from(numbers).expect("six columns")
        });
        // The file's numbers are f32 with six digits.
        let near = |got: f64, want: f64| (got - want).abs() < 2e-6;
        let mut seen = 0;
        for [eta, sigma, next, x, clean, noise] in rows {
            let got = EulerAncestral { eta, noise_seed: None }.coefficients(sigma, next);
            let right = got.iter().zip([x, clean, noise]).all(|(&got, want)| near(got, want));
            assert!(right, "eta {eta}, {sigma} to {next}: {got:?}, want {:?}", [x, clean, noise]);
            seen += 1;
        }
        assert_eq!(seen, 10);
        // A step of x 1, clean 0.25 and noise 0.3 from 0.8 to 0.5; the last step is the prediction.
        for (eta, want) in [(0.0, 0.71875), (0.5, 0.640_642_7), (1.0, 0.528_494_9)] {
            let [x, clean, noise] = EulerAncestral { eta, noise_seed: None }.coefficients(0.8, 0.5);
            assert!(near(x + 0.25 * clean + 0.3 * noise, want), "eta {eta}");
        }
        assert_eq!(EulerAncestral { eta: 1.0, noise_seed: None }.coefficients(0.4, 0.0), [0.0, 1.0, 0.0]);
    }

    #[test]
    fn the_generator_follows_the_request_unless_it_has_a_seed_of_its_own() {
        let draw = |noise_seed, seed| {
            let mut next = EulerAncestral { eta: 1.0, noise_seed }.generator(seed);
            let first = next(crate::av::Av { video: [5, 4], audio: [3, 6] });
            (first, next(crate::av::Av { video: [5, 4], audio: [3, 6] }))
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
