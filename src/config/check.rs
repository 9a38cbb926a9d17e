//! Checks that types cannot express: sizes the model takes, lists that must fall, and combinations this version lacks.

use serde_json::Value;

use super::error::ConfigError;
use super::layout;
use super::pipeline::Pipeline;
use super::schema::{Config, NumFrames, Reference, Scales, TwoStage};
use super::tree::Tree;
use crate::av::Av;
use crate::models::upsampler::Upsampling;
use crate::runtime::platform::Choice;
use crate::sampling::schedules::ScheduleKind;
use crate::sampling::{AnySampler, MAX_STEPS, SamplerOptions};

/// Frames a latent frame covers.
pub(crate) const FRAME_STEP: usize = 8;

/// The typed form. Layers were validated, so what fails here is a number too large for its type.
pub(super) fn typed(tree: &Tree) -> Result<Config, ConfigError> {
    serde_json::from_value(tree.to_value()).map_err(|e| ConfigError::Flag(format!("configuration: {e}")))
}

/// Checks the values of a configuration.
///
/// # Errors
/// The first that cannot be used, with where it was written and what would be right.
pub(crate) fn check(config: &Config, tree: &Tree) -> Result<(), ConfigError> {
    check_upsampling(config)
        .and_then(|()| check_request(config))
        .and_then(|()| check_sampling(config))
        .and_then(|()| check_run(config))
        .map_err(|(key, value, why)| ConfigError::Value { key, value, origin: tree.origin(key), why })
}

