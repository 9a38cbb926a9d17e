//! Defaults from an input video: size, number of frames and frame rate.

use std::path::Path;

use super::check::typed;
use super::error::{ConfigError, ConfigErrorKind, Limit, ValueOrigin};
use super::legal::{FRAME_STEP, nearest_frames, nearest_valid, whole_frames};
use super::message::{Message, Setting, message};
use super::pipeline::VideoUse;
use super::presets::is_shipped;
use super::schema::Config;
use super::sidecar;
use super::tree::Tree;
use crate::failpoint;
use crate::media::{Clip, ClipInfo, ClipPart, probe_clip};

/// Duration of the longest clips that the models were trained on, in seconds. Time positions are fractions of this
/// duration.
const TRAINED_SECONDS: f64 = 20.0;

/// Probes the input video and sets the size, frame rate and number of frames that the user did not set. `has_seconds`
/// is whether the command line sets a duration; `config` is the typed form of `merged`. Returns whether `merged`
/// changed.
///
/// # Errors
/// Returns an error if the video cannot be read, has fewer frames than requested, or its frame rate is not the
/// requested one.
pub(super) fn take(merged: &mut Tree, config: &Config, has_seconds: bool) -> Result<bool, ConfigError> {
    let spec = config.pipeline.spec();
    let of_pipeline = ValueOrigin::Pipeline(spec.name);
    // As in the official pipeline, a retake has no negative prompt by default.
    let negative = "request.negative_prompt";
    let clears_negative = !spec.has_negative_prompt && !is_written(merged, negative);
    if clears_negative {
        merged.set(negative, "".into(), &of_pipeline);
    }
    let (Some(path), Some(video_use)) = (config.request.video.clone(), spec.video) else {
        return Ok(clears_negative);
    };
    failpoint::reach("probe", "video");
    let info = probe_clip(Path::new(&path), Path::new("ffmpeg")).map_err(ConfigError::video)?;
    let origin = ValueOrigin::Video(path.clone());
    let multiple = match video_use {
        // The output keeps the size of the input video; only the network input is padded.
        VideoUse::Whole => 32,
        VideoUse::Reference => config.size_multiple(),
        VideoUse::Span | VideoUse::Overlap | VideoUse::Region => 1,
    };
    for (key, value) in [("request.width", info.width), ("request.height", info.height)] {
        let value = value.next_multiple_of(multiple);
        if !is_written(merged, key) {
            merged.set(key, value.into(), &origin);
        }
    }
    if let Some(rate) = info.frame_rate {
        take_rate(merged, config, rate, &origin)?;
    }
    let rate = info.frame_rate.unwrap_or(config.request.frame_rate);
    take_frames(merged, config, &info, rate, has_seconds, &origin)?;
    if video_use == VideoUse::Reference {
        take_sound(merged, config, Path::new(&path), rate, &origin)?;
    }
    Ok(true)
}

/// Returns whether the user wrote a value: it is not from the defaults, a preset, or a sidecar of another video.
fn is_written(merged: &Tree, key: &str) -> bool {
    let of_other = sidecar::holds(merged, key) && !sidecar::holds(merged, "request.video");
    let written = merged.leaf(key).is_some_and(|(_, origin)| *origin != ValueOrigin::Default && !is_shipped(origin));
    written && !of_other
}

fn fault(key: &'static str, value: impl ToString, merged: &Tree, why: impl Into<Limit>) -> ConfigError {
    ConfigError::value(ConfigErrorKind::Conflict, key, value, why).at(merged.origin(key))
}

fn take_rate(merged: &mut Tree, config: &Config, rate: f64, origin: &ValueOrigin) -> Result<(), ConfigError> {
    let (key, written) = ("request.frame_rate", config.request.frame_rate);
    if !is_written(merged, key) {
        merged.set(key, rate.into(), origin);
        return Ok(());
    }
    if (written - rate).abs() > 1e-3 {
        let why = format!(
            "the video has {rate:.3} frames per second and is not resampled: remove the option, or convert the video first, \
             e.g. ffmpeg -i IN -vf fps={written} OUT.mp4"
        );
        return Err(fault(key, written, merged, why));
    }
    Ok(())
}

