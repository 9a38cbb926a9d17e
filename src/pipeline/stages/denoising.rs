//! One denoising pass: computes clean latents from noise, or from the latents of the previous pass, to which noise is
//! added.

use std::borrow::Cow;
use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

use ndarray::{Array3, ArrayD, Axis as Dim, Ix3, s};
use serde::{Deserialize, Serialize};

use super::batch::{DrawOrder, Dump};
use super::clip_ends::ClipEnds;
use super::condition_encoder::PassTokens;
use super::conditions::ConditionTokens;
use super::denoise_loop::{CallNoise, DenoiseLoop};
use super::packing::unpack;
use super::previews::FinishedCall;
use super::prompts::{TextContexts, branch_text};
use super::run::Run;
use crate::av::Av;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::model::OpenModel;
use crate::pipeline::output::denoise_checkpoint::{CheckpointSettings, DenoiseState};
use crate::pipeline::output::tensors::fixed;
use crate::pipeline::phase::Phase;
use crate::pipeline::plan::options::RunOptions;
use crate::pipeline::programs::build::ProgramKind;
use crate::pipeline::programs::denoise::PassSpec;
use crate::pipeline::programs::executor::Executor;
use crate::pipeline::runner::Runner;
use crate::request::{Condition, Content, Noising, Request, Shapes};
use crate::runtime::watchdog::at_steps;
use crate::runtime::{Outputs, ShardedTensor};
use crate::sampling::denoise::DenoiseShape;
use crate::sampling::step_cache::SKIPS;
use crate::tensor::Tensor;
use crate::{failpoint, interrupts};

/// Programs of a pass, the prefix of its dumped tensors, and its position in the progress of its phase.
pub(crate) struct PassNames {
    prepare: ProgramKind,
    denoise: ProgramKind,
    dump: Cow<'static, str>,
    /// Number of steps of the same phase before this pass, and after it.
    around: [usize; 2],
    /// Whether a run that is interrupted in this pass can resume in it.
    is_resumable: bool,
}

/// The only pass of a request, or the first of two.
pub(crate) const FIRST: PassNames = PassNames {
    prepare: ProgramKind::Prepare,
    denoise: ProgramKind::Denoise,
    dump: Cow::Borrowed(""),
    around: [0; 2],
    is_resumable: true,
};
/// The second pass of a request.
pub(crate) const SECOND: PassNames = PassNames {
    prepare: ProgramKind::RefinePrepare,
    denoise: ProgramKind::Refine,
    dump: Cow::Borrowed("stage_2."),
    around: [0; 2],
    is_resumable: true,
};

impl PassNames {
    pub(super) fn phase(&self) -> Phase {
        self.denoise.declaration().phase
    }

    /// Returns the names for a tile of a temporal round (pipeline `dfr`). `around`: number of steps of all rounds
    /// before this tile and after it.
    pub(crate) fn of_tile(round: usize, tile: usize, around: [usize; 2]) -> Self {
        PassNames {
            prepare: ProgramKind::RoundPrepare,
            denoise: ProgramKind::Round,
            dump: format!("round_{round}.tile_{tile}.").into(),
            around,
            is_resumable: false,
        }
    }

    /// Returns the names for a tile of the second pass (pipeline `hdr`). `around`: number of steps of all tiles before
    /// this tile and after it.
    pub(crate) fn of_latent_tile(tile: usize, around: [usize; 2]) -> Self {
        PassNames { dump: format!("stage_2.tile_{tile}.").into(), around, is_resumable: false, ..SECOND }
    }
}

/// Steps of a pass that the step cache skipped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SkippedSteps {
    /// The pass.
    pub pass: Phase,
    /// Skipped steps, counted from 0.
    pub steps: Vec<usize>,
    /// Number of steps of the pass.
    pub total: usize,
}

impl SkippedSteps {
    /// Returns the number of skipped steps in a range.
    fn count(&self, range: Range<usize>) -> usize {
        self.steps.iter().filter(|step| range.contains(step)).count()
    }
}

