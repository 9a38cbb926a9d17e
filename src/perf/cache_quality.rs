//! Distances of runs with a step cache to the same runs without one, over several prompts.

use std::ops::ControlFlow;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use crate::config::Config;
use crate::failpoint;
use crate::pipeline::output::differences::{difference, short};
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
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CacheQuality {
    pub(crate) platform: String,
    pub(crate) device: String,
    /// Number of finished prompts.
    pub(crate) prompts: usize,
    /// Number of all prompts.
    pub(crate) of_prompts: usize,
    /// Number of steps of the first pass.
    pub(crate) steps: usize,
    /// Prompt scores of the runs without a step cache, if the prompts are those of the toy model.
    pub(crate) scores: Option<PromptScores>,
    /// Median seconds of the first pass without a step cache.
    pub(crate) seconds: f64,
    /// Seconds of the first pass without a step cache, for each prompt.
    pub(crate) seconds_of_prompts: Vec<f64>,
    pub(crate) caches: Vec<VariantQuality>,
    /// The device, the configuration, the prompts with their seeds, the model and the versions. Only a measurement with the
    /// same values can be resumed.
    pub(crate) identity: Value,
}

/// Results of a step cache over all prompts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct VariantQuality {
    pub(crate) name: String,
    /// Prompt scores, if the prompts are those of the toy model.
    pub(crate) scores: Option<PromptScores>,
    /// Results of each prompt.
    pub(crate) runs: Vec<RunDistance>,
}

/// Distance of a run to the run of the same prompt without a step cache.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct RunDistance {
    /// Number of skipped steps.
    pub(crate) skipped: usize,
    /// Relative L2 distance of the final video latents; 0 if there is no video.
    #[serde(deserialize_with = "number_or_nan")]
    pub(crate) video_latents: f64,
    /// Relative L2 distance of the final audio latents.
    #[serde(deserialize_with = "number_or_nan")]
    pub(crate) audio_latents: f64,
    /// PSNR of all frames in decibels; infinite (null in JSON) if they are equal or there is no video.
    #[serde(deserialize_with = "number_or_infinity")]
    pub(crate) psnr: f64,
    /// Mean SSIM of the frames; 1 if there is no video.
    #[serde(deserialize_with = "number_or_nan")]
    pub(crate) ssim: f64,
    /// 1 minus the correlation of the log spectrograms.
    #[serde(deserialize_with = "number_or_nan")]
    pub(crate) spectral: f64,
    /// Seconds of the first pass.
    pub(crate) seconds: f64,
    /// Seconds of the first pass relative to the run without a step cache.
    pub(crate) time_ratio: f64,
}

/// Reads a number that JSON writes as null if it is NaN.
fn number_or_nan<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Reads a number that JSON writes as null if it is infinite.
fn number_or_infinity<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::INFINITY))
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

/// What to measure.
pub(crate) struct Measurement<'a> {
    pub(crate) config: &'a Config,
    pub(crate) jobs: &'a [Job],
    /// Expected properties of each prompt. `None`: the prompts are not those of the toy model.
    pub(crate) toys: Option<&'a [ToyPrompt]>,
    pub(crate) caches: &'a [CacheVariant],
}

