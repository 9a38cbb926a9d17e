//! Resolves `request.num_frames: auto`: the model's duration head predicts the number of frames for a prompt. Because
//! the programs of a run depend on that number, the prompt is encoded twice: once for the prediction, and again in the
//! run.

use std::sync::Arc;

use ndarray::{Axis, Slice};

use super::batch::{Batch, videos_at_once};
use super::prompts::tokens;
use crate::av::Av;
use crate::config::{Config, Reference, nearest_frames};
use crate::models::duration_head::{FrameRounding, frames};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::model::OpenModel;
use crate::pipeline::plan::origin;
use crate::pipeline::plan::resolved::ResolvedConfig;
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::videos::Job;
use crate::pipeline::programs::configs::ModelConfigs;
use crate::pipeline::runner::Runner;
use crate::pipeline::session::Session;
use crate::request;
use crate::runtime::processes::Group;
use crate::tensor::Tensor;
use crate::weights::Component;

/// Number of frames that diffusers' pipeline generates by default.
const DIFFUSERS_DEFAULT_FRAMES: usize = 121;

/// Rule that determines the number of frames.
enum FrameCountRule {
    /// The configuration sets the number of frames.
    Given,
    /// Default number of frames of diffusers' pipeline; the model has no duration head.
    Fixed(usize),
    /// The duration head predicts the number of frames: `least` to `most`, in steps of `step`.
    Predicted { grid: FrameRounding, step: usize, least: usize, most: usize },
}

/// Returns the rule that determines the number of frames of a run.
///
/// # Errors
/// Returns an error for `auto` if the jobs have different prompts, or if the model has no duration head and the
/// reference is not diffusers.
fn frame_count_rule(config: &Config, jobs: &[Job]) -> Result<FrameCountRule> {
    if config.request.num_frames.count().is_some() {
        return Ok(FrameCountRule::Given);
    }
    if jobs.windows(2).any(|pair| pair[0].prompt != pair[1].prompt) {
        let why = "request.num_frames: auto is for one prompt, because each prompt has its own duration; run the \
                   prompts one at a time, or set a number of frames";
        return Err(PipelineError::Usage(why.into()));
    }
    let (origin, _) = origin::sources(config)?;
    if origin.has(Component::DurationHead) {
        let configs = ModelConfigs::from(origin).for_run(config);
        configs.check_duration_head()?;
        let grid =
            if config.reference == Reference::Diffusers { FrameRounding::Diffusers } else { FrameRounding::Official };
        let step = configs.sizes()?.video_grid.temporal_compression * if config.doubles_frames() { 2 } else { 1 };
        let [least, most] = [0.0, f64::MAX].map(|seconds| frames(seconds, config.request.frame_rate, step, grid));
        return Ok(FrameCountRule::Predicted { grid, step, least, most });
    }
    if config.reference == Reference::Diffusers {
        return Ok(FrameCountRule::Fixed(nearest_frames(DIFFUSERS_DEFAULT_FRAMES as f64, config.frame_step())));
    }
    Err(PipelineError::Usage(format!(
        "request.num_frames: auto needs a duration head, which {} lacks; use an LTX-2.5 model that has one, or set a \
         number of frames",
        origin.name()
    )))
}

/// Returns the largest number of frames that can be predicted, with which a run is verified before its prompt is
/// encoded. `None`: the configuration sets the number of frames.
///
/// # Errors
/// Returns an error for `auto` if the jobs have different prompts, or if the model has no duration head and the reference
/// is not diffusers.
pub(in crate::pipeline) fn longest(config: &Config, jobs: &[Job]) -> Result<Option<usize>> {
    Ok(match frame_count_rule(config, jobs)? {
        FrameCountRule::Given => None,
        FrameCountRule::Fixed(count) | FrameCountRule::Predicted { most: count, .. } => Some(count),
    })
}

/// Returns the smallest number of frames that can be predicted and is valid for the images and the generated keyframes
/// of a run. `None`: all numbers that can be predicted are valid, or nothing is predicted.
pub(crate) fn smallest_valid_prediction(config: &Config, jobs: &[Job]) -> Result<Option<usize>> {
    let FrameCountRule::Predicted { step, least, most, .. } = frame_count_rule(config, jobs)? else { return Ok(None) };
    let (origin, _) = origin::sources(config)?;
    let sizes = ModelConfigs::from(origin).for_run(config).sizes()?;
    let is_valid = |count: &usize| {
        ResolvedConfig::with_frames(config, *count).is_ok_and(|own| request::resolve(&own, &sizes).is_ok())
    };
    Ok((least..=most).step_by(step).find(is_valid).filter(|count| *count > least))
}

