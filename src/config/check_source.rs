//! Checks of the input video and of the options that use it.

use super::error::ConfigErrorKind::{Conflict, Missing, OutOfRange, Unsupported};
use super::error::{ConfigError, Limit};
use super::legal::{fail, remove};
use super::message::{Setting, message};
use super::pipeline::{VideoUse, rejected_video, unused_by_pipeline_message};
use super::schema::{Config, Dub, Retake};

pub(super) fn check_source(config: &Config) -> Result<(), ConfigError> {
    let (r, spec) = (&config.request, config.pipeline.spec());
    let name = spec.name;
    match &r.video {
        None if spec.video.is_some() => {
            return fail(Missing, "pipeline", name, message!["needs a video: ", Setting::Video]);
        }
        Some(path) if spec.video.is_none() => return fail(Unsupported, "request.video", path, rejected_video()),
        _ => {}
    }
    if spec.video.is_some() && !r.audio_latents.is_empty() {
        let why = "the pipeline uses the sound of its input video; remove request.audio_latents";
        return fail(Conflict, "request.audio_latents", format!("{} spans", r.audio_latents.len()), why);
    }
    let slots = config.conditioning.generated_keyframes;
    if slots > 0 && (spec.video.is_some() || !spec.has_video()) {
        let why = remove(format!("the pipeline {name} generates no keyframes"));
        return fail(Unsupported, "conditioning.generated_keyframes", slots, why);
    }
    check_dub(config)?;
    check_inpaint(config)?;
    let seconds = r.num_frames.count().unwrap_or(1) as f64 / r.frame_rate;
    let shown = |span: &Retake| match span.to {
        Some(to) => format!("{} to {to} s", span.from),
        None => format!("{} s to the end", span.from),
    };
    match (&r.retake, spec.video) {
        (None, Some(VideoUse::Span)) => {
            return fail(Missing, "pipeline", name, message!["requires a time span: ", Setting::Span]);
        }
        (Some(span), Some(VideoUse::Span)) => {
            let text = shown(span);
            if span.to.is_some_and(|to| span.from >= to) {
                return fail(
                    OutOfRange,
                    "request.retake",
                    text,
                    message!["is empty; ", Setting::SpanEnd, " must be after ", Setting::SpanStart],
                );
            }
            if span.from >= seconds {
                return fail(
                    OutOfRange,
                    "request.retake",
                    text,
                    format!("must start before the end of the video ({seconds:.3} s)"),
                );
            }
            if !span.video && !span.audio {
                return fail(OutOfRange, "request.retake", text, "regenerates nothing; set video or audio to true");
            }
            if span.from <= 0.0 && span.to.is_none() {
                return fail(OutOfRange, "request.retake", text, "is the complete video; set the span to regenerate");
            }
        }
        (Some(span), _) => {
            let why = unused_by_pipeline_message(spec, |spec| spec.video == Some(VideoUse::Span));
            return fail(Unsupported, "request.retake", shown(span), why);
        }
        (None, _) => {}
    }
    match (&r.extend, spec.video) {
        (None, Some(VideoUse::Overlap)) => {
            fail(Missing, "pipeline", name, message!["needs a duration: ", Setting::Extension])
        }
        (Some(_), Some(VideoUse::Overlap)) | (None, _) => Ok(()),
        (Some(extend), _) => {
            let why = unused_by_pipeline_message(spec, |spec| spec.video == Some(VideoUse::Overlap));
            fail(Unsupported, "request.extend", format!("{} s", extend.seconds), why)
        }
    }
}

