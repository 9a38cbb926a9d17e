//! The integrator of the flow: what an evaluation of the transformer makes of the latents.

use std::cell::OnceCell;
use std::fmt::Debug;
use std::ops::Deref;
use std::sync::Arc;

use ndarray::Array3;

use super::condition::ConditionInputs;
use crate::av::Av;
use crate::hlo::Value;

/// An integrator of the flow from noise (level 1) to clean latents (level 0). A sampler of your own implements this
/// trait; the denoising loop and the pipelines know no more of any.
pub trait Sampler: Debug + Send + Sync {
    /// Names of the tensors that each stream carries from evaluation to evaluation beside its latents, shaped and typed as
    /// the latents (`[b, n, c]`, f32). They are 0 at the start of each pass. Take other names than `latents`, `noise`,
    /// `clean` and `level`, which are the loop's own inputs.
    fn state(&self) -> &[&'static str] {
        &[]
    }

    /// Number of evaluations of the transformer for a number of steps: one a step by default, at most
    /// [`MAX_STEPS`](super::MAX_STEPS). It must match [`Sampler::schedule`], which has one noise level more. Neither is checked
    /// for a sampler that is not the configuration's.
    fn evaluations(&self, steps: usize) -> usize {
        steps
    }

    /// The host tables of a pass. `sigmas` has one level more than the pass has steps: it falls from the first step's level
    /// to the closing 0, which is included, in each pass.
    fn schedule(&self, sigmas: &[f32]) -> Schedule {
        Schedule { levels: sigmas.to_vec(), coefficients: Vec::new() }
    }

    /// Length of the rows of [`Schedule::coefficients`]; 0 without such a table.
    fn coefficients(&self) -> usize {
        0
    }

    /// Evaluations of a call of the loop, each with noise of its own. 1: each call has one evaluation, which draws once; 2:
    /// a call has two, and the generator makes the noise of both. 0: steps take no noise.
    ///
    /// `RunOptions::chunk` sets the length of a call only where there is neither noise nor [`Sampler::state`], nor steps that take
    /// over a prediction.
    fn noises(&self) -> usize {
        0
    }

    /// Whether steps read [`StreamState::negative`]. Its guidance branch then runs at every step, whatever the scales.
    fn reads_negative(&self) -> bool {
        false
    }

    /// Whether steps draw from the request's generator, which continues through the starting noise and the steps of each pass to
    /// the decoder's noise. Steps whose next level is 0 draw nothing. `false`: from [`Sampler::generator`].
    fn continues_request(&self) -> bool {
        false
    }

    /// Generator of a pass' noise for the video of `seed`. Only called where [`Sampler::noises`] is not 0. The noise that
    /// a pass starts from is [`TorchRng`](super::TorchRng)'s of the same seed by default: choose another seed for steps.
    fn generator(&self, seed: u64) -> StepNoise {
        unreachable!("{self:?} draws no noise, asked for that of seed {seed}")
    }

    /// One evaluation of one stream as StableHLO: the next latents `[b, n, c]`, then as many values as [`Sampler::state`]
    /// has names, in its order; all shaped and typed as the latents, f32. Latents of level `σ` are
    /// `(1 - σ) · clean + σ · noise`.
    fn step(&self, at: &Evaluation, stream: &StreamState) -> Vec<Value>;
}

/// A sampler of any type. Two are equal when they print alike: of one type, with equal settings.
#[derive(Clone, Debug)]
pub struct AnySampler(Arc<dyn Sampler>);

impl<S: Sampler + 'static> From<S> for AnySampler {
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
        format!("{self:?}") == format!("{other:?}")
    }
}

/// Noise of one video for the calls of a pass, one call at a time: from tokens and channels `[n, c]` of each stream to its
/// noise `[noises, n, c]`.
pub type StepNoise = Box<dyn FnMut(Av<[usize; 2]>) -> Av<Array3<f32>>>;

/// Host tables of a schedule.
pub struct Schedule {
    /// Noise level of each evaluation, then the closing level, at which the latents end: evaluations + 1 values; a closing 0
    /// may be left out.
    pub levels: Vec<f32>,
    /// A row for each evaluation, of [`Sampler::coefficients`] numbers.
    pub coefficients: Vec<Vec<f32>>,
}

/// An evaluation, as both streams see it.
pub struct Evaluation<'a> {
    /// Its index in the schedule, i32.
    pub index: &'a Value,
    /// Its noise level, f32.
    pub sigma: &'a Value,
    /// Index of the call's first evaluation.
    begin: &'a Value,
    /// Noise levels of all evaluations.
    levels: &'a Value,
    /// `[257, k]`.
    coefficients: Option<&'a Value>,
    change: OnceCell<Value>,
}

impl<'a> Evaluation<'a> {
    pub(super) fn new(index: &'a Value, sigma: &'a Value, begin: &'a Value, tables: &'a Tables) -> Self {
        let (levels, coefficients) = (&tables.levels, tables.coefficients.as_ref());
        Evaluation { index, sigma, begin, levels, coefficients, change: OnceCell::new() }
    }

    /// The next noise level in [`Schedule::levels`] less this one's. Where the table repeats levels, as with two evaluations a
    /// step, this is not the step's length: use coefficients.
    pub fn change(&self) -> &Value {
        self.change.get_or_init(|| self.levels.index(&(self.index + 1.0)) - self.sigma)
    }

    /// The sampler's coefficients of this evaluation, `[k]`.
    pub fn row(&self) -> Value {
        self.coefficients.expect("declared for samplers that have some").index(self.index)
    }
}

/// The schedule's tables as program inputs.
pub(super) struct Tables {
    /// Noise levels `[257]`.
    pub levels: Value,
    /// `[257, k]`, where the sampler has coefficients.
    pub coefficients: Option<Value>,
}

/// A stream at an evaluation.
pub struct StreamState<'a> {
    /// Latents `[b, n, c]`, f32.
    pub latents: &'a Value,
    /// Values that [`Sampler::state`] names, in its order.
    pub state: Vec<&'a Value>,
    /// Guided prediction of the clean latents, conditions in their place.
    pub clean: &'a Value,
    pub(super) negative: Option<&'a Value>,
    pub(super) noise: Option<&'a Value>,
    pub(super) condition: Option<&'a ConditionInputs>,
}

impl StreamState<'_> {
    /// This evaluation's noise `[b, n, c]`, f32.
    pub fn noise(&self, at: &Evaluation) -> Value {
        let all = self.noise.expect("declared for samplers that take noise");
        all.index(&(at.index - at.begin))
    }

    /// Prediction of the clean latents on the negative prompt `[b, n, c]`, f32, as the model makes it: conditions are not put in
    /// their place. Only of samplers that [read](Sampler::reads_negative) it.
    pub fn negative(&self) -> &Value {
        self.negative.expect("its branch runs for samplers that read it")
    }

    /// `x` with the clean latents of conditioned tokens in their place, as far as their strength goes; `None` where the
    /// stream has no conditioned tokens, and `x` is right as it is: `stream.conditioned(&x).unwrap_or(x)`.
    pub fn conditioned(&self, x: &Value) -> Option<Value> {
        self.condition.map(|condition| condition.apply(x))
    }
}
