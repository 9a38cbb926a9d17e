//! Step cache: evaluations that reuse the velocity of the last one that ran the transformer.
//!
//! The velocity of a stream at noise level `σ` is `v = (x - clean) / σ`, with the latents `x` and the guided prediction
//! `clean`, both `[b, n, c]`, f32. A skipped evaluation uses `clean = x - σ · v` with the last computed `v`. The loop
//! decides on the devices, in a `case` around the forward pass, so skipping needs no call from the host.
//!
//! - `adaptive` follows EasyCache (Zhou et al. 2025, arXiv 2507.02860), which needs no coefficients of a model: the
//!   change of the velocity is predicted from the change of the latents and from the ratio of both changes between the
//!   last two computed evaluations, `k = ‖v - v'‖ / ‖x - x'‖`. An evaluation is skipped while `k · ‖x - x'‖ / ‖v'‖` is
//!   below the threshold, where `x'` and `v'` belong to the last computed evaluation. EasyCache sums this quantity over
//!   single steps and reuses `v - x`; the change since the last computed evaluation equals that sum for steps along one
//!   direction, and the velocity is constant for a straight path.
//! - `fixed` skips evaluations that are known before the run, as the caches with uniform intervals that TeaCache (arXiv
//!   2411.19108) and MagCache (arXiv 2506.09045) are compared with.
//!
//! `‖·‖` is the sum of absolute values over the tokens and channels of a video, without padding. A conditioned token
//! counts by the fraction of the step's noise level that it has, because the conditioning latents replace the rest of its
//! prediction; a known token, with fraction 0, does not count. One decision applies to both streams and to all videos of a
//! batch: it uses the largest predicted change.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::MAX_STEPS;
use super::masked_stats::MaskedStatistics;
use crate::av::Av;
use crate::hlo::{Comparison, DType, Type, Value};
use crate::nn::{Axis, Params};
use ltx2_base::with_defaults;

/// Policy that selects the evaluations to skip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CachePolicy {
    /// Every step runs the transformer.
    #[default]
    Off,
    /// Skips a step if the predicted change of its velocity is below `threshold`.
    Adaptive,
    /// Skips the steps of `steps`, or the fraction `ratio` of the steps.
    Fixed,
}

with_defaults! {
    /// Step cache: steps that reuse the guided velocity of an earlier step instead of running the transformer.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    #[schemars(rename = "StepCache")]
    pub struct StepCacheConfig {
        /// Policy that selects the steps to skip.
        pub kind: CachePolicy = CachePolicy::Off,
        /// Largest predicted relative change of the velocity for which `adaptive` skips a step; 0 skips none, null uses
        /// 0.05.
        #[schemars(range(min = 0, max = 10))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub threshold: Option<f64> = None,
        /// Number of steps at the start that are never skipped; null uses 4.
        #[schemars(range(min = 1, max = MAX_STEPS))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub warmup_steps: Option<usize> = None,
        /// Number of steps at the end that are never skipped; null uses 2.
        #[schemars(range(min = 0, max = MAX_STEPS))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub last_steps: Option<usize> = None,
        /// Maximum number of consecutive skipped steps; null uses 3.
        #[schemars(range(min = 1, max = MAX_STEPS))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub max_skips: Option<usize> = None,
        /// Steps that `fixed` skips, counted from 0, in increasing order.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub steps: Option<Vec<usize>> = None,
        /// Fraction of the steps between `warmup_steps` and `last_steps` that `fixed` skips, evenly spaced.
        #[schemars(range(min = 0, max = 1))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub ratio: Option<f64> = None,
    }
}

impl CachePolicy {
    /// Returns the first step that the policy can skip.
    pub(crate) fn first_skippable(self) -> usize {
        match self {
            // The ratio of changes is known after two computed steps.
            CachePolicy::Adaptive => 2,
            CachePolicy::Off | CachePolicy::Fixed => 1,
        }
    }
}

impl StepCacheConfig {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    fn window(&self) -> SkipWindow {
        SkipWindow {
            warmup_steps: self.warmup_steps.unwrap_or(4),
            last_steps: self.last_steps.unwrap_or(2),
            max_skips: self.max_skips.unwrap_or(3),
        }
    }

