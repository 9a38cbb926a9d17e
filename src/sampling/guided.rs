//! Clean predictions of a step: runs the transformer on all branches, then applies guidance.

use super::MAX_STEPS;
use super::branch_rows::BranchRows;
use super::condition::ConditionInputs;
use super::guidance::{MaskedStatistics, StreamGuidance, combine};
use super::guidance_steps::BranchSet;
use super::shape::{CleanPrediction, DenoiseShape, Latents};
use super::step_cache::{StepCacheInputs, StreamCache};
use crate::av::Av;
use crate::hlo::{DType, Type, Value};
use crate::models::transformer::{
    ForwardInputs, StreamForward, StreamInputs, StreamModulation, TextContext, TransformerConfig, at_noise_level,
    forward, tables,
};
use crate::nn::{Axis, Params, Rope, padding_mask};

/// Declares the conditioning inputs of the conditioned streams.
fn conditions(p: &Params, shape: &DenoiseShape, latents: Av<Latents>) -> Av<Option<ConditionInputs>> {
    let Some(levels) = shape.levels_input(p) else { return Av::default() };
    latents.zip(shape.conditioned).map(|(Latents { name, content, axes }, conditioned)| {
        conditioned.then(|| {
            let index = p.input(&format!("level.{name}"), Type::new(DType::I32, &content[..2]), &axes[..2]);
            let clean = p.input(&format!("clean.{name}"), Type::new(DType::F32, content), &axes);
            let rows = levels.reshape(vec![1, shape.levels, 1]).broadcast_to(&[index.dim(0), shape.levels, 1]);
            ConditionInputs { denoise_mask: at_noise_level(&rows, Some(&index)), clean, noise_level_index: index }
        })
    })
}

/// The transformer with guidance, shared by all steps of the loop.
pub(super) struct GuidedTransformer<'a> {
    p: &'a Params,
    c: &'a TransformerConfig,
    shape: &'a DenoiseShape,
    /// Rows of all branches that any step runs.
    rows: BranchRows,
    /// Step-invariant inputs of each stream; `None` for absent streams.
    pub(crate) streams: Av<Option<GuidedStream>>,
    keyframes: Option<Value>,
    /// Mask that is added to the scores of the video self-attention, `[1, 1, n, n]`, f32.
    self_mask: Option<Value>,
    /// Index of each step's branch set, `[MAX_STEPS + 1]`, i32; `None` if all steps run the same branches.
    sets: Option<Value>,
}

/// Step-invariant inputs of one stream.
pub(super) struct GuidedStream {
    sequence: Axis,
    /// Latent tokens without padding.
    tokens: usize,
    /// Guidance scales of both streams, `[2, k]` or `[MAX_STEPS + 1, 2, k]`; this stream uses row `row` of the axis of
    /// size 2.
    scales: Value,
    row: usize,
    pub(crate) condition: Option<ConditionInputs>,
    statistics: MaskedStatistics,
    rope: Rope,
    cross_rope: Rope,
    /// Modulation of all steps; the leading dimension is the step.
    modulation: StreamModulation,
    context: TextContext,
}

/// State of one stream at a step, as guidance reads it.
#[derive(Clone)]
pub(super) struct GuidedState<'a> {
    /// Latents `[b, n, c]`, f32.
    pub(crate) latents: &'a Value,
    /// The tensors of `DenoiseShape::guidance_state`.
    pub(crate) carried: Vec<&'a Value>,
    /// The tensors of `StepCacheKind::stream_state`.
    pub(crate) cache: Vec<&'a Value>,
}

/// A stream's prediction of the clean latents, `[b, n, c]`, f32.
pub(super) struct Prediction {
    /// Guided prediction, before conditioning latents are blended in.
    guided: Value,
    /// Negative-prompt prediction, if the sampler reads it.
    pub(crate) negative: Option<Value>,
    /// The guider's next state.
    guider: Option<Value>,
}

/// Predictions of the streams, and the predictions blended with conditioning latents; `None` for absent streams.
type GuidedPredictions = (Av<Option<Prediction>>, Av<Option<Value>>);

