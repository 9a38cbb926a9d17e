//! Checks of configuration values that types cannot express: sizes, decreasing schedules and unsupported combinations.

use clap::ValueEnum;
use serde_json::Value;

use super::check_cache::{StageSteps, check_caches};
use super::check_chain::{check_chain, check_rates, outside};
use super::check_source::check_source;
use super::error::ConfigErrorKind::{Conflict, NoEffect, NotOneOf, OutOfRange, Unsupported};
use super::error::{ConfigError, Limit};
use super::layout;
use super::legal::{FRAME_STEP, fail, remove, remove_one, step_limit};
use super::message::{Message, Setting, message};
use super::pipeline::{Pipeline, PipelineSpec, pipeline_names};
use super::references;
use super::schema::{Config, GivenAudio, Reference, ReferenceVideo, Scales, TwoStage, WeightSource};
use super::tree::Tree;
use crate::av::Av;
use crate::models::upsampler::Upsampling;
use crate::runtime::platform::Choice;
use crate::sampling::schedules::{BetaSchedule, ScheduleKind};
use crate::sampling::step_cache::CachePolicy;
use crate::sampling::{AnySampler, MAX_STEPS, SamplerOptions};
use ltx2_download::http::{authority, without_credentials};

/// Deserializes the merged tree. Every layer was validated against the schema, so the only possible failure is a number
/// that is too large for its type.
pub(super) fn typed(tree: &Tree) -> Result<Config, ConfigError> {
    serde_path_to_error::deserialize(tree.to_value())
        .map_err(|e| ConfigError::argument(format!("configuration: {}: {}", e.path(), e.inner())))
}

/// Checks the values of a configuration.
///
/// # Errors
/// Returns an error for the first invalid value, with its key, its origin and the reason.
pub(crate) fn check(config: &Config, tree: &Tree) -> Result<(), ConfigError> {
    check_upsampling(config)
        .and_then(|()| check_request(config))
        .and_then(|()| check_enhancement(config))
        .and_then(|()| check_sampling(config))
        .and_then(|()| check_run(config))
        .map_err(|error| {
            let origin = tree.origin(&error.key);
            error.at(origin)
        })
}

/// Rejects options of the pipeline `dfr` in other pipelines.
fn check_dfr(config: &Config) -> Result<(), ConfigError> {
    let rounds = config.dfr.temporal_rounds;
    if rounds > 0 && !config.pipeline.spec().has_rounds() {
        let names = pipeline_names("or", PipelineSpec::has_rounds);
        let why = remove(format!("only the pipeline {names} has temporal rounds"));
        return fail(Unsupported, "dfr.temporal_rounds", rounds, why);
    }
    if let Some(lora) = config.dfr.detailing_lora.as_ref().filter(|_| !config.pipeline.spec().has_rounds()) {
        let names = pipeline_names("or", PipelineSpec::has_rounds);
        let why = remove(format!("only the pipeline {names} has a detailing LoRA"));
        return fail(Unsupported, "dfr.detailing_lora", &lora.path, why);
    }
    Ok(())
}