/// Sets the number of frames to denoise: for `extend`, the overlap plus the added frames; otherwise the requested
/// number, or that of the video.
fn take_frames(
    merged: &mut Tree,
    config: &Config,
    info: &ClipInfo,
    rate: f64,
    has_seconds: bool,
    origin: &ValueOrigin,
) -> Result<(), ConfigError> {
    let key = "request.num_frames";
    let written = config.request.num_frames.count().filter(|_| has_seconds || is_written(merged, key));
    if config.request.num_frames.count().is_none() && is_written(merged, key) {
        return Err(fault(key, "auto", merged, format!("the input video has {} frames; remove auto", info.frames)));
    }
    let of_pipeline = ValueOrigin::Pipeline(config.pipeline.name());
    match (&config.request.extend, config.pipeline.spec().video) {
        (Some(extend), Some(VideoUse::Overlap)) => {
            let fail = |why: Message| Err(fault("request.extend", format!("{} s", extend.seconds), merged, why));
            if !(extend.seconds.is_finite() && extend.seconds > 0.0) {
                return fail(message![
                    "must be above 0; use ",
                    Setting::ExtensionAtStart,
                    " to extend before the start"
                ]);
            }
            // Same limit as for `--seconds`: larger numbers of frames are not exact.
            if extend.seconds * rate >= 1e9 {
                let why =
                    format!("is too long: at {rate:.3} frames per second, a video would have more than 1e9 frames");
                return fail(why.into());
            }
            if extend.overlap % FRAME_STEP != 1 {
                let why = format!("overlap {} is not one more than a multiple of {FRAME_STEP}", extend.overlap);
                return fail(why.into());
            }
            if info.frames < extend.overlap {
                return fail(message![
                    format!("the video has {} frames, fewer than ", info.frames),
                    Setting::Key("request.extend.overlap"),
                    format!(" = {}", extend.overlap)
                ]);
            }
            let added = (nearest_frames(extend.seconds * rate + 1.0, FRAME_STEP) - 1).max(FRAME_STEP);
            let frames = extend.overlap + added;
            // A sidecar has both the extension and the number of frames that follows from it.
            if let Some(written) = written.filter(|written| *written != frames && !sidecar::holds(merged, key)) {
                let sets = format!(" sets {frames} frames; remove ");
                let why = message![Setting::Key("request.extend"), sets, Setting::This];
                return Err(fault(key, written, merged, why));
            }
            merged.set(key, frames.into(), &of_pipeline);
        }
        (_, video_use) => match written {
            Some(written) if written > info.frames => {
                return Err(fault(
                    key,
                    written,
                    merged,
                    format!("the video has {} frames; use at most that many", info.frames),
                ));
            }
            Some(_) => {}
            // `video_to_audio` keeps all frames; the network input has only those that fill complete latents.
            None if matches!(video_use, Some(VideoUse::Whole | VideoUse::Reference)) => {
                merged.set(key, whole_frames(info.frames).into(), origin);
            }
            None => {
                merged.set(key, info.frames.into(), origin);
                let (frames, step) = (info.frames, config.frame_step());
                if frames % step != 1 {
                    let (low, high) = nearest_valid(frames, 1, step);
                    let rule = format!("must be one more than a multiple of {step}; the nearest are {low} and {high}");
                    let cut = format!(" {low} to use the first {low} frames, or repeat the last frame");
                    let pad = format!(", e.g. ffmpeg -i IN -vf tpad=stop_mode=clone:stop={} OUT.mp4", high - frames);
                    let why = message![rule, ": pass ", Setting::NumFrames, cut, pad];
                    return Err(fault(key, frames, merged, why));
                }
            }
        },
    }
    Ok(())
}

