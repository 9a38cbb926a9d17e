//! `request.num_frames: auto`: the frames that the model's duration head predicts for a prompt. The programs of a run
//! depend on them, so they are predicted before it starts, and the prompt is encoded a second time there.

use std::sync::Arc;

use ndarray::{Axis, Slice};

use super::batch::Batch;
use super::configs::ModelConfigs;
use super::error::{PipelineError, Result};
use super::model::Model;
use super::origin;
use super::parameters::check_files;
use super::prompts::tokens;
use super::runner::Runner;
use super::session::Session;
use crate::av::Av;
use crate::config::{Config, Job, Pipeline, Reference, nearest_frames};
use crate::models::duration_head::{Grid, frames};
use crate::runtime::processes::Group;
use crate::tensor::Tensor;
use crate::weights::Component;

/// Frames where diffusers' pipeline has no head.
const WITHOUT_HEAD: usize = 121;

/// The configuration with the frames of its prompt's video; itself where it has a number.
///
/// # Errors
/// Several prompts; a model without a duration head, but where diffusers' conventions hold; an image behind the last frame;
/// what is wrong with model or device.
pub(super) fn resolve(config: &Config, jobs: &[Job], group: Option<&Arc<Group>>) -> Result<Config> {
    resolve_by(config, jobs, |short, job| {
        let model = Model::of(config)?;
        check_files(&model.configs, &model.weights, [Component::DurationHead])?;
        predict(&mut Session::start(short, model, group)?.runner, short, job)
    })
}

/// The same with a model that is ready.
///
/// # Errors
/// Those of [`resolve`].
pub(crate) fn resolve_on(runner: &mut Runner, config: &Config, jobs: &[Job]) -> Result<Config> {
    resolve_by(config, jobs, |short, job| {
        check_files(&runner.model.configs, &runner.model.weights, [Component::DurationHead])?;
        predict(runner, short, job)
    })
}

/// The same by `predict`: seconds of a job by the shortest configuration of its prompt.
fn resolve_by(config: &Config, jobs: &[Job], predict: impl FnOnce(&Config, &Job) -> Result<f64>) -> Result<Config> {
    if config.request.num_frames.count().is_some() {
        return Ok(config.clone());
    }
    let Some(job) = jobs.first() else { return Ok(config.clone()) };
    if jobs.iter().any(|other| other.prompt != job.prompt) {
        let why = "request.num_frames: auto is for one prompt: each has a duration of its own; run them one at a time, or \
                   give a number of frames";
        return Err(PipelineError::Usage(why.into()));
    }
    let (origin, _) = origin::of_run(config)?;
    let configs = ModelConfigs::from(origin.clone()).for_run(config);
    let rate = config.request.frame_rate;
    let count = if origin.has(Component::DurationHead) {
        let grid = if config.reference == Reference::Diffusers { Grid::Diffusers } else { Grid::Official };
        let step = configs.sizes()?.video_grid.temporal_compression * if config.doubles_frames() { 2 } else { 1 };
        let seconds = predict(&shortest(config, frames(0.0, rate, step, grid))?, job)?;
        let count = frames(seconds, rate, step, grid);
        tracing::info!("the prompt's video lasts {seconds:.2} s, as predicted: {count} frames at {rate} a second");
        count
    } else if config.reference == Reference::Diffusers {
        let count = nearest_frames(WITHOUT_HEAD as f64, config.frame_step());
        tracing::warn!("the model has no duration head: {count} frames, as diffusers' pipeline makes then");
        count
    } else {
        return Err(PipelineError::Usage(format!(
            "request.num_frames: auto needs a duration head, which {} lacks: take an LTX-2.5 model that has one, or give a \
             number of frames",
            origin.name()
        )));
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