/// Checks the options of the pipeline `dub_it`.
fn check_dub(config: &Config) -> Result<(), ConfigError> {
    let (dub, spec) = (&config.request.dub, config.pipeline.spec());
    if spec.video != Some(VideoUse::Reference) {
        let why = || unused_by_pipeline_message(spec, |spec| spec.video == Some(VideoUse::Reference));
        let strength = |dub: &Dub| fail(Unsupported, "request.dub", format!("strength {}", dub.strength), why());
        return dub.as_ref().map_or(Ok(()), strength);
    }
    if let Some(seconds) = dub.as_ref().and_then(|dub| dub.sound_seconds).filter(|seconds| *seconds <= 0.0) {
        return fail(OutOfRange, "request.dub.sound_seconds", seconds, Limit::Above(0.0));
    }
    let loras = &config.model.loras;
    if let [first, second, ..] = &loras[..] {
        let why =
            format!("the pipeline {} uses one LoRA, its IC-LoRA; remove {} or {}", spec.name, first.path, second.path);
        return fail(Unsupported, "model.loras", format!("{} LoRAs", loras.len()), why);
    }
    if let Some(lora) = loras.iter().find(|lora| ![1, 2].iter().all(|stage| lora.stages.contains(stage))) {
        let why = format!("the pipeline {} uses its IC-LoRA in both stages; remove stages", spec.name);
        return fail(Unsupported, "model.loras", format!("{} in one stage", lora.path), why);
    }
    match config.conditioning.reference_scales()[1] {
        1 => Ok(()),
        step => {
            let why =
                format!("the pipeline {} uses every frame of its input video; set 1, or use another LoRA", spec.name);
            fail(Unsupported, "conditioning.reference_temporal_scale_factor", step, why)
        }
    }
}

/// Side of the square of pixels that a latent represents.
const CELL: usize = 32;

/// Checks the mask and the rectangles of the pipeline `inpaint`.
fn check_inpaint(config: &Config) -> Result<(), ConfigError> {
    let (r, spec) = (&config.request, config.pipeline.spec());
    let own = r.inpaint.clone().unwrap_or_default();
    if spec.video != Some(VideoUse::Region) {
        let why = || unused_by_pipeline_message(spec, |spec| spec.video == Some(VideoUse::Region));
        return match (&r.mask, &r.inpaint) {
            (Some(path), _) => fail(Unsupported, "request.mask", path, why()),
            (None, Some(_)) => fail(Unsupported, "request.inpaint", "set", why()),
            (None, None) => Ok(()),
        };
    }
    let rectangles = [("request.inpaint.region", own.region), ("request.inpaint.keep", own.keep)];
    let given: Vec<_> = rectangles.into_iter().filter_map(|(key, rectangle)| Some((key, rectangle?))).collect();
    match given.len() + usize::from(r.mask.is_some()) {
        0 => return fail(Missing, "pipeline", spec.name, message!["requires a region: ", Setting::Mask]),
        1 => {}
        _ => {
            let why = "keep only one of request.mask, request.inpaint.region and request.inpaint.keep";
            return fail(Conflict, "pipeline", spec.name, why);
        }
    }
    for (key, [left, top, width, height]) in given {
        let text = format!("[{left}, {top}, {width}, {height}]");
        let (right, bottom) = (left.saturating_add(width), top.saturating_add(height));
        if width == 0 || height == 0 || right > r.width || bottom > r.height {
            let why = format!("must be a rectangle [left, top, width, height] within {}x{} pixels", r.width, r.height);
            return fail(OutOfRange, key, text, why);
        }
        if key == "request.inpaint.keep" && [left, top, width, height].iter().any(|side| side % CELL != 0) {
            return fail(OutOfRange, key, text, format!("all four numbers must be multiples of {CELL}"));
        }
        if [width, height] == [r.width, r.height] {
            return fail(OutOfRange, key, text, "is the complete picture; use a smaller rectangle");
        }
    }
    let scales = config.conditioning.reference_scales();
    if own.reference && scales != [1, 1] {
        let why = "request.inpaint.reference needs an IC-LoRA for references of the video's own size and frame rate; use \
                   another LoRA, or set both scales to 1";
        return fail(Unsupported, "conditioning.reference_downscale_factor", scales[0], why);
    }
    Ok(())
}
