//! Noise schedules: decreasing sigmas, one per step and a final 0, in single precision.
//!
//! Two conventions exist for the same model. They return different schedules for the same settings:
//!
//! - [`official`]: Lightricks' scheduler, with a shift for 4096 tokens at every resolution.
//! - [`FlowMatch`]: the diffusers scheduler with the model's `scheduler_config.json`, with a shift for the actual token
//!   count.
//!
//! Both use the operations of their reference implementation, in the same order and precision (f64 scalars, f32
//! tables), so the tables are bitwise equal. The exception is a schedule of one step, for which the references divide
//! by 0 or by a rounding error: both conventions return `[1, 0]` here.

use std::path::Path;

use serde::Deserialize;

use super::{MAX_STEPS, SamplingError};
use crate::models::ranges;

/// Token count for which the official pipelines shift the schedule.
pub const OFFICIAL_TOKENS: usize = 4096;

/// The official shift is linear in the token count, from 0.95 at 1024 tokens to 2.05 at 4096, unclamped; the last
/// non-zero sigma is 0.1.
const OFFICIAL: FlowMatch = FlowMatch {
    num_train_timesteps: 1000,
    shift: 1.0,
    use_dynamic_shifting: true,
    base_shift: 0.95,
    max_shift: 2.05,
    base_image_seq_len: 1024,
    max_image_seq_len: OFFICIAL_TOKENS,
    shift_terminal: Some(0.1),
    time_shift_type: TimeShift::Exponential,
};

/// Returns Lightricks' schedule: `steps + 1` sigmas, shifted for `tokens` video tokens ([`OFFICIAL_TOKENS`], except in
/// pipelines that use the token count of the latents).
///
/// # Errors
/// Returns [`SamplingError::Steps`] if `steps` is not 1 to [`MAX_STEPS`], and [`SamplingError::NotFinite`] if the token
/// count overflows the shift.
pub fn official(steps: usize, tokens: usize) -> Result<Vec<f32>, SamplingError> {
    check_steps(steps)?;
    if steps == 1 {
        return Ok(vec![1.0, 0.0]);
    }
    let e = OFFICIAL.mu(tokens).exp() as f32;
    let step = -1.0 / steps as f32;
    // torch.linspace(1, 0, steps + 1) counts from both ends and rounds each value once.
    let half = steps.div_ceil(2);
    let uniform = (0..steps).map(|i| if i < half { step.mul_add(i as f32, 1.0) } else { -(step * (steps - i) as f32) });
    // torch computes scalar / tensor as a product with the reciprocal, which rounds twice.
    let shifted: Vec<f32> = uniform.map(|s| (1.0 / (e + (1.0 / s - 1.0))) * e).collect();
    OFFICIAL.finish(shifted, tokens)
}

/// Returns the sigmas of `list` unchanged, followed by 0 unless the list already ends with 0.
///
/// # Errors
/// Returns [`SamplingError::SigmaList`] if the sigmas are not strictly decreasing within (0, 1], and
/// [`SamplingError::Steps`] if their number is not 1 to [`MAX_STEPS`].
pub(crate) fn verbatim(list: &[f64]) -> Result<Vec<f32>, SamplingError> {
    let mut sigmas = checked_list(list)?;
    sigmas.push(0.0);
    Ok(sigmas)
}

/// Formula that shifts a sigma `s` by `mu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TimeShift {
    /// Exponential shift of a sigma `s` by `mu`: `e^mu / (e^mu + 1/s - 1)`.
    #[default]
    Exponential,
    /// Linear shift of a sigma `s` by `mu`: `mu / (mu + 1/s - 1)`.
    Linear,
}

/// The fields of diffusers' `FlowMatchEulerDiscreteScheduler` configuration that LTX-2 pipelines use, with the defaults
/// of that class.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct FlowMatch {
    /// Ratio of timesteps to sigmas.
    pub(crate) num_train_timesteps: usize,
    /// Constant shift, used without `use_dynamic_shifting`.
    pub(crate) shift: f64,
    /// Whether the shift depends on the token count.
    pub(crate) use_dynamic_shifting: bool,
    /// Dynamic shift `mu` for `base_image_seq_len` tokens.
    pub(crate) base_shift: f64,
    /// Dynamic shift `mu` for `max_image_seq_len` tokens.
    pub(crate) max_shift: f64,
    /// See `base_shift`.
    pub(crate) base_image_seq_len: usize,
    /// See `max_shift`.
    pub(crate) max_image_seq_len: usize,
    /// The last non-zero sigma, to which the schedule is stretched; `None` or 0: not stretched.
    pub(crate) shift_terminal: Option<f64>,
    /// Formula of the dynamic shift.
    pub(crate) time_shift_type: TimeShift,
}