/// A key, its value, and why it cannot be used.
type Fault = (&'static str, String, String);

fn fail(key: &'static str, value: String, why: String) -> Result<(), Fault> {
    Err((key, value, why))
}

fn check_request(config: &Config) -> Result<(), Fault> {
    let r = &config.request;
    let multiple = config.size_multiple();
    for (key, value) in [("request.width", r.width), ("request.height", r.height)] {
        if value % multiple != 0 {
            let (low, high) = around(value, 0, multiple);
            let stages = match 32 * config.upsamplings().iter().map(|u| u.rows()[0]).product::<usize>() {
                32 => None,
                96 => Some("spatial_x1_5 between two stages".to_string()),
                _ => Some("two stages".to_string()),
            };
            let scale = config.conditioning.reference_scales()[0];
            let smaller = scale > 1 && !r.reference_videos.is_empty();
            let references = smaller.then(|| format!("references of 1/{scale} its size"));
            let with = [stages, references].into_iter().flatten().collect::<Vec<_>>().join(" and ");
            let with = if with.is_empty() { with } else { format!(" with {with}") };
            let why = format!("must be a multiple of {multiple}{with}; the nearest are {low} and {high}");
            return fail(key, value.to_string(), why);
        }
    }
    let count = r.num_frames.count();
    let step = config.frame_step();
    if let Some(frames) = count.filter(|frames| frames % step != 1) {
        let (low, high) = around(frames, 1, step);
        let stages = if config.doubles_frames() { " with temporal_x2 between two stages" } else { "" };
        let why = format!("must be one more than a multiple of {step}{stages}; the nearest are {low} and {high}");
        return fail("request.num_frames", frames.to_string(), why);
    }
    if !(r.frame_rate.is_finite() && r.frame_rate > 0.0) {
        return fail("request.frame_rate", r.frame_rate.to_string(), "must be above 0".into());
    }
    let last = r.num_videos as u64 - 1;
    if r.seed.checked_add(last).is_none() {
        return fail("request.seed", r.seed.to_string(), format!("{} videos need seeds beyond 64 bits", r.num_videos));
    }
    if let Some((image, frames)) = count.and_then(|frames| Some((outside(config, frames)?, frames))) {
        let why = format!("the video has {frames} frames, numbered from 0");
        return fail("request.images", format!("frame {image}"), why);
    }
    if let Some(why) = config.pipeline.images_fault(r.images.len()) {
        return fail("pipeline", config.pipeline.name().into(), why.into());
    }
    if let Some(why) = config.pipeline.references_fault(r.reference_videos.len()) {
        return fail("pipeline", config.pipeline.name().into(), why.into());
    }
    if !r.reference_videos.is_empty() && config.doubles_frames() {
        let why = "a first pass of half the frames takes no request.reference_videos; leave out one of the two";
        return fail("two_stage.upsample", "temporal_x2".into(), why.into());
    }
    check_source(config)?;
    check_chain(config)?;
    if let Some(why) = config.pipeline.audio_fault(r.audio.is_some()) {
        return fail("pipeline", config.pipeline.name().into(), why.into());
    }
    if r.audio.is_some() && !r.audio_latents.is_empty() {
        let why = "request.audio gives the whole sound; leave out one of the two";
        return fail("request.audio_latents", format!("{} spans", r.audio_latents.len()), why.into());
    }
    if let Some(seconds) = r.audio.as_ref().and_then(|audio| audio.duration).filter(|seconds| *seconds <= 0.0) {
        return fail("request.audio.duration", seconds.to_string(), "must be above 0".into());
    }
    let rounds = config.dfr.temporal_rounds;
    if rounds > 0 && config.pipeline != Pipeline::Dfr {
        return fail("dfr.temporal_rounds", rounds.to_string(), "only the pipeline dfr has rounds".into());
    }
    let slots = config.conditioning.generated_keyframes;
    if slots > 0 && config.pipeline != Pipeline::Distilled {
        return fail(
            "conditioning.generated_keyframes",
            slots.to_string(),
            "only the pipeline distilled makes such; dfr has its own".into(),
        );
    }
    Ok(())
}

/// Checks the settings of pipelines that start from a video.
fn check_source(config: &Config) -> Result<(), Fault> {
    let (r, pipeline) = (&config.request, config.pipeline);
    let name = || pipeline.name().to_string();
    match &r.video {
        None if pipeline.takes_video() => {
            return fail("pipeline", name(), "needs a video: --video PATH, or request.video".into());
        }
        Some(path) if !pipeline.takes_video() => {
            let why = "only the pipelines retake, extend and video_to_audio take a video".into();
            return fail("request.video", path.clone(), why);
        }
        _ => {}
    }
    if pipeline.takes_video() && !r.audio_latents.is_empty() {
        let why = "the pipeline has the sound of its video; leave it out".into();
        return fail("request.audio_latents", format!("{} spans", r.audio_latents.len()), why);
    }
    let slots = config.conditioning.generated_keyframes;
    if slots > 0 && (pipeline.takes_video() || pipeline == Pipeline::TextToAudio) {
        let why = format!("the pipeline {} generates none; leave it out", name());
        return fail("conditioning.generated_keyframes", slots.to_string(), why);
    }
    let seconds = r.num_frames.count().unwrap_or(1) as f64 / r.frame_rate;
    match (&r.retake, pipeline) {
        (None, Pipeline::Retake) => {
            let why = "needs the span that is made anew: --retake START END, or request.retake".into();
            return fail("pipeline", name(), why);
        }
        (Some(span), Pipeline::Retake) => {
            let text = match span.end {
                Some(end) => format!("{} to {end} s", span.start),
                None => format!("{} s to the end", span.start),
            };
            if span.end.is_some_and(|end| span.start >= end) {
                return fail("request.retake", text, "is empty; end must be after start".into());
            }
            if span.start >= seconds {
                return fail("request.retake", text, format!("lies behind the video, which ends at {seconds:.3} s"));
            }
            if !span.video && !span.audio {
                return fail("request.retake", text, "makes neither video nor sound anew; set one of both true".into());
            }
        }
        (Some(_), _) => return fail("request.retake", name(), "is the pipeline retake's alone".into()),
        (None, _) => {}
    }
    match (&r.extend, pipeline) {
        (None, Pipeline::Extend) => fail(
            "pipeline",
            name(),
            "needs a duration: --extend SECONDS, --extend-before SECONDS, or request.extend".into(),
        ),
        (Some(_), Pipeline::Extend) | (None, _) => Ok(()),
        (Some(_), _) => fail("request.extend", name(), "is the pipeline extend's alone".into()),
    }
}

/// Checks the settings of a video of several clips.
fn check_chain(config: &Config) -> Result<(), Fault> {
    let (r, name) = (&config.request, config.pipeline.name());
    let Some(chain) = &r.chain else { return Ok(()) };
    let refused = |why: &str| fail("request.chain", name.into(), why.into());
    if !config.pipeline.makes_clips() {
        return refused(
            "this pipeline makes one clip; leave --chain out, or take a pipeline that starts from a prompt or images",
        );
    }
    if r.num_frames.count().is_none() {
        return refused("request.num_frames: auto is the length of a clip; give --seconds or a number of frames");
    }
    if r.audio.is_some() || !r.audio_latents.is_empty() {
        return refused("clips make their own sound; leave out --chain, or request.audio and request.audio_latents");
    }
    if !r.reference_videos.is_empty() {
        return refused("a reference is of one clip; leave out --chain, or request.reference_videos");
    }
    if config.doubles_frames() {
        return refused("clips keep their frame rate; leave out --chain, or temporal_x2 of two_stage.upsample");
    }
    for (key, frames) in [("request.chain.clip", chain.clip), ("request.chain.overlap", chain.overlap)] {
        if frames % FRAME_STEP != 1 {
            let (low, high) = around(frames, 1, FRAME_STEP);
            let why = format!("must be one more than a multiple of {FRAME_STEP}; the nearest are {low} and {high}");
            return fail(key, frames.to_string(), why);
        }
    }
    if chain.overlap >= chain.clip {
        let why = format!("must be less than request.chain.clip, {}", chain.clip);
        return fail("request.chain.overlap", chain.overlap.to_string(), why);
    }
    if let Some(image) = outside(config, chain.clip) {
        let why = format!("images are in the first clip, which has {} frames (request.chain.clip)", chain.clip);
        return fail("request.images", format!("frame {image}"), why);
    }
    Ok(())
}

/// The frame of an image that a video of so many frames lacks.
fn outside(config: &Config, frames: usize) -> Option<usize> {
    config.request.images.iter().map(|image| image.frame).find(|frame| *frame >= frames)
}

fn check_sampling(config: &Config) -> Result<(), Fault> {
    if let Some(sigmas) = &config.sampler.sigmas
        && let Some(why) = schedule_fault(sigmas)
    {
        return fail("sampler.sigmas", format!("{sigmas:?}"), why);
    }
    let schedule = config.sampler.schedule;
    if config.sampler.sigmas.is_some() && schedule != ScheduleKind::Shifted {
        let why =
            "sampler.sigmas holds the noise levels already: set sampler.steps, which takes their place, or remove it";
        return fail("sampler.schedule", format!("{schedule:?}"), why.into());
    }
    // By `reference` it is one of many conventions; beside another one, somebody asked for it.
    let asked = config.sampler.sigma_shift == Reference::Diffusers && config.reference != Reference::Diffusers;
    if asked && schedule != ScheduleKind::Shifted {
        let why =
            format!("sampler.schedule = {schedule:?} is shifted for no number of tokens; leave out one of the two");
        return fail("sampler.sigma_shift", "diffusers".into(), why);
    }
    if let Some(why) = schedule_fault(&config.two_stage.sigmas) {
        return fail("two_stage.sigmas", format!("{:?}", config.two_stage.sigmas), why);
    }
    if let Some(why) = schedule_fault(&config.dfr.sigmas) {
        return fail("dfr.sigmas", format!("{:?}", config.dfr.sigmas), why);
    }
    check_sampler(config)?;
    check_guidance(config)
}

/// Checks what lies between two stages.
fn check_upsampling(config: &Config) -> Result<(), Fault> {
    let (asked, pipeline) = (&config.two_stage.upsample, config.pipeline);
    if *asked == TwoStage::default().upsample {
        return Ok(());
    }
    let in_time = asked.iter().filter(|upsampling| **upsampling == Upsampling::TemporalX2).count();
    let why = match (in_time, asked.len() - in_time) {
        _ if !pipeline.has_two_stages() => format!("the pipeline {} has one stage; leave it out", pipeline.name()),
        _ if pipeline == Pipeline::Dfr => "the pipeline dfr has spatial_x2, then dfr.temporal_rounds".into(),
        (0, 0) => "must name one upsampling or more".into(),
        (2.., _) | (_, 2..) => "must name at most one upsampling in space and one in time".into(),
        _ => return Ok(()),
    };
    let names: Vec<_> = asked.iter().map(|upsampling| upsampling.name()).collect();
    fail("two_stage.upsample", format!("[{}]", names.join(", ")), why)
}

fn check_run(config: &Config) -> Result<(), Fault> {
    if let Some(t) = config.runtime.tiling {
        let pairs = [("pixels", t.pixels, t.overlap, 32), ("frames", t.frames, t.frame_overlap, FRAME_STEP)];
        for (what, size, overlap, step) in pairs {
            if size % step != 0 || overlap % step != 0 || overlap >= size {
                let why = format!("{what} and their overlap must be multiples of {step}, and the overlap smaller");
                return fail("runtime.tiling", format!("{what} {size}, overlap {overlap}"), why);
            }
        }
    }
    if let Some(gib) = config.runtime.memory_limit.filter(|gib| *gib <= 0.0) {
        return fail("runtime.memory_limit", gib.to_string(), "must be more than 0 GiB".into());
    }
    if let Some(lora) = config.model.loras.iter().find(|l| l.stages.iter().any(|s| !matches!(s, 1 | 2))) {
        return fail("model.loras", lora.path.clone(), format!("stages {:?} must be 1, 2 or both", lora.stages));
    }
    if let Err(why) = config.platform() {
        return fail("runtime.platform", config.runtime.platform.clone(), why);
    }
    if let Some(mesh) = &config.mesh
        && let Err(why) = layout::check_mesh(mesh)
    {
        return fail("mesh", layout::mesh_text(mesh), why);
    }
    Ok(())
}

/// Key, value and fault of settings that the sampler does not take, or of more steps than its tables hold.
fn check_sampler(config: &Config) -> Result<(), Fault> {
    let steps = config.sampler.steps;
    let (sampler, _) = config.samplers().map_err(|(key, value)| {
        (key, value, "this sampler takes no such setting; remove it, or choose another sampler.kind".to_string())
    })?;
    let fits = |steps: &usize| sampler.evaluations(*steps) <= MAX_STEPS;
    if fits(&steps) {
        return Ok(());
    }
    let most = (1..steps).rev().find(fits).unwrap_or(1);
    let why = format!("{} evaluations of the transformer: at most {most} steps", sampler.evaluations(steps));
    fail("sampler.steps", steps.to_string(), why)
}

/// Key, value and fault of guidance that no step can follow.
fn check_guidance(config: &Config) -> Result<(), Fault> {
    let guidance = &config.guidance;
    if let Err((key, value)) = guidance.kind.guider(guidance.options()) {
        let why = "this guider takes no such setting; remove it, or choose another guidance.kind";
        return fail(key, value, why.into());
    }
    let (sampler, _) = config.samplers().map_err(|(key, value)| (key, value, String::new()))?;
    let streams = [
        ("guidance.video.skip", "guidance.video.by_sigma", &guidance.video),
        ("guidance.audio.skip", "guidance.audio.by_sigma", &guidance.audio),
    ];
    for (skip_key, sigma_key, own) in streams {
        let bounds = own.by_sigma.as_deref().unwrap_or_default();
        if let Some(pair) = bounds.windows(2).find(|pair| pair[1].sigma >= pair[0].sigma) {
            let why = format!("{} does not fall below {}", pair[1].sigma, pair[0].sigma);
            return fail(sigma_key, "sigma".into(), why);
        }
        if own.by_sigma.as_ref().is_some_and(Vec::is_empty)
            || bounds.iter().any(|at| at.sigma.is_nan() || at.sigma < 0.0)
        {
            return fail(sigma_key, "sigma".into(), "there must be one or more noise levels, none below 0".into());
        }
        if let Some(at) = bounds.iter().find(|at| at.stg.is_some() && guidance.stg_streams == Reference::Diffusers) {
            let why = "guidance.stg_streams: diffusers knows no such; take official";
            return fail(sigma_key, format!("stg at {}", at.sigma), why.into());
        }
        let skip = own.skip.into_iter().chain(bounds.iter().filter_map(|at| at.skip)).max().unwrap_or(0);
        let why = match skip {
            0 => continue,
            _ if sampler.evaluations(2) != 2 => "a sampler that evaluates the transformer twice a step skips none",
            _ if sampler.reads_negative() => "this sampler reads the prediction on the negative prompt at every step",
            _ => continue,
        };
        return fail(skip_key, skip.to_string(), format!("{why}; remove it, or choose another sampler.kind"));
    }
    Ok(())
}

/// The legal values around an illegal one, both at least the smallest positive.
fn around(value: usize, remainder: usize, step: usize) -> (usize, usize) {
    let smallest = if remainder == 0 { step } else { remainder };
    let steps = value.saturating_sub(smallest) / step;
    let low = smallest + steps * step;
    (low, low + step)
}

/// The legal number of frames nearest to a duration in frames, one more than a multiple of `step`; of two, the longer.
pub(crate) fn nearest_frames(frames: f64, step: usize) -> usize {
    let steps = ((frames - 1.0) / step as f64).round().max(0.0);
    steps as usize * step + 1
}

/// The steps that a list of sigmas makes: a closing 0 is none.
pub(crate) fn steps_of(sigmas: &Value) -> usize {
    let list = sigmas.as_array().map_or(&[][..], Vec::as_slice);
    list.iter().filter(|s| s.as_f64() != Some(0.0)).count()
}

fn schedule_fault(sigmas: &[f64]) -> Option<String> {
    let body = sigmas.strip_suffix(&[0.0]).unwrap_or(sigmas);
    if !(1..=MAX_STEPS).contains(&body.len()) {
        return Some(format!("{} steps; there must be 1 to {MAX_STEPS}", body.len()));
    }
    if let Some(bad) = body.iter().find(|s| !(**s > 0.0 && **s <= 1.0)) {
        return Some(format!("{bad} is not above 0 and at most 1"));
    }
    body.windows(2).find(|w| w[1] >= w[0]).map(|w| format!("{} does not fall below {}", w[1], w[0]))
}

impl Config {
    /// The same with so many frames.
    ///
    /// # Errors
    /// An image that stands behind the last.
    pub(crate) fn with_frames(&self, frames: usize) -> Result<Config, String> {
        if let Some(image) = outside(self, frames) {
            return Err(format!("request.images: frame {image}: the video has {frames} frames, numbered from 0"));
        }
        let mut config = self.clone();
        config.request.num_frames = NumFrames::Count(frames);
        Ok(config)
    }

    /// Frames that are denoised together, where their number is given: those of a clip, of all where there is one.
    pub(crate) fn clip_frames(&self) -> Option<usize> {
        let all = self.request.num_frames.count()?;
        Some(self.request.chain.as_ref().map_or(all, |chain| chain.clip.min(all)))
    }

    /// The platform to look for.
    ///
    /// # Errors
    /// A word that is none, with those that are.
    pub(crate) fn platform(&self) -> Result<Choice, String> {
        self.runtime.platform.parse()
    }

    /// The samplers of both stages. Settings that only some take are the first's, and the second's where it is the same.
    ///
    /// # Errors
    /// Key and value of a setting that the first does not take.
    pub(crate) fn samplers(&self) -> Result<(AnySampler, AnySampler), (&'static str, String)> {
        let options = self.sampler.options(self.runtime.dtype);
        let first = self.sampler.kind.sampler(options)?;
        let second = match self.two_stage.sampler.filter(|kind| *kind != self.sampler.kind) {
            Some(kind) => kind.sampler(SamplerOptions { draws: options.draws, ..SamplerOptions::default() })?,
            None => first.clone(),
        };
        Ok((first, second))
    }

    /// The scales of the video and the audio stream: a missing value is the other stream's, and off if both are.
    pub(crate) fn scales(&self) -> Av<ResolvedScales> {
        let (video, audio) = (&self.guidance.video, &self.guidance.audio);
        Av { video: ResolvedScales::new(video, audio), audio: ResolvedScales::new(audio, video) }
    }
}

/// One stream's guidance, every value known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ResolvedScales {
    /// Away from the negative prompt; 1 is off.
    pub(crate) cfg: f64,
    /// Away from the perturbed prediction; 0 is off.
    pub(crate) stg: f64,
    /// Away from the prediction without the other stream; 1 is off.
    pub(crate) modality: f64,
    /// Towards the standard deviation before guidance; 0 is off.
    pub(crate) rescale: f64,
}