fn check_request(config: &Config) -> Result<(), ConfigError> {
    let r = &config.request;
    let multiple = config.size_multiple();
    for (key, value) in [("request.width", r.width), ("request.height", r.height)] {
        if value % multiple != 0 {
            let stages = match config.upsamplings().iter().map(|upsampling| upsampling.rows()[0]).product::<usize>() {
                1 => None,
                3 => Some("spatial_x1_5 between two stages".to_string()),
                _ => Some("two stages".to_string()),
            };
            let scale = config.conditioning.reference_scales()[0];
            let smaller = scale > 1 && config.follows_references();
            let references = smaller.then(|| format!("reference videos at 1/{scale} size"));
            let with = [stages, references].into_iter().flatten().collect::<Vec<_>>().join(" and ");
            let with = if with.is_empty() { with } else { format!(" with {with}") };
            return fail(OutOfRange, key, value, step_limit(value, 0, multiple, with));
        }
    }
    let count = r.num_frames.count();
    let step = config.frame_step();
    if let Some(frames) = count.filter(|frames| frames % step != 1) {
        let stages = if config.doubles_frames() { " with temporal_x2 between two stages" } else { "" };
        return fail(OutOfRange, "request.num_frames", frames, step_limit(frames, 1, step, stages.into()));
    }
    check_rates(config)?;
    let last = r.num_videos as u64 - 1;
    if r.seed.checked_add(last).is_none() {
        let why = format!("the seeds of {} videos exceed 64 bits; use a smaller seed", r.num_videos);
        return fail(OutOfRange, "request.seed", r.seed, why);
    }
    if let Some((image, frames)) = count.and_then(|frames| Some((outside(config, frames)?, frames))) {
        let why = format!("the video has {frames} frames, numbered from 0");
        return fail(OutOfRange, "request.images", format!("frame {image}"), why);
    }
    if let Some(why) = config.pipeline.spec().images_fault(r.images.len()) {
        return fail(config.pipeline.spec().images.fault_kind(), "pipeline", config.pipeline.name(), why);
    }
    if let Some(why) = config.pipeline.spec().references_fault(r.reference_videos.len()) {
        return fail(config.pipeline.spec().reference_videos.fault_kind(), "pipeline", config.pipeline.name(), why);
    }
    references::check_options(config)?;
    check_hdr(config)?;
    if config.follows_references() && config.doubles_frames() {
        let key = if r.reference_videos.is_empty() { "request.video" } else { "request.reference_videos" };
        let why = "reference videos are not supported with temporal_x2; remove temporal_x2 or ";
        let why = message![why, Setting::Key(key)];
        return fail(Conflict, "two_stage.upsample", "temporal_x2", why);
    }
    check_source(config)?;
    check_chain(config)?;
    if let Some(why) = config.pipeline.spec().audio_fault(r.audio.is_some()) {
        return fail(config.pipeline.spec().audio.fault_kind(), "pipeline", config.pipeline.name(), why);
    }
    if r.audio.is_some() && !r.audio_latents.is_empty() {
        let audio = Setting::Key("request.audio");
        let why = message![audio, " already provides the complete audio; remove ", audio, " or request.audio_latents"];
        return fail(Conflict, "request.audio_latents", format!("{} spans", r.audio_latents.len()), why);
    }
    if let Some(seconds) = r.audio.as_ref().and_then(|audio| audio.duration).filter(|seconds| *seconds <= 0.0) {
        return fail(OutOfRange, "request.audio.duration", seconds, Limit::Above(0.0));
    }
    check_dfr(config)?;
    if !config.output.audio && !config.pipeline.spec().generates_video {
        let why = format!("the pipeline {} generates audio; set ", config.pipeline.name());
        let why = message![why, Setting::Key("output.audio"), " to true"];
        return fail(Unsupported, "output.audio", "false", why);
    }
    let slots = config.conditioning.generated_keyframes;
    if slots > 0 && !config.pipeline.spec().generated_keyframes {
        let user = format!("only the pipeline {} uses ", pipeline_names("or", |spec| spec.generated_keyframes));
        let other = format!(" ({} generates its own keyframes)", pipeline_names("or", PipelineSpec::has_rounds));
        let why = remove(message![user, Setting::This, other]);
        return fail(Unsupported, "conditioning.generated_keyframes", slots, why);
    }
    Ok(())
}