impl Default for FlowMatch {
    fn default() -> Self {
        Self {
            num_train_timesteps: 1000,
            shift: 1.0,
            use_dynamic_shifting: false,
            base_shift: 0.5,
            max_shift: 1.15,
            base_image_seq_len: 256,
            max_image_seq_len: 4096,
            shift_terminal: None,
            time_shift_type: TimeShift::Exponential,
        }
    }
}

/// Keys that [`FlowMatch`] uses. Keys in `OFF` are known, but must be null or false.
const KEYS: [&str; 9] = [
    "num_train_timesteps",
    "shift",
    "use_dynamic_shifting",
    "base_shift",
    "max_shift",
    "base_image_seq_len",
    "max_image_seq_len",
    "shift_terminal",
    "time_shift_type",
];
const OFF: [&str; 5] =
    ["invert_sigmas", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "stochastic_sampling"];
const CLASS: &str = "FlowMatchEulerDiscreteScheduler";

impl FlowMatch {
    /// Parses a `scheduler_config.json`; `file` is the path shown in errors.
    ///
    /// # Errors
    /// Returns [`SamplingError::Scheduler`] if the scheduler class is different, an unsupported option is enabled, an
    /// unknown key has a value other than null or false, or a value has the wrong type or is out of range.
    pub fn from_json(text: &str, file: &Path) -> Result<Self, SamplingError> {
        let fail = |why: String| SamplingError::Scheduler { file: file.to_path_buf(), why };
        let mut json: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(text).map_err(|e| fail(format!("not a JSON object: {e}")))?;
        if let Some(class) = json.get("_class_name").filter(|c| c.as_str() != Some(CLASS)) {
            return Err(fail(format!("_class_name is {class}; only {CLASS} is supported")));
        }
        for (key, value) in &json {
            let idle = value.is_null() || *value == false;
            if OFF.contains(&key.as_str()) {
                if !idle {
                    return Err(fail(format!("{key} = {value} is not supported; set it to false")));
                }
            } else if !KEYS.contains(&key.as_str()) && !key.starts_with('_') && !idle {
                let near = KEYS.iter().max_by(|a, b| strsim::jaro(a, key).total_cmp(&strsim::jaro(b, key)));
                let near = near.expect("some keys are known");
                return Err(fail(format!("unknown key {key}; remove it, or use the nearest known key, {near}")));
            }
        }
        // A null means the default; for `shift_terminal`, null is the default.
        json.retain(|_, value| !value.is_null());
        let json = json.into();
        ranges::check("scheduler", &json, |key| KEYS.contains(&key)).map_err(|e| fail(e.to_string()))?;
        let config: Self = serde_json::from_value(json).map_err(|e| fail(e.to_string()))?;
        if config.use_dynamic_shifting && config.base_image_seq_len == config.max_image_seq_len {
            return Err(fail(
                "use_dynamic_shifting requires base_image_seq_len and max_image_seq_len to differ".into(),
            ));
        }
        if config.shift_terminal.is_some_and(|t| !(0.0..1.0).contains(&t)) {
            return Err(fail("shift_terminal must be null or in [0, 1)".into()));
        }
        Ok(config)
    }

    /// Returns the dynamic shift for a token count: linear through the two anchor points, unclamped.
    pub(crate) fn mu(&self, tokens: usize) -> f64 {
        let (low, high) = (self.base_image_seq_len as f64, self.max_image_seq_len as f64);
        let slope = (self.max_shift - self.base_shift) / (high - low);
        tokens as f64 * slope + (self.base_shift - slope * low)
    }

