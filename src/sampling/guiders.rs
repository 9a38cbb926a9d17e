//! Guiders: how the predictions on the prompt `c` and on the negative prompt `u` become a term of guidance.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::counted::Counted;
use crate::hlo::{Comparison, Value};

/// A guider by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GuiderKind {
    /// Classifier-free guidance.
    #[default]
    Cfg,
    /// CFG*: away from the negative prediction's projection onto the conditional one's direction.
    CfgStar,
    /// Adaptive projected guidance.
    Apg,
    /// Adaptive projected guidance with momentum over the steps, as it was first published: its factor is `cfg`, not `cfg - 1`,
    /// and 0 is off.
    LegacyApg,
}

/// A guider with its settings.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Guider {
    /// `(s - 1)(c - u)`.
    #[default]
    Cfg,
    /// `(s - 1)(c - αu)`, `α = ⟨c,u⟩ / ‖u‖²`.
    CfgStar,
    /// `(s - 1)(η·g∥ + g⊥)` of `g = c - u`, parallel and orthogonal to `c`.
    Apg {
        /// Weight of the part that is parallel to the conditional prediction.
        eta: f32,
        /// Norm of `g` over a sample's tokens and channels above which it is scaled down to it; 0 for none.
        threshold: f32,
    },
    /// `s(η·g∥ + g⊥)` of the sum `g = c - u + momentum · g'`, `g'` being that of the step before.
    LegacyApg {
        /// See [`Guider::Apg`].
        eta: f32,
        /// See [`Guider::Apg`].
        threshold: f32,
        /// Part of the sum that the next step's takes over.
        momentum: f32,
    },
}

/// Settings of `apg` and `legacy_apg`; each takes those it knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GuiderOptions {
    /// Weight of the part of guidance that is parallel to the conditional prediction; null for 1.
    pub eta: Option<f64>,
    /// Norm of the difference of both predictions above which it is scaled down to it, of `apg` (null and 0: none) and
    /// `legacy_apg` (null: 5).
    #[schemars(range(min = 0))]
    pub threshold: Option<f64>,
    /// Part of the difference that the next step takes over, of `legacy_apg`; null for 0.
    pub momentum: Option<f64>,
}

impl GuiderOptions {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl GuiderKind {
    /// The guider, with its settings.
    ///
    /// # Errors
    /// Key and value of a setting that it does not take.
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

    /// The scale that switches its term off.
    pub fn off(self) -> f32 {
        if self == GuiderKind::LegacyApg { 0.0 } else { 1.0 }
    }

    /// Names of the tensors `[b, n, c]` that it carries from step to step for each stream; 0 at the start.
    pub(crate) fn state(self) -> &'static [&'static str] {
        if self == GuiderKind::LegacyApg { &["guidance"] } else { &[] }
    }

    /// Number of [`Guider::parameters`].
    pub(super) fn parameters(self) -> usize {
        match self {
            GuiderKind::Cfg | GuiderKind::CfgStar => 0,
            GuiderKind::Apg => 2,
            GuiderKind::LegacyApg => 3,
        }
    }

    /// The term of predictions `[samples, n, channels]`, and the next state of guiders that have one.
    pub(super) fn term(self, at: &Term) -> (Value, Option<Value>) {
        let Term { conditional, negative, scale, counted, .. } = *at;
        match self {
            GuiderKind::Cfg => ((conditional - negative) * (scale - 1.0), None),
            GuiderKind::CfgStar => {
                let projected = negative * projection(counted, conditional, negative);
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
    /// The guider's name in a configuration.
    pub fn kind(self) -> GuiderKind {
        match self {
            Guider::Cfg => GuiderKind::Cfg,
            Guider::CfgStar => GuiderKind::CfgStar,
            Guider::Apg { .. } => GuiderKind::Apg,
            Guider::LegacyApg { .. } => GuiderKind::LegacyApg,
        }
    }

    /// Its settings as the program reads them behind a stream's scales.
    pub fn parameters(self) -> Vec<f32> {
        match self {
            Guider::Cfg | Guider::CfgStar => Vec::new(),
            Guider::Apg { eta, threshold } => vec![eta, threshold],
            Guider::LegacyApg { eta, threshold, momentum } => vec![eta, threshold, momentum],
        }
    }
}

/// Predictions and numbers that a guider's term is made of.
pub(super) struct Term<'a> {
    /// Prediction on the prompt.
    pub(super) conditional: &'a Value,
    /// Prediction on the negative prompt.
    pub(super) negative: &'a Value,
    /// The guider's scale.
    pub(super) scale: &'a Value,
    /// The guider's parameters, `[parameters]`.
    pub(super) parameters: &'a Value,
    /// State of guiders that have one.
    pub(super) state: Option<&'a Value>,
    /// Elements that sums are taken over.
    pub(super) counted: &'a Counted,
}

impl Term<'_> {
    fn parameter(&self, i: usize) -> Value {
        self.parameters.at(0, i)
    }

    /// `η·g∥ + g⊥` of a difference `g` that is no longer than the threshold.
    fn projected(&self, difference: &Value) -> Value {
        let (eta, threshold) = (self.parameter(0), self.parameter(1));
        let norm = self.counted.sum(&difference.square()).sqrt();
        let shorter = (&threshold / &norm).minimum(&norm.like(1.0));
        let limited = threshold.compare(Comparison::Gt, &threshold.like(0.0)).broadcast_to(norm.dims());
        let difference = difference * limited.select(&shorter, &norm.like(1.0));
        let parallel = self.conditional * projection(self.counted, &difference, self.conditional);
        &parallel * eta + (&difference - &parallel)
    }
}

/// Factor of `onto` that is the projection of `x` onto it, of each sample.
fn projection(counted: &Counted, x: &Value, onto: &Value) -> Value {
    counted.sum(&(x * onto)) / (counted.sum(&onto.square()) + 1e-8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guider_takes_its_own_settings_only() {
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
