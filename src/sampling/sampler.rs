//! The sampler interface: how the latents advance from one transformer evaluation to the next.

use std::any::Any;
use std::cell::OnceCell;
use std::fmt::Debug;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use ndarray::Array3;

use super::condition::ConditionInputs;
use super::step_record::StepRecord;
use crate::av::Av;
use crate::hlo::Value;

/// A sampler: an integrator of the flow from noise (level 1) to clean latents (level 0). The denoising loop and the
/// pipelines depend only on this trait, so you can implement your own sampler.
pub trait Sampler: Debug + Send + Sync {
    /// Returns the names of additional tensors that each stream carries between evaluations, with the shape and type of
    /// its latents (`[b, n, c]`, f32). They are 0 at the start of each pass. The names `latents`, `noise`, `clean` and
    /// `level` are reserved for the inputs of the loop.
    fn state(&self) -> &[&'static str] {
        &[]
    }

    /// Returns the number of transformer evaluations for `steps` steps, at most [`MAX_STEPS`](super::MAX_STEPS); by
    /// default one per step. [`Sampler::schedule`] must return one noise level more than this number. Neither condition
    /// is checked for custom samplers.
    fn evaluations(&self, steps: usize) -> usize {
        steps
    }

    /// Returns the host tables of a pass. `sigmas` contains the noise level of each step, followed by 0.
    fn schedule(&self, sigmas: &[f32]) -> Schedule {
        Schedule { levels: sigmas.to_vec(), coefficients: Vec::new() }
    }

    /// Returns the number of coefficients per evaluation in [`Schedule::coefficients`]; 0 if the sampler has none.
    fn coefficients(&self) -> usize {
        0
    }

    /// Returns the number of noise tensors per call of the denoising program, one for each evaluation of the call. 1:
    /// each call runs one evaluation. 2: each call runs both evaluations of a two-evaluation step. 0: steps use no
    /// noise.
    ///
    /// `RunOptions::chunk` sets the number of evaluations per call only if there is no noise, no [`Sampler::state`] and
    /// no step that reuses a prediction.
    fn noises(&self) -> usize {
        0
    }

    /// Returns whether steps read [`StreamState::negative`]. If so, the negative-prompt branch runs at every step,
    /// regardless of the guidance scales.
    fn reads_negative(&self) -> bool {
        false
    }

    /// Returns whether the noise of the steps comes from the request's generator, which also draws the initial noise
    /// before the steps and the decoder noise after them. Steps whose next level is 0 draw nothing. `false`: noise
    /// comes from [`Sampler::generator`].
    fn continues_request(&self) -> bool {
        false
    }

    /// Returns the noise generator of one pass for the video with `seed`. Called only if [`Sampler::noises`] is not 0.
    /// By default the initial noise of a pass is [`TorchRng`](super::TorchRng) with the same seed, so use a different
    /// seed for the steps.
    fn generator(&self, seed: u64) -> StepNoise {
        unreachable!("{self:?} uses no noise, but its generator for seed {seed} was requested")
    }

    /// Builds one evaluation of one stream in StableHLO. Returns the next latents `[b, n, c]`, then the next value of
    /// each tensor of [`Sampler::state`], in order; all f32 with the shape of the latents. Latents at noise level `σ`
    /// are `(1 - σ) · clean + σ · noise`.
    fn step(&self, at: &Evaluation, stream: &StreamState) -> Vec<Value>;

    /// Returns the clean prediction of the last evaluation of a call, `[b, n, c]`, from host copies of the call's
    /// tensors. Only previews read it. The default is exact for steps that are equal to Euler's method, and an estimate
    /// for other steps.
    fn clean_prediction(&self, record: &StepRecord) -> Array3<f32> {
        record.euler_prediction()
    }
}

/// Type-erased sampler. Two samplers are equal if they have the same type and compare equal.
#[derive(Clone, Debug)]
pub struct AnySampler(Arc<dyn ComparableSampler>);

/// A sampler that can be compared with samplers of other types.
trait ComparableSampler: Sampler + Any {
    fn equals(&self, other: &dyn Any) -> bool;
}

impl<S: Sampler + PartialEq + 'static> ComparableSampler for S {
    fn equals(&self, other: &dyn Any) -> bool {
        other.downcast_ref() == Some(self)
    }
}

impl AnySampler {
    fn as_any(&self) -> &dyn Any {
        &*self.0
    }
}

impl<S: Sampler + PartialEq + 'static> From<S> for AnySampler {
    fn from(sampler: S) -> Self {
        AnySampler(Arc::new(sampler))
    }
}

