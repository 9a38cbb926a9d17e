//! One stage of denoising: noise, or noised latents of the stage before, to the clean latents of its size.

use std::ops::Range;
use std::rc::Rc;

use ndarray::{Array3, Axis as Dim, Ix3, Ix4, Ix5};

use super::batch::{Batch, Dump, Noise};
use super::calls::{self, Loop};
use super::clock::Clock;
use super::error::{PipelineError, Result};
use super::given::GivenTokens;
use super::loops::steps_loop;
use super::models::Models;
use super::programs::ProgramKind;
use super::saved::Saved;
use super::stages::Stages;
use super::text_to_video::{Request, Settings, Shapes, Stage, Watch, branch_text, fixed, pack};
use crate::failpoint;
use crate::nn::Build;
use crate::runtime::{Outputs, ShardedTensor};
use crate::sampling::denoise::{DenoiseShape, Sampler};
use crate::sampling::res2s::{self, StepNoise};
use crate::tensor::Tensor;

/// What a stage's programs and dumped tensors are called.
pub struct Names {
    prepare: ProgramKind,
    denoise: ProgramKind,
    dump: &'static str,
    stage: Stage,
}

/// Of the only stage, and of the first of two.
pub const FIRST: Names =
    Names { prepare: ProgramKind::Prepare, denoise: ProgramKind::Denoise, dump: "", stage: Stage::Denoise };
/// Of the second.
pub const SECOND: Names =
    Names { prepare: ProgramKind::RefinePrepare, denoise: ProgramKind::Refine, dump: "stage_2.", stage: Stage::Refine };

/// A stage with everything on the devices but the text.
pub struct Denoising<'a> {
    request: &'a Request,
    /// What fixes its programs.
    shape: DenoiseShape,
    /// Its latents.
    pub shapes: Shapes,
    steps_loop: Rc<Loop>,
    given: Option<GivenTokens>,
    start: [Tensor; 2],
    names: Names,
}

impl<'a> Denoising<'a> {
    /// A stage of a batch, from noise, or from the normalised tokens of the stage before with as much noise as its first
    /// level has. `noise` goes on where the stage before left it.
    ///
    /// # Errors
    /// A picture that cannot be used; what is wrong with program, parameters or device.
    #[allow(clippy::too_many_arguments)] // What a stage is made of; each is used once.
    pub fn new(
        models: &Models,
        stages: &mut Stages,
        request: &'a Request,
        batch: &Batch,
        noise: &mut Noise,
        before: Option<[Array3<f32>; 2]>,
        build: &Build,
        (names, dump): (Names, &mut Dump),
    ) -> Result<Self> {
        let prefix = names.dump;
        let shapes = Shapes::of(&models.sizes, request)?;
        let given = GivenTokens::encode(models, stages, request, &shapes, build)?;
        let shape = request.denoise_shape(&models.sizes, &shapes, batch.size());
        let drawn = noise.draw(stages, &shapes, &models.sizes)?;
        let (video, audio) = (fixed::<_, Ix5>(drawn.video)?, fixed::<_, Ix4>(drawn.audio)?);
        dump.keep_row(&format!("{prefix}noise.video"), &video, 1, 0);
        dump.keep_row(&format!("{prefix}noise.audio"), &audio, 1, 0);
        let [mut video, mut audio] = pack(models, &video, &audio)?;
        if let Some(appended) = drawn.appended {
            video = joined(&[&video, &fixed(appended)?])?;
        }
        if let Some([old_video, old_audio]) = before {
            let part = request.sigmas.first().copied().unwrap_or(1.0);
            let blend = |noise: &mut Array3<f32>, old: &Array3<f32>| {
                let mut own = noise.slice_mut(ndarray::s![.., ..old.shape()[1], ..]);
                own.zip_mut_with(old, |x, old| *x = *x * part + old * (1.0 - part));
            };
            blend(&mut video, &old_video);
            blend(&mut audio, &old_audio);
        }
        if let Some(given) = &given {
            given.blend(&mut video);
        }
        let of = (request, &shape, &shapes, given.as_ref());
        let steps_loop = steps_loop(models, stages, names.denoise.name(), of, build)?;
        Ok(Denoising { request, shape, shapes, steps_loop, given, start: [video, audio].map(Tensor::from), names })
    }

    /// Runs all steps on the connectors' text: normalised tokens `[b, n, c]` and `[b, m, c]`, appended ones dropped. `sound`
    /// is kept with the steps, where such are.
    ///
    /// # Errors
    /// The plugin's message; [`PipelineError::Interrupted`] when `watch` says so; the stream whose latents are not finite,
    /// and the step after which.
    #[allow(clippy::too_many_arguments)] // What a stage runs on; each is used once.
    pub fn run(
        self,
        models: &Models,
        stages: &mut Stages,
        text: &Outputs,
        sound: Option<&Array3<f32>>,
        settings: &Settings,
        clock: &mut Clock,
        watch: Watch,
    ) -> Result<[Array3<f32>; 2]> {
        let contexts = [branch_text(text, "video", &self.shape)?, branch_text(text, "audio", &self.shape)?];
        let of = (self.request, &self.shape, &self.shapes, self.given.as_ref());
        let prepare = calls::prepare(models, stages, self.names.prepare.name(), of, contexts, &settings.build)?;
        let prepared = prepare.run(stages)?;
        let latents = clock.during(|| self.steps(stages, &prepared, sound, settings, watch))?;
        let own = self.shapes.tokens[0] - self.shapes.appended;
        let [video, audio] = latents.map(fixed::<f32, Ix3>);
        let (mut video, audio) = (video?, audio?);
        if own < video.shape()[1] {
            video = video.slice(ndarray::s![.., ..own, ..]).to_owned();
        }
        Ok([video, audio])
    }