/// Normalised tokens of the previous pass, from which a pass starts.
pub(crate) struct InitialTokens {
    /// Tokens of the video and the audio stream, `[b, n, c]` and `[b, m, c]`. A stream that is not denoised keeps its
    /// tokens.
    pub(crate) tokens: Av<Array3<f32>>,
    /// Tokens from which the `k` generated keyframes of `n` tokens each start, `[b, k·n, c]`. `None`: the keyframes
    /// start from noise.
    pub(crate) generated: Option<Array3<f32>>,
    /// Tokens of the `k` keyframes that are conditions of the pass, `[b, k·n, c]`.
    pub(crate) carried: Option<Array3<f32>>,
    /// Tokens of the reference videos that are conditions of the pass, if they are encoded already: `[1, m, c]` each.
    pub(crate) references: Vec<Array3<f32>>,
}

/// Normalised tokens that a pass returns.
pub(crate) struct DenoisedTokens {
    /// Tokens of the video and the audio stream, `[b, n, c]` and `[b, m, c]`.
    pub(crate) tokens: Av<Array3<f32>>,
    /// Tokens of the `k` generated keyframes, `[b, k·n, c]`.
    pub(crate) generated: Array3<f32>,
}

/// A pass whose inputs, except for the text contexts, are on the devices.
pub(crate) struct Pass<'a> {
    pub(super) request: &'a Request,
    pub(super) shape: DenoiseShape,
    pub(super) shapes: Shapes,
    steps_loop: Rc<DenoiseLoop>,
    pub(super) conditions: Option<ConditionTokens>,
    start: Av<Tensor>,
    pub(super) names: PassNames,
}

