//! The pipelines by name, and the rules in which they differ: what a configuration of each needs, its presets, and what
//! a request of it means.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::weights::Version;

/// Inputs and outputs of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Pipeline {
    /// Video with sound from a prompt.
    TextToVideo,
    /// The same, with image conditioning.
    ImageToVideo,
    /// Video to a sound that is given, with image conditioning or without.
    AudioToVideo,
    /// Half size first, then refined at full size.
    TwoStage,
    /// Two stages of a distilled model: few steps, no guidance.
    Distilled,
    /// The same two stages of a distilled model, the first with reference videos and an IC-LoRA, which was trained to follow them.
    #[serde(rename = "in_context", alias = "ic_lora")]
    #[value(name = "in_context", alias = "ic_lora")]
    IcLora,
    /// Two stages with the second-order sampler.
    Hq,
    /// Between conditioning images, in two stages.
    Keyframes,
    /// Keyframes generated beside the video in two stages, then rounds that double its frame rate (LTX-2.5).
    Dfr,
    /// A time span of a given video made anew, in one stage.
    Retake,
    /// A given video gone on with, behind its end or before its start.
    Extend,
    /// Sound for a given video.
    VideoToAudio,
    /// Sound alone from a prompt.
    TextToAudio,
}

impl Pipeline {
    /// Its name in YAML.
    pub fn name(self) -> &'static str {
        match self {
            Pipeline::TextToVideo => "text_to_video",
            Pipeline::ImageToVideo => "image_to_video",
            Pipeline::AudioToVideo => "audio_to_video",
            Pipeline::TwoStage => "two_stage",
            Pipeline::Distilled => "distilled",
            Pipeline::IcLora => "in_context",
            Pipeline::Hq => "hq",
            Pipeline::Keyframes => "keyframes",
            Pipeline::Dfr => "dfr",
            Pipeline::Retake => "retake",
            Pipeline::Extend => "extend",
            Pipeline::VideoToAudio => "video_to_audio",
            Pipeline::TextToAudio => "text_to_audio",
        }
    }

    /// Whether a second stage runs at twice the size of the first.
    pub fn has_two_stages(self) -> bool {
        use Pipeline::{Dfr, Distilled, Hq, IcLora, Keyframes, TwoStage};
        matches!(self, TwoStage | Distilled | IcLora | Hq | Keyframes | Dfr)
    }

    /// Extension of the files that it writes.
    pub fn extension(self) -> &'static str {
        if self == Pipeline::TextToAudio { "wav" } else { "mp4" }
    }

    /// Whether there is a video in its passes.
    pub(crate) fn has_video(self) -> bool {
        self != Pipeline::TextToAudio
    }

    /// Whether it makes frames, rather than sound alone.
    pub(crate) fn makes_frames(self) -> bool {
        !matches!(self, Pipeline::VideoToAudio | Pipeline::TextToAudio)
    }

    /// Flags of what its requests need beside a prompt.
    pub(crate) fn needed_flags(self) -> &'static [&'static str] {
        match self {
            Pipeline::ImageToVideo | Pipeline::Keyframes => &["--image"],
            Pipeline::AudioToVideo => &["--audio"],
            Pipeline::IcLora => &["--reference-video", "--lora"],
            Pipeline::Retake => &["--video", "--retake"],
            Pipeline::Extend => &["--video", "--extend"],
            Pipeline::VideoToAudio => &["--video"],
            Pipeline::TextToVideo
            | Pipeline::TwoStage
            | Pipeline::Distilled
            | Pipeline::Hq
            | Pipeline::Dfr
            | Pipeline::TextToAudio => &[],
        }
    }

    /// Whether it starts from a given video.
    pub fn takes_video(self) -> bool {
        matches!(self, Pipeline::Retake | Pipeline::Extend | Pipeline::VideoToAudio)
    }

    /// Whether its video may be made of clips (`request.chain`).
    pub(crate) fn makes_clips(self) -> bool {
        use Pipeline::{Distilled, Hq, ImageToVideo, Keyframes, TextToVideo, TwoStage};
        matches!(self, TextToVideo | ImageToVideo | TwoStage | Distilled | Hq | Keyframes)
    }

    /// The preset of a model generation.
    pub(crate) fn preset(self, version: Version) -> &'static str {
        match (version, self) {
            // No other generation has it: its transformers are refused by name.
            (_, Pipeline::Dfr) => "ltx2_5_dfr",
            (
                version,
                Pipeline::AudioToVideo
                | Pipeline::Retake
                | Pipeline::Extend
                | Pipeline::VideoToAudio
                | Pipeline::TextToAudio,
            ) => match version {
                // Lightricks' code guides these by every term, whatever the generation.
                Version::V2_0 => "ltx2_full_guidance",
                newer => Pipeline::TextToVideo.preset(newer),
            },
            (Version::V2_0, Pipeline::TextToVideo | Pipeline::ImageToVideo) => "ltx2",
            (Version::V2_0, Pipeline::TwoStage | Pipeline::Keyframes) => "ltx2_two_stage",
            (Version::V2_0, Pipeline::Distilled | Pipeline::IcLora) => "ltx2_distilled",
            (Version::V2_0, Pipeline::Hq) => "ltx2_hq",
            (Version::V2_3, Pipeline::TextToVideo | Pipeline::ImageToVideo) => "ltx2_3",
            (Version::V2_3, Pipeline::TwoStage | Pipeline::Keyframes) => "ltx2_3_two_stage",
            (Version::V2_3, Pipeline::Distilled | Pipeline::IcLora) => "ltx2_3_distilled",
            (Version::V2_3, Pipeline::Hq) => "ltx2_3_hq",
            (Version::V2_5, Pipeline::TextToVideo | Pipeline::ImageToVideo) => "ltx2_5",
            (Version::V2_5, Pipeline::TwoStage | Pipeline::Keyframes) => "ltx2_5_two_stage",
            (Version::V2_5, Pipeline::Distilled | Pipeline::IcLora) => "ltx2_5_distilled",
            (Version::V2_5, Pipeline::Hq) => "ltx2_5_hq",
        }
    }

    /// Fault of so many conditioning images.
    pub(crate) fn images_fault(self, images: usize) -> Option<&'static str> {
        match self {
            Pipeline::TextToVideo if images > 0 => {
                Some("images need --pipeline image_to_video, keyframes, or one of two stages")
            }
            Pipeline::ImageToVideo | Pipeline::Keyframes if images == 0 => {
                Some("needs a frame: --image PATH FRAME STRENGTH, or request.images")
            }
            Pipeline::Retake | Pipeline::Extend | Pipeline::VideoToAudio | Pipeline::TextToAudio if images > 0 => {
                Some("takes no images: request.images")
            }
            _ => None,
        }
    }

    /// Fault of a sound that is given, or is not.
    pub(crate) fn audio_fault(self, given: bool) -> Option<&'static str> {
        use Pipeline::{AudioToVideo, Extend, Retake};
        match self {
            Pipeline::AudioToVideo if !given => Some("needs a sound: --audio PATH, or request.audio"),
            pipeline
                if given && !pipeline.has_two_stages() && !matches!(pipeline, AudioToVideo | Retake | Extend)
                    || given && pipeline == Pipeline::Dfr =>
            {
                Some(
                    "a sound needs --pipeline audio_to_video, two_stage, distilled, in_context, hq or keyframes, or retake or extend \
                     of a video without sound",
                )
            }
            _ => None,
        }
    }

    /// Fault of so many reference videos.
    pub(crate) fn references_fault(self, references: usize) -> Option<&'static str> {
        match self {
            Pipeline::IcLora if references == 0 => {
                Some("needs a reference: --reference-video PATH, or request.reference_videos")
            }
            Pipeline::Dfr | Pipeline::Retake | Pipeline::Extend | Pipeline::VideoToAudio | Pipeline::TextToAudio
                if references > 0 =>
            {
                Some(
                    "takes no reference videos; --pipeline in_context does, and others of one or two stages from a prompt",
                )
            }
            _ => None,
        }
    }

    /// Whether LoRAs that name no stage hold for the first alone.
    pub(crate) fn has_loras_in_first_stage(self) -> bool {
        self == Pipeline::IcLora
    }

    /// Whether an image of frame 0 is appended as tokens too, instead of replacing the video's first.
    pub(crate) fn appends_every_image(self) -> bool {
        self == Pipeline::Keyframes
    }

    /// Whether the official schedule is shifted for the first stage's own size: HQ's alone is.
    pub(crate) fn shifts_for_own_size(self) -> bool {
        self == Pipeline::Hq
    }

    /// Whether the official pipeline keeps the second stage's sound.
    pub(crate) fn keeps_refined_audio(self) -> bool {
        matches!(self, Pipeline::Distilled | Pipeline::IcLora | Pipeline::Keyframes)
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use crate::config::{CliOverrides, load};
    use crate::media::{Frames, write_png_frames};

    /// Scales that Lightricks' pipelines have for each generation: every term.
    #[test]
    fn streams_that_go_with_a_given_one_have_full_guidance() {
        let folder = tempfile::tempdir().expect("a folder");
        let frames = Frames::new(Array4::zeros((25, 64, 96, 3))).expect("frames");
        write_png_frames(folder.path(), &frames).expect("written");
        let video = format!("request.video={}", folder.path().display());
        for (model, steps, block) in [("Lightricks/LTX-2", 40, 29), ("Lightricks/LTX-2.3", 30, 28)] {
            for (pipeline, given) in [
                ("audio_to_video", &["request.audio={path: a.wav}"][..]),
                ("retake", &[&video, "request.retake={start: 0.5}"]),
                ("extend", &[&video, "request.extend={seconds: 1}"]),
                ("video_to_audio", &[&video]),
                ("text_to_audio", &[]),
            ] {
                let own = [format!("model.path={model}"), format!("pipeline={pipeline}")];
                let set = own.into_iter().chain(given.iter().map(|pair| (*pair).to_string())).collect();
                let config = load(&CliOverrides { set, ..CliOverrides::default() }).expect("legal").config;
                let scales = config.scales().map(|own| [own.cfg, own.stg, own.modality, own.rescale]);
                assert_eq!([scales.video, scales.audio], [[3.0, 1.0, 3.0, 0.7], [7.0, 1.0, 3.0, 0.7]], "{pipeline}");
                assert_eq!((config.sampler.steps, &config.guidance.stg_blocks[..]), (steps, &[block][..]), "{model}");
            }
        }
    }
}