    /// Returns the step cache of a pass; `None` if it is off.
    pub fn step_cache(&self) -> Option<StepCache> {
        let window = self.window();
        match (self.kind, &self.steps) {
            (CachePolicy::Off, _) => None,
            (CachePolicy::Adaptive, _) => {
                Some(StepCache::Adaptive { threshold: self.threshold.unwrap_or(0.05) as f32, window })
            }
            (CachePolicy::Fixed, Some(steps)) => Some(StepCache::Steps(steps.clone())),
            (CachePolicy::Fixed, None) => Some(StepCache::Ratio { ratio: self.ratio.unwrap_or(0.0), window }),
        }
    }
}

/// Steps that may be skipped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SkipWindow {
    /// Number of steps at the start that always run the transformer.
    pub warmup_steps: usize,
    /// Number of steps at the end that always run the transformer.
    pub last_steps: usize,
    /// Maximum number of consecutive skipped steps.
    pub max_skips: usize,
}

/// Step cache of a pass.
#[derive(Clone, Debug, PartialEq)]
pub enum StepCache {
    /// Skips steps whose predicted relative change is below `threshold`.
    Adaptive {
        /// Threshold of the predicted relative change.
        threshold: f32,
        /// Steps that may be skipped.
        window: SkipWindow,
    },
    /// Skips these steps, counted from 0.
    Steps(Vec<usize>),
    /// Skips the fraction `ratio` of the steps in the window.
    Ratio {
        /// Fraction, 0 to 1.
        ratio: f64,
        /// Steps that may be skipped.
        window: SkipWindow,
    },
}

/// Kind of step cache, on which the program depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StepCacheKind {
    /// The program decides which steps to skip.
    Adaptive,
    /// The program reads from a table which steps to skip.
    Fixed,
}

impl StepCache {
    /// Returns the kind, on which the program depends.
    pub fn kind(&self) -> StepCacheKind {
        match self {
            StepCache::Adaptive { .. } => StepCacheKind::Adaptive,
            StepCache::Steps(_) | StepCache::Ratio { .. } => StepCacheKind::Fixed,
        }
    }

    /// Returns, for each of `steps` steps, whether it may be skipped (`adaptive`) or is skipped (`fixed`).
    pub fn schedule(&self, steps: usize) -> Vec<bool> {
        let within =
            |window: &SkipWindow, step: usize| step >= window.warmup_steps.max(1) && step + window.last_steps < steps;
        match self {
            StepCache::Adaptive { window, .. } => {
                let first = CachePolicy::Adaptive.first_skippable();
                (0..steps).map(|step| step >= first && within(window, step)).collect()
            }
            StepCache::Steps(skipped) => (0..steps).map(|step| step > 0 && skipped.contains(&step)).collect(),
            StepCache::Ratio { ratio, window } => {
                let (mut wanted, mut in_a_row) = (0.0, 0);
                let mut skip = |step: usize| {
                    // If `max_skips` prevents a skip, no later step is skipped in its place.
                    let due = |wanted: f64| (wanted + 1e-9).floor();
                    let before = due(wanted);
                    wanted += if within(window, step) { *ratio } else { 0.0 };
                    let skips = due(wanted) > before && in_a_row < window.max_skips;
                    in_a_row = if skips { in_a_row + 1 } else { 0 };
                    skips
                };
                (0..steps).map(&mut skip).collect()
            }
        }
    }

    /// Returns the program's input `cache_limits`: the threshold, and the maximum number of consecutive skipped steps.
    /// `None`: the program has no such input.
    pub fn limits(&self) -> Option<[f32; 2]> {
        match self {
            StepCache::Adaptive { threshold, window } => Some([*threshold, window.max_skips as f32]),
            StepCache::Steps(_) | StepCache::Ratio { .. } => None,
        }
    }
}

/// Name of the carried table that counts the consecutive skipped evaluations, `[MAX_STEPS + 1]`, i32: for each finished
/// evaluation, 0 if it ran the transformer.
pub(crate) const SKIPS: &str = "cache_skips";
/// Name of the carried ratios `k` of both streams, `[2, b]`, f32.
const RATIOS: &str = "cache_ratios";