impl Deref for AnySampler {
    type Target = dyn Sampler;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl PartialEq for AnySampler {
    fn eq(&self, other: &Self) -> bool {
        self.0.equals(other.as_any())
    }
}

impl Eq for AnySampler {}

impl Hash for AnySampler {
    /// Hashes only the type, so that samplers need not implement [`Hash`].
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_any().type_id().hash(state);
    }
}

/// Noise source of one video in one pass. Takes the token and channel counts `[n, c]` of each stream, and returns noise
/// `[noises, n, c]` for each stream, for one execution of the denoising program.
pub type StepNoise = Box<dyn FnMut(Av<[usize; 2]>) -> Av<Array3<f32>>>;

/// Noise levels and coefficients of a pass, computed on the host.
pub struct Schedule {
    /// Noise level of each evaluation, then the final level: evaluations + 1 values. A final 0 may be omitted.
    pub levels: Vec<f32>,
    /// One row of [`Sampler::coefficients`] numbers for each evaluation.
    pub coefficients: Vec<Vec<f32>>,
}

/// Inputs of one transformer evaluation that are the same for both streams.
pub struct Evaluation<'a> {
    /// Index of the evaluation in the schedule, i32.
    pub index: &'a Value,
    /// Noise level of the evaluation, f32.
    pub sigma: &'a Value,
    /// Index of the first evaluation of this call of the program.
    begin: &'a Value,
    /// Noise levels of all evaluations.
    levels: &'a Value,
    /// Coefficients of the sampler's update formula, `[MAX_STEPS + 1, k]`: one row for each evaluation of the
    /// transformer, then zeros. `k` depends on the sampler.
    coefficients: Option<&'a Value>,
    change: OnceCell<Value>,
}

impl<'a> Evaluation<'a> {
    pub(super) fn new(index: &'a Value, sigma: &'a Value, begin: &'a Value, tables: &'a ScheduleTables) -> Self {
        let (levels, coefficients) = (&tables.levels, tables.coefficients.as_ref());
        Evaluation { index, sigma, begin, levels, coefficients, change: OnceCell::new() }
    }

    /// Returns the next noise level of [`Schedule::levels`] minus the current one. If the schedule has several
    /// evaluations per step, this is not the length of the step; use coefficients instead.
    pub fn change(&self) -> &Value {
        self.change.get_or_init(|| self.levels.index(&(self.index + 1.0)) - self.sigma)
    }

    /// Returns the sampler's coefficients for this evaluation, `[k]`.
    pub fn row(&self) -> Value {
        self.coefficients.expect("the sampler has coefficients").index(self.index)
    }
}

/// The tables of a [`Schedule`] as program inputs.
pub(super) struct ScheduleTables {
    /// Noise levels `[MAX_STEPS + 1]`.
    pub levels: Value,
    /// Coefficients of all evaluations, `[MAX_STEPS + 1, k]`; `None` if the sampler has no coefficients.
    pub coefficients: Option<Value>,
}

/// State of one stream at an evaluation.
pub struct StreamState<'a> {
    /// Latents `[b, n, c]`, f32.
    pub latents: &'a Value,
    /// The tensors of [`Sampler::state`], in order.
    pub state: Vec<&'a Value>,
    /// Guided prediction of the clean latents, blended with the conditioning latents.
    pub clean: &'a Value,
    pub(super) negative: Option<&'a Value>,
    pub(super) noise: Option<&'a Value>,
    pub(super) condition: Option<&'a ConditionInputs>,
}

impl StreamState<'_> {
    /// Returns the noise of this evaluation, `[b, n, c]`, f32.
    pub fn noise(&self, at: &Evaluation) -> Value {
        let all = self.noise.expect("the sampler uses noise");
        all.index(&(at.index - at.begin))
    }

    /// Returns the prediction of the clean latents on the negative prompt, `[b, n, c]`, f32, without blending in
    /// conditioning latents. Available only if [`Sampler::reads_negative`] is true.
    pub fn negative(&self) -> &Value {
        self.negative.expect("the sampler reads the negative prediction")
    }

    /// Blends the clean latents of conditioned tokens into `x`, weighted by their strength. Returns `None` if the
    /// stream has no conditioned tokens; use `stream.conditioned(&x).unwrap_or(x)`.
    pub fn conditioned(&self, x: &Value) -> Option<Value> {
        self.condition.map(|condition| condition.apply(x))
    }
}