/// Predictions of an evaluation that may have reused cached velocities, and the next state of the step cache.
pub(super) struct CachedPredictions {
    /// Predictions of the streams; `None` for absent streams and, with a step cache, for streams that are not denoised.
    pub(crate) predictions: Av<Option<Prediction>>,
    /// The predictions blended with conditioning latents.
    pub(crate) clean: Av<Option<Value>>,
    /// Next tensors of `StepCacheKind::stream_state`.
    pub(crate) streams: Av<Vec<Value>>,
    /// Next tensors of `StepCacheKind::shared_state`.
    pub(crate) shared: Vec<Value>,
}

impl From<GuidedPredictions> for CachedPredictions {
    fn from((predictions, clean): GuidedPredictions) -> Self {
        CachedPredictions { predictions, clean, streams: Av::default(), shared: Vec::new() }
    }
}

impl<'a> GuidedTransformer<'a> {
    /// Declares the step-invariant inputs of the loop; `carried` are the latents.
    pub(crate) fn input(
        p: &'a Params,
        c: &'a TransformerConfig,
        shape: &'a DenoiseShape,
        scales: Value,
        latents: Av<Latents>,
        carried: Av<&Value>,
    ) -> Self {
        let condition = conditions(p, shape, latents);
        let branches = BranchRows::padded(p, shape.branches.len());
        let videos = carried.video.dim(0);
        let statistics = latents.zip(carried).map(|(l, x)| MaskedStatistics::new(p.builder(), x, l.content));
        let keyframes = shape.keyframes.then(|| {
            let ty = Type::new(DType::F32, [1, shape.tokens.video]);
            p.input("keyframes.video", ty, &[Axis::Replicated, Axis::VideoSequence])
        });
        let self_mask = shape.self_mask.then(|| {
            let n = shape.tokens.video;
            let axes = [Axis::Replicated, Axis::VideoSequence, Axis::Replicated];
            let bias = p.input("self_mask.video", Type::new(DType::F32, [1, n, n]), &axes);
            bias.pad(2, 0, carried.video.dim(1) - n, 0.0).unsqueeze(1)
        });
        let present = shape.present();
        let [rope, cross_rope] =
            tables::inputs(p, c, 1, shape.tokens.zip(present).map(|(n, present)| present.then_some(n)));
        let modulation = c.streams().zip(Av::NAMES).zip(shape.conditioned.zip(present));
        let modulation = modulation.map(|((s, name), (conditioned, present))| {
            let part = || {
                StreamModulation::new(c, &s, |part, dims| {
                    let levels = shape.levels_of(part, conditioned);
                    let ty = Type::new(p.dtype(), [&[MAX_STEPS + 1, levels], dims].concat());
                    let axes = vec![Axis::Replicated; ty.rank()];
                    p.input(&format!("modulation.{name}.{part}"), ty, &axes)
                })
            };
            present.then(part)
        });
        let context = c.streams().zip(Av::NAMES).zip(present);
        let text = [videos * branches, shape.text];
        let context = context.map(|((s, name), present)| present.then(|| TextContext::input(p, c, &s, name, text)));
        let sets = (!shape.sets.is_empty())
            .then(|| p.input("branch_sets", Type::new(DType::I32, [MAX_STEPS + 1]), &[Axis::Replicated]));
        let rows = BranchRows::all(p, shape, videos);
        let own = latents.zip(Av { video: 0, audio: 1 }).zip(condition.zip(statistics));
        let streams = own.zip(rope.zip(cross_rope)).zip(modulation.zip(context));
        let streams =
            streams.map(|((((l, row), (condition, statistics)), (rope, cross_rope)), (modulation, context))| {
                let (sequence, tokens, scales) = (l.axes[1], l.content[1], scales.clone());
                let (rope, cross_rope, modulation, context) = (rope?, cross_rope?, modulation?, context?);
                let own = GuidedStream {
                    sequence,
                    tokens,
                    scales,
                    row,
                    condition,
                    statistics,
                    rope,
                    cross_rope,
                    modulation,
                    context,
                };
                Some(own)
            });
        GuidedTransformer { p, c, shape, rows, streams, keyframes, self_mask, sets }
    }