/// Sets the duration of the reference sound to that of the input video's sound, on which the shapes of programs depend.
/// `rate`: frames per second.
fn take_sound(
    merged: &mut Tree,
    config: &Config,
    path: &Path,
    rate: f64,
    origin: &ValueOrigin,
) -> Result<(), ConfigError> {
    let key = "request.dub.sound_seconds";
    if is_written(merged, key) {
        return Ok(());
    }
    let frames = typed(merged)?.request.num_frames.count().unwrap_or(1);
    let seconds = match &config.request.audio {
        Some(_) => frames as f64 / rate,
        None => {
            let part = ClipPart { frames: Some(2), seconds: None };
            let clip = Clip::read(path, Path::new("ffmpeg"), part).map_err(ConfigError::video)?;
            let none = || {
                let why =
                    message!["has no sound to follow; use a video with sound, or add its sound: ", Setting::Audio];
                ConfigError::value(ConfigErrorKind::Missing, "request.video", path.display(), why)
            };
            let sound = clip.sound.ok_or_else(none).map_err(|error| error.at(merged.origin("request.video")))?;
            sound.len() as f64 / f64::from(sound.rate())
        }
    };
    merged.set(key, seconds.into(), origin);
    Ok(())
}

/// Returns a warning if a clip is longer than the clips on which the models were trained.
pub(crate) fn training_length_warning(config: &Config, frames: usize, rate: f64) -> Option<String> {
    let seconds = (frames - 1) as f64 / rate;
    (seconds > TRAINED_SECONDS).then(|| {
        let most = (TRAINED_SECONDS * rate) as usize / FRAME_STEP * FRAME_STEP + 1;
        let within = match (&config.request.chain, config.pipeline.spec()) {
            (Some(_), _) => "reduce request.chain.clip",
            (None, spec) if spec.chain => "use --chain to generate shorter clips",
            (None, spec) if spec.video.is_some() => "use a shorter part of the video",
            (None, _) => "reduce --seconds",
        };
        format!(
            "{frames} frames at {rate:.3} per second are {seconds:.1} s, but the model was trained on clips of at most \
             {TRAINED_SECONDS} s ({most} frames); {within}"
        )
    })
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use super::*;
    use crate::config::{CliOverrides, NumFrames, load};
    use crate::media::{Frames, write_png_frames};

    /// Loads a configuration whose input video is a folder of black frames.
    fn load_video(frames: usize, height: usize, width: usize, set: &[&str]) -> Result<Config, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let frames = Frames::new(Array4::zeros((frames, height, width, 3))).expect("frames");
        write_png_frames(folder.path(), &frames).expect("written");
        let video = format!("request.video={}", folder.path().display());
        let set = [&[video.as_str()], set].concat().iter().map(|s| (*s).to_string()).collect();
        load(&CliOverrides { set, ..CliOverrides::default() }).map(|l| l.config).map_err(|e| e.to_string())
    }

    const RETAKE: [&str; 2] = ["pipeline=retake", "request.retake={from: 0.5, to: 0.7}"];

    #[test]
    fn input_video_sets_size_and_frame_count() {
        let config = load_video(25, 64, 96, &RETAKE).expect("legal");
        assert_eq!((config.request.width, config.request.height), (96, 64));
        assert_eq!((config.request.num_frames, config.request.frame_rate), (NumFrames::Count(25), 24.0));
        assert_eq!(config.request.negative_prompt, "");
        // Explicit values take precedence: the first 17 frames, at another size.
        let set = [&RETAKE[..], &["request.num_frames=17", "request.width=64", "request.negative_prompt=x"]].concat();
        let config = load_video(25, 64, 96, &set).expect("legal");
        assert_eq!((config.request.width, config.request.num_frames), (64, NumFrames::Count(17)));
        assert_eq!(config.request.negative_prompt, "x");
        // `video_to_audio` accepts any size and length.
        let config = load_video(30, 50, 40, &["pipeline=video_to_audio"]).expect("legal");
        assert_eq!((config.request.width, config.request.height), (64, 64));
        assert_eq!(config.request.num_frames, NumFrames::Count(25));
    }

    #[test]
    fn extend_clip_length_is_overlap_plus_added_frames() {
        let extend = |set: &[&str]| load_video(30, 64, 96, &[&["pipeline=extend"], set].concat());
        let frames = |set: &[&str]| extend(set).expect("legal").request.num_frames;
        assert_eq!(frames(&["request.extend={seconds: 2}"]), NumFrames::Count(25 + 48));
        assert_eq!(frames(&["request.extend={seconds: 0.1, at: start, overlap: 17}"]), NumFrames::Count(17 + 8));
        for (set, why) in [
            ("request.extend={seconds: -1}", "must be above 0; use --extend-at start"),
            (
                "request.extend={seconds: 1e18}",
                "1000000000000000000 s (--set): is too long: at 24.000 frames per second",
            ),
            ("request.extend={seconds: 1, overlap: 24}", "overlap 24 is not one more than a multiple of 8"),
            ("request.extend={seconds: 1, overlap: 33}", "has 30 frames, fewer than request.extend.overlap = 33"),
        ] {
            let error = extend(&[set]).expect_err("refused");
            assert!(error.contains(why), "{error}");
        }
        let error = extend(&["request.extend={seconds: 2}", "request.num_frames=25"]).expect_err("refused");
        let conflict = "request.num_frames = 25 (--set): request.extend sets 73 frames; remove this key";
        assert!(error.contains(conflict), "{error}");
    }

    #[test]
    fn invalid_input_videos_are_one_line_errors() {
        let span = |span: &str| load_video(25, 64, 96, &["pipeline=retake", &format!("request.retake={span}")]);
        for (retake, why) in [
            ("{from: 2, to: 1}", "2 to 1 s (--set): is empty; to must be after from"),
            ("{from: 1.5, to: 2}", "must start before the end of the video (1.042 s)"),
            ("{from: 0, video: false, audio: false}", "regenerates nothing"),
            ("{kept: source}", "0 s to the end (--set): is the complete video; set the span"),
        ] {
            let error = span(retake).expect_err("refused");
            assert!(error.contains(why), "{error}");
        }
        assert!(span("{from: 0.5, to: 99}").is_ok(), "a span goes to the end at most");
        let error = load_video(30, 64, 96, &RETAKE).expect_err("30 frames");
        assert!(error.contains("must be one more than a multiple of 8; the nearest are 25 and 33"), "{error}");
        assert!(error.contains("request.num_frames = 30 (video "), "{error}");
        for (frames, first, more) in [(24, 17, 1), (29, 25, 4), (117, 113, 4)] {
            let error = load_video(frames, 64, 96, &RETAKE).expect_err("no legal number");
            let typed = format!("pass --num-frames {first} to use the first {first} frames, or repeat the last frame");
            assert!(error.contains(&typed) && error.contains(&format!("tpad=stop_mode=clone:stop={more} ")), "{error}");
            let given = format!("request.num_frames={first}");
            load_video(frames, 64, 96, &[&RETAKE[..], &[&given]].concat()).expect("what the error says is legal");
        }
        let error = load_video(25, 60, 96, &RETAKE).expect_err("60 rows");
        assert!(error.contains("request.height = 60 (video ") && error.contains("nearest are 32 and 64"), "{error}");
        let error = load_video(25, 64, 96, &[&RETAKE[..], &["request.num_frames=33"]].concat()).expect_err("too many");
        assert!(error.contains("request.num_frames = 33 (--set): the video has 25"), "{error}");
        let error = load_video(25, 64, 96, &[]).expect_err("text to video");
        assert!(
            error.contains("only the pipelines retake, extend, inpaint, dub_it and video_to_audio take a video"),
            "{error}"
        );
        let none = load(&CliOverrides { set: vec!["pipeline=retake".into()], ..CliOverrides::default() });
        assert!(none.expect_err("no video").to_string().contains("needs a video: --video PATH"));
    }

    /// Without a sound track, the sound comes from `request.audio` and is as long as the frames that are used.
    #[test]
    fn dubbed_video_sets_size_frames_and_sound_duration() {
        let dub = |set: &[&str]| load_video(30, 70, 100, &[&["pipeline=dub_it"], set].concat());
        let config = dub(&["request.audio={path: a.wav}"]).expect("legal");
        assert_eq!((config.request.width, config.request.height), (128, 128));
        assert_eq!(config.request.num_frames, NumFrames::Count(25));
        assert_eq!(config.request.dub.and_then(|dub| dub.sound_seconds), Some(25.0 / 24.0));
        for (set, why) in [
            ("seed=1", "has no sound to follow; use a video with sound, or add its sound: --audio PATH"),
            ("dub={sound_seconds: 0}", "request.dub.sound_seconds = 0 (--set): must be above 0"),
        ] {
            let error = dub(&[&format!("request.{set}")]).expect_err("refused");
            assert!(error.contains(why), "{error}");
        }
        let sound = "request.audio={path: a.wav}";
        let lora = |loras: &str| dub(&[sound, &format!("model.loras={loras}")]).expect_err("refused");
        let path = "path: tests/fixtures/lora/ic_tiny_a_plain.safetensors";
        let two = lora(&format!("[{{{path}}}, {{{path}}}]"));
        assert!(two.contains("the pipeline dub_it uses one LoRA, its IC-LoRA; remove "), "{two}");
        let one = lora(&format!("[{{{path}, stages: [1]}}]"));
        assert!(one.contains("the pipeline dub_it uses its IC-LoRA in both stages; remove stages"), "{one}");
        let slow = dub(&[sound, "conditioning.reference_temporal_scale_factor=2"]).expect_err("refused");
        assert!(slow.contains("the pipeline dub_it uses every frame of its input video"), "{slow}");
        let long = dub(&[sound, "two_stage.upsample=[temporal_x2, spatial_x2]", "request.num_frames=17"])
            .expect_err("refused");
        assert!(long.contains("remove temporal_x2 or request.video"), "{long}");
        let other = load_video(25, 64, 96, &[&RETAKE[..], &["request.dub={strength: 0.5}"]].concat());
        assert!(other.expect_err("refused").contains("only the pipeline dub_it uses this key"));
    }

    #[test]
    fn inpainting_needs_one_region_within_the_picture() {
        let inpaint = |set: &[&str]| load_video(25, 64, 96, &[&["pipeline=inpaint"], set].concat());
        assert!(inpaint(&["request.inpaint={region: [0, 0, 96, 32]}"]).is_ok());
        assert!(inpaint(&["request.mask=mask.png"]).is_ok());
        let wide = ["request.inpaint={keep: [32, 0, 96, 64]}", "request.width=160"];
        assert_eq!(inpaint(&wide).expect("legal").request.width, 160);
        for (set, why) in [
            ("seed=1", "requires a region: --mask PATH, --inpaint X Y W H or --outpaint X Y W H"),
            ("inpaint={region: [0, 0, 8, 8], keep: [0, 0, 32, 32]}", "keep only one of request.mask"),
            (
                "inpaint={region: [64, 0, 33, 8]}",
                "[64, 0, 33, 8] (--set): must be a rectangle [left, top, width, height] within 96x64",
            ),
            ("inpaint={region: [0, 0, 0, 8]}", "must be a rectangle"),
            ("inpaint={region: [0, 0, 96, 64]}", "is the complete picture; use a smaller rectangle"),
            ("inpaint={keep: [16, 0, 64, 64]}", "all four numbers must be multiples of 32"),
        ] {
            let error = inpaint(&[&format!("request.{set}")]).expect_err("refused");
            assert!(error.contains(why), "{error}");
        }
        for set in ["request.mask=mask.png", "request.inpaint={region: [0, 0, 8, 8]}"] {
            let error = load_video(25, 64, 96, &[&RETAKE[..], &[set]].concat()).expect_err("refused");
            assert!(error.contains("only the pipeline inpaint uses this key"), "{error}");
        }
    }

    #[test]
    fn clips_beyond_the_training_length_give_a_warning() {
        let of = |set: &[&str], frames| {
            training_length_warning(&Config::load("ltx2", set.iter().copied()).expect("legal"), frames, 24.0)
        };
        assert_eq!(of(&[], 481), None);
        let warning = of(&[], 721).expect("30 s");
        assert!(warning.contains("721 frames") && warning.contains("20 s (481 frames)"), "{warning}");
        assert!(warning.ends_with("use --chain to generate shorter clips"), "{warning}");
        let warning = of(&["request.chain={clip: 721}", "request.num_frames=1441"], 721).expect("30 s");
        assert!(warning.ends_with("reduce request.chain.clip"), "{warning}");
        let warning = of(&["pipeline=text_to_audio"], 721).expect("30 s");
        assert!(warning.ends_with("reduce --seconds"), "{warning}");
    }
}
