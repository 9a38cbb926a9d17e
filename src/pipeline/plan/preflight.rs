//! Checks of a [`RunPlan`](super::run_plan::RunPlan) before anything is compiled, so that errors are reported as early
//! as possible.

use std::path::Path;

use serde_json::Value;

use super::layouts::{RankingDevices, ranking};
use super::setup;
use super::videos::RunVideos;
use crate::config::{AUTO, ActivationType, Config, FRAME_STEP, GivenAudio, LayerForm, VideoUse, WeightType};
use crate::kernels::AttentionKernel;
use crate::media::{Audio, Clip, ClipPart};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::output::hashes;
use crate::pipeline::programs::build::Programs;
use crate::pipeline::stages::condition_encoder;
use crate::pipeline::stages::prompts::read_contexts;
use crate::pipeline::stages::sound_encoder::{given_sound, read_input_audio};
use crate::pjrt::discover::Platform;
use crate::request::{Condition, Content, InpaintArea, ModelSizes, Placement, Request, Shared};
use crate::runtime::platforms::spec;
use crate::runtime::{Toolchain, platform};

/// Checks layout, number formats and sizes by building the programs for the platform on which they will run. Opens no
/// device.
pub(super) fn check_placement(config: &Config, programs: &Programs) -> Result<()> {
    let choice = config.platform().map_err(PipelineError::Input)?;
    match platform::expected(&choice) {
        Some(platform) if spec(platform).is_host => check_on_cpu(config, programs),
        Some(other) => check_on_devices(config, programs, other.name()),
        None => {
            // The platform is known only after its plugin is opened, so number formats and kernels cannot be checked
            // here.
            let mut own = config.clone();
            (own.runtime.weights, own.runtime.activations) = (WeightType::Bf16, ActivationType::Bf16);
            own.runtime.attention = AttentionKernel::Auto;
            own.runtime.layers = LayerForm::Auto;
            check_on_devices(&own, programs, "")
        }
    }
}

/// Builds the programs for the CPU. The configuration determines the number of (virtual) devices.
fn check_on_cpu(config: &Config, programs: &Programs) -> Result<()> {
    let toolchain = Toolchain::of_kind("cpu", "cpu");
    let count = config.virtual_devices()?;
    let config = match (config.layout == AUTO, count) {
        (true, 2..) => {
            let devices = RankingDevices { toolchain: &toolchain, count, capacity: None, chip: None };
            return ranking(config, devices).map(drop);
        }
        (true, _) => &Config { layout: "replicated".into(), ..config.clone() },
        (false, _) => config,
    };
    programs.check(&setup::build_for(config, count, &toolchain)?)
}

/// Builds the programs for as many devices of a platform as the mesh has. If layout or mesh depend on the number of
/// devices present, builds them for one device.
fn check_on_devices(config: &Config, programs: &Programs, platform: &str) -> Result<()> {
    let named = config.named_devices()?.filter(|_| config.layout != AUTO);
    let build = match named {
        Some(count) => setup::build(config, count, platform, "")?,
        None => setup::build(&on_one_device(config), 1, platform, "")?,
    };
    programs.check(&build)
}

fn on_one_device(config: &Config) -> Config {
    Config { layout: "replicated".into(), mesh: None, ..config.clone() }
}

/// Checks that a model's components match the configuration and each other, by building the programs of a run for one
/// device.
///
/// # Errors
/// Returns an error for the first component that does not match, or if the model's version does not support a requested
/// feature.
pub fn check_components(config: &Config) -> Result<()> {
    Programs::from_config(config, None)?.check(&setup::build(&on_one_device(config), 1, Platform::Cpu.name(), "")?)
}

/// Returns which part of the input video the requests of a configuration need.
fn wanted(config: &Config) -> ClipPart {
    let frames = config.request.num_frames.count();
    match config.pipeline.spec().video {
        Some(VideoUse::Span | VideoUse::Region) => {
            ClipPart { frames, seconds: frames.map(|frames| frames as f64 / config.request.frame_rate) }
        }
        Some(VideoUse::Reference) => ClipPart { frames, seconds: None },
        // The video's own audio is not read, because it is replaced. Trailing frames that do not fill a latent frame
        // are kept if the video ends there; one more latent frame is read to find out whether it does.
        Some(VideoUse::Whole) => {
            ClipPart { frames: frames.map(|frames| frames.saturating_add(FRAME_STEP)), seconds: Some(0.0) }
        }
        _ => ClipPart::default(),
    }
}