    /// Predicts both streams at a step.
    pub(crate) fn predict(&self, step: &Value, sigma: &Value, states: &Av<GuidedState>) -> GuidedPredictions {
        let Some(sets) = &self.sets else {
            let velocity = self.velocity(&self.rows, Av::both(true), step, states);
            let _scope = self.p.builder().scope("sampler");
            let both = self.present().zip(states.as_ref()).zip(velocity).map(|((s, state), velocity)| {
                let prediction = self.guided(s?, &self.rows, step, state, &velocity?, sigma);
                let clean = s?.clean(&prediction);
                Some((prediction, clean))
            });
            let (video, audio) = (both.video.unzip(), both.audio.unzip());
            return (Av { video: video.0, audio: audio.0 }, Av { video: video.1, audio: audio.1 });
        };
        let b = self.p.builder();
        let results = b.case(&sets.index(step), self.shape.sets.len(), |k| {
            let predicted = self.predict_set(&self.shape.sets[k], step, sigma, states);
            let tensors = |own: Prediction| [Some(own.guided), own.negative, own.guider];
            predicted.into_iter().flatten().flat_map(tensors).flatten().collect()
        });
        let mut results = results.into_iter();
        let (negative, guider) = (self.shape.sampler.reads_negative(), !self.shape.guider.state().is_empty());
        // If building failed, results are missing; the builder keeps its first error.
        let missing = || states.video.latents.clone();
        let mut next = || results.next().unwrap_or_else(missing);
        let mut prediction =
            || Prediction { guided: next(), negative: negative.then(&mut next), guider: guider.then(&mut next) };
        let predictions = self.shape.present().map(|present| present.then(&mut prediction));
        let clean = self.present().zip(predictions.as_ref()).map(|(s, own)| Some(s?.clean(own.as_ref()?)));
        (predictions, clean)
    }

    /// Predicts both streams, or reuses their cached velocities if the step cache skips the evaluation. `shared`: the
    /// tensors of `StepCacheKind::shared_state`.
    pub(crate) fn predict_or_reuse(
        &self,
        cache: &StepCacheInputs,
        step: &Value,
        sigma: &Value,
        states: &Av<GuidedState>,
        shared: &[Value],
    ) -> CachedPredictions {
        let b = self.p.builder();
        let denoised = self.present().zip(self.shape.denoised()).map(|(s, denoised)| s.filter(|_| denoised));
        let cached = denoised.zip(states.as_ref()).map(|(s, state)| {
            let statistics = &s?.statistics;
            let denoise_mask = s?.condition.as_ref().map(|condition| &condition.denoise_mask);
            Some(StreamCache { latents: state.latents, state: state.cache.clone(), statistics, denoise_mask })
        });
        let skip = cache.skip(self.p, step, &cached, shared);
        let old_ratios = |row: usize| shared.first().map(|ratios| ratios.slice(0, row, row + 1));
        let results = b.case(&skip, 2, |skipped| {
            let mut predictions = if skipped == 0 { self.predict(step, sigma, states).0 } else { Av::default() };
            let _scope = b.scope("step_cache");
            let (mut results, mut ratios) = (Vec::new(), Vec::new());
            let both = cached.as_ref().zip(states.as_ref()).zip(predictions.as_mut()).zip(Av { video: 0, audio: 1 });
            for (((own, state), prediction), row) in both {
                let mut ratio = old_ratios(row);
                if let Some(own) = own {
                    let (guided, guider, state) = match prediction.take() {
                        Some(prediction) => {
                            let (next, new) = cache.computed(own, &prediction.guided, sigma);
                            ratio = new.or(ratio);
                            (prediction.guided, prediction.guider, next)
                        }
                        None => {
                            let kept = own.state.iter().copied().cloned().collect();
                            (own.reused(sigma), self.guider_state(state).cloned(), kept)
                        }
                    };
                    results.extend(std::iter::once(guided).chain(guider).chain(state));
                }
                ratios.extend(ratio);
            }
            if let [video, audio] = &ratios[..] {
                results.push(b.concat(&[video, audio], 0));
            }
            results
        });
        let mut results = results.into_iter();
        // If building failed, results are missing; the builder keeps its first error.
        let missing = || states.video.latents.clone();
        let mut next = || results.next().unwrap_or_else(missing);
        let has_guider = !self.shape.guider.state().is_empty();
        let both = denoised.map(|s| {
            let s = s?;
            let guided = next();
            // `DenoiseShape::step_cache_fault` rejects samplers that read the negative prediction.
            let negative = self.shape.sampler.reads_negative().then(|| guided.clone());
            let prediction = Prediction { guided, negative, guider: has_guider.then(&mut next) };
            let clean = s.clean(&prediction);
            let state: Vec<Value> = cache.kind.stream_state().iter().map(|_| next()).collect();
            Some((prediction, clean, state))
        });
        let shared = cache.next_shared(step, &skip, old_ratios(0).map(|_| next()), shared);
        let mut all = CachedPredictions { shared, ..(Av::default(), Av::default()).into() };
        let to = all.predictions.as_mut().zip(all.clean.as_mut()).zip(all.streams.as_mut());
        for (own, ((prediction, clean), state)) in both.into_iter().zip(to) {
            if let Some(own) = own {
                (*prediction, *clean, *state) = (Some(own.0), Some(own.1), own.2);
            }
        }
        all
    }

