//! Schedule names, and the schedules that depend only on the number of steps (Lightricks' ltx-core 1.0.0).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use statrs::function::beta::beta_reg;

use super::{MAX_STEPS, SamplingError};
use ltx2_base::with_defaults;

/// Name of a noise schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Uniformly spaced sigmas, shifted for the token count that `sampler.sigma_shift` selects.
    #[default]
    Ltx2,
    /// Quantiles of a beta distribution, dense at both ends.
    Beta,
    /// Short uniform steps in the first half, then quadratically growing ones. With 8 steps: the sigmas of the
    /// distilled models.
    LinearQuadratic,
}

/// Total decrease of sigma over the linear half of the linear-quadratic schedule.
const THRESHOLD: f64 = 0.025;

/// Number of discrete noise levels to which the beta quantiles are rounded.
const LEVELS: usize = 10_000;

with_defaults! {
    /// Parameters of the beta schedule.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct BetaSchedule {
        /// First parameter of the beta distribution; smaller values put more steps at low noise levels.
        #[schemars(range(min = 0.05, max = 50))]
        pub alpha: f64 = 0.6,
        /// Second parameter of the beta distribution; smaller values put more steps at high noise levels.
        #[schemars(range(min = 0.05, max = 50))]
        pub beta: f64 = 0.6,
        /// Shift of the noise levels; positive values raise them.
        #[schemars(range(min = -5, max = 5))]
        pub shift: f64 = 2.37,
    }
}

impl BetaSchedule {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Returns `steps` sigmas and a final 0: uniform steps in the first half, which decrease by 0.025 in total, then
/// quadratic steps with the same initial slope.
///
/// # Errors
/// Returns [`SamplingError::Steps`] if `steps` is not 1 to [`MAX_STEPS`].
pub fn linear_quadratic(steps: usize) -> Result<Vec<f32>, SamplingError> {
    check(steps)?;
    if steps == 1 {
        return Ok(vec![1.0, 0.0]);
    }
    let linear = steps / 2;
    let (first, rest) = (linear as f64, (steps - linear) as f64);
    let slope = THRESHOLD / first;
    let ahead = first - THRESHOLD * steps as f64;
    let square = ahead / (first * rest.powi(2));
    let (line, constant) = (slope - 2.0 * ahead / rest.powi(2), square * first.powi(2));
    let removed = |i: usize| {
        let at = i as f64;
        if i < linear { at * THRESHOLD / first } else { square * at.powi(2) + line * at + constant }
    };
    Ok((0..steps).map(|i| (1.0 - removed(i)) as f32).chain([0.0]).collect())
}

/// Returns sigmas at the quantiles of a beta distribution and a final 0: `steps` sigmas, or fewer if several quantiles
/// round to the same of 10000 levels.
///
/// # Errors
/// Returns [`SamplingError::Steps`] if `steps` is not 1 to [`MAX_STEPS`].
pub fn beta(steps: usize, of: &BetaSchedule) -> Result<Vec<f32>, SamplingError> {
    check(steps)?;
    let quantiles = (0..steps).map(|i| quantile(1.0 - i as f64 / steps as f64, of));
    let mut indices: Vec<usize> = quantiles.map(|q| (q * (LEVELS - 1) as f64).round_ties_even() as usize).collect();
    indices.dedup();
    Ok(indices.into_iter().map(|index| level(index, of.shift)).chain([0.0]).collect())
}

/// Returns discrete level `index` (ascending), computed in single precision like the reference.
fn level(index: usize, shift: f64) -> f32 {
    let (time, e) = ((index + 1) as f32 / LEVELS as f32, shift.exp() as f32);
    (1.0 / (e + (1.0 / time - 1.0))) * e
}

/// Returns the `p` quantile of the beta distribution. Bisection is precise enough because the result is rounded to a
/// level.
fn quantile(p: f64, of: &BetaSchedule) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if beta_reg(of.alpha, of.beta, middle) < p { low = middle } else { high = middle }
    }
    if p >= 1.0 { 1.0 } else { high }
}

fn check(steps: usize) -> Result<(), SamplingError> {
    if (1..=MAX_STEPS).contains(&steps) { Ok(()) } else { Err(SamplingError::Steps(steps)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct ScheduleFixture {
        linear_quadratic: Vec<Vec<f32>>,
        beta: Vec<Vec<f32>>,
        beta_of_others: Vec<Vec<f32>>,
    }

    /// Fixture written by `scripts/oracle/sigmas.py`; each table has one value more than steps.
    #[test]
    fn beta_and_linear_quadratic_match_reference_bitwise() {
        let tables: ScheduleFixture = serde_json::from_str(include_str!("../../tests/fixtures/sigmas/schedules.json"))
            .expect("the fixture parses");
        type Schedule = fn(usize) -> Result<Vec<f32>, SamplingError>;
        let others: Schedule = |steps| beta(steps, &BetaSchedule { alpha: 0.9, beta: 0.4, shift: 1.2 });
        let own: Schedule = |steps| beta(steps, &BetaSchedule::default());
        let schedules: [(&str, Schedule, Vec<Vec<f32>>); 3] = [
            ("linear_quadratic", linear_quadratic, tables.linear_quadratic),
            ("beta", own, tables.beta),
            ("beta of other parameters", others, tables.beta_of_others),
        ];
        for (name, of, all) in schedules {
            let steps = [1, 2, 3, 7, 8, 20, 40, 256];
            assert_eq!(all.len(), steps.len());
            for (steps, want) in steps.into_iter().zip(all) {
                assert_eq!(of(steps).expect("legal steps"), want, "{name}, {steps} steps");
            }
        }
    }

    #[test]
    fn schedules_decrease_and_eight_steps_match_distilled() {
        let distilled = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0];
        assert_eq!(linear_quadratic(8).expect("legal steps"), distilled);
        let bounds = [0.05, 50.0].map(|alpha| [0.05, 50.0].map(|beta| [-5.0, 5.0].map(|shift| [alpha, beta, shift])));
        let of = |[alpha, beta, shift]: [f64; 3]| BetaSchedule { alpha, beta, shift };
        for steps in 1..=MAX_STEPS {
            // Computing quantiles is slow, so only every 51st step count is tested at the parameter bounds.
            let bounds = bounds.as_flattened().as_flattened().iter().filter(|_| steps % 51 == 1);
            let betas = std::iter::once(BetaSchedule::default()).chain(bounds.map(|all| of(*all)));
            let all = betas.map(|settings| beta(steps, &settings)).chain([linear_quadratic(steps)]);
            for levels in all.map(|levels| levels.expect("legal steps")) {
                assert!(levels.windows(2).all(|w| w[0] > w[1]), "{steps} steps: {levels:?}");
                assert!((levels[0] - 1.0).abs() < 1e-6 && levels.last() == Some(&0.0), "{steps} steps: {levels:?}");
            }
        }
        assert!(beta(0, &BetaSchedule::default()).is_err() && linear_quadratic(257).is_err());
    }
}