impl Run<'_> {
    /// Prepares a pass. It starts from noise, or from the tokens `before` of the previous pass, noised to the first
    /// noise level of this pass. The noise continues the random sequence of the previous pass.
    pub(crate) fn begin<'r>(
        &mut self,
        request: &'r Request,
        before: Option<InitialTokens>,
        names: PassNames,
    ) -> Result<Pass<'r>> {
        let shapes = Shapes::from_request(&self.runner.model.sizes, request)?;
        let resumed = if before.is_none() { self.resumed_references(request, &shapes, &names)? } else { Vec::new() };
        let given = PassTokens {
            keyframes: before.as_ref().and_then(|before| before.carried.as_ref()),
            sound: self.sound.as_ref().map(|sound| &sound.tokens),
            previous_sound: self.previous_sound.as_ref(),
            references: before.as_ref().map_or(&resumed, |before| &before.references),
            clip_end: self.clip_ends.as_ref().and_then(|ends| ends.before(names.phase())),
        };
        let conditions = self.runner.encode_conditions(request, &shapes, given)?;
        let sizes = &self.runner.model.sizes;
        let shape = request.denoise_shape(sizes, &shapes, self.batch.size);
        let order = DrawOrder::for_pass(request, names.phase() == Phase::Refine, self.runner.build.dtype);
        let drawn = self.noise.draw(&mut self.runner.executor, &shapes, sizes, order)?;
        for (stream, noise) in Av::NAMES.zip(Av { video: &drawn.video, audio: &drawn.audio }) {
            if let Some(noise) = noise {
                self.dump.keep_row(&format!("{}noise.{stream}", names.dump), noise, 1, 0);
            }
        }
        let mut start = drawn.start(&shapes, sizes, self.batch.size)?;
        if let Some(conditions) = &conditions {
            conditions.give(start.as_mut(), self.batch.size);
        }
        if let Some(InitialTokens { tokens, generated, .. }) = before {
            for ((start, own), denoised) in start.as_mut().zip(tokens.as_ref()).zip(shapes.denoised()) {
                if !denoised {
                    start.clone_from(own);
                }
            }
            let mut old = start.as_ref().map(|noise| Array3::zeros(noise.raw_dim()));
            for (old, own) in old.as_mut().zip(tokens) {
                old.slice_mut(s![.., ..own.shape()[1], ..]).assign(&own);
            }
            if let Some(generated) = generated {
                let places = shapes.generated(&request.conditions.video);
                let frames = generated.axis_chunks_iter(Dim(1), shapes.frame_tokens());
                places
                    .into_iter()
                    .zip(frames)
                    .for_each(|(to, frame)| old.video.slice_mut(s![.., to, ..]).assign(&frame));
            }
            if let (Some(conditions), Noising::Known) = (&conditions, request.noising) {
                conditions.place(old.as_mut());
            }
            let part = *request.sigmas.first().expect("a schedule has a level");
            // A stream that is not denoised keeps its tokens.
            let starting = start.as_mut().zip(old).zip(shapes.denoised());
            for ((noise, old), _) in starting.into_iter().filter(|(_, denoised)| *denoised) {
                noise.zip_mut_with(&old, |x, old| *x = *x * part + old * (1.0 - part));
            }
        }
        if let Some(conditions) = &conditions {
            conditions.append(start.as_mut(), self.batch.size)?;
            conditions.blend(start.as_mut());
        }
        let spec = PassSpec { request, shape: &shape, shapes: &shapes, conditions: conditions.as_ref() };
        let steps_loop = self.runner.denoise_loop(names.denoise, spec)?;
        Ok(Pass { request, shape, shapes, steps_loop, conditions, start: start.map(Tensor::from), names })
    }

    /// Returns the tokens of the first pass that a resumed second pass follows. They stay clean in all steps, so the
    /// checkpoint contains them as the last tokens of the video.
    fn resumed_references(&self, request: &Request, shapes: &Shapes, names: &PassNames) -> Result<Vec<Array3<f32>>> {
        let follows = |condition: &&Condition| matches!(condition.content, Content::ReferenceLatents(_));
        let condition = request.conditions.video.last().filter(follows);
        let saved = self.options.checkpoint.as_ref().and_then(|checkpoint| checkpoint.found(names.phase()));
        let (Some(condition), Some(saved)) = (condition, saved) else { return Ok(Vec::new()) };
        let grid = &self.runner.model.sizes.video_grid;
        let tokens = condition.appended(&shapes.video, grid.temporal_compression).map_or(0, |own| grid.tokens(&own));
        let latents = Av::in_turn(&saved.carried).map(|own| own[0].to_f32()).video;
        let latents: Array3<f32> = fixed(latents)?;
        let end = shapes.tokens.video;
        Ok(vec![latents.slice(s![.., end - tokens..end, ..]).to_owned()])
    }

    /// Runs all steps of a pass. `text`: text contexts of the batch. `sound`: audio tokens of the first pass, to save in
    /// checkpoints.
    ///
    /// # Errors
    /// Returns [`PipelineError::Interrupted`] if the progress callback stops the run, [`PipelineError::NotFinite`] with
    /// stream and step if latents are not finite, or an error of the plugin.
    pub(crate) fn denoise(
        &mut self,
        pass: Pass,
        text: &TextContexts,
        sound: Option<&Array3<f32>>,
    ) -> Result<DenoisedTokens> {
        let text_contexts = text.as_ref().zip(pass.request.input_streams());
        let text_contexts = text_contexts.try_map(|(text, given)| branch_text(text, &pass.shape, given))?;
        let conditions = pass.conditions.as_ref();
        let spec = PassSpec { request: pass.request, shape: &pass.shape, shapes: &pass.shapes, conditions };
        let prepare = self.runner.prepare(pass.names.prepare, spec, text_contexts)?;
        let prepared = prepare.run(&self.runner.executor)?;
        // On CUDA, the call that starts the loop blocks until the loop ends, because its trip count is computed on the
        // device. Count this time as waiting for the device.
        let started = Instant::now();
        let latents = self.steps(&pass, &prepared, sound);
        self.clock.waited_since(started);
        let own = pass.shapes.own_tokens();
        let mut tokens = latents?.try_map(fixed::<f32, Ix3>)?;
        let places = pass.shapes.generated(&pass.request.conditions.video);
        let none = tokens.video.slice(s![.., ..0, ..]);
        let frames = places.into_iter().map(|at| tokens.video.slice(s![.., at, ..]));
        let frames: Vec<_> = [none].into_iter().chain(frames).collect();
        let generated = ndarray::concatenate(Dim(1), &frames).expect("tokens of one stream");
        for (tokens, own) in tokens.as_mut().zip(own) {
            if own < tokens.shape()[1] {
                *tokens = tokens.slice(s![.., ..own, ..]).to_owned();
            }
        }
        if let Some(ends) = &mut self.clip_ends {
            ends.keep(pass.names.phase(), tokens.as_ref(), &pass.shapes);
        }
        Ok(DenoisedTokens { tokens, generated })
    }

    /// Runs all transformer evaluations, `options.chunk` steps per call.
    fn steps(&mut self, pass: &Pass, prepared: &Outputs, sound: Option<&Array3<f32>>) -> Result<Av<ArrayD<f32>>> {
        let steps = pass.request.sigmas.len() - 1;
        let total = pass.shape.sampler.evaluations(steps);
        // A run that is interrupted in a tile resumes before the first tile.
        let checkpoint = self.options.checkpoint.as_ref().filter(|_| pass.names.is_resumable);
        let size = at_once(pass, steps, self.options, checkpoint);
        let seeds = self.batch.rows().map(|request| request.seed);
        let tokens = pass.shapes.step_tokens(&self.runner.model.sizes);
        let mut noise = CallNoise::of_pass(pass.request, seeds, self.noise.of_steps(), tokens);
        let previews = self.previews.as_ref().map(|previews| previews.schedule(pass, total)).unwrap_or_default();
        let (mut done, mut carried, mut latents) = begin(pass, &self.runner.executor, checkpoint)?;
        // Discard the noise of the steps that the interrupted run has finished.
        (0..done).step_by(size).for_each(|_| drop(noise.draw()));
        let (loaded, mut kept, mut kept_at) = (done, done, Instant::now());
        let mut hold = None;
        let (batch, dump) = (self.batch.size, &mut self.dump);
        let mut keep = |step: usize, latents: &Av<Tensor>, model: &OpenModel| match self.options.dump_steps {
            true => pass.keep_step(step, latents, model, batch, dump),
            false => Ok(()),
        };
        keep(0, &latents, &self.runner.model)?;
        let [behind, ahead] = pass.names.around;
        while done < total {
            let of_steps = done * steps / total;
            let stop = (self.watch)(pass.names.phase(), behind + of_steps, behind + steps + ahead).is_break();
            // Also save the start of a second pass, so that the first pass need not be repeated.
            let begins = done == 0 && pass.names.phase() == Phase::Refine;
            if let Some(checkpoint) = checkpoint.filter(|_| done > kept || begins)
                && checkpoint.is_due(of_steps - kept * steps / total, kept_at.elapsed(), stop)
            {
                let ends = self.clip_ends.as_deref();
                // A run that otherwise succeeds must not fail because the disk is full.
                match checkpoint.write(&saved(pass.names.phase(), done, &carried, sound, ends, &self.skipped)?) {
                    Ok(()) => {
                        (kept, kept_at) = (done, Instant::now());
                        // The guard would overwrite the checkpoint with an earlier state.
                        self.guard = None;
                    }
                    Err(error) => tracing::warn!("cannot save the steps: {error}"),
                }
            }
            if done == kept {
                hold = None;
            }
            if stop {
                if let Some(checkpoint) = checkpoint.filter(|_| kept == done && done > 0) {
                    checkpoint.tell();
                }
                return Err(PipelineError::Interrupted(of_steps, steps));
            }
            let end = previews.end_of_call(done, (done + size).min(total));
            let _at = at_steps(of_steps + 1, (end * steps).div_ceil(total), steps);
            tracing::debug!("{}: evaluations {} to {end} of {total}", pass.names.phase().name(), done + 1);
            let drawn = noise.draw();
            let video_noise = if previews.is_due(end) { noise_of_video(&drawn) } else { None };
            let inputs = pass.steps_loop.steps(&self.runner.executor, done..end, drawn)?;
            let run = || pass.steps_loop.run(&self.runner.executor, prepared, &inputs, carried);
            carried = failpoint::within("step", of_steps, run)?;
            let before = std::mem::replace(&mut latents, latents_of(&carried)?);
            if let Some(stream) = not_finite(&latents) {
                return Err(pass.not_finite_error(&self.runner.executor, prepared, &before, done..end, stream));
            }
            if let Some(shown) = &mut self.previews {
                let (before, after, noise) = (&before.video, &latents.video, video_noise);
                let call = FinishedCall { evaluations: [done, end], before, after, carried: &carried, noise };
                shown.show(self.runner, pass, &previews, call)?;
            }
            done = end;
            if checkpoint.is_some_and(CheckpointSettings::keeps_steps) {
                hold.get_or_insert_with(|| interrupts::hold("the current steps"));
            }
            if self.options.is_warm_up {
                break;
            }
            keep(done.div_ceil(size), &latents, &self.runner.model)?;
        }
        if let Some(checkpoint) = checkpoint.filter(|checkpoint| checkpoint.saves_on_interrupt() && done == total) {
            let saved = saved(pass.names.phase(), done, &carried, sound, self.clip_ends.as_deref(), &self.skipped)?;
            self.guard = Some(checkpoint.clone().keeper(saved));
        } else if hold.is_some() {
            self.guard = hold.take();
        }
        drop((hold, noise));
        self.count_steps(pass, &carried, loaded..done)?;
        let _ = (self.watch)(pass.names.phase(), behind + steps, behind + steps + ahead);
        Ok(latents.map(Tensor::into_f32))
    }

    /// Records the steps of a pass that the step cache skipped and, for the first pass, the number of computed steps.
    /// `run`: the evaluations of this run.
    fn count_steps(&mut self, pass: &Pass, carried: &[ShardedTensor], run: Range<usize>) -> Result<()> {
        let steps = pass.request.sigmas.len() - 1;
        let total = pass.shape.sampler.evaluations(steps);
        let skipped = pass.skipped_steps(carried, total)?;
        if pass.names.phase() == Phase::Denoise {
            let saved = skipped.as_ref().map_or(0, |own| own.count(run.clone()));
            self.computed_steps = run.len() * steps / total - saved;
        }
        self.skipped.extend(skipped);
        Ok(())
    }
}

