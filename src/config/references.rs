//! Reference videos: their scales by the LoRAs' headers, their frames by the files, where these are written nowhere.

use std::path::Path;

use serde_json::{Value, json};

use super::check::typed;
use super::error::{ConfigError, ValueOrigin};
use super::legal::{FRAME_STEP, whole_frames};
use super::pipeline::Pipeline;
use super::schema::{Config, ReferenceVideo};
use super::sidecar;
use super::tree::Tree;
use crate::media::{ClipInfo, probe_clip};
use crate::weights::ReferenceScales;

const VIDEOS: &str = "request.reference_videos";
const SCALES: [&str; 2] = ["conditioning.reference_downscale_factor", "conditioning.reference_temporal_scale_factor"];

/// Names the pipeline of requests with references that name none.
pub(super) fn name_pipeline(merged: &Tree, config: &Config, line: &mut Tree) {
    if !config.request.reference_videos.is_empty() && merged.origin("pipeline") == ValueOrigin::Default {
        line.set("pipeline", Pipeline::IcLora.name().into(), &merged.origin(VIDEOS));
    }
}

/// Takes over what headers and videos say; `sidecar_frames` is the number of frames of a sidecar below.
///
/// # Errors
/// A LoRA or a video that cannot be read; LoRAs of different scales.
pub(super) fn take(merged: &mut Tree, sidecar_frames: Option<usize>) -> Result<(), ConfigError> {
    let config = typed(merged)?;
    if config.pipeline.has_loras_in_first_stage() {
        keep_loras_in_first_stage(merged);
    }
    if config.request.reference_videos.is_empty() || config.pipeline.references_fault(1).is_some() {
        return Ok(());
    }
    forget_derived(merged, &config, sidecar_frames);
    take_scales(merged, &typed(merged)?)?;
    take_frames(merged, &typed(merged)?)
}

/// Takes out what a sidecar derived from LoRAs and from a number of frames that something overrides: scales, and the frames of
/// references that were as long as its video.
fn forget_derived(merged: &mut Tree, config: &Config, sidecar_frames: Option<usize>) {
    if !sidecar::holds(merged, "model.loras") {
        for key in SCALES {
            if sidecar::holds(merged, key) {
                merged.cut(key);
            }
        }
    }
    if !sidecar::holds(merged, VIDEOS) || sidecar::holds(merged, "request.num_frames") {
        return;
    }
    let mut videos = config.request.reference_videos.clone();
    videos.iter_mut().filter(|video| video.frames == sidecar_frames).for_each(|video| video.frames = None);
    let origin = merged.origin(VIDEOS);
    merged.set(VIDEOS, json!(videos), &origin);
}

/// Writes the stage of LoRAs that name none.
fn keep_loras_in_first_stage(merged: &mut Tree) {
    let Some((Value::Array(loras), origin)) = merged.leaf("model.loras") else { return };
    let (mut loras, origin) = (loras.clone(), origin.clone());
    for lora in loras.iter_mut().filter_map(Value::as_object_mut) {
        lora.entry("stages").or_insert_with(|| json!([1]));
    }
    merged.set("model.loras", loras.into(), &origin);
}

/// Both scales, of all LoRAs of the first stage: one that says nothing agrees with any.
fn take_scales(merged: &mut Tree, config: &Config) -> Result<(), ConfigError> {
    let loras = || config.model.loras.iter().filter(|lora| lora.stages.contains(&1));
    if loras().next().is_none() {
        tracing::warn!("{VIDEOS}: a model follows references by an IC-LoRA, and none is given: --lora FILE");
    }
    if SCALES.iter().all(|key| merged.leaf(key).is_some()) {
        return Ok(());
    }
    let mut found: [Option<(usize, &str)>; 2] = [None, None];
    for lora in loras() {
        let scales = ReferenceScales::of(&lora.path).map_err(ConfigError::Lora)?;
        for ((found, own), key) in found.iter_mut().zip([scales.downscale, scales.temporal]).zip(SCALES) {
            match (own, &found) {
                (Some(own), Some((known, first))) if own != *known => {
                    let why = format!("{first} says {known}: LoRAs of different scales do not go together");
                    return Err(ConfigError::Value {
                        key,
                        value: own.to_string(),
                        origin: ValueOrigin::Lora(lora.path.clone()),
                        why,
                    });
                }
                (Some(own), None) => *found = Some((own, &lora.path)),
                _ => {}
            }
        }
    }
    if let (None, None, Some(lora)) = (merged.leaf(SCALES[0]), found[0], loras().next()) {
        tracing::warn!(
            "{}: no LoRA says `reference_downscale_factor`: references have the size of the stage; if it was trained with \
             smaller ones, set {}",
            lora.path,
            SCALES[0]
        );
    }
    for (key, found) in SCALES.into_iter().zip(found) {
        if merged.leaf(key).is_none() {
            let (value, origin) =
                found.map_or((1, ValueOrigin::Default), |(value, path)| (value, ValueOrigin::Lora(path.into())));
            merged.set(key, value.into(), &origin);
        }
    }
    Ok(())
}