impl StepCacheKind {
    /// Returns the names of the tensors that the loop carries for each stream, with the shape and type of its latents:
    /// the velocity and, for `adaptive`, the latents of the last evaluation that ran the transformer.
    pub(super) fn stream_state(self) -> &'static [&'static str] {
        match self {
            StepCacheKind::Adaptive => &["cache_velocity", "cache_latents"],
            StepCacheKind::Fixed => &["cache_velocity"],
        }
    }

    /// Returns the names of the tensors that the loop carries for both streams together.
    pub(crate) fn shared_state(self) -> &'static [&'static str] {
        match self {
            StepCacheKind::Adaptive => &[RATIOS, SKIPS],
            StepCacheKind::Fixed => &[],
        }
    }

    /// Returns the type, logical dimensions included, and the axes of a tensor of [`StepCacheKind::shared_state`].
    pub(super) fn shared_type(name: &str, batch: usize) -> (Type, Vec<Axis>) {
        match name {
            RATIOS => (Type::new(DType::F32, [2, batch]), vec![Axis::Replicated, Axis::Batch]),
            _ => (Type::new(DType::I32, [MAX_STEPS + 1]), vec![Axis::Replicated]),
        }
    }
}

/// Inputs of the step cache: `cache_schedule [MAX_STEPS + 1]` (i32; see [`StepCache::schedule`]) and, for `adaptive`,
/// `cache_limits [2]` (see [`StepCache::limits`]).
pub(super) struct StepCacheInputs {
    pub(super) kind: StepCacheKind,
    schedule: Value,
    limits: Option<Value>,
}

/// Cached values of a stream.
pub(super) struct StreamCache<'a> {
    /// Latents `[b, n, c]` of this evaluation.
    pub(super) latents: &'a Value,
    /// The tensors of [`StepCacheKind::stream_state`].
    pub(super) state: Vec<&'a Value>,
    /// Sums that exclude padding.
    pub(super) statistics: &'a MaskedStatistics,
    /// Fraction of the step's noise level that each token has, `[b, n, 1]`. `None`: the stream has no conditioned tokens.
    pub(super) denoise_mask: Option<&'a Value>,
}

impl StreamCache<'_> {
    /// Returns the L1 norm of each video, `[b, 1, 1]`, weighted by the fraction of noise of each token.
    fn norm(&self, x: &Value) -> Value {
        let weighted = self.denoise_mask.map_or_else(|| x.abs(), |mask| x.abs() * mask);
        self.statistics.sum(&weighted)
    }

    /// Returns the L1 norm of the change of the latents since the last computed evaluation, `[b, 1, 1]`.
    fn change(&self) -> Value {
        self.norm(&(self.latents - self.state[1]))
    }

    /// Returns the prediction of the clean latents that reuses the cached velocity, `[b, n, c]`.
    pub(super) fn reused(&self, sigma: &Value) -> Value {
        self.latents - self.state[0] * sigma
    }
}

/// Divides norms; a denominator of 0, as in padding videos, counts as the smallest normal number.
fn relative(x: &Value, to: &Value) -> Value {
    x / to.maximum(&to.like(f64::from(f32::MIN_POSITIVE)))
}

impl StepCacheInputs {
    pub(super) fn input(p: &Params, kind: StepCacheKind) -> Self {
        let table = Type::new(DType::I32, [MAX_STEPS + 1]);
        let schedule = p.input("cache_schedule", table, &[Axis::Replicated]);
        let limits = (kind == StepCacheKind::Adaptive)
            .then(|| p.input("cache_limits", Type::new(DType::F32, [2]), &[Axis::Replicated]));
        StepCacheInputs { kind, schedule, limits }
    }

    /// Returns 1 if the evaluation `step` is skipped, otherwise 0 (i32 scalar). `streams`: the denoised streams.
    /// `shared`: the tensors of [`StepCacheKind::shared_state`].
    pub(super) fn skip(&self, p: &Params, step: &Value, streams: &Av<Option<StreamCache>>, shared: &[Value]) -> Value {
        let _scope = p.builder().scope("step_cache");
        let scheduled = self.schedule.index(step);
        let (Some(limits), [ratios, skips]) = (&self.limits, shared) else { return scheduled };
        let changes = streams.as_ref().zip(Av { video: 0, audio: 1 }).into_iter().filter_map(|(own, row)| {
            let own = own.as_ref()?;
            let change = relative(&own.change(), &own.norm(own.state[0]));
            let ratio = ratios.at(0, row);
            Some((ratio.reshape(change.dims()) * change).max_keep(&[0, 1, 2]))
        });
        let Some(largest) = changes.reduce(|a, b| a.maximum(&b)) else { return scheduled };
        let is_small = largest.reshape(Vec::new()).compare(Comparison::Lt, &limits.at(0, 0));
        let before = skips.index(&(step - 1.0)).to(DType::F32);
        let is_allowed = scheduled.compare(Comparison::Gt, &scheduled.like(0.0));
        let is_allowed = is_allowed.and(&before.compare(Comparison::Lt, &limits.at(0, 1)));
        // Every device takes the same branch: the norms are sums over all devices.
        p.place("step_cache", &is_small.and(&is_allowed).to(DType::I32), &[])
    }