    /// Returns the next values of the tensors that guidance carries for a stream.
    pub(crate) fn carried(&self, prediction: &Prediction) -> Vec<Value> {
        let reused_prediction = self.shape.reuses_predictions().then(|| prediction.guided.clone());
        prediction.guider.clone().into_iter().chain(reused_prediction).collect()
    }

    /// Predicts with one branch set. Streams that the set does not predict reuse their last prediction.
    fn predict_set(
        &self,
        set: &BranchSet,
        step: &Value,
        sigma: &Value,
        states: &Av<GuidedState>,
    ) -> Av<Option<Prediction>> {
        let reused_prediction = |state: &GuidedState| Prediction {
            guided: (*state.carried.last().unwrap_or(&state.latents)).clone(),
            negative: self.shape.sampler.reads_negative().then(|| state.latents.clone()),
            guider: self.guider_state(state).cloned(),
        };
        if set.branches.is_empty() {
            return self.present().zip(states.as_ref()).map(|(s, state)| s.map(|_| reused_prediction(state)));
        }
        let rows = BranchRows::for_set(self.p, self.shape, set, states.video.latents.dim(0));
        let velocity = self.velocity(&rows, set.predicted, step, states);
        let _scope = self.p.builder().scope("sampler");
        let streams = self.present().zip(states.as_ref()).zip(velocity).zip(set.predicted);
        streams.map(|(((s, state), velocity), predicted)| match predicted {
            true => Some(self.guided(s?, &rows, step, state, &velocity?, sigma)),
            false => s.map(|_| reused_prediction(state)),
        })
    }