impl ResolvedScales {
    fn new(own: &Scales, other: &Scales) -> Self {
        ResolvedScales {
            cfg: own.cfg.or(other.cfg).unwrap_or(1.0),
            stg: own.stg.or(other.stg).unwrap_or(0.0),
            modality: own.modality.or(other.modality).unwrap_or(1.0),
            rescale: own.rescale.or(other.rescale).unwrap_or(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CliOverrides, load};

    fn set(pairs: &[&str]) -> CliOverrides {
        CliOverrides { set: pairs.iter().map(|pair| (*pair).to_string()).collect(), ..CliOverrides::default() }
    }

    #[test]
    fn the_two_nearest_are_legal() {
        assert_eq!([around(500, 0, 32), around(5, 0, 32), around(33, 0, 32)], [(480, 512), (32, 64), (32, 64)]);
        assert_eq!([around(120, 1, 8), around(8, 1, 8), around(2, 1, 8)], [(113, 121), (1, 9), (1, 9)]);
        let nearest = |step: usize| [0.0, 1.0, 4.9, 5.0, 120.0, 117.0].map(|frames| nearest_frames(frames, step));
        assert_eq!((nearest(8), nearest(16)), ([1, 1, 1, 9, 121, 121], [1, 1, 1, 1, 113, 113]));
    }

    #[test]
    fn schedules_fall() {
        assert_eq!(schedule_fault(&[1.0, 0.5, 0.0]), None);
        assert_eq!(schedule_fault(&[0.5, 0.5]).unwrap(), "0.5 does not fall below 0.5");
        assert_eq!(schedule_fault(&[1.5]).unwrap(), "1.5 is not above 0 and at most 1");
        assert_eq!(schedule_fault(&[0.0]).unwrap(), "0 steps; there must be 1 to 256");
        assert_eq!(steps_of(&serde_json::json!([1, 0.5, 0])), 2);
    }

    #[test]
    fn a_missing_scale_is_the_other_streams() {
        let mut config = Config::default();
        assert_eq!(config.scales().video, ResolvedScales { cfg: 1.0, stg: 0.0, modality: 1.0, rescale: 0.0 });
        config.guidance.video.cfg = Some(4.0);
        config.guidance.audio.stg = Some(1.0);
        assert_eq!(config.scales().audio.cfg, 4.0);
        assert_eq!(config.scales().video.stg, 1.0);
    }

    #[test]
    fn what_no_chain_can_be_is_said() {
        let chain = "request.chain={clip: 33, overlap: 9}";
        for (pairs, want) in [
            (
                &["request.chain={clip: 32}"][..],
                "request.chain.clip = 32 (--set): must be one more than a multiple of 8; the nearest are 25 and 33",
            ),
            (
                &["request.chain={overlap: 10}"],
                "request.chain.overlap = 10 (--set): must be one more than a multiple of 8",
            ),
            (
                &["request.chain={clip: 25}"],
                "request.chain.overlap = 25 (default): must be less than request.chain.clip, 25",
            ),
            (&[chain, "pipeline=text_to_audio"], "request.chain = text_to_audio (--set): this pipeline makes one clip"),
            (
                &[chain, "pipeline=dfr", "model.path=LTX-2.5"],
                "request.chain = dfr (--set): this pipeline makes one clip",
            ),
            (&[chain, "request.num_frames=auto"], "request.num_frames: auto is the length of a clip; give --seconds"),
            (&[chain, "request.audio={path: a.wav}", "pipeline=two_stage"], "clips make their own sound"),
            (&[chain, "request.reference_videos=[{path: a.mp4}]", "pipeline=two_stage"], "a reference is of one clip"),
            (
                &[chain, "two_stage.upsample=[temporal_x2, spatial_x2]", "pipeline=two_stage"],
                "clips keep their frame rate",
            ),
            (
                &[chain, "pipeline=image_to_video", "request.images=[{path: a.png, frame: 40}]"],
                "request.images = frame 40 (--set): images are in the first clip, which has 33 frames (request.chain.clip)",
            ),
        ] {
            let error = load(&set(pairs)).expect_err("refused").to_string();
            assert!(error.contains(want), "{pairs:?}: {error}");
        }
        let config = load(&set(&[chain, "request.num_frames=1441"])).expect("legal").config;
        assert_eq!(config.clip_frames(), Some(33));
        assert_eq!(load(&set(&[chain, "request.num_frames=25"])).expect("legal").config.clip_frames(), Some(25));
    }
}