/// Rejects options that the pipeline `hdr` does not support.
fn check_hdr(config: &Config) -> Result<(), ConfigError> {
    if !config.pipeline.spec().hdr {
        return Ok(());
    }
    let weighted = |video: &ReferenceVideo| video.attention_mask.is_some() || video.attention_strength < 1.0;
    if config.request.reference_videos.iter().any(weighted) {
        let why = "the pipeline hdr does not support attention_strength and attention_mask; remove them";
        return fail(Unsupported, "request.reference_videos", "with weighted attention", why);
    }
    if config.request.text_embeddings.is_some() && config.request.enhance_prompt {
        let why = "request.text_embeddings replaces the prompt; remove one of them";
        return fail(Conflict, "request.enhance_prompt", true, why);
    }
    if config.request.text_embeddings.is_some() && config.scales().video.cfg != 1.0 {
        let why = "contains no negative prompt, but guidance needs one; set guidance.video.cfg to 1";
        return fail(Conflict, "request.text_embeddings", "a file", why);
    }
    let scales = ["conditioning.reference_downscale_factor", "conditioning.reference_temporal_scale_factor"];
    for (key, scale) in scales.into_iter().zip(config.conditioning.reference_scales()) {
        if scale != 1 {
            return fail(
                Unsupported,
                key,
                scale,
                "the pipeline hdr supports only reference videos of its own size; set 1",
            );
        }
    }
    let upsample = config.upsamplings();
    if upsample != [Upsampling::SpatialX2] {
        let why = "the pipeline hdr supports only spatial_x2; remove this key";
        return fail(Unsupported, "two_stage.upsample", "other steps", why);
    }
    if config.reference != Reference::Official {
        let own = if config.reference == Reference::Diffusers { "diffusers" } else { "official_1_0" };
        return fail(Unsupported, "reference", own, "the pipeline hdr computes as Lightricks 1.2.0 does; use official");
    }
    if config.two_stage.cache.kind != CachePolicy::Off {
        return fail(
            Unsupported,
            "two_stage.cache",
            "on",
            "the pipeline hdr supports no step cache in its second stage",
        );
    }
    Ok(())
}

fn check_sampling(config: &Config) -> Result<(), ConfigError> {
    if let Some(sigmas) = &config.sampler.sigmas
        && let Some(why) = schedule_fault(sigmas)
    {
        return fail(OutOfRange, "sampler.sigmas", list(sigmas), why);
    }
    let schedule = config.sampler.schedule;
    if schedule != ScheduleKind::Beta && config.sampler.beta != BetaSchedule::default() {
        let BetaSchedule { alpha, beta, shift } = config.sampler.beta;
        let why = "only the schedule beta has these parameters; remove them, or set sampler.schedule to beta";
        return fail(NoEffect, "sampler.beta", format!("alpha {alpha}, beta {beta}, shift {shift}"), why);
    }
    if config.sampler.sigmas.is_some() && schedule != ScheduleKind::Ltx2 {
        let why = message![
            Setting::Key("sampler.sigmas"),
            " already sets the noise levels; remove ",
            Setting::This,
            ", or set ",
            Setting::Key("sampler.steps"),
            " instead of ",
            Setting::Key("sampler.sigmas")
        ];
        return fail(Conflict, "sampler.schedule", word(schedule), why);
    }
    // `reference: diffusers` sets this key together with others; with any other reference, the user set it explicitly.
    let asked = config.sampler.sigma_shift == Reference::Diffusers && config.reference != Reference::Diffusers;
    if asked && schedule != ScheduleKind::Ltx2 {
        let why = format!("sampler.schedule = {} does not depend on the number of tokens", word(schedule));
        let why = remove_one(why, "sampler.schedule");
        return fail(NoEffect, "sampler.sigma_shift", "diffusers", why);
    }
    if let Some(why) = schedule_fault(&config.two_stage.sigmas) {
        return fail(OutOfRange, "two_stage.sigmas", list(&config.two_stage.sigmas), why);
    }
    if let Some(why) = schedule_fault(&config.dfr.sigmas) {
        return fail(OutOfRange, "dfr.sigmas", list(&config.dfr.sigmas), why);
    }
    check_sampler(config)?;
    check_guidance(config)
}

fn check_upsampling(config: &Config) -> Result<(), ConfigError> {
    let (asked, spec) = (&config.two_stage.upsample, config.pipeline.spec());
    if *asked == TwoStage::default().upsample {
        return Ok(());
    }
    let in_time = asked.iter().filter(|upsampling| **upsampling == Upsampling::TemporalX2).count();
    let why: Message = match (in_time, asked.len() - in_time) {
        _ if !spec.has_two_stages() => format!(
            "the pipeline {} has only one stage; remove two_stage.upsample, or use a two-stage pipeline",
            spec.name
        )
        .into(),
        _ if spec.has_rounds() => format!(
            "the pipeline {} always uses spatial_x2, then dfr.temporal_rounds; remove two_stage.upsample",
            spec.name
        )
        .into(),
        (0, 0) => "must list at least one upsampling".into(),
        (2.., _) | (_, 2..) => "must list at most one spatial and one temporal upsampling".into(),
        _ => return Ok(()),
    };
    let kind = if spec.has_two_stages() && !spec.has_rounds() { OutOfRange } else { Unsupported };
    let names: Vec<_> = asked.iter().map(|upsampling| upsampling.name()).collect();
    fail(kind, "two_stage.upsample", format!("[{}]", names.join(", ")), why)
}

