//! Pipelines. Each has a [`PipelineSpec`], from which every rule about inputs, options and outputs is derived.

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::ConfigErrorKind;
use super::message::{Message, Setting, message};
use super::schema::{Config, Image};
use crate::media::HdrTransform;
use crate::weights::Version;

/// Pipeline of a run: determines the inputs and outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
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
    /// HDR video without sound from an SDR reference video, in two stages of a distilled model with an HDR LoRA.
    Hdr,
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
    /// Regenerates a masked region of an input video, or everything outside of it, in one stage.
    Inpaint,
    /// Two stages of a distilled model that regenerate an input video with new speech by the same speaker, with an
    /// IC-LoRA that was trained for it.
    DubIt,
    /// Sound for an input video.
    VideoToAudio,
    /// Sound only, from a prompt.
    TextToAudio,
}

/// Properties of a pipeline, such as its passes and the inputs that it accepts.
#[derive(Debug)]
pub struct PipelineSpec {
    /// Name in YAML.
    pub name: &'static str,
    pub passes: Passes,
    /// Whether the pipeline generates video, not only sound.
    pub generates_video: bool,
    /// Whether the pipeline generates HDR video, without an audio stream: both passes use the reference videos, and the
    /// second denoises tiles.
    pub hdr: bool,
    pub images: Support,
    /// Whether the pipeline supports input audio. Pipelines with an input video use the sound of the video instead.
    pub audio: Support,
    pub reference_videos: Support,
    /// Use of the required input video. `None`: the pipeline rejects input videos.
    pub video: Option<VideoUse>,
    /// Whether the pipeline supports chained clips (`request.chain`).
    pub chain: bool,
    /// Whether the first pass supports `conditioning.generated_keyframes`.
    pub generated_keyframes: bool,
    /// Whether the pipeline supports `request.motion_speed`.
    pub motion_speed: bool,
    /// Presets for LTX-2.0, LTX-2.3 and LTX-2.5.
    presets: [&'static str; 3],
    /// Pipeline with the same weights and presets that a server uses if a request has images and this pipeline rejects
    /// them, or if a request lacks the images that this pipeline requires.
    pub(crate) image_variant: Option<Pipeline>,
    /// Whether the pipeline uses the negative prompt of its preset.
    pub(crate) has_negative_prompt: bool,
    /// Whether LoRAs without `stages` apply to the first pass only.
    pub(crate) has_loras_in_first_pass: bool,
    /// Whether an image for frame 0 is appended as tokens instead of replacing the first frame
    /// ([`Config::placed_images`]).
    appends_every_image: bool,
    /// Whether the official noise schedule is shifted for the token count of the first pass instead of a constant token
    /// count.
    pub(crate) shifts_for_own_size: bool,
    /// Whether the official pipeline keeps the audio of the second pass.
    pub(crate) keeps_refined_audio: bool,
    /// Noise levels of the second pass, which replace those of the preset. `None`: the preset's.
    pub(crate) second_sigmas: Option<&'static [f64]>,
    /// Whether the preset's sampler `euler_ancestral` is replaced by `euler`.
    pub(crate) replaces_ancestral_sampler: bool,
}

/// A conditioning image and its place in the video.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedImage<'a> {
    pub(crate) image: &'a Image,
    /// Index of the frame.
    pub(crate) frame: usize,
    /// Whether the image is appended as tokens; otherwise it replaces the first frame.
    pub(crate) appended: bool,
}

/// Denoising passes of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    One,
    /// Two passes, the second of which refines the latents of the first at a larger size.
    Two,
    /// Two passes that also generate keyframes at the ends of segments, then rounds over tiles of the video that double
    /// the frame rate. Both reference implementations fix the noise order and the noise levels of these passes.
    TwoAndRounds,
}

/// Support of a pipeline for one kind of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Support {
    Required,
    Optional,
    Rejected,
}

/// Use of the input video by a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VideoUse {
    /// Keeps everything outside of a time span (`request.retake`).
    Span,
    /// Extends the video by a duration (`request.extend`), conditioned on the frames at its end or start.
    Overlap,
    /// Keeps all frames, of any size and number.
    Whole,
    /// Keeps the latents outside of a region (`request.mask`, `request.inpaint`).
    Region,
    /// Generates a new video and new sound that follow the frames and the sound of the video.
    Reference,
}