impl Pass<'_> {
    /// Reloads the weights of the denoising loop that another program has evicted.
    pub(super) fn reload(&self, runner: &mut Runner) -> Result<()> {
        self.steps_loop.load(&mut runner.executor, self.names.denoise.name())
    }

    /// Dumps the latents after call `step` of the loop. Number 0 is the state before the first call.
    fn keep_step(
        &self,
        step: usize,
        latents: &Av<Tensor>,
        model: &OpenModel,
        batch: usize,
        dump: &mut Dump,
    ) -> Result<()> {
        let tokens = latents.as_ref().try_map(|t| fixed::<_, Ix3>(t.to_f32()))?;
        let tokens = tokens.zip(self.shapes.own_tokens()).map(|(all, own)| all.slice(s![.., ..own, ..]).to_owned());
        let (video, audio) = unpack(model, &self.shapes, batch, tokens)?;
        let name = |stream: &str| format!("{}step_{step}.latents.{stream}", self.names.dump);
        dump.keep_row(&name("video"), &video, 1, 0);
        dump.keep_row(&name("audio"), &audio, 1, 0);
        Ok(())
    }

    /// Returns the steps that the step cache skipped; `None` without a step cache. `carried`: state of the loop after
    /// `total` evaluations.
    fn skipped_steps(&self, carried: &[ShardedTensor], total: usize) -> Result<Option<SkippedSteps>> {
        let Some(cache) = &self.request.cache else { return Ok(None) };
        let table = self.steps_loop.carried.iter().position(|name| name == SKIPS);
        let skipped: Vec<bool> = match table.and_then(|at| carried.get(at)) {
            Some(table) => table.download()?.to_f32().iter().map(|in_a_row| *in_a_row > 0.0).collect(),
            None => cache.schedule(total),
        };
        let steps = skipped.iter().take(total).enumerate().filter(|(_, skipped)| **skipped);
        Ok(Some(SkippedSteps { pass: self.names.phase(), steps: steps.map(|(step, _)| step).collect(), total }))
    }

    /// Returns the error for a call after which the latents of `stream` are not finite. It names the step, or all steps
    /// of a call that cannot be repeated. `before`: latents before the call.
    fn not_finite_error(
        &self,
        executor: &Executor,
        prepared: &Outputs,
        before: &Av<Tensor>,
        call: Range<usize>,
        stream: &'static str,
    ) -> PipelineError {
        let steps = self.request.sigmas.len() - 1;
        let total = self.shape.sampler.evaluations(steps);
        let found = match (self.shape.sampler.noises(), self.shape.is_stateless()) {
            (1.., _) | (_, false) => Ok(Some((stream, call.start))),
            // The state of the cache before the call has been donated, so the call cannot be repeated.
            _ if self.shape.cache.is_some() => Ok(None),
            _ => self.first_not_finite(executor, prepared, before, call.clone()),
        };
        let number = |evaluation: usize| evaluation * steps / total + 1;
        let (first, last) = (number(call.start), number(call.end - 1));
        let (stream, after) = match found {
            Ok(Some((stream, at))) => (stream, format!("step {}", number(at))),
            Ok(None) if first == last => (stream, format!("step {last}")),
            Ok(None) => (stream, format!("one of the steps {first} to {last}")),
            Err(error) => return error,
        };
        PipelineError::NotFinite(format!("the {stream} latents after {after} of {steps}"))
    }

    /// Repeats the Euler steps of a call one at a time. Returns the first stream and step for which the latents are not
    /// finite.
    fn first_not_finite(
        &self,
        executor: &Executor,
        prepared: &Outputs,
        before: &Av<Tensor>,
        steps: Range<usize>,
    ) -> Result<Option<(&'static str, usize)>> {
        let mut carried = self.steps_loop.start(executor, before)?;
        let mut noise = CallNoise::new(&*self.shape.sampler, std::iter::empty(), Av::default());
        for step in steps {
            let inputs = self.steps_loop.steps(executor, step..step + 1, noise.draw())?;
            carried = self.steps_loop.run(executor, prepared, &inputs, carried)?;
            if let Some(stream) = not_finite(&latents_of(&carried)?) {
                return Ok(Some((stream, step)));
            }
        }
        Ok(None)
    }
}