fn check_run(config: &Config) -> Result<(), ConfigError> {
    if let Some(t) = config.runtime.tiling {
        let pairs = [("pixels", t.pixels, t.overlap, 32), ("frames", t.frames, t.frame_overlap, FRAME_STEP)];
        for (what, size, overlap, step) in pairs {
            if size % step != 0 || overlap % step != 0 || overlap >= size {
                let why = format!("{what} and overlap must be multiples of {step}, and overlap less than {what}");
                return fail(OutOfRange, "runtime.tiling", format!("{what} {size}, overlap {overlap}"), why);
            }
        }
    }
    if let Some(gib) = config.runtime.memory_limit.filter(|gib| *gib <= 0.0) {
        return fail(OutOfRange, "runtime.memory_limit", gib, "must be more than 0 GiB");
    }
    if let Err(why) = config.chip() {
        return fail(NotOneOf, "runtime.chip_file", config.runtime.chip_file.as_deref().unwrap_or_default(), why);
    }
    if let (Some(blocks), WeightSource::File) = (config.model.blocks, config.model.weights) {
        let why = remove("only random weights allow fewer blocks").then(", or set model.weights to random");
        return fail(Conflict, "model.blocks", blocks, why);
    }
    if let Some(lora) = config.model.loras.iter().find(|l| l.stages.iter().any(|s| !matches!(s, 1 | 2))) {
        let why = format!("stages must be [1], [2] or [1, 2], not {}", list(&lora.stages));
        return fail(OutOfRange, "model.loras", &lora.path, why);
    }
    if let Err(why) = config.platform() {
        return fail(NotOneOf, "runtime.platform", &config.runtime.platform, why);
    }
    if let Some(mesh) = &config.mesh
        && let Err(why) = layout::check_mesh(mesh)
    {
        return fail(OutOfRange, "mesh", layout::mesh_text(mesh), why);
    }
    Ok(())
}

fn check_enhancement(config: &Config) -> Result<(), ConfigError> {
    let own = &config.enhance;
    if let Some(endpoint) = &own.endpoint {
        let is_http = ["http://", "https://"].iter().any(|scheme| endpoint.starts_with(scheme));
        let host = authority(endpoint);
        if !is_http || host.1.is_empty() {
            let why = "must be the base URL of a chat server, such as http://localhost:8080/v1";
            return fail(OutOfRange, "enhance.endpoint", without_credentials(endpoint), why);
        }
        if host.0.is_some() || endpoint.contains(['?', '#']) {
            let why = "must not contain credentials or a query, because sidecars record it; pass the API key in the \
                       environment variable that enhance.key_env names";
            let shown = without_credentials(endpoint);
            return fail(OutOfRange, "enhance.endpoint", shown.split(['?', '#']).next().unwrap_or_default(), why);
        }
        if own.model.as_ref().is_none_or(|model| model.trim().is_empty()) {
            return fail(
                Conflict,
                "enhance.endpoint",
                endpoint,
                "set enhance.model to the name of the endpoint's model",
            );
        }
    }
    if let Some(name) = own.key_env.as_ref().filter(|name| !is_variable_name(name)) {
        // Not quoted, because the value may be a key.
        let shown = format!("{} characters", name.chars().count());
        return fail(OutOfRange, "enhance.key_env", shown, "must be the name of an environment variable, not the key");
    }
    if own.top_p == Some(0.0) {
        return fail(OutOfRange, "enhance.top_p", 0, "must be more than 0");
    }
    let later = config.request.chain.iter().flat_map(|chain| &chain.prompts);
    let mut prompts = config.request.prompt.iter().filter(|_| config.request.prompts.is_none()).chain(later);
    if config.request.enhance_prompt && prompts.any(|prompt| prompt.trim().is_empty()) {
        let why = "an empty prompt cannot be enhanced; write a prompt, or set request.enhance_prompt to false";
        return fail(Conflict, "request.enhance_prompt", true, why);
    }
    Ok(())
}

