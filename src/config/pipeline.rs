//! Pipelines and their rules: required inputs, presets and supported request options.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::weights::Version;

/// Pipeline of a run: determines the inputs and outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Pipeline {
    /// Video with sound from a prompt.
    TextToVideo,
    /// Video with sound from a prompt and conditioning images.
    ImageToVideo,
    /// Video for input audio, optionally with conditioning images.
    AudioToVideo,
    /// Two stages: generation at half size with guidance, then upsampling and refinement at full size.
    TwoStage,
    /// Two stages of a distilled model: few steps, no guidance.
    Distilled,
    /// Two stages of a distilled model; the first stage follows reference videos with an IC-LoRA that was trained for
    /// them.
    #[serde(rename = "in_context")]
    #[value(name = "in_context")]
    IcLora,
    /// Two stages with a second-order sampler.
    Hq,
    /// Two stages that interpolate between conditioning images.
    Keyframes,
    /// Two stages that also generate keyframes, then rounds that double the frame rate (LTX-2.5).
    Dfr,
    /// Regenerates a time span of an input video, in one stage.
    Retake,
    /// Extends an input video after its end or before its start.
    Extend,
    /// Sound for an input video.
    VideoToAudio,
    /// Sound only, from a prompt.
    TextToAudio,
}

impl Pipeline {
    /// Returns the name of the pipeline in YAML.
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

    /// Returns whether a second stage refines the first at a larger size.
    pub fn has_two_stages(self) -> bool {
        use Pipeline::{Dfr, Distilled, Hq, IcLora, Keyframes, TwoStage};
        matches!(self, TwoStage | Distilled | IcLora | Hq | Keyframes | Dfr)
    }

    /// Returns the extension of the pipeline's output files.
    pub fn extension(self) -> &'static str {
        if self == Pipeline::TextToAudio { "wav" } else { "mp4" }
    }

    /// Returns whether the pipeline's passes have a video stream.
    pub(crate) fn has_video(self) -> bool {
        self != Pipeline::TextToAudio
    }

    /// Returns whether the pipeline generates frames, not only sound.
    pub(crate) fn makes_frames(self) -> bool {
        !matches!(self, Pipeline::VideoToAudio | Pipeline::TextToAudio)
    }

    /// Returns the flags that the pipeline requires in addition to a prompt.
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

    /// Returns whether the pipeline requires an input video.
    pub fn takes_video(self) -> bool {
        matches!(self, Pipeline::Retake | Pipeline::Extend | Pipeline::VideoToAudio)
    }

    /// Returns whether the pipeline supports chained clips (`request.chain`).
    pub(crate) fn makes_clips(self) -> bool {
        use Pipeline::{Distilled, Hq, ImageToVideo, Keyframes, TextToVideo, TwoStage};
        matches!(self, TextToVideo | ImageToVideo | TwoStage | Distilled | Hq | Keyframes)
    }

    /// Returns the preset of the pipeline for a model generation.
    pub(crate) fn preset(self, version: Version) -> &'static str {
        match (version, self) {
            // Only LTX-2.5 supports dfr; models of other generations are rejected later.
            (_, Pipeline::Dfr) => "ltx2_5_dfr",
            (
                version,
                Pipeline::AudioToVideo
                | Pipeline::Retake
                | Pipeline::Extend
                | Pipeline::VideoToAudio
                | Pipeline::TextToAudio,
            ) => match version {
                // Lightricks' code uses every guidance term in these pipelines, for all model generations.
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

    /// Returns an error message if the pipeline does not support this number of conditioning images.
    pub(crate) fn images_fault(self, images: usize) -> Option<&'static str> {
        match self {
            Pipeline::TextToVideo if images > 0 => {
                Some("images need --pipeline image_to_video, keyframes, or a two-stage pipeline")
            }
            Pipeline::ImageToVideo | Pipeline::Keyframes if images == 0 => {
                Some("needs an image: --image PATH FRAME STRENGTH, or request.images")
            }
            Pipeline::Retake | Pipeline::Extend | Pipeline::VideoToAudio | Pipeline::TextToAudio if images > 0 => {
                Some("does not support images; remove them")
            }
            _ => None,
        }
    }

    /// Returns an error message if input audio is missing or not supported.
    pub(crate) fn audio_fault(self, given: bool) -> Option<&'static str> {
        use Pipeline::{AudioToVideo, Extend, Retake};
        match self {
            Pipeline::AudioToVideo if !given => Some("needs input audio: --audio PATH, or request.audio"),
            pipeline
                if given && !pipeline.has_two_stages() && !matches!(pipeline, AudioToVideo | Retake | Extend)
                    || given && pipeline == Pipeline::Dfr =>
            {
                Some(
                    "input audio needs --pipeline audio_to_video, two_stage, distilled, in_context, hq or keyframes, or retake or extend \
                     of a video without sound",
                )
            }
            _ => None,
        }
    }

    /// Returns an error message if the pipeline does not support this number of reference videos.
    pub(crate) fn references_fault(self, references: usize) -> Option<&'static str> {
        match self {
            Pipeline::IcLora if references == 0 => {
                Some("needs a reference video: --reference-video PATH, or request.reference_videos")
            }
            Pipeline::Dfr | Pipeline::Retake | Pipeline::Extend | Pipeline::VideoToAudio | Pipeline::TextToAudio
                if references > 0 =>
            {
                Some(
                    "does not support reference videos; use --pipeline in_context or another pipeline that starts from a prompt",
                )
            }
            _ => None,
        }
    }

    /// Returns whether LoRAs without `stages` apply to the first stage only.
    pub(crate) fn has_loras_in_first_stage(self) -> bool {
        self == Pipeline::IcLora
    }

    /// Returns whether an image for frame 0 is appended as tokens instead of replacing the first frame.
    pub(crate) fn appends_every_image(self) -> bool {
        self == Pipeline::Keyframes
    }

    /// Returns whether the official noise schedule is shifted for the token count of the first stage instead of a
    /// constant token count; only for `hq`.
    pub(crate) fn shifts_for_own_size(self) -> bool {
        self == Pipeline::Hq
    }

    /// Returns whether the official pipeline keeps the audio of the second stage.
    pub(crate) fn keeps_refined_audio(self) -> bool {
        matches!(self, Pipeline::Distilled | Pipeline::IcLora | Pipeline::Keyframes)
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use crate::config::{CliOverrides, load};
    use crate::media::{Frames, write_png_frames};

    /// Lightricks' code uses every guidance term in these pipelines, for each model generation.
    #[test]
    fn pipelines_with_input_streams_use_full_guidance() {
        let folder = tempfile::tempdir().expect("a folder");
        let frames = Frames::new(Array4::zeros((25, 64, 96, 3))).expect("frames");
        write_png_frames(folder.path(), &frames).expect("written");
        let video = format!("request.video={}", folder.path().display());
        for (model, steps, block) in [("Lightricks/LTX-2", 40, 29), ("Lightricks/LTX-2.3", 30, 28)] {
            for (pipeline, given) in [
                ("audio_to_video", &["request.audio={path: a.wav}"][..]),
                ("retake", &[&video, "request.retake={from: 0.5}"]),
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
