//! `request.num_frames: auto`: the frames that the model's duration head predicts for a prompt. The programs of a run
//! depend on them, so they are predicted before it starts, and the prompt is encoded a second time there.

use std::sync::Arc;

use ndarray::{Axis, Slice};

use super::batch::Batch;
use super::configs::ModelConfigs;
use super::error::{PipelineError, Result};
use super::model::Model;
use super::origin;
use super::prompts::tokens;
use super::runner::Runner;
use super::session::Session;
use crate::av::Av;
use crate::config::{Config, Job, Pipeline, Reference, nearest_frames};
use crate::models::duration_head::{Grid, frames};
use crate::request::of_job;
use crate::runtime::processes::Group;
use crate::tensor::Tensor;
use crate::weights::Component;

/// Frames where diffusers' pipeline has no head.
const WITHOUT_HEAD: usize = 121;

/// Number of frames where `request.num_frames` is `auto`, as far as it is known before the prompt is encoded.
enum Frames {
    /// The configuration has a number.
    Given,
    /// The model has no duration head, and diffusers' pipeline generates this number then.
    Fixed(usize),
    /// The duration head predicts it, from `least` to `most`.
    Predicted { grid: Grid, step: usize, least: usize, most: usize },
}

/// Decides how a run's number of frames is found.
///
/// # Errors
/// Several prompts; a model without a duration head, unless diffusers' conventions hold.
fn frames_of(config: &Config, jobs: &[Job]) -> Result<Frames> {
    if config.request.num_frames.count().is_some() {
        return Ok(Frames::Given);
    }
    if jobs.windows(2).any(|pair| pair[0].prompt != pair[1].prompt) {
        let why = "request.num_frames: auto is for one prompt: each has a duration of its own; run them one at a time, or \
                   give a number of frames";
        return Err(PipelineError::Usage(why.into()));
    }
    let (origin, _) = origin::of_run(config)?;
    if origin.has(Component::DurationHead) {
        let configs = ModelConfigs::from(origin).for_run(config);
        configs.check_duration_head()?;
        let grid = if config.reference == Reference::Diffusers { Grid::Diffusers } else { Grid::Official };
        let step = configs.sizes()?.video_grid.temporal_compression * if config.doubles_frames() { 2 } else { 1 };
        let [least, most] = [0.0, f64::MAX].map(|seconds| frames(seconds, config.request.frame_rate, step, grid));
        return Ok(Frames::Predicted { grid, step, least, most });
    }
    if config.reference == Reference::Diffusers {
        return Ok(Frames::Fixed(nearest_frames(WITHOUT_HEAD as f64, config.frame_step())));
    }
    Err(PipelineError::Usage(format!(
        "request.num_frames: auto needs a duration head, which {} lacks: take an LTX-2.5 model that has one, or give a \
         number of frames",
        origin.name()
    )))
}

/// The configuration with the most frames that may be predicted for its prompt, to verify a run before the prompt is
/// encoded; unchanged if it has a number of frames.
///
/// # Errors
/// Several prompts; a model without a duration head, unless diffusers' conventions hold; an image beyond the last frame.
pub(super) fn longest(config: &Config, jobs: &[Job]) -> Result<Config> {
    match frames_of(config, jobs)? {
        Frames::Given => Ok(config.clone()),
        Frames::Fixed(count) | Frames::Predicted { most: count, .. } => {
            config.with_frames(count).map_err(PipelineError::Usage)
        }
    }
}

/// Number of frames that must be predicted at least for the images and generated keyframes of a run. `None`: every prediction has
/// as many, or nothing is predicted.
///
/// # Errors
/// Those of [`longest`].
pub(crate) fn least_valid(config: &Config, jobs: &[Job]) -> Result<Option<usize>> {
    let Frames::Predicted { step, least, most, .. } = frames_of(config, jobs)? else { return Ok(None) };
    let (Some(job), (origin, _)) = (jobs.first(), origin::of_run(config)?) else { return Ok(None) };
    let sizes = ModelConfigs::from(origin).for_run(config).sizes()?;
    let is_valid = |count: &usize| config.with_frames(*count).is_ok_and(|own| of_job(&own, &sizes, job).is_ok());
    Ok((least..=most).step_by(step).find(is_valid).filter(|count| *count > least))
}

/// The configuration with the number of frames that the duration head predicts for its prompt; unchanged if it has one.
///
/// # Errors
/// Those of [`longest`]; errors of model or device.
pub(super) fn resolve(config: &Config, jobs: &[Job], group: Option<&Arc<Group>>) -> Result<Config> {
    resolve_by(config, jobs, |short, job| {
        predict(&mut Session::start(short, Model::of(short)?, group)?.runner, short, job)
    })
}