    /// Returns `steps + 1` sigmas: a uniform schedule, shifted for `tokens` video tokens (after packing).
    ///
    /// # Errors
    /// Returns [`SamplingError::Steps`] if `steps` is not 1 to [`MAX_STEPS`], and [`SamplingError::NotFinite`] if a
    /// shifted sigma is not finite.
    pub fn sigmas(&self, steps: usize, tokens: usize) -> Result<Vec<f32>, SamplingError> {
        check_steps(steps)?;
        let last = 1.0 / steps as f64;
        let step = (last - 1.0) / (steps - 1).max(1) as f64;
        let uniform = (0..steps).map(|i| if i > 0 && i + 1 == steps { last } else { i as f64 * step + 1.0 });
        self.shift_all(uniform.map(|s| s as f32).collect(), tokens)
    }

    /// Shifts and stretches an explicit list like diffusers does; a final 0 is optional.
    pub(crate) fn shifted(&self, list: &[f64], tokens: usize) -> Result<Vec<f32>, SamplingError> {
        self.shift_all(checked_list(list)?, tokens)
    }

    fn shift_all(&self, sigmas: Vec<f32>, tokens: usize) -> Result<Vec<f32>, SamplingError> {
        let mu = self.mu(tokens);
        let (constant, excess) = (self.shift as f32, (self.shift - 1.0) as f32);
        let weight = match self.time_shift_type {
            TimeShift::Exponential => mu.exp() as f32,
            TimeShift::Linear => mu as f32,
        };
        let shift = |s: f32| match self.use_dynamic_shifting {
            true => weight / (weight + (1.0 / s - 1.0)),
            false => constant * s / (1.0 + excess * s),
        };
        self.finish(sigmas.into_iter().map(shift).collect(), tokens)
    }

    /// Stretches the sigmas so that the last is `shift_terminal`, checks that all are finite, and appends 0.
    fn finish(&self, mut sigmas: Vec<f32>, tokens: usize) -> Result<Vec<f32>, SamplingError> {
        let room = 1.0 - sigmas.last().copied().unwrap_or_default();
        if let Some(terminal) = self.shift_terminal.filter(|t| *t != 0.0 && sigmas.len() > 1) {
            let scale = room / (1.0 - terminal) as f32;
            sigmas.iter_mut().for_each(|s| *s = 1.0 - (1.0 - *s) / scale);
        }
        if !sigmas.iter().all(|s| s.is_finite()) {
            return Err(SamplingError::NotFinite { steps: sigmas.len(), tokens, mu: self.mu(tokens) });
        }
        sigmas.push(0.0);
        Ok(sigmas)
    }
}

fn check_steps(steps: usize) -> Result<(), SamplingError> {
    if (1..=MAX_STEPS).contains(&steps) { Ok(()) } else { Err(SamplingError::Steps(steps)) }
}

