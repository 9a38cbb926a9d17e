//! Verification of a run before anything is compiled. `generate`, its dry run, `check`, `bench`, `profile` and `serve` go
//! through here, so that they agree on what a run needs, and nothing that can fail early fails after the last step.

use std::path::Path;

use serde_json::Value;

use super::condition_encoder;
use super::duration;
use super::error::{PipelineError, Result};
use super::hashes;
use super::layouts::{Devices, ranking};
use super::loras::Loras;
use super::model::Model;
use super::options::GenerateOptions;
use super::outputs;
use super::programs::Programs;
use super::recorded;
use super::setup;
use super::sound_encoder::{given_sound, sound_of};
use crate::config::{
    AUTO, ActivationType, Config, FRAME_STEP, GivenAudio, Job, Pipeline, Sidecar, WeightType, beyond_training,
};
use crate::kernels::AttentionKernel;
use crate::media::{Audio, Clip, ClipPart};
use crate::pjrt::discover::Platform;
use crate::request::{Condition, Content, Placement, Request, Shared};
use crate::runtime::{Toolchain, platform};

/// A verified run: its model, its requests, and the hashes of its inputs.
pub struct Preflight {
    /// The model. Every component that the run reads is verified, and its fingerprint is computed.
    pub model: Model,
    /// The requests of the jobs, with the given video and sound.
    pub requests: Vec<Request>,
    /// SHA-256 of the given files by path, for sidecars; null if none is written.
    pub inputs: Value,
}

impl Preflight {
    /// Verifies a run of `jobs`: the model's components, the requests, the given files, the LoRAs. With a `sidecar`, which the run
    /// repeats, inputs and model are compared with those that it records. If the number of frames is predicted, the requests have
    /// the most frames that a prediction may give.
    ///
    /// # Errors
    /// The first thing that the run would fail at before it compiles a program.
    pub fn of(config: &Config, jobs: &[Job], sidecar: Option<&Sidecar>) -> Result<Self> {
        // Of a predicted number of frames the longest: what predicts it is a component of the run all the same.
        let (asked, config) = (config, &duration::longest(config, jobs)?);
        // What no model of this generation can do, and components that do not fit each other, are said before what files lack.
        let programs = match Programs::of(config, None) {
            Err(error @ (PipelineError::Usage(_) | PipelineError::Input(_))) => return Err(error),
            other => other,
        };
        let model = Model::of(asked)?;
        let requests = requests(config, jobs, &model)?;
        let programs = programs?;
        check_placement(config, &programs)?;
        setup::round_trip(&mut config.clone(), None)?;
        Loras::open(&config.model)?.check(&model.weights)?;
        model.identity(asked)?;
        recorded::check_rerun(config, sidecar, &model)?;
        Ok(Preflight { inputs: inputs(config)?, model, requests })
    }
}

/// [`Preflight::of`] for `generate`, with its output files and the room for them.
///
/// # Errors
/// The first thing that the run would fail at before it compiles a program.
pub fn preflight(config: &Config, options: &GenerateOptions) -> Result<Preflight> {
    if config.request.prompt.is_none() && config.request.prompts.is_none() {
        let why = "no prompt: give --prompt, --prompts or request.prompt in the YAML";
        return Err(PipelineError::Usage(why.into()));
    }
    outputs::check_places(config, options)?;
    let run = Preflight::of(config, &options.jobs, options.sidecar.as_ref())?;
    check_chain(&run.requests, options, config.output.audio)?;
    if config.request.num_frames.count().is_some() {
        outputs::check_room(config, options, &run.requests, run.model.sample_rate)?;
    }
    Ok(run)
}