fn is_variable_name(name: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !name.is_empty()
        && name.len() <= 128
        && name.chars().all(is_word)
        && !name.starts_with(|c: char| c.is_ascii_digit())
}

/// Checks the sampler options and the step caches, and that no stage needs more than [`MAX_STEPS`] transformer
/// evaluations.
fn check_sampler(config: &Config) -> Result<(), ConfigError> {
    let (first, second) = config.samplers().map_err(|(key, value)| {
        let why = "this sampler does not have this option; remove it, or choose another sampler.kind";
        ConfigError::value(Unsupported, key, value, why)
    })?;
    let listed = |sigmas: &[f64]| sigmas.strip_suffix(&[0.0]).unwrap_or(sigmas).len();
    let own = config.sampler.sigmas.as_deref().map(|sigmas| ("sampler.sigmas", listed(sigmas), &first));
    let own = own.unwrap_or(("sampler.steps", config.sampler.steps, &first));
    let two_stages = config.pipeline.has_two_stages();
    let refine = two_stages.then(|| ("two_stage.sigmas", listed(&config.two_stage.sigmas), &second));
    for (key, steps, sampler) in [own].into_iter().chain(refine) {
        let fits = |steps: &usize| sampler.evaluations(*steps) <= MAX_STEPS;
        if !fits(&steps) {
            let most = (1..steps).rev().find(fits).unwrap_or(1);
            let why =
                format!("requires {} transformer evaluations; use at most {most} steps", sampler.evaluations(steps));
            return fail(OutOfRange, key, format!("{steps} steps"), why);
        }
    }
    let sampler_key = config.two_stage.sampler.map_or("sampler.kind", |_| "two_stage.sampler");
    let second = refine.map(|(_, steps, sampler)| StageSteps { sampler, sampler_key, steps });
    check_caches(config, &StageSteps { sampler: own.2, sampler_key: "sampler.kind", steps: own.1 }, second.as_ref())
}

/// Checks guidance options against the guider and the sampler.
fn check_guidance(config: &Config) -> Result<(), ConfigError> {
    let guidance = &config.guidance;
    if let Err((key, value)) = guidance.kind.guider(guidance.apg) {
        let why = "this guider does not have this option; remove it, or choose another guidance.kind";
        return fail(Unsupported, key, value, why);
    }
    let unsupported = |(key, value)| ConfigError::value(Unsupported, key, value, Message::default());
    let (sampler, _) = config.samplers().map_err(unsupported)?;
    let streams = [
        ("guidance.video.skip", "guidance.video.by_sigma", &guidance.video),
        ("guidance.audio.skip", "guidance.audio.by_sigma", &guidance.audio),
    ];
    for (skip_key, sigma_key, own) in streams {
        let bounds = own.by_sigma.as_deref().unwrap_or_default();
        let levels = format!("sigmas {}", list(&bounds.iter().map(|at| at.sigma).collect::<Vec<f64>>()));
        if let Some(pair) = bounds.windows(2).find(|pair| pair[1].sigma >= pair[0].sigma) {
            let why = format!("noise levels must decrease, but {} follows {}", pair[1].sigma, pair[0].sigma);
            return fail(OutOfRange, sigma_key, levels, why);
        }
        if own.by_sigma.as_ref().is_some_and(Vec::is_empty)
            || bounds.iter().any(|at| at.sigma.is_nan() || at.sigma < 0.0)
        {
            return fail(OutOfRange, sigma_key, levels, "must have at least one entry, and no sigma below 0");
        }
        if let Some(at) = bounds.iter().find(|at| at.stg.is_some() && guidance.stg_streams == Reference::Diffusers) {
            let why = "not supported with guidance.stg_streams: diffusers; set guidance.stg_streams to official";
            return fail(Conflict, sigma_key, format!("stg at {}", at.sigma), why);
        }
        let skip = own.skip.into_iter().chain(bounds.iter().filter_map(|at| at.skip)).max().unwrap_or(0);
        let why = match skip {
            0 => continue,
            _ if sampler.evaluations(2) != 2 => "a sampler with two evaluations per step cannot skip steps",
            _ if sampler.reads_negative() => "this sampler reads the prediction for the negative prompt at every step",
            _ => continue,
        };
        return fail(Unsupported, skip_key, skip, remove(why).then(", or choose another sampler.kind"));
    }
    Ok(())
}