    /// Returns the next state of a stream after an evaluation that ran the transformer, and the stream's ratio `k` as
    /// `[1, b]`. `guided`: the guided prediction, `[b, n, c]`.
    pub(super) fn computed(&self, own: &StreamCache, guided: &Value, sigma: &Value) -> (Vec<Value>, Option<Value>) {
        let velocity = (own.latents - guided) / sigma;
        if self.kind == StepCacheKind::Fixed {
            return (vec![velocity], None);
        }
        let ratio = relative(&own.norm(&(&velocity - own.state[0])), &own.change());
        let ratio = ratio.reshape(vec![1, ratio.dim(0)]);
        (vec![velocity, own.latents.clone()], Some(ratio))
    }

    /// Returns the next tensors of [`StepCacheKind::shared_state`]. `ratios`: next ratios, `[2, b]`.
    pub(super) fn next_shared(
        &self,
        step: &Value,
        skip: &Value,
        ratios: Option<Value>,
        shared: &[Value],
    ) -> Vec<Value> {
        let ([_, skips], Some(ratios)) = (shared, ratios) else { return Vec::new() };
        let in_a_row = (skips.index(&(step - 1.0)) + 1.0) * skip;
        vec![ratios, skips.dynamic_update(0, step, &in_a_row.reshape(vec![1]))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skipped(cache: &StepCache, steps: usize) -> Vec<usize> {
        cache.schedule(steps).iter().enumerate().filter(|(_, skip)| **skip).map(|(step, _)| step).collect()
    }

    #[test]
    fn ratio_spreads_skips_evenly_within_limits() {
        let ratio = |ratio, warmup_steps, last_steps, max_skips| StepCache::Ratio {
            ratio,
            window: SkipWindow { warmup_steps, last_steps, max_skips },
        };
        assert_eq!(skipped(&ratio(0.5, 2, 1, 3), 9), [3, 5, 7]);
        assert_eq!(skipped(&ratio(0.3, 4, 2, 3), 20), [7, 10, 13, 17]);
        assert_eq!(skipped(&ratio(1.0, 1, 0, 2), 8), [1, 2, 4, 5, 7]);
        assert_eq!(skipped(&ratio(0.0, 1, 0, 2), 8), [0; 0]);
        assert_eq!(skipped(&ratio(0.5, 4, 2, 3), 3), [0; 0]);
    }

    #[test]
    fn adaptive_never_skips_first_and_last_steps() {
        let window = SkipWindow { warmup_steps: 4, last_steps: 2, max_skips: 3 };
        let cache = StepCache::Adaptive { threshold: 0.5, window };
        assert_eq!(skipped(&cache, 10), [4, 5, 6, 7]);
        assert_eq!((cache.kind(), cache.limits()), (StepCacheKind::Adaptive, Some([0.5, 3.0])));
        assert_eq!(skipped(&StepCache::Steps(vec![0, 2, 9]), 5), [2], "the first step has nothing to reuse");
    }

    #[test]
    fn configuration_selects_the_policy() {
        let config = StepCacheConfig::default();
        assert_eq!(config.step_cache(), None);
        let config = StepCacheConfig { kind: CachePolicy::Adaptive, max_skips: Some(1), ..config };
        let window = SkipWindow { warmup_steps: 4, last_steps: 2, max_skips: 1 };
        assert_eq!(config.step_cache(), Some(StepCache::Adaptive { threshold: 0.05, window }));
        let config = StepCacheConfig { kind: CachePolicy::Fixed, ratio: Some(0.5), ..config };
        assert_eq!(config.step_cache(), Some(StepCache::Ratio { ratio: 0.5, window }));
        let config = StepCacheConfig { steps: Some(vec![3]), ..config };
        assert_eq!(config.step_cache(), Some(StepCache::Steps(vec![3])));
    }
}