/// Returns the number of finished evaluations, the tensors that the loop carries, and the latents of both streams:
/// those of the checkpoint if it belongs to this pass, otherwise those at the start of the pass.
fn begin(
    pass: &Pass,
    executor: &Executor,
    checkpoint: Option<&CheckpointSettings>,
) -> Result<(usize, Vec<ShardedTensor>, Av<Tensor>)> {
    let Some(saved) = checkpoint.and_then(|s| s.found(pass.names.phase())) else {
        return Ok((0, pass.steps_loop.start(executor, &pass.start)?, pass.start.clone()));
    };
    let carried = pass.steps_loop.resume(executor, &saved.carried)?;
    Ok((saved.done, carried, Av::in_turn(&saved.carried).map(|own| own[0].clone())))
}

/// Returns the number of transformer evaluations per call of the loop.
fn at_once(pass: &Pass, steps: usize, options: &RunOptions, checkpoint: Option<&CheckpointSettings>) -> usize {
    match pass.shape.sampler.noises() {
        0 if options.dump_steps => 1,
        0 if pass.shape.is_stateless() => {
            let every = checkpoint.and_then(CheckpointSettings::every_steps);
            options.chunk.unwrap_or(steps).min(every.unwrap_or(steps)).max(1)
        }
        noises => noises.max(1),
    }
}