const ONE_PASS_PRESETS: [&str; 3] = ["ltx2", "ltx2_3", "ltx2_5"];
/// Presets that enable every guidance term, as Lightricks' code does in pipelines with input streams.
const FULL_GUIDANCE_PRESETS: [&str; 3] = ["ltx2_full_guidance", "ltx2_3", "ltx2_5"];
const TWO_STAGE_PRESETS: [&str; 3] = ["ltx2_two_stage", "ltx2_3_two_stage", "ltx2_5_two_stage"];
const DISTILLED_PRESETS: [&str; 3] = ["ltx2_distilled", "ltx2_3_distilled", "ltx2_5_distilled"];

const TEXT_TO_VIDEO: PipelineSpec = PipelineSpec {
    name: "text_to_video",
    passes: Passes::One,
    generates_video: true,
    hdr: false,
    images: Support::Rejected,
    audio: Support::Rejected,
    reference_videos: Support::Optional,
    video: None,
    chain: true,
    generated_keyframes: false,
    motion_speed: true,
    presets: ONE_PASS_PRESETS,
    image_variant: Some(Pipeline::ImageToVideo),
    has_negative_prompt: true,
    has_loras_in_first_pass: false,
    appends_every_image: false,
    shifts_for_own_size: false,
    keeps_refined_audio: false,
    second_sigmas: None,
    replaces_ancestral_sampler: false,
};

const IMAGE_TO_VIDEO: PipelineSpec = PipelineSpec {
    name: "image_to_video",
    images: Support::Required,
    image_variant: Some(Pipeline::TextToVideo),
    ..TEXT_TO_VIDEO
};

const AUDIO_TO_VIDEO: PipelineSpec = PipelineSpec {
    name: "audio_to_video",
    images: Support::Optional,
    audio: Support::Required,
    chain: false,
    presets: FULL_GUIDANCE_PRESETS,
    image_variant: None,
    ..TEXT_TO_VIDEO
};

const TWO_STAGE: PipelineSpec = PipelineSpec {
    name: "two_stage",
    passes: Passes::Two,
    images: Support::Optional,
    audio: Support::Optional,
    presets: TWO_STAGE_PRESETS,
    image_variant: None,
    ..TEXT_TO_VIDEO
};

const DISTILLED: PipelineSpec = PipelineSpec {
    name: "distilled",
    generated_keyframes: true,
    presets: DISTILLED_PRESETS,
    keeps_refined_audio: true,
    ..TWO_STAGE
};

const IN_CONTEXT: PipelineSpec = PipelineSpec {
    name: "in_context",
    reference_videos: Support::Required,
    chain: false,
    presets: DISTILLED_PRESETS,
    has_loras_in_first_pass: true,
    keeps_refined_audio: true,
    replaces_ancestral_sampler: true,
    ..TWO_STAGE
};

const HDR: PipelineSpec = PipelineSpec {
    name: "hdr",
    hdr: true,
    images: Support::Rejected,
    audio: Support::Rejected,
    second_sigmas: Some(&[0.909375, 0.725, 0.0]),
    motion_speed: false,
    has_loras_in_first_pass: false,
    ..IN_CONTEXT
};

const HQ: PipelineSpec =
    PipelineSpec { name: "hq", presets: ["ltx2_hq", "ltx2_3_hq", "ltx2_5_hq"], shifts_for_own_size: true, ..TWO_STAGE };

const KEYFRAMES: PipelineSpec = PipelineSpec {
    name: "keyframes",
    images: Support::Required,
    appends_every_image: true,
    keeps_refined_audio: true,
    ..TWO_STAGE
};

const DFR: PipelineSpec = PipelineSpec {
    name: "dfr",
    passes: Passes::TwoAndRounds,
    audio: Support::Rejected,
    reference_videos: Support::Rejected,
    chain: false,
    motion_speed: false,
    // Models of other generations are rejected later.
    presets: ["ltx2_5_dfr"; 3],
    ..TWO_STAGE
};

const RETAKE: PipelineSpec = PipelineSpec {
    name: "retake",
    audio: Support::Optional,
    reference_videos: Support::Rejected,
    video: Some(VideoUse::Span),
    chain: false,
    presets: FULL_GUIDANCE_PRESETS,
    image_variant: None,
    has_negative_prompt: false,
    ..TEXT_TO_VIDEO
};

