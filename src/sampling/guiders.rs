//! Guiders: compute the guidance term from the predictions on the prompt (`c`) and on the negative prompt (`u`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::masked_stats::MaskedStatistics;
use crate::hlo::{Comparison, Value};

/// Name of a guider.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GuiderKind {
    /// Classifier-free guidance.
    #[default]
    Cfg,
    /// CFG*: steps away from the projection of the conditional prediction onto the negative one.
    CfgStar,
    /// Adaptive projected guidance.
    Apg,
    /// Adaptive projected guidance with momentum over the steps, as first published: its factor is `cfg` instead of
    /// `cfg - 1`, and 0 disables it.
    LegacyApg,
}

/// A guider with its parameters. In the formulas, `s` is the scale `cfg`, `c` the prediction on the prompt, and `u` the
/// prediction on the negative prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Guider {
    /// Classifier-free guidance (CFG): `(s - 1)(c - u)`, with the symbols of [`Guider`].
    #[default]
    Cfg,
    /// CFG*: `(s - 1)(c - αu)` with `α = ⟨c,u⟩ / ‖u‖²` and the symbols of [`Guider`].
    CfgStar,
    /// Adaptive projected guidance: `(s - 1)(η·g∥ + g⊥)`, where `g∥` and `g⊥` are the parts of `g = c - u` parallel and
    /// orthogonal to `c`, with the symbols of [`Guider`].
    Apg {
        /// Weight `η` of the part of the guidance term that is parallel to the conditional prediction.
        eta: f32,
        /// Upper limit of the norm of the difference `g` over a sample's tokens and channels; a longer `g` is scaled
        /// down to the limit. 0: no limit.
        threshold: f32,
    },
    /// Adaptive projected guidance with momentum, as first published: `s(η·g∥ + g⊥)` with `g = c - u + momentum · g'`,
    /// where `g'` is the `g` of the previous step, with the symbols of [`Guider`].
    LegacyApg {
        /// See [`Guider::Apg`].
        eta: f32,
        /// See [`Guider::Apg`].
        threshold: f32,
        /// Weight with which the difference `g` of the previous step is added to that of the current step.
        momentum: f32,
    },
}

/// Settings of the guiders `apg` and `legacy_apg`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GuiderOptions {
    /// Weight of the part of the guidance term that is parallel to the conditional prediction; null uses 1.
    pub eta: Option<f64>,
    /// Upper limit of the norm of the difference between the conditional and the negative prediction; a longer
    /// difference is scaled down to the limit. Null uses no limit with `apg` and 5 with `legacy_apg`; 0 disables the
    /// limit.
    #[schemars(range(min = 0))]
    pub threshold: Option<f64>,
    /// Weight with which the difference of the previous step is added to that of the current step; null uses 0. Only
    /// `legacy_apg` has this option.
    pub momentum: Option<f64>,
}

impl GuiderOptions {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl GuiderKind {
    /// Builds the guider from its options.
    ///
    /// # Errors
    /// Returns the key and the value of an option that this guider does not support.
    pub fn guider(self, mut options: GuiderOptions) -> Result<Guider, (&'static str, String)> {
        let mut take = |default: f64, of: fn(&mut GuiderOptions) -> &mut Option<f64>| {
            of(&mut options).take().unwrap_or(default) as f32
        };
        let guider = match self {
            GuiderKind::Cfg => Guider::Cfg,
            GuiderKind::CfgStar => Guider::CfgStar,
            GuiderKind::Apg => {
                Guider::Apg { eta: take(1.0, |o| &mut o.eta), threshold: take(0.0, |o| &mut o.threshold) }
            }
            GuiderKind::LegacyApg => Guider::LegacyApg {
                eta: take(1.0, |o| &mut o.eta),
                threshold: take(5.0, |o| &mut o.threshold),
                momentum: take(0.0, |o| &mut o.momentum),
            },
        };
        let left = [
            ("guidance.apg.eta", options.eta),
            ("guidance.apg.threshold", options.threshold),
            ("guidance.apg.momentum", options.momentum),
        ];
        match left.into_iter().find_map(|(key, value)| Some((key, value?.to_string()))) {
            Some(unknown) => Err(unknown),
            None => Ok(guider),
        }
    }

    /// Returns the scale that disables the guider.
    pub fn off(self) -> f32 {
        if self == GuiderKind::LegacyApg { 0.0 } else { 1.0 }
    }

    /// Returns the names of the tensors `[b, n, c]` that the guider carries between steps for each stream, initially 0.
    pub(crate) fn state(self) -> &'static [&'static str] {
        if self == GuiderKind::LegacyApg { &["guidance"] } else { &[] }
    }