/// [`resolve`] with a model that is on its devices.
///
/// # Errors
/// Those of [`resolve`].
pub(crate) fn resolve_on(runner: &mut Runner, config: &Config, jobs: &[Job]) -> Result<Config> {
    runner.model.verify(config)?;
    resolve_by(config, jobs, |short, job| predict(runner, short, job))
}

/// [`resolve`] with `predict`, which returns the seconds of a job's video, given the shortest configuration.
fn resolve_by(config: &Config, jobs: &[Job], predict: impl FnOnce(&Config, &Job) -> Result<f64>) -> Result<Config> {
    let Some(job) = jobs.first() else { return Ok(config.clone()) };
    let count = match frames_of(config, jobs)? {
        Frames::Given => return Ok(config.clone()),
        Frames::Fixed(count) => {
            tracing::warn!("the model has no duration head: {count} frames, as diffusers' pipeline makes then");
            count
        }
        Frames::Predicted { grid, step, least, .. } => {
            let seconds = predict(&shortest(config, least)?, job)?;
            let rate = config.request.frame_rate;
            let count = frames(seconds, rate, step, grid);
            tracing::info!("the prompt's video lasts {seconds:.2} s, as predicted: {count} frames at {rate} a second");
            count
        }
    };
    config.with_frames(count).map_err(PipelineError::Usage)
}

/// The configuration of the shortest video there may be, of text alone: nothing that is not read here is opened.
fn shortest(config: &Config, least: usize) -> Result<Config> {
    let mut short = Config { pipeline: Pipeline::TextToVideo, ..config.clone() };
    (short.request.images, short.request.audio_latents, short.request.audio) = (Vec::new(), Vec::new(), None);
    short.conditioning.generated_keyframes = 0;
    short.with_frames(least).map_err(PipelineError::Usage)
}

/// Seconds of a job's video, of the shortest configuration of its prompt.
fn predict(runner: &mut Runner, short: &Config, job: &Job) -> Result<f64> {
    let request = runner.model.request(short, job)?;
    let batch = Batch::new(std::slice::from_ref(&request), &runner.build.layout)?;
    let (ids, mask, _) = tokens(&runner.model, &batch, 1)?;
    let embeds = runner.text_encoder(ids, mask.clone())?.run(&runner.executor)?.tensor("prompt_embeds")?;
    let text = runner.connectors(embeds, mask)?.run(&runner.executor)?;
    // Other rows fill what the layout makes at a time.
    let first = |name| {
        let all = text.tensor(name)?.into_f32();
        Ok::<_, PipelineError>(Tensor::F32(all.slice_axis(Axis(0), Slice::from(..1)).to_owned()))
    };
    let text = Av::NAMES.try_map(first)?;
    let seconds = runner.duration_head(text)?.run(&runner.executor)?.tensor("seconds")?.to_f32();
    match seconds.first() {
        Some(seconds) if seconds.is_finite() => Ok(f64::from(*seconds)),
        _ => Err(PipelineError::NotFinite("the predicted seconds".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Auto, Image, NumFrames};

    fn frames_of(reference: Reference, images: Vec<Image>, prompts: &[&str]) -> Result<Option<usize>> {
        let mut config = Config { reference, ..Config::default() };
        config.model.path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/tiny_2_3").into();
        config.request.num_frames = NumFrames::Auto(Auto::Auto);
        config.request.images = images;
        let job = |(index, prompt): (usize, &&str)| Job { prompt: (*prompt).into(), seed: index as u64, index };
        let jobs: Vec<Job> = prompts.iter().enumerate().map(job).collect();
        Ok(resolve(&config, &jobs, None)?.request.num_frames.count())
    }

    #[test]
    fn a_number_stays() {
        let own = resolve(&Config::default(), &[], None).expect("nothing to do").request.num_frames;
        assert_eq!(own.count(), Config::default().request.num_frames.count());
    }

    #[test]
    fn without_a_head_each_reference_is_followed() {
        assert_eq!(frames_of(Reference::Diffusers, vec![], &["a", "a"]).expect("falls back"), Some(WITHOUT_HEAD));
        let message = |result: Result<_>| result.expect_err("refused").to_string();
        let why = message(frames_of(Reference::Official, vec![], &["a"]));
        assert!(why.contains("tiny_2_3 lacks") && why.contains("give a number of frames"), "{why}");
        let why = message(frames_of(Reference::Diffusers, vec![], &["a", "b"]));
        assert!(why.contains("auto is for one prompt"), "{why}");
        let image = Image { path: "x.png".into(), frame: 121, strength: 1.0, crf: None };
        let why = message(frames_of(Reference::Diffusers, vec![image], &["a"]));
        assert_eq!(why, "request.images: frame 121: the video has 121 frames, numbered from 0");
    }
}