fn list<T: std::fmt::Display>(items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(ToString::to_string).collect();
    format!("[{}]", items.join(", "))
}

/// Returns the YAML name of an enum value.
pub(super) fn word(choice: impl serde::Serialize) -> String {
    match serde_json::to_value(choice) {
        Ok(Value::String(word)) => word,
        other => other.map_or_else(|_| String::new(), |value| value.to_string()),
    }
}

/// Returns the number of denoising steps that a list of sigmas defines: one for each sigma other than 0.
pub(crate) fn steps_of(sigmas: &Value) -> usize {
    let list = sigmas.as_array().map_or(&[][..], Vec::as_slice);
    list.iter().filter(|s| s.as_f64() != Some(0.0)).count()
}

fn schedule_fault(sigmas: &[f64]) -> Option<String> {
    let body = sigmas.strip_suffix(&[0.0]).unwrap_or(sigmas);
    if !(1..=MAX_STEPS).contains(&body.len()) {
        return Some(format!("has {} steps, but must have 1 to {MAX_STEPS}", body.len()));
    }
    if let Some(bad) = body.iter().find(|s| !(**s > 0.0 && **s <= 1.0)) {
        return Some(format!("the noise level {bad} must be above 0 and at most 1"));
    }
    body.windows(2).find(|w| w[1] >= w[0]).map(|w| format!("noise levels must decrease, but {} follows {}", w[1], w[0]))
}

impl Config {
    /// Returns the number of frames per denoising pass: the frames of one clip (`request.chain.clip`), or all frames of
    /// a video that is not chained. `None` for `num_frames: auto`.
    pub(crate) fn clip_frames(&self) -> Option<usize> {
        let all = self.request.num_frames.count()?;
        Some(self.request.chain.as_ref().map_or(all, |chain| chain.clip.min(all)))
    }

    /// Returns the input audio to which the generated video is matched; `None` if there is no input audio. With an
    /// input video, also returns `None`, because `request.audio` is then the sound of that video.
    pub(crate) fn given_sound(&self) -> Option<&GivenAudio> {
        self.request.audio.as_ref().filter(|_| !self.pipeline.takes_video())
    }

    /// Returns the pipelines that a server runs: the configured one, then those of `serve.pipelines`.
    ///
    /// # Errors
    /// Returns an error that lists the pipelines if `serve.pipelines` has an unknown name.
    pub fn served_pipelines(&self) -> Result<Vec<Pipeline>, ConfigError> {
        let named = |name: &String| {
            let found = Pipeline::value_variants().iter().find(|pipeline| pipeline.name() == name).copied();
            let why = || format!("unknown pipeline; use {}", pipeline_names("or", |_| true));
            found.ok_or_else(|| ConfigError::value(NotOneOf, "serve.pipelines", name, why()))
        };
        let all = [Ok(self.pipeline)].into_iter().chain(self.serve.pipelines.iter().map(named));
        all.collect()
    }

    /// Returns the selected platform.
    ///
    /// # Errors
    /// Returns an error that lists the platforms if the name is unknown.
    pub(crate) fn platform(&self) -> Result<Choice, String> {
        self.runtime.platform.parse()
    }

    /// Returns the samplers of both stages. Options that only some samplers accept apply to the first stage; the second
    /// stage uses them only if it has the same sampler.
    ///
    /// # Errors
    /// Returns the key and value of an option that the first sampler does not accept.
    pub(crate) fn samplers(&self) -> Result<(AnySampler, AnySampler), (&'static str, String)> {
        let options = self.sampler.options(self.runtime.dtype);
        let first = self.sampler.kind.sampler(options)?;
        let second = match self.two_stage.sampler.filter(|kind| *kind != self.sampler.kind) {
            Some(kind) => kind.sampler(SamplerOptions { draws: options.draws, ..SamplerOptions::default() })?,
            None => first.clone(),
        };
        Ok((first, second))
    }

