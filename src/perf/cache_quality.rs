//! Distances of runs with a step cache to the same runs without one, over several prompts.

use std::ops::ControlFlow;

use serde::Serialize;

use crate::config::Config;
use crate::pipeline::phase::Phase;
use crate::pipeline::plan::options::RunOptions;
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::videos::{Job, RunVideos};
use crate::pipeline::session::Session;
use crate::pipeline::stages::text_to_video::Generated;
use crate::pipeline::{PipelineError, Result};
use crate::quality;
use crate::quality::toy::{PromptScores, ToyPrompt};
use crate::request::Request;
use crate::sampling::step_cache::{CachePolicy, StepCache};

/// A step cache of the first pass to measure.
pub(crate) struct CacheVariant {
    /// Text with which the user selected it.
    pub(crate) name: String,
    pub(crate) cache: StepCache,
}

/// Results of the runs without a step cache, and of each step cache.
#[derive(Debug, Serialize)]
pub(crate) struct CacheQuality {
    pub(crate) platform: String,
    pub(crate) device: String,
    /// Number of prompts.
    pub(crate) prompts: usize,
    /// Number of steps of the first pass.
    pub(crate) steps: usize,
    /// Prompt scores of the runs without a step cache, if the prompts are those of the toy model.
    pub(crate) scores: Option<PromptScores>,
    /// Median seconds of the first pass without a step cache.
    pub(crate) seconds: f64,
    pub(crate) caches: Vec<VariantQuality>,
}

/// Results of a step cache over all prompts.
#[derive(Debug, Default, Serialize)]
pub(crate) struct VariantQuality {
    pub(crate) name: String,
    /// Prompt scores, if the prompts are those of the toy model.
    pub(crate) scores: Option<PromptScores>,
    /// Results of each prompt.
    pub(crate) runs: Vec<RunDistance>,
}

/// Distance of a run to the run of the same prompt without a step cache.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct RunDistance {
    /// Number of skipped steps.
    pub(crate) skipped: usize,
    /// Relative L2 distance of the final video latents; 0 if there is no video.
    pub(crate) video_latents: f64,
    /// Relative L2 distance of the final audio latents.
    pub(crate) audio_latents: f64,
    /// PSNR of all frames in decibels; infinite (null in JSON) if they are equal or there is no video.
    pub(crate) psnr: f64,
    /// Mean SSIM of the frames; 1 if there is no video.
    pub(crate) ssim: f64,
    /// 1 minus the correlation of the log spectrograms.
    pub(crate) spectral: f64,
    /// Seconds of the first pass.
    pub(crate) seconds: f64,
    /// Seconds of the first pass relative to the run without a step cache.
    pub(crate) time_ratio: f64,
}

impl VariantQuality {
    /// Returns the values of all prompts, in increasing order. NaN is the largest.
    fn sorted(&self, value: impl Fn(&RunDistance) -> f64) -> Vec<f64> {
        let mut values: Vec<f64> = self.runs.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values
    }

    /// Returns the median over the prompts: of an even number of them, the larger of the two values in the middle.
    pub(crate) fn median(&self, value: impl Fn(&RunDistance) -> f64) -> f64 {
        median(&self.sorted(value))
    }

    /// Returns the minimum over the prompts.
    pub(crate) fn least(&self, value: impl Fn(&RunDistance) -> f64) -> f64 {
        self.sorted(value).first().copied().unwrap_or(f64::NAN)
    }

    /// Returns the mean over the prompts.
    pub(crate) fn mean(&self, value: impl Fn(&RunDistance) -> f64) -> f64 {
        self.runs.iter().map(value).sum::<f64>() / self.runs.len() as f64
    }
}