/// Returns the number of frames that the duration head predicts. `None`: the configuration sets the number of frames, or
/// there are no jobs. `enhance`: returns the job with an enhanced prompt; called before the prompt is encoded.
///
/// # Errors
/// Returns the errors of [`longest`], of the model, of the device and of `enhance`.
pub(in crate::pipeline) fn resolve(
    config: &Config,
    jobs: &[Job],
    group: Option<&Arc<Group>>,
    enhance: impl FnOnce(&mut Runner, &Job) -> Result<Job>,
) -> Result<Option<usize>> {
    resolve_with(config, jobs, |short, job| {
        let model = OpenModel::from_config(short)?;
        let mut session = Session::start(RunPlan::of_model(short, &model)?, model, group)?;
        let job = enhance(&mut session.runner, job)?;
        predict(&mut session.runner, short, &job)
    })
}

/// Same as [`resolve`], with a verified model that is already on its devices.
pub(crate) fn resolve_on(runner: &mut Runner, config: &Config, jobs: &[Job]) -> Result<Option<usize>> {
    resolve_with(config, jobs, |short, job| predict(runner, short, job))
}

/// Implements [`resolve`]. `predict` predicts the duration (seconds) of a job's video, given the configuration of the
/// shortest possible video.
fn resolve_with(
    config: &Config,
    jobs: &[Job],
    predict: impl FnOnce(&Config, &Job) -> Result<f64>,
) -> Result<Option<usize>> {
    let Some(job) = jobs.first() else { return Ok(None) };
    let count = match frame_count_rule(config, jobs)? {
        FrameCountRule::Given => return Ok(None),
        FrameCountRule::Fixed(count) => {
            tracing::warn!(
                "the model has no duration head; generating {count} frames, the default of diffusers' pipeline"
            );
            count
        }
        FrameCountRule::Predicted { grid, step, least, .. } => {
            let seconds = predict(&ResolvedConfig::text_only(config, least), job)?;
            let rate = config.request.frame_rate;
            let count = frames(seconds, rate, step, grid);
            tracing::info!("the duration head predicts a video of {seconds:.2} s: {count} frames at {rate} fps");
            count
        }
    };
    Ok(Some(count))
}

/// Predicts the duration (seconds) of a job's video. `short`: configuration of the shortest possible video.
fn predict(runner: &mut Runner, short: &Config, job: &Job) -> Result<f64> {
    let request = runner.model.request(short, job)?;
    let batch = Batch { asked: std::slice::from_ref(&request), size: videos_at_once(&runner.build.layout) };
    let (ids, mask, _) = tokens(&runner.model, &batch, 1)?;
    let embeds = runner.text_encoder(ids, mask.clone())?.run(&runner.executor)?.tensor("prompt_embeds")?;
    let text = runner.connectors(embeds, mask)?.run(&runner.executor)?;
    // The other rows of the batch are padding.
    let first = |name| {
        let all = text.tensor(name)?.into_f32();
        Ok::<_, PipelineError>(Tensor::F32(all.slice_axis(Axis(0), Slice::from(..1)).to_owned()))
    };
    let text = Av::NAMES.try_map(first)?;
    let seconds = runner.duration_head(text)?.run(&runner.executor)?.tensor("seconds")?.to_f32();
    match seconds.first() {
        Some(seconds) if seconds.is_finite() => Ok(f64::from(*seconds)),
        _ => Err(PipelineError::NotFinite("the predicted durations".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{AutoValue, Image, NumFrames};

    fn frame_count(reference: Reference, images: Vec<Image>, prompts: &[&str]) -> Result<Option<usize>> {
        let mut config = Config { reference, ..Config::default() };
        config.model.path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/tiny_2_3").into();
        config.request.num_frames = NumFrames::Auto(AutoValue::Auto);
        config.request.images = images;
        let job = |(index, prompt): (usize, &&str)| Job { prompt: (*prompt).into(), seed: index as u64, index };
        let jobs: Vec<Job> = prompts.iter().enumerate().map(job).collect();
        let count = resolve(&config, &jobs, None, |_, job| Ok(job.clone()))?;
        count.map(|count| ResolvedConfig::with_frames(&config, count).map(|_| count)).transpose()
    }

    #[test]
    fn explicit_frame_count_is_kept() {
        let job = Job { index: 0, prompt: "a".into(), seed: 0 };
        let count = resolve(&Config::default(), &[job], None, |_, job| Ok(job.clone()));
        assert_eq!(count.expect("nothing to do"), None);
    }

    #[test]
    fn missing_duration_head_follows_reference() {
        assert_eq!(
            frame_count(Reference::Diffusers, vec![], &["a", "a"]).expect("falls back"),
            Some(DIFFUSERS_DEFAULT_FRAMES)
        );
        let message = |result: Result<_>| result.expect_err("refused").to_string();
        let why = message(frame_count(Reference::Official, vec![], &["a"]));
        assert!(why.contains("tiny_2_3 lacks") && why.contains("set a number of frames"), "{why}");
        let why = message(frame_count(Reference::Diffusers, vec![], &["a", "b"]));
        assert!(why.contains("auto is for one prompt"), "{why}");
        let image = Image { path: "x.png".into(), frame: 121, strength: 1.0, crf: None };
        let why = message(frame_count(Reference::Diffusers, vec![image], &["a"]));
        assert_eq!(why, "request.images: frame 121 does not exist: the video has 121 frames, numbered from 0");
    }
}