/// Rejects an input video without audio if a request keeps the audio of the video.
fn check_kept_sound(path: &str, clip: &Clip, requests: &[Request]) -> Result<()> {
    let is_kept = |c: &Condition| matches!(c.content, Content::VideoSound { .. }) && c.placement == Placement::Whole;
    if clip.sound.is_some() || !requests.iter().any(|request| request.conditions.audio.iter().any(is_kept)) {
        return Ok(());
    }
    let is_inpainted = |c: &Condition| matches!(c.placement, Placement::Kept(_));
    let reason = match requests.iter().any(|request| request.conditions.video.iter().any(is_inpainted)) {
        true => {
            "has no sound to keep; set request.inpaint.audio to true to generate sound, or pass its sound with --audio"
        }
        false => "has no sound to keep (request.retake.audio: false); remove this key to generate sound",
    };
    Err(PipelineError::File { path: path.into(), reason: reason.into() })
}

/// Reads the input video and the input audio of a configuration once and attaches them to all requests.
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
    // All requests have the same input audio.
    let sound = requests.first().map(read_input_audio).transpose().map_err(given("request.audio"))?;
    if let Some(sound) = sound.flatten().map(Shared::from) {
        requests.iter_mut().for_each(|request| request.sound = Some(sound.clone()));
    }
    Ok(())
}

/// Reads `request.audio` as the audio of an input video. Fails if the video has audio itself.
fn sound_for(clip: &Clip, path: &str, audio: &GivenAudio, frame_rate: f64) -> Result<Audio> {
    if clip.sound.is_some() {
        let why = "has its own sound; remove request.audio, or pass the frames without sound";
        return Err(PipelineError::Usage(format!("request.audio = {}: the input video {path} {why}", audio.path)));
    }
    let seconds = clip.frames.count() as f64 / frame_rate;
    given_sound(Path::new(&audio.path), audio.start, audio.duration, seconds)
}

/// Rejects options that are not supported for chained videos.
pub(super) fn check_chain(requests: &[Request], videos: &RunVideos, audio: bool) -> Result<()> {
    if requests.iter().all(|request| request.chain.is_none()) {
        return Ok(());
    }
    let unserved = [
        (videos.dump.is_some(), "--dump is not supported for a video of several clips"),
        (!audio, "output.audio: false is not supported for a video of several clips"),
    ];
    match unserved.into_iter().find(|(asked, _)| *asked) {
        Some((_, why)) => Err(PipelineError::Usage(format!("{why}; remove this setting or --chain (request.chain)"))),
        None => Ok(()),
    }
}

/// Checks the file with text contexts that HDR requests with this configuration use, if any.
///
/// # Errors
/// Returns an error if the file cannot be read, or if its tensors have other shapes than the model needs.
pub(crate) fn check_text_embeddings(config: &Config, sizes: &ModelSizes) -> Result<()> {
    let path = config.request.text_embeddings.as_deref().filter(|_| config.pipeline.spec().hdr);
    path.map_or(Ok(()), |path| check_contexts(Path::new(path), sizes, config.request.max_sequence_length))
}

fn check_contexts(path: &Path, sizes: &ModelSizes, tokens: usize) -> Result<()> {
    let given = |error| PipelineError::Given { key: "request.text_embeddings", source: Box::new(error) };
    read_contexts(path, sizes, tokens, 1).map(drop).map_err(given)
}

/// Checks that the requests can use their input files.
pub(crate) fn check_input_files(requests: &[Request], sizes: &ModelSizes) -> Result<()> {
    for request in requests {
        if let Some(path) = &request.text_embeddings {
            check_contexts(path, sizes, request.max_sequence_length)?;
        }
        for condition in request.conditions.as_ref().into_iter().flatten() {
            let key = match &condition.content {
                Content::Image { .. } => "request.images",
                Content::AudioLatents { .. } => "request.audio_latents",
                Content::Reference { .. } => "request.reference_videos",
                _ if matches!(condition.placement, Placement::Kept(InpaintArea::Mask(_))) => "request.mask",
                _ => "request.video",
            };
            let given = |error| PipelineError::Given { key, source: Box::new(error) };
            condition_encoder::check(condition, request).map_err(given)?;
        }
    }
    Ok(())
}

/// Returns the hashes of a configuration's input files, for sidecars; null if no sidecar is written.
pub(crate) fn inputs(config: &Config) -> Result<Value> {
    if config.output.sidecar { Ok(Value::Object(hashes::of_given(config)?)) } else { Ok(Value::Null) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{NumFrames, Pipeline};

    /// A retake of the first seconds of an hour-long video decodes only those seconds. An extension decodes the
    /// complete video, because the output contains all of it.
    #[test]
    fn only_the_needed_part_of_a_video_is_read() {
        let mut config = Config::default();
        config.request.num_frames = NumFrames::Count(49);
        let part = |pipeline| wanted(&Config { pipeline, ..config.clone() });
        assert_eq!(part(Pipeline::Retake), ClipPart { frames: Some(49), seconds: Some(49.0 / 24.0) });
        assert_eq!(part(Pipeline::VideoToAudio), ClipPart { frames: Some(57), seconds: Some(0.0) });
        assert_eq!(part(Pipeline::Extend), ClipPart::default());
    }
}