/// Frames of each reference: all of it, at most as many as the video has.
fn take_frames(merged: &mut Tree, config: &Config) -> Result<(), ConfigError> {
    let Some(most) = config.request.num_frames.count() else {
        let why = "references are cut to a number of frames: give one".into();
        let (key, origin) = ("request.num_frames", merged.origin("request.num_frames"));
        return Err(ConfigError::Value { key, value: "auto".into(), origin, why });
    };
    let [_, step] = config.conditioning.reference_scales();
    let mut videos = config.request.reference_videos.clone();
    for video in &mut videos {
        if video.frames.is_none() {
            let info = probe_clip(Path::new(&video.path), Path::new("ffmpeg")).map_err(ConfigError::Video)?;
            differences(config, video, &info, most, step).iter().for_each(|line| tracing::warn!("{line}"));
            video.frames = Some(info.frames);
            check_mask(merged, video, encoded_frames(info.frames.min(most), step), most)?;
        }
        video.frames = video.frames.map(|frames| frames.min(most));
    }
    let (origin, videos) = (merged.origin(VIDEOS), json!(videos));
    merged.set(VIDEOS, videos, &origin);
    Ok(())
}

/// Refuses a mask whose frames do not go with those of its reference, of which so many are encoded.
fn check_mask(merged: &Tree, video: &ReferenceVideo, encoded: usize, most: usize) -> Result<(), ConfigError> {
    let Some(path) = &video.attention_mask else { return Ok(()) };
    let info = probe_clip(Path::new(path), Path::new("ffmpeg")).map_err(ConfigError::Video)?;
    let fault = mask_group(info.frames.min(most), (encoded - 1) / FRAME_STEP + 1).err();
    let (value, origin) = (format!("attention_mask {path}"), merged.origin(VIDEOS));
    fault.map_or(Ok(()), |why| Err(ConfigError::Value { key: VIDEOS, value, origin, why }))
}

/// Frames of a mask for each latent frame of its reference but the first, which has one.
///
/// # Errors
/// Frames that make no such groups.
pub(crate) fn mask_group(frames: usize, latents: usize) -> Result<usize, String> {
    let (rest, later) = (frames - 1, latents - 1);
    match later {
        0 => Ok(0),
        _ if rest >= later && rest.is_multiple_of(later) => Ok(rest / later),
        _ => Err(format!(
            "a mask of {frames} frames does not fit the reference's {latents} latent frames: it has one for the first, and as \
             many for each other"
        )),
    }
}

/// Where a reference is not as the video, in words.
fn differences(config: &Config, video: &ReferenceVideo, info: &ClipInfo, most: usize, step: usize) -> Vec<String> {
    let (path, r) = (&video.path, &config.request);
    let mut lines = Vec::new();
    let read = info.frames.min(most);
    if read < most {
        lines.push(format!("{path}: {read} frames, the video has {most}: the last ones have no reference"));
    }
    let taken = taken(read, step);
    let encoded = encoded_frames(read, step);
    if encoded < taken {
        lines.push(format!(
            "{path}: {taken} frames are not one more than a multiple of {FRAME_STEP}: the last {} are left out",
            taken - encoded
        ));
    }
    if let Some(rate) = info.frame_rate.filter(|rate| (rate - r.frame_rate).abs() > 1e-3) {
        lines.push(format!(
            "{path}: {rate:.3} frames a second, the video has {:.3}: frame goes with frame, whatever their times",
            r.frame_rate
        ));
    }
    let [own, made] = [(info.width, info.height), (r.width, r.height)].map(|(w, h)| w as f64 / h as f64);
    let left = own.min(made) / own.max(made);
    if left < 0.9 {
        lines.push(format!(
            "{path}: {}x{}, the video is {}x{}: {:.0} % of it lies outside and is cut off",
            info.width,
            info.height,
            r.width,
            r.height,
            (1.0 - left) * 100.0
        ));
    }
    lines
}

/// Frames that are taken of so many: the first, the second, and each `step`-th from there on.
fn taken(frames: usize, step: usize) -> usize {
    1 + (frames.max(1) - 1).div_ceil(step)
}