fn median(sorted: &[f64]) -> f64 {
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Runs every prompt without and with each step cache. `toys`: the expected properties of each prompt, if the prompts
/// are those of the toy model. `progress`: called with the number of finished prompts.
///
/// # Errors
/// Returns an error if the model, a request or a device fails.
pub(crate) fn cache_quality(
    config: &Config,
    jobs: &[Job],
    toys: Option<&[ToyPrompt]>,
    variants: &[CacheVariant],
    mut progress: impl FnMut(usize),
) -> Result<CacheQuality> {
    let videos = RunVideos::unwritten(jobs.to_vec(), None);
    let (mut plan, model) = RunPlan::new(config, &videos)?;
    let requests = std::mem::take(&mut plan.requests);
    let first = requests.first().ok_or_else(|| PipelineError::Usage("no prompt: pass --prompts".into()))?;
    if first.chain.is_some() || first.dfr.is_some() {
        let why = "quality: chained clips and the pipeline dfr are not supported";
        return Err(PipelineError::Usage(why.into()));
    }
    if config.two_stage.cache.kind != CachePolicy::Off {
        let why = "quality: two_stage.cache is not measured; remove it, or set two_stage.cache.kind to off";
        return Err(PipelineError::Usage(why.into()));
    }
    let steps = first.sigmas.len() - 1;
    let mut session = Session::start(plan, model, None)?;
    session.fit_memory(None)?;
    let mut run = |request: &Request, cache: Option<&StepCache>, is_warm_up: bool| {
        let request = Request { cache: cache.cloned(), ..request.clone() };
        let options = RunOptions { dump: true, is_warm_up, ..RunOptions::default() };
        session.runner.generate(&request, &options, &mut |_, _, _| ControlFlow::Continue(()))
    };
    // The first call of a program takes longer. Step caches of the same kind have the same program.
    let mut warmed = Vec::new();
    for cache in std::iter::once(None).chain(variants.iter().map(|variant| Some(&variant.cache))) {
        let kind = cache.map(StepCache::kind);
        if !warmed.contains(&kind) {
            run(first, cache, true)?;
            warmed.push(kind);
        }
    }
    let scored = || toys.map(|_| PromptScores::default());
    let (mut scores, mut seconds) = (scored(), Vec::new());
    let new =
        |variant: &CacheVariant| VariantQuality { name: variant.name.clone(), scores: scored(), runs: Vec::new() };
    let mut caches: Vec<VariantQuality> = variants.iter().map(new).collect();
    for (at, request) in requests.iter().enumerate() {
        let judge = |scores: &mut Option<PromptScores>, made: &Generated| {
            if let (Some(scores), Some(toy)) = (scores, toys.and_then(|toys| toys.get(at))) {
                scores.judge(toy, &made.frames, &made.audio, made.sample_rate);
            }
        };
        let whole = run(request, None, false)?;
        judge(&mut scores, &whole);
        seconds.push(denoise_seconds(&whole));
        for (variant, quality) in variants.iter().zip(&mut caches) {
            let made = run(request, Some(&variant.cache), false)?;
            judge(&mut quality.scores, &made);
            quality.runs.push(distance(&made, &whole));
        }
        progress(at + 1);
    }
    seconds.sort_by(f64::total_cmp);
    let engine = session.runner.executor.engine();
    Ok(CacheQuality {
        platform: engine.platform().into(),
        device: engine.own_device().kind().to_string(),
        prompts: requests.len(),
        steps,
        scores,
        seconds: median(&seconds),
        caches,
    })
}

fn denoise_seconds(made: &Generated) -> f64 {
    let own = made.timings.iter().find(|took| took.phase == Phase::Denoise);
    own.map_or(f64::NAN, |took| took.total.as_secs_f64())
}

fn distance(made: &Generated, whole: &Generated) -> RunDistance {
    let latents = |name: &str| {
        let find = |of: &Generated| of.dump.iter().find(|(own, _)| own == name).map(|(_, tensor)| tensor.to_f32());
        let (Some(a), Some(b)) = (find(made), find(whole)) else { return f64::NAN };
        quality::tensors(a.iter().copied(), b.iter().copied()).relative_l2
    };
    let video = (whole.frames.count() > 0)
        .then(|| quality::video(made.frames.to_video().view(), whole.frames.to_video().view()));
    let seconds = denoise_seconds(made);
    RunDistance {
        skipped: made.skipped.first().map_or(0, |first| first.steps.len()),
        video_latents: if video.is_some() { latents("latents.video") } else { 0.0 },
        audio_latents: latents("latents.audio"),
        psnr: video.as_ref().map_or(f64::INFINITY, |video| video.psnr),
        ssim: video.as_ref().map_or(1.0, |video| video.ssim),
        spectral: 1.0 - quality::audio(made.audio.view(), whole.audio.view()).spectral,
        seconds,
        time_ratio: seconds / denoise_seconds(whole),
    }
}