    /// Returns the guidance scales of both streams. A value missing in one stream is inherited from the other stream; a
    /// value missing in both disables its guidance term.
    pub(crate) fn scales(&self) -> Av<ResolvedScales> {
        let (video, audio) = (&self.guidance.video, &self.guidance.audio);
        Av { video: ResolvedScales::new(video, audio), audio: ResolvedScales::new(audio, video) }
    }
}

/// Guidance scales of one stream. A missing value is that of the other stream; if both are missing, it is neutral.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ResolvedScales {
    /// Classifier-free guidance scale; 1 disables it.
    pub(crate) cfg: f64,
    /// STG scale; 0 disables it.
    pub(crate) stg: f64,
    /// Modality guidance scale; 1 disables it.
    pub(crate) modality: f64,
    /// Strength (0 to 1) of rescaling the guided prediction to the standard deviation of the prediction before
    /// guidance; 0 disables it.
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
    use crate::config::load;
    use crate::config::tests::set;

    #[test]
    fn schedules_must_decrease() {
        assert_eq!(schedule_fault(&[1.0, 0.5, 0.0]), None);
        assert_eq!(schedule_fault(&[0.5, 0.5]).unwrap(), "noise levels must decrease, but 0.5 follows 0.5");
        assert_eq!(schedule_fault(&[1.5]).unwrap(), "the noise level 1.5 must be above 0 and at most 1");
        assert_eq!(schedule_fault(&[0.0]).unwrap(), "has 0 steps, but must have 1 to 256");
        assert_eq!(steps_of(&serde_json::json!([1, 0.5, 0])), 2);
    }

    #[test]
    fn missing_scale_inherits_from_the_other_stream() {
        let mut config = Config::default();
        assert_eq!(config.scales().video, ResolvedScales { cfg: 1.0, stg: 0.0, modality: 1.0, rescale: 0.0 });
        config.guidance.video.cfg = Some(4.0);
        config.guidance.audio.stg = Some(1.0);
        assert_eq!(config.scales().audio.cfg, 4.0);
        assert_eq!(config.scales().video.stg, 1.0);
    }

    #[test]
    fn invalid_upsampling_errors_list_valid_values() {
        let two = "pipeline=two_stage";
        for (pairs, want) in [
            (
                [two, "request.width=672"],
                "request.width = 672 (--set): must be a multiple of 64 with two stages; the nearest are 640 and 704",
            ),
            (
                [two, "two_stage.upsample=[temporal_x2, spatial_x1_5]"],
                "request.height = 1024 (preset ltx2_two_stage): must be a multiple of 96 with spatial_x1_5 between two stages; the \
                 nearest are 960 and 1056",
            ),
            (
                [two, "two_stage.upsample=[spatial_x2, temporal_x2]"],
                "request.num_frames = 121 (preset ltx2): must be one more than a multiple of 16 with temporal_x2 between two stages; \
                 the nearest are 113 and 129",
            ),
            ([two, "two_stage.upsample=[]"], "two_stage.upsample = [] (--set): must list at least one upsampling"),
            (
                [two, "two_stage.upsample=[spatial_x2, spatial_x1_5]"],
                "two_stage.upsample = [spatial_x2, spatial_x1_5] (--set): must list at most one spatial and one temporal upsampling",
            ),
            (
                [two, "two_stage.upsample=[temporal_x2, temporal_x2]"],
                "two_stage.upsample = [temporal_x2, temporal_x2] (--set): must list at most one spatial and one temporal upsampling",
            ),
            (
                ["pipeline=dfr", "two_stage.upsample=[spatial_x1_5]"],
                "two_stage.upsample = [spatial_x1_5] (--set): the pipeline dfr always uses spatial_x2, then dfr.temporal_rounds; remove two_stage.upsample",
            ),
        ] {
            assert_eq!(load(&set(&pairs)).unwrap_err().to_string(), want, "{pairs:?}");
        }
    }
}