const EXTEND: PipelineSpec =
    PipelineSpec { name: "extend", video: Some(VideoUse::Overlap), has_negative_prompt: true, ..RETAKE };

const INPAINT: PipelineSpec = PipelineSpec { name: "inpaint", video: Some(VideoUse::Region), ..EXTEND };

const DUB_IT: PipelineSpec = PipelineSpec {
    name: "dub_it",
    video: Some(VideoUse::Reference),
    reference_videos: Support::Rejected,
    motion_speed: false,
    has_loras_in_first_pass: false,
    keeps_refined_audio: false,
    ..IN_CONTEXT
};

const VIDEO_TO_AUDIO: PipelineSpec = PipelineSpec {
    name: "video_to_audio",
    generates_video: false,
    audio: Support::Rejected,
    video: Some(VideoUse::Whole),
    ..EXTEND
};

const TEXT_TO_AUDIO: PipelineSpec =
    PipelineSpec { name: "text_to_audio", video: None, motion_speed: false, ..VIDEO_TO_AUDIO };

impl Support {
    /// Returns the kind of the error about an input: it is required and missing, or given and not supported.
    pub(super) fn fault_kind(self) -> ConfigErrorKind {
        if self == Support::Required { ConfigErrorKind::Missing } else { ConfigErrorKind::Unsupported }
    }
}

impl PipelineSpec {
    /// Returns whether a second pass refines the first at a larger size.
    pub fn has_two_stages(&self) -> bool {
        self.passes != Passes::One
    }

    /// Returns whether rounds that double the frame rate follow the two passes.
    pub fn has_rounds(&self) -> bool {
        self.passes == Passes::TwoAndRounds
    }

    /// Returns whether the passes have a video stream.
    pub fn has_video(&self) -> bool {
        self.generates_video || self.video.is_some()
    }

    /// Returns the stages of LoRAs that do not specify them.
    pub(crate) fn default_lora_stages(&self) -> Vec<u8> {
        if self.has_loras_in_first_pass { vec![1] } else { vec![1, 2] }
    }

    /// Returns the flags that the pipeline requires in addition to a prompt.
    pub(crate) fn needed_flags(&self) -> Vec<&'static str> {
        let needed: [(bool, &[&str]); 8] = [
            (self.images == Support::Required, &["--image"]),
            (self.audio == Support::Required, &["--audio"]),
            (self.reference_videos == Support::Required, &["--reference-video", "--lora"]),
            (self.video.is_some(), &["--video"]),
            (self.video == Some(VideoUse::Span), &["--retake"]),
            (self.video == Some(VideoUse::Overlap), &["--extend"]),
            (self.video == Some(VideoUse::Region), &["--mask"]),
            (self.video == Some(VideoUse::Reference), &["--lora"]),
        ];
        needed.into_iter().filter(|(is_needed, _)| *is_needed).flat_map(|(_, flags)| flags).copied().collect()
    }

    /// Returns an error message if the pipeline does not support this number of conditioning images.
    pub(crate) fn images_fault(&self, images: usize) -> Option<Message> {
        match self.images {
            Support::Required if images == 0 => Some(message!["needs an image: ", Setting::Images]),
            Support::Rejected if images > 0 && self.image_variant.is_some() => {
                Some(message!["images need ", Setting::Pipeline, " image_to_video, keyframes, or a two-stage pipeline"])
            }
            Support::Rejected if images > 0 => Some("does not support images; remove them".into()),
            _ => None,
        }
    }

    /// Returns an error message if input audio is missing or not supported.
    pub(crate) fn audio_fault(&self, is_given: bool) -> Option<Message> {
        match self.audio {
            Support::Required if !is_given => Some(message!["needs input audio: ", Setting::Audio]),
            Support::Rejected if is_given => {
                let names = |has_video| {
                    pipeline_names("or", |spec| spec.audio != Support::Rejected && spec.video.is_some() == has_video)
                };
                let listed = format!(" {}, or {} of a video without sound", names(false), names(true));
                Some(message!["input audio needs ", Setting::Pipeline, listed])
            }
            _ => None,
        }
    }

    /// Returns an error message if the pipeline does not support this number of reference videos.
    pub(crate) fn references_fault(&self, references: usize) -> Option<Message> {
        match self.reference_videos {
            Support::Required if references == 0 => {
                Some(message!["needs a reference video: ", Setting::ReferenceVideos])
            }
            Support::Rejected if references > 0 => {
                let names = pipeline_names("or", |spec| spec.reference_videos == Support::Required);
                let names = format!(" {names} or another pipeline that starts from a prompt");
                Some(message!["does not support reference videos; use ", Setting::Pipeline, names])
            }
            _ => None,
        }
    }
}