/// Downloads the state of the loop for a checkpoint.
fn saved(
    phase: Phase,
    done: usize,
    carried: &[ShardedTensor],
    sound: Option<&Array3<f32>>,
    ends: Option<&ClipEnds>,
    skipped: &[SkippedSteps],
) -> Result<DenoiseState> {
    let carried = carried.iter().map(|c| Ok(c.download()?)).collect::<Result<_>>()?;
    let (sound, ends, skipped) = (sound.cloned(), ends.cloned().unwrap_or_default(), skipped.to_vec());
    Ok(DenoiseState { phase, done, carried, sound, ends, skipped })
}

fn latents_of(carried: &[ShardedTensor]) -> Result<Av<Tensor>> {
    let missing = || PipelineError::Input("the denoising loop returned no latents".into());
    Av::in_turn(carried).try_map(|own| Ok(own.first().ok_or_else(missing)?.download()?))
}

/// Returns a copy of the noise of the video stream. `None`: the sampler uses no noise.
fn noise_of_video(drawn: &[(String, Tensor)]) -> Option<Tensor> {
    drawn.iter().find(|(name, _)| name == "noise.video").map(|(_, noise)| noise.clone())
}

/// Returns the name of the first stream that contains NaN or infinite values.
fn not_finite(latents: &Av<Tensor>) -> Option<&'static str> {
    let broken = |t: &Tensor| match t {
        Tensor::F32(values) => values.iter().any(|v| !v.is_finite()),
        other => other.to_f32().iter().any(|v| !v.is_finite()),
    };
    Av::NAMES.zip(latents.as_ref()).into_iter().find_map(|(stream, t)| broken(t).then_some(stream))
}
