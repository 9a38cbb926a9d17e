//! Reference videos: default scales from the headers of LoRAs, default lengths from the video files.

use std::path::Path;

use serde_json::{Value, json};

use super::check::typed;
use super::error::{ConfigError, ConfigErrorKind, ValueOrigin};
use super::ic_lora;
use super::ic_loras::PublishedIcLora;
use super::legal::{FRAME_STEP, whole_frames};
use super::pipeline::{Pipeline, Support};
use super::presets::is_shipped;
use super::schema::{Config, MaskChannel, ReferenceVideo};
use super::sidecar;
use super::tree::Tree;
use crate::media::{ClipInfo, HdrTransform, probe_clip};
use crate::weights::ReferenceScales;

const VIDEOS: &str = "request.reference_videos";
const LORAS: &str = "model.loras";
const TRANSFORM: &str = "conditioning.hdr_transform";
const SCALES: [&str; 2] = ["conditioning.reference_downscale_factor", "conditioning.reference_temporal_scale_factor"];

/// Selects a pipeline that the inputs imply, in the top layer `line`, and returns whether the pipeline changed.
/// Reference videos, or an IC-LoRA, select `in_context` if no pipeline is set, `hdr` with a LoRA that generates HDR
/// video, or the only pipeline that supports a published IC-LoRA. Images select `image_to_video` instead of `text_to_video`, unless the user chose `text_to_video` in the same
/// layer as the images or above it.
pub(super) fn select_pipeline(merged: &Tree, config: &Config, line: &mut Tree) -> bool {
    let origin = merged.origin("pipeline");
    let implied_by = match (config.request.reference_videos.is_empty(), &config.model.ic_lora) {
        (false, _) => Some(VIDEOS),
        (true, Some(_)) => Some(ic_lora::KEY),
        (true, None) => None,
    };
    if let Some(key) = implied_by.filter(|_| origin == ValueOrigin::Default) {
        let pipeline = match &config.model.ic_lora {
            _ if config.model.loras.iter().any(|lora| generates_hdr(&lora.path)) => Pipeline::Hdr,
            Some(own) => ic_lora::implied_pipeline(own),
            None => Pipeline::IcLora,
        };
        line.set("pipeline", pipeline.name().into(), &merged.origin(key));
        return true;
    }
    let is_chosen = origin != ValueOrigin::Default && !is_shipped(&origin);
    let is_above = line.get("request.images").is_some() && line.get("pipeline").is_none();
    let selects =
        config.pipeline == Pipeline::TextToVideo && !config.request.images.is_empty() && (is_above || !is_chosen);
    if selects {
        line.set("pipeline", Pipeline::ImageToVideo.name().into(), &merged.origin("request.images"));
    }
    selects
}

/// Returns whether a LoRA generates HDR video; false if it cannot be read, which is reported when its scales are read.
pub(crate) fn generates_hdr(path: &str) -> bool {
    ReferenceScales::read(path).is_ok_and(|header| header.hdr.is_some())
}

/// Sets missing scales from LoRA headers and missing lengths from video files. `config` is the typed form of `merged`;
/// `sidecar_frames` is the number of frames that a sidecar sets. Returns whether `merged` changed.
///
/// # Errors
/// Returns an error if a LoRA or a video cannot be read, or if LoRAs have different scales.
pub(super) fn take(merged: &mut Tree, config: &Config, sidecar_frames: Option<usize>) -> Result<bool, ConfigError> {
    let spec = config.pipeline.spec();
    let sets_stages = spec.has_loras_in_first_pass;
    if sets_stages {
        default_loras_to_first_stage(merged);
    }
    if config.request.reference_videos.is_empty() || spec.reference_videos == Support::Rejected {
        return Ok(sets_stages);
    }
    clear_derived_values(merged, config, sidecar_frames);
    set_scales_from_loras(merged, &typed(merged)?)?;
    set_transform_from_loras(merged, &typed(merged)?)?;
    take_frames(merged, &typed(merged)?)?;
    Ok(true)
}