/// Frames that are encoded of so many: those that are taken, as far as they make whole latents.
pub(crate) fn encoded_frames(frames: usize, step: usize) -> usize {
    whole_frames(taken(frames, step))
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use super::*;
    use crate::config::{CliOverrides, load};
    use crate::media::{Frames, write_png_frames};

    /// A configuration with a folder of frames as its reference.
    fn of(frames: usize, set: &[&str]) -> Result<Config, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let frames = Frames::new(Array4::zeros((frames, 64, 96, 3))).expect("frames");
        write_png_frames(folder.path(), &frames).expect("written");
        let video = format!("request.reference_videos=[{{path: {}}}]", folder.path().display());
        let set = [&[video.as_str()], set].concat().iter().map(|s| (*s).to_string()).collect();
        load(&CliOverrides { set, ..CliOverrides::default() }).map(|l| l.config).map_err(|e| e.to_string())
    }

    fn lora(scale: &str) -> String {
        format!("model.loras=[{{path: tests/fixtures/lora/{scale}.safetensors}}]")
    }

    #[test]
    fn frames_are_those_of_whole_latents() {
        let steps = |frames: usize| [1, 2, 4].map(|step| encoded_frames(frames, step));
        assert_eq!([1, 8, 9, 121].map(steps), [[1, 1, 1], [1, 1, 1], [9, 1, 1], [121, 57, 25]]);
    }

    #[test]
    fn a_mask_has_a_group_of_frames_for_each_latent() {
        assert_eq!(
            [(1, 1), (9, 1), (9, 2), (121, 13), (121, 16)].map(|(f, l)| mask_group(f, l)),
            [Ok(0), Ok(0), Ok(8), Ok(10), Ok(8)]
        );
        assert!(mask_group(1, 2).is_err() && mask_group(4, 3).is_err_and(|why| why.contains("3 latent frames")));
    }

    #[test]
    fn headers_and_files_say_what_is_not_written() {
        let config = of(30, &[&lora("ic_tiny_a"), "request.num_frames=17"]).expect("legal");
        assert_eq!(config.pipeline, Pipeline::IcLora);
        assert_eq!(config.conditioning.reference_scales(), [2, 1]);
        assert_eq!(config.request.reference_videos[0].frames, Some(17));
        assert_eq!(config.model.loras[0].stages, [1]);
        assert_eq!(config.sampler.sigmas.as_ref().map(Vec::len), Some(9), "the distilled preset");
        // Without a word in the header, or a LoRA at all, references have the stage's size.
        assert_eq!(of(9, &[&lora("ic_tiny_a_plain")]).expect("legal").conditioning.reference_scales(), [1, 1]);
        let config = of(9, &["pipeline=text_to_video"]).expect("legal");
        assert_eq!((config.pipeline, config.conditioning.reference_scales()), (Pipeline::TextToVideo, [1, 1]));
        assert_eq!(config.request.reference_videos[0].frames, Some(9));
        // What is written holds.
        let both = ["conditioning.reference_downscale_factor=4", "conditioning.reference_temporal_scale_factor=2"];
        let gone = lora("gone");
        let set = [&[gone.as_str(), "request.width=1024"], &both[..]].concat();
        assert_eq!(of(9, &set).expect("not read").conditioning.reference_scales(), [4, 2]);
        // Stages that are written are kept; other pipelines have both.
        let both = format!("{}, stages: [1, 2]}}]", lora("ic_tiny_a").trim_end_matches("}]"));
        assert_eq!(of(9, &[&both]).expect("legal").model.loras[0].stages, [1, 2]);
        assert_eq!(of(9, &[&lora("ic_tiny_a"), "pipeline=distilled"]).expect("legal").model.loras[0].stages, [1, 2]);
    }

    #[test]
    fn what_cannot_be_is_said_in_a_line() {
        let fails = |set: &[&str]| of(9, set).expect_err("refused");
        let error = fails(&[&lora("ic_tiny_a"), "request.width=704"]);
        let why =
            "must be a multiple of 128 with two stages and references of 1/2 its size; the nearest are 640 and 768";
        assert!(error.contains("request.width = 704 (--set)") && error.contains(why), "{error}");
        let error = fails(&["request.num_frames=auto"]);
        assert!(error.contains("request.num_frames = auto") && error.contains("give one"), "{error}");
        for pipeline in ["retake", "extend", "video_to_audio", "text_to_audio", "dfr"] {
            let error = fails(&[&format!("pipeline={pipeline}")]);
            assert!(error.contains("takes no reference videos; --pipeline in_context does"), "{error}");
        }
        let none = load(&CliOverrides { set: vec!["pipeline=ic_lora".into()], ..CliOverrides::default() });
        assert!(none.expect_err("no reference").to_string().contains("needs a reference: --reference-video PATH"));
    }

    #[test]
    fn a_reference_that_is_not_as_the_video_is_told_of() {
        let video = ReferenceVideo {
            path: "a.mp4".into(),
            strength: 1.0,
            attention_strength: 1.0,
            attention_mask: None,
            frames: None,
        };
        let config = Config::default();
        let said = |width, height, frames, frame_rate: f64| {
            let info = ClipInfo { width, height, frames, frame_rate: Some(frame_rate) };
            differences(&config, &video, &info, 121, 1)
        };
        assert_eq!(said(768, 512, 121, 24.0), [""; 0]);
        assert_eq!(said(1536, 1024, 500, 24.0), [""; 0]);
        let all = said(512, 768, 100, 30.0);
        let words = [
            "100 frames, the video has 121",
            "the last 3 are left out",
            "30.000 frames a second",
            "56 % of it lies outside",
        ];
        assert!(all.iter().zip(words).all(|(line, words)| line.contains(words)) && all.len() == words.len(), "{all:?}");
    }
}