    /// All evaluations, `settings.chunk` steps at a time.
    fn steps(
        &self,
        stages: &Stages,
        prepared: &Outputs,
        sound: Option<&Array3<f32>>,
        settings: &Settings,
        watch: Watch,
    ) -> Result<[ndarray::ArrayD<f32>; 2]> {
        let steps = self.request.sigmas.len() - 1;
        let sampler = self.shape.sampler;
        let total = sampler.evaluations(steps);
        let saving = settings.saving.as_ref();
        let every = saving.and_then(|s| s.every());
        let size = match sampler {
            Sampler::Euler => settings.chunk.unwrap_or(steps).min(every.unwrap_or(steps)).max(1),
            // A call takes the noise of one step.
            Sampler::Res2s => res2s::NOISES,
        };
        let mut noise = (sampler == Sampler::Res2s).then(StepNoise::default);
        let (mut done, mut carried, mut latents) = match saving.and_then(|s| s.found(self.names.stage)) {
            Some(saved) => {
                let carried = self.steps_loop.go_on(stages, &saved.carried)?;
                (saved.done, carried, [0, 1].map(|stream| saved.carried[stream].clone()))
            }
            None => (0, self.steps_loop.start(stages, &self.start)?, self.start.clone()),
        };
        // Noise goes on where the steps before left it.
        for _ in (0..done).step_by(res2s::NOISES) {
            noise.as_mut().map(|n| n.step(self.tokens(0), self.tokens(1)));
        }
        let mut kept = done;
        while done < total {
            let of_steps = done * steps / total;
            let stop = watch(self.names.stage, of_steps, steps).is_break();
            if let Some((saving, every)) = saving.zip(every)
                && done > kept
                && (stop || done * steps / total >= kept * steps / total + every)
            {
                let carried = carried.iter().map(|c| Ok(c.download()?)).collect::<Result<_>>()?;
                // A disk that is full is no reason to lose what runs well.
                match saving.write(&Saved { stage: self.names.stage, done, carried, sound: sound.cloned() }) {
                    Ok(()) => kept = done,
                    Err(error) => tracing::warn!("the steps are not kept: {error}"),
                }
            }
            if stop {
                if let Some(saving) = saving.filter(|_| kept == done && done > 0) {
                    saving.tell();
                }
                return Err(PipelineError::Interrupted(of_steps, steps));
            }
            let end = (done + size).min(total);
            let noise = noise.as_mut().map(|n| n.step(self.tokens(0), self.tokens(1)));
            tracing::debug!("{}: evaluations {} to {end} of {total}", self.names.stage.name(), done + 1);
            let inputs = self.steps_loop.steps(stages, done, end, noise, self.shape.batch)?;
            let run = || self.steps_loop.run(stages, prepared, &inputs, carried);
            carried = failpoint::within("step", of_steps, run)?;
            let before = std::mem::replace(&mut latents, latents_of(&carried)?);
            if let Some(stream) = not_finite(&latents) {
                let step = match sampler {
                    Sampler::Euler => self.first_not_finite(stages, prepared, &before, done..end)?,
                    Sampler::Res2s => Some((stream, done)),
                };
                let (stream, at) = step.unwrap_or((stream, end - 1));
                let step = at * steps / total + 1;
                return Err(PipelineError::NotFinite(format!("the {stream} latents after step {step} of {steps}")));
            }
            done = end;
        }
        let _ = watch(self.names.stage, steps, steps);
        Ok(latents.map(Tensor::into_f32))
    }

    /// The first of these steps by Euler after which a stream's latents are not finite: one at a time, again.
    fn first_not_finite(
        &self,
        stages: &Stages,
        prepared: &Outputs,
        before: &[Tensor; 2],
        steps: Range<usize>,
    ) -> Result<Option<(&'static str, usize)>> {
        let mut carried = self.steps_loop.go_on(stages, before)?;
        for step in steps {
            let inputs = self.steps_loop.steps(stages, step, step + 1, None, self.shape.batch)?;
            carried = self.steps_loop.run(stages, prepared, &inputs, carried)?;
            if let Some(stream) = not_finite(&latents_of(&carried)?) {
                return Ok(Some((stream, step)));
            }
        }
        Ok(None)
    }

    /// Tokens and channels of a stream.
    fn tokens(&self, i: usize) -> [usize; 2] {
        let dims = self.start[i].shape();
        [dims[1], dims[2]]
    }
}

/// Tokens of the same videos, one after the other.
fn joined(parts: &[&Array3<f32>]) -> Result<Array3<f32>> {
    let views: Vec<_> = parts.iter().map(|p| p.view()).collect();
    ndarray::concatenate(Dim(1), &views).map_err(|e| PipelineError::Input(e.to_string()))
}

/// What the loop carries first: the latents of both streams.
fn latents_of(carried: &[ShardedTensor]) -> Result<[Tensor; 2]> {
    let [video, audio, ..] = carried else { return Err(PipelineError::Input("the loop carries no latents".into())) };
    Ok([video.download()?, audio.download()?])
}

/// The stream that holds a value that is not finite.
fn not_finite(latents: &[Tensor; 2]) -> Option<&'static str> {
    let broken = |t: &Tensor| match t {
        Tensor::F32(values) => values.iter().any(|v| !v.is_finite()),
        other => other.to_f32().iter().any(|v| !v.is_finite()),
    };
    ["video", "audio"].into_iter().zip(latents).find_map(|(stream, t)| broken(t).then_some(stream))
}