    fn guider_state<'s>(&self, state: &GuidedState<'s>) -> Option<&'s Value> {
        let first = state.carried.first().copied();
        first.filter(|_| !self.shape.guider.state().is_empty())
    }

    fn present(&self) -> Av<Option<&GuidedStream>> {
        self.streams.as_ref().map(Option::as_ref)
    }

    /// Returns the velocities of each stream, `[rows, n, c]`; `None` for absent streams.
    fn velocity(
        &self,
        rows: &BranchRows,
        updated: Av<bool>,
        step: &Value,
        states: &Av<GuidedState>,
    ) -> Av<Option<Value>> {
        let streams = self.present().zip(states.as_ref()).map(|(s, state)| Some((s?, state.latents)));
        let masks = Av { video: self.self_mask.as_ref(), audio: None };
        let inputs = streams.zip(masks);
        let inputs = inputs.map(|(own, mask)| own.map(|(s, x)| self.stream_inputs(s, rows, x, mask, step)));
        let tokens =
            streams.map(|own| own.map(|(s, x)| rows.repeat_per_branch(self.p, &x.to(self.p.dtype()), s.sequence)));
        let context = streams.map(|own| own.map(|(s, _)| rows.context(self.p, &s.context)));
        let all = tokens.as_ref().zip(context.as_ref().zip(inputs.as_ref()));
        let all = all.map(|(tokens, (context, inputs))| {
            Some(StreamForward { tokens: tokens.as_ref()?, context: context.as_ref()?, inputs: inputs.as_ref()? })
        });
        let inputs = ForwardInputs {
            streams: all,
            keyframes: self.keyframes.as_ref(),
            perturbation: rows.perturbation.as_ref(),
            isolation: &rows.isolation,
            updated,
        };
        forward(self.p, self.c, &inputs)
    }

    fn stream_inputs(
        &self,
        s: &GuidedStream,
        rows: &BranchRows,
        latents: &Value,
        self_mask: Option<&Value>,
        step: &Value,
    ) -> StreamInputs {
        let b = self.p.builder();
        StreamInputs {
            modulation: s.modulation.map(|table| table.index(step).unsqueeze(0)),
            noise_level_index: s
                .condition
                .as_ref()
                .map(|c| rows.repeat_per_branch(self.p, &c.noise_level_index, s.sequence)),
            rope: s.rope.clone(),
            cross_rope: s.cross_rope.clone(),
            text_mask: padding_mask(b, s.context.tokens(), self.shape.text),
            self_mask: self_mask.cloned(),
            padding_mask: padding_mask(b, latents.dim(1), s.tokens),
        }
    }

    /// Returns the guided prediction of a stream from the velocities of the branches.
    fn guided(
        &self,
        s: &GuidedStream,
        rows: &BranchRows,
        step: &Value,
        state: &GuidedState,
        velocity: &Value,
        sigma: &Value,
    ) -> Prediction {
        let x = state.latents;
        // Each branch's clean prediction is computed on the devices that hold its velocity, then all are gathered.
        let dims = vec![x.dim(0), rows.count, x.dim(1), x.dim(2)];
        let placed = |x: &Value, branch: Axis| {
            self.p.place("predictions", x, &[Axis::Batch, branch, s.sequence, Axis::Replicated])
        };
        let velocity = placed(&velocity.to(DType::F32).reshape(dims), Axis::Branch);
        let change = match (&s.condition, self.shape.clean_prediction) {
            (None, _) | (_, CleanPrediction::Step) => velocity * sigma,
            (Some(condition), CleanPrediction::Token) => velocity * (&condition.denoise_mask * sigma).unsqueeze(1),
        };
        let predictions = placed(&(x.unsqueeze(1) - change), Axis::Branch);
        let everywhere = placed(&predictions, Axis::Replicated);
        let predictions: Vec<Value> = (0..rows.branches.len()).map(|k| everywhere.at(1, k)).collect();
        let scales = if self.shape.scales_by_step { s.scales.index(step) } else { s.scales.clone() };
        let (guider, rescale, statistics) = (self.shape.guider, self.shape.rescale, &s.statistics);
        let guidance = StreamGuidance { branches: &rows.branches, guider, rescale, statistics };
        let before = self.guider_state(state);
        let (guided, guider) = combine(&guidance, &predictions, &scales.at(0, s.row), before);
        let negative = self.shape.sampler.reads_negative().then(|| rows.negative(&predictions).clone());
        Prediction { guided, negative, guider }
    }
}

impl GuidedStream {
    /// Blends the conditioning latents into a prediction.
    fn clean(&self, prediction: &Prediction) -> Value {
        let guided = &prediction.guided;
        self.condition.as_ref().map_or(guided.clone(), |condition| condition.apply(guided))
    }
}