/// Checks a list of sigmas and returns it without a final 0.
fn checked_list(list: &[f64]) -> Result<Vec<f32>, SamplingError> {
    let body = list.strip_suffix(&[0.0]).unwrap_or(list);
    check_steps(body.len())?;
    let mut above = f64::INFINITY;
    for (index, &value) in body.iter().enumerate() {
        let why = if !(value > 0.0 && value <= 1.0) {
            "is not in (0, 1]"
        } else if value >= above {
            "is not below the previous sigma"
        } else {
            above = value;
            continue;
        };
        return Err(SamplingError::SigmaList { index, value, why });
    }
    Ok(body.iter().map(|s| *s as f32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::testing::assert_covers;

    #[derive(Deserialize)]
    struct SigmasFixture {
        official: Vec<Official>,
        diffusers: Vec<Diffusers>,
    }

    #[derive(Deserialize)]
    struct Official {
        steps: usize,
        tokens: usize,
        sigmas: Vec<f32>,
    }

    #[derive(Deserialize)]
    struct Diffusers {
        config: serde_json::Value,
        tokens: usize,
        steps: usize,
        given: Option<Vec<f64>>,
        sigmas: Vec<f32>,
        timesteps: Vec<f32>,
    }

    fn config(text: &str) -> Result<FlowMatch, SamplingError> {
        FlowMatch::from_json(text, Path::new("scheduler/scheduler_config.json"))
    }

    #[test]
    fn schedules_match_references_bitwise() {
        let fixture: SigmasFixture =
            serde_json::from_str(include_str!("../../tests/fixtures/sigmas/sigmas.json")).expect("the fixture parses");
        for case in fixture.official {
            let got = official(case.steps, case.tokens).expect("legal steps");
            assert_eq!(got, case.sigmas, "official, {} steps, {} tokens", case.steps, case.tokens);
        }
        for case in fixture.diffusers {
            let scheduler = config(&case.config.to_string()).expect("a known configuration");
            let got = match &case.given {
                Some(list) => scheduler.shifted(list, case.tokens),
                None => scheduler.sigmas(case.steps, case.tokens),
            };
            let got = got.expect("legal steps");
            assert_eq!(got, case.sigmas, "{} steps, {} tokens, {}", case.steps, case.tokens, case.config);
            let timesteps: Vec<f32> =
                got[..got.len() - 1].iter().map(|s| s * scheduler.num_train_timesteps as f32).collect();
            assert_eq!(timesteps, case.timesteps, "timesteps, {}", case.config);
        }
    }

    #[test]
    fn official_schedule_decreases_for_every_step_count() {
        for steps in 1..=MAX_STEPS {
            let sigmas = official(steps, OFFICIAL_TOKENS).expect("legal steps");
            assert_eq!((sigmas.len(), sigmas[steps]), (steps + 1, 0.0));
            assert!((sigmas[0] - 1.0).abs() < 1e-6, "{steps} steps start at {}", sigmas[0]);
            assert!(sigmas.windows(2).all(|w| w[0] > w[1]), "{steps} steps");
        }
        assert_eq!(official(1, OFFICIAL_TOKENS).expect("one step"), [1.0, 0.0]);
        assert_eq!(OFFICIAL.sigmas(1, 6144).expect("one step"), [1.0, 0.0]);
        let message = |steps| official(steps, OFFICIAL_TOKENS).expect_err("out of range").to_string();
        assert_eq!(message(0), "0 steps requested; the step count must be 1 to 256");
        assert_eq!(message(257), "257 steps requested; the step count must be 1 to 256");
        assert!(matches!(official(4, 10_000_000), Err(SamplingError::NotFinite { steps: 4, .. })));
    }

    #[test]
    fn explicit_sigmas_are_validated_and_unchanged() {
        let distilled = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875];
        let closed = verbatim(&distilled).expect("a schedule");
        assert_eq!(closed.len(), 9);
        assert_eq!(closed[1..3], [0.99375, 0.9875]);
        assert_eq!(verbatim(&[0.909375, 0.725, 0.421875, 0.0]).expect("a schedule"), [0.909375, 0.725, 0.421875, 0.0]);
        let message = |list: &[f64]| verbatim(list).expect_err("not a schedule").to_string();
        assert_eq!(
            message(&[0.9, 0.95]),
            "sigmas[1] = 0.95 is not below the previous sigma; sigmas must be in (0, 1] and strictly decreasing"
        );
        assert!(message(&[1.5]).starts_with("sigmas[0] = 1.5 is not in (0, 1]"));
        assert!(message(&[f64::NAN]).starts_with("sigmas[0] = NaN is not in (0, 1]"));
        assert!(message(&[0.0]).starts_with("0 steps"));
    }

    #[test]
    fn out_of_range_scheduler_values_are_rejected() {
        assert_covers::<FlowMatch>("scheduler");
        let error = config(r#"{"max_image_seq_len": 0}"#).expect_err("no tokens").to_string();
        let reason = "max_image_seq_len = 0 is out of range: it must be 1 to 2147483648";
        assert_eq!(error, format!("scheduler/scheduler_config.json: {reason}"));
    }

    #[test]
    fn unsupported_scheduler_options_are_rejected() {
        let message = |text| config(text).expect_err("unsupported").to_string();
        let file = "scheduler/scheduler_config.json: ";
        assert_eq!(
            message(r#"{"use_karras_sigmas": true}"#),
            format!("{file}use_karras_sigmas = true is not supported; set it to false")
        );
        assert_eq!(
            message(r#"{"shift_terminl": 0.1}"#),
            format!("{file}unknown key shift_terminl; remove it, or use the nearest known key, shift_terminal")
        );
        assert!(message(r#"{"_class_name": "DDIMScheduler"}"#).contains("only FlowMatchEulerDiscreteScheduler"));
        assert!(message(r#"{"time_shift_type": "cubic"}"#).contains("cubic"));
        assert!(message("[]").contains("not a JSON object"));
        let harmless = r#"{"_diffusers_version": "0.42.1", "use_beta_sigmas": false, "shift_terminal": null}"#;
        assert_eq!(config(harmless).expect("supported"), FlowMatch::default());
    }
}