/// Sets missing scales from LoRA headers if the input video is used as a reference video. Must precede
/// [`source::take`](super::source::take), because valid sizes depend on the scale. Returns whether `merged` changed.
///
/// # Errors
/// Returns an error if a LoRA cannot be read, or if LoRAs have different scales.
pub(super) fn take_scales(merged: &mut Tree, config: &Config) -> Result<bool, ConfigError> {
    if !config.follows_input() {
        return Ok(false);
    }
    clear_derived_scales(merged);
    set_scales_from_loras(merged, &typed(merged)?)?;
    set_transform_from_loras(merged, &typed(merged)?)?;
    Ok(true)
}

/// Removes values of a sidecar that were derived from keys that the user overrides: scales read from other LoRAs, and
/// the lengths of reference videos that were as long as the sidecar's video.
fn clear_derived_values(merged: &mut Tree, config: &Config, sidecar_frames: Option<usize>) {
    clear_derived_scales(merged);
    if !sidecar::holds(merged, VIDEOS) || sidecar::holds(merged, "request.num_frames") {
        return;
    }
    let mut videos = config.request.reference_videos.clone();
    videos.iter_mut().filter(|video| video.frames == sidecar_frames).for_each(|video| video.frames = None);
    let origin = merged.origin(VIDEOS);
    merged.set(VIDEOS, json!(videos), &origin);
}

/// Removes scales and the curve of a sidecar that were read from other LoRAs.
fn clear_derived_scales(merged: &mut Tree) {
    if sidecar::holds(merged, "model.loras") {
        return;
    }
    for key in SCALES.into_iter().chain([TRANSFORM]) {
        if sidecar::holds(merged, key) {
            merged.cut(key);
        }
    }
}

/// Sets stage 1 for LoRAs that do not specify their stages.
fn default_loras_to_first_stage(merged: &mut Tree) {
    let Some((Value::Array(loras), origin)) = merged.leaf("model.loras") else { return };
    let (mut loras, origin) = (loras.clone(), origin.clone());
    for lora in loras.iter_mut().filter_map(Value::as_object_mut) {
        lora.entry("stages").or_insert_with(|| json!([1]));
    }
    merged.set("model.loras", loras.into(), &origin);
}