/// Checks layout, numeric formats and the sizes of components against each other by writing the programs for the platform that
/// the run will open. No device is opened.
fn check_placement(config: &Config, programs: &Programs) -> Result<()> {
    let choice = config.platform().map_err(PipelineError::Input)?;
    match platform::expected(&choice) {
        Some(Platform::Cpu) => check_on_cpu(config, programs),
        Some(other) => check_on_devices(config, programs, other.name()),
        None => {
            // The plugin decides which numeric formats and kernels it takes.
            let mut own = config.clone();
            (own.runtime.weights, own.runtime.activations) = (WeightType::Bf16, ActivationType::Bf16);
            own.runtime.attention = AttentionKernel::Auto;
            check_on_devices(&own, programs, "")
        }
    }
}

/// Writes the programs for a CPU, whose number of devices the configuration decides.
fn check_on_cpu(config: &Config, programs: &Programs) -> Result<()> {
    let toolchain = Toolchain { platform: "cpu".into(), kind: "cpu".into(), version: String::new() };
    let count = config.virtual_devices()?;
    let config = match (config.layout == AUTO, count) {
        (true, 2..) => {
            let devices = Devices { toolchain: &toolchain, count, capacity: None, chip: None };
            return ranking(config, devices).map(drop);
        }
        (true, _) => &Config { layout: "replicated".into(), ..config.clone() },
        (false, _) => config,
    };
    programs.check(&setup::build_for(config, count, &toolchain)?)
}

/// Writes the programs for as many devices of a platform as the mesh names; for one where the number of devices that are there
/// decides about layout or mesh.
fn check_on_devices(config: &Config, programs: &Programs, platform: &str) -> Result<()> {
    let named = config.named_devices()?.filter(|_| config.layout != AUTO);
    let build = match named {
        Some(count) => setup::build(config, count, platform, "")?,
        None => setup::build(&on_one_device(config), 1, platform, "")?,
    };
    programs.check(&build)
}

/// The configuration on one device.
fn on_one_device(config: &Config) -> Config {
    Config { layout: "replicated".into(), mesh: None, ..config.clone() }
}

/// Checks whether a model's components fit a configuration and each other: the programs of a run are written for one device.
///
/// # Errors
/// The first component that does not fit, or what its generation cannot do.
pub fn check_components(config: &Config) -> Result<()> {
    Programs::of(config, None)?.check(&setup::build(&on_one_device(config), 1, Platform::Cpu.name(), "")?)
}

/// The part of a given video that a configuration's requests take.
fn wanted(config: &Config) -> ClipPart {
    let frames = config.request.num_frames.count();
    match config.pipeline {
        Pipeline::Retake => {
            ClipPart { frames, seconds: frames.map(|frames| frames as f64 / config.request.frame_rate) }
        }
        // Its sound is another one. Frames that make no whole latent stay: there are none where as many as make one follow.
        Pipeline::VideoToAudio => {
            ClipPart { frames: frames.map(|frames| frames.saturating_add(FRAME_STEP)), seconds: Some(0.0) }
        }
        _ => ClipPart::default(),
    }
}

/// Refuses a video without sound whose sound is to be kept.
fn check_kept_sound(path: &str, clip: &Clip, requests: &[Request]) -> Result<()> {
    let is_kept = |c: &Condition| matches!(c.content, Content::VideoSound { .. }) && c.placement == Placement::Whole;
    if clip.sound.is_some() || !requests.iter().any(|request| request.conditions.audio.iter().any(is_kept)) {
        return Ok(());
    }
    let reason =
        "has no sound, and request.retake.audio: false keeps it; leave that out, and sound is made for all of it";
    Err(PipelineError::File { path: path.into(), reason: reason.into() })
}