    /// Returns the length of [`Guider::parameters`].
    pub(super) fn parameters(self) -> usize {
        match self {
            GuiderKind::Cfg | GuiderKind::CfgStar => 0,
            GuiderKind::Apg => 2,
            GuiderKind::LegacyApg => 3,
        }
    }

    /// Returns the guidance term for predictions `[samples, n, channels]`, and the next state if the guider has one.
    pub(super) fn term(self, at: &TermArguments) -> (Value, Option<Value>) {
        let TermArguments { conditional, negative, scale, statistics, .. } = *at;
        match self {
            GuiderKind::Cfg => ((conditional - negative) * (scale - 1.0), None),
            GuiderKind::CfgStar => {
                let projected = negative * projection(statistics, conditional, negative);
                ((conditional - projected) * (scale - 1.0), None)
            }
            GuiderKind::Apg => (at.projected(&(conditional - negative)) * (scale - 1.0), None),
            GuiderKind::LegacyApg => {
                let difference = conditional - negative;
                let sum = at.state.map_or(difference.clone(), |sum| sum * at.parameter(2) + &difference);
                (at.projected(&sum) * scale, Some(sum))
            }
        }
    }
}

impl Guider {
    /// Returns the guider's name in a configuration.
    pub fn kind(self) -> GuiderKind {
        match self {
            Guider::Cfg => GuiderKind::Cfg,
            Guider::CfgStar => GuiderKind::CfgStar,
            Guider::Apg { .. } => GuiderKind::Apg,
            Guider::LegacyApg { .. } => GuiderKind::LegacyApg,
        }
    }

    /// Returns the parameters that follow the scales of a stream in the program's `scales` input.
    pub fn parameters(self) -> Vec<f32> {
        match self {
            Guider::Cfg | Guider::CfgStar => Vec::new(),
            Guider::Apg { eta, threshold } => vec![eta, threshold],
            Guider::LegacyApg { eta, threshold, momentum } => vec![eta, threshold, momentum],
        }
    }
}

/// Arguments of [`GuiderKind::term`].
pub(super) struct TermArguments<'a> {
    /// Prediction on the prompt.
    pub(super) conditional: &'a Value,
    /// Prediction on the negative prompt.
    pub(super) negative: &'a Value,
    /// The guider's scale.
    pub(super) scale: &'a Value,
    /// The guider's parameters, `[parameters]`.
    pub(super) parameters: &'a Value,
    /// The guider's state, if it has one.
    pub(super) state: Option<&'a Value>,
    /// Sums and standard deviations that exclude padding.
    pub(super) statistics: &'a MaskedStatistics,
}

impl TermArguments<'_> {
    fn parameter(&self, i: usize) -> Value {
        self.parameters.at(0, i)
    }

    /// Limits the norm of the difference `g` to the threshold, then returns `η·g∥ + g⊥`.
    fn projected(&self, difference: &Value) -> Value {
        let (eta, threshold) = (self.parameter(0), self.parameter(1));
        let norm = self.statistics.sum(&difference.square()).sqrt();
        let shorter = (&threshold / &norm).minimum(&norm.like(1.0));
        let limited = threshold.compare(Comparison::Gt, &threshold.like(0.0)).broadcast_to(norm.dims());
        let difference = difference * limited.select(&shorter, &norm.like(1.0));
        let parallel = self.conditional * projection(self.statistics, &difference, self.conditional);
        &parallel * eta + (&difference - &parallel)
    }
}

/// Returns, for each sample, the factor by which to multiply `onto` to get the projection of `x` onto it.
fn projection(statistics: &MaskedStatistics, x: &Value, onto: &Value) -> Value {
    statistics.sum(&(x * onto)) / (statistics.sum(&onto.square()) + 1e-8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guider_rejects_unsupported_options() {
        let all = GuiderOptions { eta: Some(0.5), threshold: Some(1.0), momentum: Some(0.25) };
        let legacy = GuiderKind::LegacyApg.guider(all).expect("takes all");
        assert_eq!((legacy.kind(), legacy.parameters()), (GuiderKind::LegacyApg, vec![0.5, 1.0, 0.25]));
        let apg = GuiderKind::Apg.guider(GuiderOptions { momentum: None, ..all }).expect("takes two");
        assert_eq!(apg.parameters().len(), GuiderKind::Apg.parameters());
        assert_eq!(GuiderKind::Apg.guider(all), Err(("guidance.apg.momentum", "0.25".into())));
        assert_eq!(GuiderKind::CfgStar.guider(all), Err(("guidance.apg.eta", "0.5".into())));
        assert_eq!(GuiderKind::Cfg.guider(GuiderOptions::default()), Ok(Guider::Cfg));
    }
}