/// Returns the names of the pipelines that `has_property` selects, such as "a, b or c"; `last` is the word before the
/// last name.
pub(crate) fn pipeline_names(last: &str, has_property: impl Fn(&PipelineSpec) -> bool) -> String {
    let specs = Pipeline::value_variants().iter().map(|pipeline| pipeline.spec());
    let found: Vec<&str> = specs.filter(|spec| has_property(spec)).map(|spec| spec.name).collect();
    match found.split_last() {
        Some((name, before @ [_, ..])) => format!("{} {last} {name}", before.join(", ")),
        _ => found.concat(),
    }
}

/// Returns the error message for an input video that the pipeline rejects.
pub(super) fn rejected_video() -> Message {
    let names = pipeline_names("and", |spec| spec.video.is_some());
    format!("only the pipelines {names} take a video; select one of them").into()
}

/// Returns the error message for a key that the pipeline `own` does not read; `uses` selects the pipelines that read
/// the key.
pub(super) fn unused_by_pipeline_message(own: &PipelineSpec, uses: fn(&PipelineSpec) -> bool) -> Message {
    let uses = format!("only the pipeline {} uses ", pipeline_names("or", uses));
    message![uses, Setting::This, format!(", but the pipeline is {}", own.name)]
}

impl Config {
    /// Returns the curve of the decoded values of HDR video; `None` if the video is SDR.
    pub(crate) fn hdr_transform(&self) -> Option<HdrTransform> {
        let stated = self.conditioning.hdr_transform.unwrap_or(HdrTransform::LogC3);
        self.pipeline.spec().hdr.then_some(stated)
    }

    /// Returns the conditioning images with the places that the pipeline gives them.
    pub(crate) fn placed_images(&self) -> impl Iterator<Item = PlacedImage<'_>> {
        let every = self.pipeline.spec().appends_every_image;
        self.request.images.iter().map(move |image| {
            let frame = image.frame;
            PlacedImage { image, frame, appended: every || frame > 0 }
        })
    }
}

impl Pipeline {
    /// Returns the properties of the pipeline.
    pub const fn spec(self) -> &'static PipelineSpec {
        match self {
            Pipeline::TextToVideo => &TEXT_TO_VIDEO,
            Pipeline::ImageToVideo => &IMAGE_TO_VIDEO,
            Pipeline::AudioToVideo => &AUDIO_TO_VIDEO,
            Pipeline::TwoStage => &TWO_STAGE,
            Pipeline::Distilled => &DISTILLED,
            Pipeline::IcLora => &IN_CONTEXT,
            Pipeline::Hdr => &HDR,
            Pipeline::Hq => &HQ,
            Pipeline::Keyframes => &KEYFRAMES,
            Pipeline::Dfr => &DFR,
            Pipeline::Retake => &RETAKE,
            Pipeline::Extend => &EXTEND,
            Pipeline::Inpaint => &INPAINT,
            Pipeline::DubIt => &DUB_IT,
            Pipeline::VideoToAudio => &VIDEO_TO_AUDIO,
            Pipeline::TextToAudio => &TEXT_TO_AUDIO,
        }
    }

    /// Returns the name of the pipeline in YAML.
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    /// Returns whether a second pass refines the first at a larger size.
    pub fn has_two_stages(self) -> bool {
        self.spec().has_two_stages()
    }

    /// Returns the extension of the pipeline's output files.
    pub fn extension(self) -> &'static str {
        if self.spec().has_video() { "mp4" } else { "wav" }
    }

    /// Returns whether the pipeline requires an input video.
    pub fn takes_video(self) -> bool {
        self.spec().video.is_some()
    }

    /// Returns the preset of the pipeline for a model generation.
    pub fn preset(self, version: Version) -> &'static str {
        let [v2_0, v2_3, v2_5] = self.spec().presets;
        match version {
            Version::V2_0 => v2_0,
            Version::V2_3 => v2_3,
            Version::V2_5 => v2_5,
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use crate::config::{CliOverrides, load};
    use crate::media::{Frames, write_png_frames};

    /// Lightricks' code enables every guidance term in these pipelines, for each model generation.
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