/// Gives requests the video and the sound that a configuration names, each read once.
///
/// # Errors
/// A file that cannot be read, or lacks the sound that is kept.
pub(crate) fn give(config: &Config, requests: &mut [Request]) -> Result<()> {
    let given = |key| move |error| PipelineError::Given { key, source: Box::new(error) };
    if let Some(path) = &config.request.video {
        let clip = Clip::read(Path::new(path), Path::new("ffmpeg"), wanted(config));
        let mut clip = clip.map_err(PipelineError::from).map_err(given("request.video"))?;
        if let Some(audio) = &config.request.audio {
            let sound = sound_for(&clip, path, audio, config.request.frame_rate);
            clip.sound = Some(sound.map_err(given("request.audio"))?);
        }
        check_kept_sound(path, &clip, requests).map_err(given("request.video"))?;
        let clip = Shared::from(clip);
        requests.iter_mut().for_each(|request| request.clip = Some(clip.clone()));
    }
    // All of them have the same one.
    let sound = requests.first().map(sound_of).transpose().map_err(given("request.audio"))?;
    if let Some(sound) = sound.flatten().map(Shared::from) {
        requests.iter_mut().for_each(|request| request.sound = Some(sound.clone()));
    }
    Ok(())
}

/// The sound of a given video that has none of its own.
fn sound_for(clip: &Clip, path: &str, audio: &GivenAudio, frame_rate: f64) -> Result<Audio> {
    if clip.sound.is_some() {
        let why = "has its own sound; leave out request.audio, or give its frames without sound";
        return Err(PipelineError::Usage(format!("request.audio = {}: the video {path} {why}", audio.path)));
    }
    let seconds = clip.frames.count() as f64 / frame_rate;
    given_sound(Path::new(&audio.path), audio.start, audio.duration, seconds)
}

/// Refuses what there is of a video of one clip only.
fn check_chain(requests: &[Request], options: &GenerateOptions, audio: bool) -> Result<()> {
    if requests.iter().all(|request| request.chain.is_none()) {
        return Ok(());
    }
    let unserved = [
        (options.dump.is_some(), "--dump: tensors of a video of several clips are not kept"),
        (!audio, "output.audio: false: a video of several clips has its sound"),
    ];
    match unserved.into_iter().find(|(asked, _)| *asked) {
        Some((_, why)) => Err(PipelineError::Usage(format!("{why}; leave it out, or --chain (request.chain)"))),
        None => Ok(()),
    }
}

/// The requests of the jobs, with the given files.
fn requests(config: &Config, jobs: &[Job], model: &Model) -> Result<Vec<Request>> {
    let mut requests = jobs.iter().map(|job| model.request(config, job)).collect::<Result<Vec<Request>>>()?;
    give(config, &mut requests)?;
    let warning = requests.first().and_then(|r| beyond_training(config, r.output_frames(), r.output_rate()));
    warning.iter().for_each(|warning| tracing::warn!("{warning}"));
    check_given(&requests)?;
    Ok(requests)
}

/// Refuses files that requests are given and cannot use.
///
/// # Errors
/// The first such file.
pub(crate) fn check_given(requests: &[Request]) -> Result<()> {
    for request in requests {
        for condition in request.conditions.as_ref().into_iter().flatten() {
            let key = match &condition.content {
                Content::Image { .. } => "request.images",
                Content::AudioLatents { .. } => "request.audio_latents",
                Content::Reference { .. } => "request.reference_videos",
                _ => "request.video",
            };
            let given = |error| PipelineError::Given { key, source: Box::new(error) };
            condition_encoder::check(condition).map_err(given)?;
        }
    }
    Ok(())
}

/// For sidecars, hashes of every file that a configuration's requests are made from.
pub(crate) fn inputs(config: &Config) -> Result<Value> {
    if config.output.sidecar { Ok(Value::Object(hashes::of_given(config)?)) } else { Ok(Value::Null) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::NumFrames;

    /// Of an hour, a retake of its first seconds decodes these; all is wanted where it is written again.
    #[test]
    fn no_more_is_read_than_is_wanted() {
        let mut config = Config::default();
        config.request.num_frames = NumFrames::Count(49);
        let part = |pipeline| wanted(&Config { pipeline, ..config.clone() });
        assert_eq!(part(Pipeline::Retake), ClipPart { frames: Some(49), seconds: Some(49.0 / 24.0) });
        assert_eq!(part(Pipeline::VideoToAudio), ClipPart { frames: Some(57), seconds: Some(0.0) });
        assert_eq!(part(Pipeline::Extend), ClipPart::default());
    }
}
