//! Checks of chained clips, frame rate and motion speed.

use super::error::ConfigErrorKind::{OutOfRange, Unsupported};
use super::error::{ConfigError, Limit};
use super::legal::{FRAME_STEP, fail, remove, step_limit};
use super::message::{Message, Setting, message};
use super::schema::Config;

pub(super) fn check_chain(config: &Config) -> Result<(), ConfigError> {
    let (r, name) = (&config.request, config.pipeline.name());
    let Some(chain) = &r.chain else { return Ok(()) };
    let refused = |why: Message| fail(Unsupported, "request.chain", name, why);
    if !config.pipeline.spec().chain {
        return refused(
            "this pipeline does not support chained clips; remove --chain, or use a pipeline that starts from a prompt or images".into(),
        );
    }
    if r.num_frames.count().is_none() {
        return refused(message![
            "with chained clips, ",
            Setting::Key("request.num_frames"),
            " cannot be auto; set ",
            Setting::Seconds,
            " or a number of frames"
        ]);
    }
    if r.audio.is_some() || !r.audio_latents.is_empty() {
        return refused(message![
            "chained clips generate their own audio; remove --chain, or ",
            Setting::Key("request.audio"),
            " and request.audio_latents"
        ]);
    }
    if !r.reference_videos.is_empty() {
        return refused(message![
            "reference videos are not supported with chained clips; remove --chain or ",
            Setting::Key("request.reference_videos")
        ]);
    }
    if config.doubles_frames() {
        return refused(
            "temporal_x2 is not supported with chained clips; remove --chain, or temporal_x2 from two_stage.upsample"
                .into(),
        );
    }
    for (key, frames) in [("request.chain.clip", chain.clip), ("request.chain.overlap", chain.overlap)] {
        if frames % FRAME_STEP != 1 {
            return fail(OutOfRange, key, frames, step_limit(frames, 1, FRAME_STEP, String::new()));
        }
    }
    if chain.overlap >= chain.clip {
        let why = format!("must be less than request.chain.clip ({})", chain.clip);
        return fail(OutOfRange, "request.chain.overlap", chain.overlap, why);
    }
    if let Some(image) = outside(config, chain.clip) {
        let why = format!(
            "images condition only the first clip; use a frame index below {} (request.chain.clip)",
            chain.clip
        );
        return fail(OutOfRange, "request.images", format!("frame {image}"), why);
    }
    Ok(())
}

/// Returns the frame index of the first conditioning image that is outside a video of `frames` frames.
pub(crate) fn outside(config: &Config, frames: usize) -> Option<usize> {
    config.placed_images().map(|placed| placed.frame).find(|frame| *frame >= frames)
}

pub(super) fn check_rates(config: &Config) -> Result<(), ConfigError> {
    let r = &config.request;
    if !(r.frame_rate.is_finite() && r.frame_rate > 0.0) {
        return fail(OutOfRange, "request.frame_rate", r.frame_rate, Limit::Above(0.0));
    }
    if !(r.motion_speed.is_finite() && r.motion_speed > 0.0) {
        return fail(OutOfRange, "request.motion_speed", r.motion_speed, Limit::Above(0.0));
    }
    if r.motion_speed != 1.0 && !config.pipeline.spec().motion_speed {
        let why = remove(format!("the pipeline {} supports only the motion speed 1", config.pipeline.name()));
        return fail(Unsupported, "request.motion_speed", r.motion_speed, why);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::config::load;
    use crate::config::tests::set;

    #[test]
    fn invalid_chains_are_rejected() {
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
                "request.chain.overlap = 25 (default): must be less than request.chain.clip (25)",
            ),
            (
                &[chain, "pipeline=text_to_audio"],
                "request.chain = text_to_audio (--set): this pipeline does not support chained clips",
            ),
            (
                &[chain, "pipeline=dfr", "model.path=LTX-2.5"],
                "request.chain = dfr (--set): this pipeline does not support chained clips",
            ),
            (
                &[chain, "request.num_frames=auto"],
                "with chained clips, request.num_frames cannot be auto; set --seconds",
            ),
            (&[chain, "request.audio={path: a.wav}", "pipeline=two_stage"], "chained clips generate their own audio"),
            (
                &[
                    chain,
                    "two_stage.upsample=[temporal_x2, spatial_x2]",
                    "pipeline=two_stage",
                    "request.num_frames=129",
                ],
                "temporal_x2 is not supported with chained clips",
            ),
            (
                &[chain, "pipeline=image_to_video", "request.images=[{path: a.png, frame: 40}]"],
                "request.images = frame 40 (--set): images condition only the first clip; use a frame index below 33 (request.chain.clip)",
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