impl Measurement<'_> {
    /// Returns results without any prompt.
    fn start(&self, session: &Session, steps: usize) -> Result<CacheQuality> {
        let (config, engine) = (self.config, session.runner.executor.engine());
        let scores = || self.toys.map(|_| PromptScores::default());
        let new =
            |variant: &CacheVariant| VariantQuality { name: variant.name.clone(), scores: scores(), runs: Vec::new() };
        let prompts: Vec<Value> = self.jobs.iter().map(|job| json!({"prompt": job.prompt, "seed": job.seed})).collect();
        let mut own = config.effective("", 0);
        own["output"] = Value::Null;
        Ok(CacheQuality {
            platform: engine.platform().into(),
            device: engine.own_device().kind().to_string(),
            prompts: 0,
            of_prompts: self.jobs.len(),
            steps,
            scores: scores(),
            seconds: 0.0,
            seconds_of_prompts: Vec::new(),
            caches: self.caches.iter().map(new).collect(),
            identity: json!({
                "device": engine.own_device().kind().to_string(),
                "config": own,
                "caches": self.caches.iter().map(|variant| &variant.name).collect::<Vec<_>>(),
                "prompts": prompts,
                "toy_prompts": self.toys.is_some(),
                "model": session.runner.model.identity(config)?,
                "versions": session.versions,
            }),
        })
    }

    /// Runs every prompt without and with each step cache. `earlier`: results of an interrupted measurement, whose prompts
    /// are not measured again. `save`: called with the results after each prompt.
    ///
    /// # Errors
    /// Returns an error if `earlier` is of another measurement, or if the model, a request or a device fails.
    pub(crate) fn run(
        &self,
        earlier: Option<CacheQuality>,
        mut save: impl FnMut(&CacheQuality),
    ) -> Result<CacheQuality> {
        let (config, toys) = (self.config, self.toys);
        check_passes(config)?;
        let videos = RunVideos::unwritten(self.jobs.to_vec(), None);
        let (mut plan, model) = RunPlan::new(config, &videos)?;
        let requests = std::mem::take(&mut plan.requests);
        let first = requests.first().ok_or_else(|| PipelineError::Usage("no prompt: pass --prompts".into()))?;
        if first.chain.is_some() || first.dfr.is_some() {
            let why = "quality: chained clips and the pipeline dfr are not supported";
            return Err(PipelineError::Usage(why.into()));
        }
        let mut session = Session::start(plan, model, None)?;
        let mut quality = self.start(&session, first.sigmas.len() - 1)?;
        if let Some(earlier) = earlier {
            check_same(&earlier, &quality)?;
            quality = earlier;
        }
        if quality.prompts >= requests.len() {
            return Ok(quality);
        }
        session.fit_memory(None)?;
        let mut run = |request: &Request, cache: Option<&StepCache>, is_warm_up: bool| {
            let request = Request { cache: cache.cloned(), ..request.clone() };
            let options = RunOptions { dump: true, is_warm_up, ..RunOptions::default() };
            session.runner.generate(&request, &options, &mut |_, _, _| ControlFlow::Continue(()))
        };
        // The first call of a program takes longer. Step caches of the same kind have the same program.
        let mut warmed = Vec::new();
        for cache in std::iter::once(None).chain(self.caches.iter().map(|variant| Some(&variant.cache))) {
            let kind = cache.map(StepCache::kind);
            if !warmed.contains(&kind) {
                run(first, cache, true)?;
                warmed.push(kind);
            }
        }
        for (at, request) in requests.iter().enumerate().skip(quality.prompts) {
            let judge = |scores: &mut Option<PromptScores>, made: &Generated| {
                if let (Some(scores), Some(toy)) = (scores, toys.and_then(|toys| toys.get(at))) {
                    scores.judge(toy, &made.frames, &made.audio, made.sample_rate);
                }
            };
            let whole = run(request, None, false)?;
            judge(&mut quality.scores, &whole);
            for (variant, own) in self.caches.iter().zip(&mut quality.caches) {
                let made = run(request, Some(&variant.cache), false)?;
                judge(&mut own.scores, &made);
                own.runs.push(distance(&made, &whole));
            }
            quality.add_prompt(denoise_seconds(&whole));
            save(&quality);
            failpoint::reach("prompt", at + 1);
        }
        Ok(quality)
    }
}

impl CacheQuality {
    /// Counts a prompt whose first pass took `seconds` without a step cache.
    fn add_prompt(&mut self, seconds: f64) {
        self.prompts += 1;
        self.seconds_of_prompts.push(seconds);
        let mut sorted = self.seconds_of_prompts.clone();
        sorted.sort_by(f64::total_cmp);
        self.seconds = median(&sorted);
    }
}

fn check_passes(config: &Config) -> Result<()> {
    if config.two_stage.cache.kind == CachePolicy::Off {
        return Ok(());
    }
    let why = "quality measures only the step cache of the first pass: set two_stage.cache.kind to off";
    Err(PipelineError::Usage(why.into()))
}

/// Returns an error with the first difference if `earlier` is not a measurement of the same runs.
fn check_same(earlier: &CacheQuality, own: &CacheQuality) -> Result<()> {
    let Some((key, was, is)) = difference(&earlier.identity, &own.identity, "") else { return Ok(()) };
    Err(PipelineError::Usage(format!(
        "--resume: the file of --json has results of another measurement: {key} was {}, is now {}; repeat that \
         measurement, or choose another file",
        short(&was),
        short(&is)
    )))
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