/// Sets both scales from the LoRAs of the first stage. LoRAs without scales are compatible with any.
fn set_scales_from_loras(merged: &mut Tree, config: &Config) -> Result<(), ConfigError> {
    let loras = || config.model.loras.iter().filter(|lora| lora.stages.contains(&1));
    if loras().next().is_none() {
        let key = if config.request.video.is_some() { "request.video" } else { VIDEOS };
        tracing::warn!(
            "{key}: models need an IC-LoRA to follow reference videos; pass one with --ic-lora NAME or --lora FILE"
        );
    }
    if SCALES.iter().all(|key| merged.leaf(key).is_some()) {
        return Ok(());
    }
    let mut found: [Option<(usize, &str)>; 2] = [None, None];
    for lora in loras() {
        if let Some(why) = ic_lora::missing_lora(&lora.path) {
            let error = ConfigError::value(ConfigErrorKind::Missing, LORAS, &lora.path, why);
            return Err(error.at(merged.origin(LORAS)));
        }
        let mut scales = ReferenceScales::read(&lora.path).map_err(ConfigError::lora)?;
        if config.model.ic_lora.as_ref().is_some_and(|own| own.path == lora.path) {
            let published = PublishedIcLora::of_file(&lora.path).and_then(|row| row.downscale);
            scales.downscale = scales.downscale.or(published);
        }
        for ((found, own), key) in found.iter_mut().zip([scales.downscale, scales.temporal]).zip(SCALES) {
            match (own, &found) {
                (Some(own), Some((known, first))) if own != *known => {
                    let why = format!("{first} has the scale {known}; LoRAs with different scales cannot be combined");
                    let error = ConfigError::value(ConfigErrorKind::Conflict, key, own, why);
                    return Err(error.at(ValueOrigin::Lora(lora.path.clone())));
                }
                (Some(own), None) => *found = Some((own, &lora.path)),
                _ => {}
            }
        }
    }
    let is_known = config.pipeline.spec().hdr || merged.leaf(SCALES[0]).is_some();
    if let (false, None, Some(lora)) = (is_known, found[0], loras().next()) {
        tracing::warn!(
            "{}: no LoRA specifies `reference_downscale_factor`, so reference videos have the size of the stage; if the \
             LoRA was trained with smaller ones, set {}",
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

/// Sets the curve of HDR video from the LoRAs in the pipeline `hdr`. Rejects LoRAs for HDR video in other pipelines.
fn set_transform_from_loras(merged: &mut Tree, config: &Config) -> Result<(), ConfigError> {
    let is_hdr = config.pipeline.spec().hdr;
    let mut found: Option<HdrTransform> = None;
    for lora in &config.model.loras {
        // A LoRA that cannot be read is reported when it is opened.
        let Some(stated) = ReferenceScales::read(&lora.path).ok().and_then(|header| header.hdr) else { continue };
        let fail = |kind, why: String| {
            Err(ConfigError::value(kind, TRANSFORM, &stated, why).at(ValueOrigin::Lora(lora.path.clone())))
        };
        if !is_hdr {
            let why = format!("this LoRA generates HDR video, but the pipeline is {}; use hdr", config.pipeline.name());
            return fail(ConfigErrorKind::Unsupported, why);
        }
        // Headers without a name mean LogC3.
        let named = if stated == "true" { Some(HdrTransform::LogC3) } else { HdrTransform::named(&stated) };
        let Some(transform) = named else {
            let known = HdrTransform::ALL.map(HdrTransform::name).join(" and ");
            return fail(
                ConfigErrorKind::Unsupported,
                format!("this curve is not supported; the known ones are {known}"),
            );
        };
        if let Some(other) = found.filter(|other| *other != transform) {
            let why =
                format!("another LoRA has the curve {}; LoRAs with different curves cannot be combined", other.name());
            return fail(ConfigErrorKind::Conflict, why);
        }
        found = Some(transform);
        if merged.leaf(TRANSFORM).is_none() {
            merged.set(TRANSFORM, transform.name().into(), &ValueOrigin::Lora(lora.path.clone()));
        }
    }
    if is_hdr && found.is_none() && merged.leaf(TRANSFORM).is_none() {
        tracing::warn!(
            "pipeline hdr: no LoRA specifies `hdr_transform`, so the curve is logc3; otherwise, set {TRANSFORM}"
        );
    }
    Ok(())
}

/// Sets the number of frames to read from each reference video: its length, limited to that of the generated video.
fn take_frames(merged: &mut Tree, config: &Config) -> Result<(), ConfigError> {
    let Some(most) = config.request.num_frames.count() else {
        let (key, why) = ("request.num_frames", "reference videos need a number of frames; set one");
        return Err(ConfigError::value(ConfigErrorKind::Unsupported, key, "auto", why).at(merged.origin(key)));
    };
    let [_, step] = config.conditioning.reference_scales();
    let mut videos = config.request.reference_videos.clone();
    for video in &mut videos {
        if video.frames.is_none() {
            let info = probe_clip(Path::new(&video.path), Path::new("ffmpeg")).map_err(ConfigError::video)?;
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

/// Checks the options of each reference video that do not depend on its file.
///
/// # Errors
/// Returns an error if the parameters of a conversion are invalid, or if a channel is set without a mask.
pub(super) fn check_options(config: &Config) -> Result<(), ConfigError> {
    for video in &config.request.reference_videos {
        config.reference_filter(video)?;
        if video.attention_mask.is_none() && video.attention_mask_channel == MaskChannel::Alpha {
            let why = "there is no mask; set attention_mask of this reference video, or remove the channel";
            let value = format!("attention_mask_channel alpha of {}", video.path);
            return Err(ConfigError::value(ConfigErrorKind::Missing, VIDEOS, value, why));
        }
    }
    Ok(())
}

/// Rejects a mask whose frames cannot be assigned to the latent frames of its reference video; `encoded` is the number
/// of frames of this video that are encoded.
fn check_mask(merged: &Tree, video: &ReferenceVideo, encoded: usize, most: usize) -> Result<(), ConfigError> {
    let Some(path) = &video.attention_mask else { return Ok(()) };
    let info = probe_clip(Path::new(path), Path::new("ffmpeg")).map_err(ConfigError::video)?;
    let fault = mask_group(info.frames.min(most), (encoded - 1) / FRAME_STEP + 1).err();
    let (value, origin) = (format!("attention_mask {path}"), merged.origin(VIDEOS));
    fault.map_or(Ok(()), |why| Err(ConfigError::value(ConfigErrorKind::OutOfRange, VIDEOS, value, why).at(origin)))
}

/// Returns the number of mask frames per latent frame of the reference, except the first latent frame, which has one
/// mask frame.
///
/// # Errors
/// Returns an error if the mask frames after the first cannot be divided evenly among the later latent frames.
pub(crate) fn mask_group(frames: usize, latents: usize) -> Result<usize, String> {
    let (rest, later) = (frames - 1, latents - 1);
    match later {
        0 => Ok(0),
        _ if rest >= later && rest.is_multiple_of(later) => Ok(rest / later),
        _ => Err(format!(
            "a mask with {frames} frames does not match the reference's {latents} latent frames: it needs one frame for \
             the first latent frame and an equal number of frames for each later one"
        )),
    }
}

/// Returns warnings about differences between a reference and the generated video.
fn differences(config: &Config, video: &ReferenceVideo, info: &ClipInfo, most: usize, step: usize) -> Vec<String> {
    let (path, r) = (&video.path, &config.request);
    let mut lines = Vec::new();
    let read = info.frames.min(most);
    if read < most {
        lines.push(format!(
            "{path} has {read} frames, but the video has {most}: the last frames of the video have no reference"
        ));
    }
    let taken = taken(read, step);
    let encoded = encoded_frames(read, step);
    if encoded < taken {
        lines.push(format!(
            "{path}: {taken} frames are sampled, but the number must be one more than a multiple of {FRAME_STEP}; frames \
             dropped at the end: {}",
            taken - encoded
        ));
    }
    if let Some(rate) = info.frame_rate.filter(|rate| (rate - r.frame_rate).abs() > 1e-3) {
        lines.push(format!(
            "{path} has {rate:.3} frames per second, but the video has {:.3}: frames are matched by index, not by time",
            r.frame_rate
        ));
    }
    if config.pipeline.spec().hdr {
        lines.extend(padding(path, info, r.width, r.height));
        return lines;
    }
    let [own, made] = [(info.width, info.height), (r.width, r.height)].map(|(w, h)| w as f64 / h as f64);
    let left = own.min(made) / own.max(made);
    if left < 0.9 {
        lines.push(format!(
            "{path} is {}x{}, but the video is {}x{}: {:.0} % of each reference frame is cropped",
            info.width,
            info.height,
            r.width,
            r.height,
            (1.0 - left) * 100.0
        ));
    }
    lines
}

/// Returns a warning if a reference video leaves much of a larger HDR frame, `width` x `height`, to its reflection.
fn padding(path: &str, info: &ClipInfo, width: usize, height: usize) -> Option<String> {
    let scale = f64::min(1.0, f64::min(width as f64 / info.width as f64, height as f64 / info.height as f64));
    let scaled = |side: usize| (side as f64 * scale).round() as usize;
    let [columns, rows] = [width - scaled(info.width).min(width), height - scaled(info.height).min(height)];
    let sized = |side: usize| side.next_multiple_of(HDR_STEP);
    (columns >= HDR_STEP || rows >= HDR_STEP).then(|| {
        format!(
            "{path} is {}x{}, but the video is {width}x{height}: {columns} columns and {rows} rows repeat its edges; use \
             --width {} --height {}",
            info.width,
            info.height,
            sized(info.width),
            sized(info.height)
        )
    })
}

/// Sizes of HDR videos are multiples of this number of pixels.
const HDR_STEP: usize = 64;

/// Returns the number of frames that are sampled from `frames` frames: the first, the second, and every `step`-th frame
/// after the second.
fn taken(frames: usize, step: usize) -> usize {
    1 + (frames.max(1) - 1).div_ceil(step)
}

/// Returns the number of sampled frames that are encoded: the largest number that fills complete latent frames.
pub(crate) fn encoded_frames(frames: usize, step: usize) -> usize {
    whole_frames(taken(frames, step))
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use super::*;
    use crate::config::{CliOverrides, load};
    use crate::media::{Frames, write_png_frames};

    /// Loads a configuration whose reference video is a folder of black frames.
    fn load_reference(frames: usize, set: &[&str]) -> Result<Config, String> {
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
    fn encoded_frames_fill_complete_latents() {
        let steps = |frames: usize| [1, 2, 4].map(|step| encoded_frames(frames, step));
        assert_eq!([1, 8, 9, 121].map(steps), [[1, 1, 1], [1, 1, 1], [9, 1, 1], [121, 57, 25]]);
    }

    #[test]
    fn mask_has_equal_frame_groups_per_latent() {
        assert_eq!(
            [(1, 1), (9, 1), (9, 2), (121, 13), (121, 16)].map(|(f, l)| mask_group(f, l)),
            [Ok(0), Ok(0), Ok(8), Ok(10), Ok(8)]
        );
        assert!(mask_group(1, 2).is_err() && mask_group(4, 3).is_err_and(|why| why.contains("3 latent frames")));
    }

    #[test]
    fn detailing_lora_is_added_to_the_second_stage() {
        let folder = tempfile::tempdir().expect("a folder");
        let full_size = folder.path().join("full_size.safetensors");
        let header = r#"{"__metadata__":{"reference_downscale_factor":"1"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
        std::fs::write(&full_size, bytes).expect("written");
        let dfr = |pipeline: &str, path: &str| {
            let lora = format!("dfr.detailing_lora={{path: {path}, strength: 0.7}}");
            let set = [lora, format!("pipeline={pipeline}"), "model.path=LTX-2.5".into()];
            Config::load("ltx2_5_dfr", set).map_err(|error| error.to_string())
        };
        let config = dfr("dfr", "tests/fixtures/lora/ic_tiny_2_5.safetensors").expect("legal");
        let [lora] = &config.model.loras[..] else { panic!("one LoRA") };
        assert_eq!((lora.strength, &lora.stages[..], config.adds_lora(lora)), (0.7, &[2][..], true));
        // A header without scales means half of the size.
        assert!(dfr("dfr", "tests/fixtures/lora/ic_tiny_a_plain.safetensors").is_ok());
        let error = dfr("dfr", full_size.to_str().expect("UTF-8")).expect_err("another scale");
        assert!(error.contains("dfr.detailing_lora = ") && error.contains("has 1/1 of the video's size"), "{error}");
        let error = dfr("two_stage", "a.safetensors").expect_err("another pipeline");
        assert!(error.contains("only the pipeline dfr has a detailing LoRA"), "{error}");
    }

    #[test]
    fn missing_scales_and_lengths_are_read_from_files() {
        let config = load_reference(30, &[&lora("ic_tiny_a"), "request.num_frames=17"]).expect("legal");
        assert_eq!(config.pipeline, Pipeline::IcLora);
        assert_eq!(config.conditioning.reference_scales(), [2, 1]);
        assert_eq!(config.request.reference_videos[0].frames, Some(17));
        assert_eq!(config.model.loras[0].stages, [1]);
        assert_eq!(config.sampler.sigmas.as_ref().map(Vec::len), Some(9), "the distilled preset");
        // Without scales in the header, or without a LoRA, references have the size of the stage.
        assert_eq!(
            load_reference(9, &[&lora("ic_tiny_a_plain")]).expect("legal").conditioning.reference_scales(),
            [1, 1]
        );
        let config = load_reference(9, &["pipeline=text_to_video"]).expect("legal");
        assert_eq!((config.pipeline, config.conditioning.reference_scales()), (Pipeline::TextToVideo, [1, 1]));
        assert_eq!(config.request.reference_videos[0].frames, Some(9));
        // Explicit values take precedence.
        let both = ["conditioning.reference_downscale_factor=4", "conditioning.reference_temporal_scale_factor=2"];
        let gone = lora("gone");
        let set = [&[gone.as_str(), "request.width=1024"], &both[..]].concat();
        assert_eq!(load_reference(9, &set).expect("not read").conditioning.reference_scales(), [4, 2]);
        // Explicit stages are kept; in other pipelines, the default is both stages.
        let both = format!("{}, stages: [1, 2]}}]", lora("ic_tiny_a").trim_end_matches("}]"));
        assert_eq!(load_reference(9, &[&both]).expect("legal").model.loras[0].stages, [1, 2]);
        assert_eq!(
            load_reference(9, &[&lora("ic_tiny_a"), "pipeline=distilled"]).expect("legal").model.loras[0].stages,
            [1, 2]
        );
    }

    #[test]
    fn hdr_lora_selects_pipeline_curve_and_noise_levels() {
        let own = ["model.loras=[{path: tests/fixtures/lora/hdr_tiny_2_3.safetensors}]"];
        let size = ["request.width=128", "request.height=64"];
        let load = |set: &[&str]| load_reference(9, &[&own[..], &size, set].concat());
        let config = load(&[]).expect("legal");
        assert_eq!((config.pipeline, config.hdr_transform()), (Pipeline::Hdr, Some(HdrTransform::LogC3)));
        assert_eq!(
            (config.model.loras[0].stages.clone(), config.two_stage.sigmas),
            (vec![1, 2], vec![0.909375, 0.725, 0.0])
        );
        assert_eq!(config.sampler.sigmas.map(|all| all.len()), Some(9), "the distilled preset");
        let config = load(&["two_stage.sigmas=[0.8, 0.0]", "conditioning.hdr_transform=acescct"]).expect("legal");
        assert_eq!((config.hdr_transform(), config.two_stage.sigmas), (Some(HdrTransform::AcesCct), vec![0.8, 0.0]));
        assert!(load(&["pipeline=distilled"]).expect_err("SDR").contains("but the pipeline is distilled; use hdr"));
        // Without an HDR LoRA, the curve is LogC3.
        let plain = load_reference(9, &[&size[..], &["pipeline=hdr"]].concat()).expect("legal");
        assert_eq!(plain.hdr_transform(), Some(HdrTransform::LogC3));
        assert_eq!(load_reference(9, &[]).expect("legal").hdr_transform(), None);
    }

    #[test]
    fn small_hdr_references_are_reported() {
        let info = |width, height| ClipInfo { width, height, frames: 9, frame_rate: None };
        assert_eq!(padding("a.mp4", &info(1920, 1080), 1920, 1088), None);
        assert_eq!(padding("a.mp4", &info(3840, 2160), 1920, 1088), None);
        let line = padding("a.mp4", &info(1280, 720), 1920, 1088).expect("a warning");
        assert!(line.contains("640 columns and 368 rows repeat its edges; use --width 1280 --height 768"), "{line}");
    }

    #[test]
    fn invalid_references_are_one_line_errors() {
        let fails = |set: &[&str]| load_reference(9, set).expect_err("refused");
        let error = fails(&[&lora("ic_tiny_a"), "request.width=704"]);
        let why =
            "must be a multiple of 128 with two stages and reference videos at 1/2 size; the nearest are 640 and 768";
        assert!(error.contains("request.width = 704 (--set)") && error.contains(why), "{error}");
        let error = fails(&["request.num_frames=auto"]);
        assert!(error.contains("request.num_frames = auto") && error.contains("set one"), "{error}");
        for pipeline in ["retake", "extend", "video_to_audio", "text_to_audio", "dfr"] {
            let error = fails(&[&format!("pipeline={pipeline}")]);
            assert!(error.contains("does not support reference videos; use --pipeline in_context"), "{error}");
        }
        let none = load(&CliOverrides { set: vec!["pipeline=in_context".into()], ..CliOverrides::default() });
        assert!(
            none.expect_err("no reference").to_string().contains("needs a reference video: --reference-video PATH")
        );
    }

    #[test]
    fn reference_video_mismatches_are_reported() {
        let video = ReferenceVideo {
            path: "a.mp4".into(),
            strength: 1.0,
            attention_strength: 1.0,
            attention_mask: None,
            attention_mask_channel: MaskChannel::default(),
            frames: None,
            preprocess: None,
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
            "100 frames, but the video has 121",
            "frames dropped at the end: 3",
            "30.000 frames per second",
            "56 % of each reference frame is cropped",
        ];
        assert!(all.iter().zip(words).all(|(line, words)| line.contains(words)) && all.len() == words.len(), "{all:?}");
    }
}
