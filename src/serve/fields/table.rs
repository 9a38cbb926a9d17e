//! Table of the request fields, from which the parser, the documentation and the suggestions for misspelled names are
//! derived.

use FieldEffect::{Keys, Neutral, Own};
use FieldKind::{
    Flag, Frames, IcLora, Image, Images, Integer, Integers, Loras, Mask, Metadata, Number, Numbers, Rectangle, Retake,
    Seconds, Seed, Size, Sound, Text, Tree, Video, Videos, Word,
};

use crate::sampling::MAX_STEPS;

/// Type of a field's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FieldKind {
    /// Text of at most this many bytes.
    Text(usize),
    /// Single line of text of at most this many characters.
    Word(usize),
    /// Integer between this minimum and maximum.
    Integer(u64, u64),
    /// Number between this minimum and maximum.
    Number(f64, f64),
    /// Boolean value.
    Flag,
    /// Integer from 0 to 2^64-1, or -1 for a random seed.
    Seed,
    /// Number of frames, or `auto`.
    Frames,
    /// Duration in seconds, as a number or as text.
    Seconds,
    /// Size `WxH` in pixels, a size alias, or `auto`.
    Size,
    Numbers,
    Integers,
    /// `[left, top, width, height]` in pixels.
    Rectangle,
    Image,
    Images,
    Sound,
    Video,
    Videos,
    /// Image or video.
    Mask,
    Loras,
    /// `{name, scale}`, or the name.
    IcLora,
    Metadata,
    /// Time span of a retake: `{start, end, video, audio}`.
    Retake,
    /// Tree of YAML configuration keys.
    Tree,
}

/// Effect of a request field.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FieldEffect {
    /// Sets these configuration keys to the field's value.
    Keys(&'static [&'static str]),
    /// Handled by code that is specific to the field.
    Own,
    /// Has no effect. Other servers support the field; this server accepts only the listed values, which change
    /// nothing.
    Neutral(&'static [&'static str]),
}

/// A request field.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub name: &'static str,
    /// Other names of the field.
    pub aliases: &'static [&'static str],
    pub kind: FieldKind,
    pub place: FieldEffect,
    pub description: &'static str,
}

const fn row(
    name: &'static str,
    aliases: &'static [&'static str],
    kind: FieldKind,
    place: FieldEffect,
    description: &'static str,
) -> Spec {
    Spec { name, aliases, kind, place, description }
}

/// Maximum length of a prompt, in bytes.
pub const MAX_PROMPT: usize = 16 << 10;
const SCALE: FieldKind = Number(-30.0, 30.0);
const UNIT: FieldKind = Number(0.0, 1.0);

/// All fields. If several fields set the same key, the last one in the table takes precedence.
pub static FIELDS: [Spec; 78] = [
    row("prompt", &[], Text(MAX_PROMPT), Keys(&["request.prompt"]), "Description of the video and its sound."),
    row(
        "enhance_prompt",
        &[],
        Flag,
        Keys(&["request.enhance_prompt"]),
        "Whether a language model rewrites the prompt into a detailed one; the video object has it as enhanced_prompt.",
    ),
    row("model", &[], Word(256), Own, "Name of the model, as listed by /v1/models. Default: the first one."),
    row(
        "pipeline",
        &[],
        Word(64),
        Own,
        "One of the server's pipelines. With images, text_to_video becomes image_to_video.",
    ),
    row(
        "size",
        &[],
        Size,
        Own,
        "Size in pixels, WIDTHxHEIGHT: multiples of 32, or of 64 with two stages. auto: the server's default.",
    ),
    row("width", &[], Integer(32, 16384), Own, "Width in pixels; with height, an alternative to size."),
    row("height", &[], Integer(32, 16384), Own, "Height in pixels; with width, an alternative to size."),
    row("fps", &["frame_rate"], Number(1.0, 60.0), Keys(&["request.frame_rate"]), "Frames per second."),
    row(
        "seconds",
        &[],
        Seconds,
        Own,
        "Duration in seconds, rounded to a number of frames that is one more than a multiple of 8. For extensions: the added duration.",
    ),
    row(
        "num_frames",
        &[],
        Frames,
        Own,
        "Number of frames, one more than a multiple of 8; overrides seconds. auto: the model predicts it from the prompt.",
    ),
    row("auto_duration", &[], Flag, Own, "true: same as num_frames auto; cannot be combined with a length."),
    row(
        "use_diffusion_decoder",
        &[],
        Flag,
        Own,
        "Whether LTX-2.5 decodes frames with its diffusion decoder. Models without one accept only false.",
    ),
    row(
        "negative_prompt",
        &[],
        Text(MAX_PROMPT),
        Own,
        "What the video should not contain. Empty text in JSON sets an empty negative prompt.",
    ),
    row("seed", &[], Seed, Own, "Random seed, 0 to 2^64-1. Absent or -1: the server chooses one and returns it."),
    row(
        "num_inference_steps",
        &["steps"],
        // The server's own limit is `serve.max_steps`.
        Integer(1, MAX_STEPS as u64),
        Keys(&["sampler.steps"]),
        "Number of denoising steps; not supported by models with fixed noise levels.",
    ),
    row(
        "sigmas",
        &["stage_1_sigmas"],
        Numbers,
        Keys(&["sampler.sigmas"]),
        "Noise levels, decreasing from at most 1; an alternative to num_inference_steps.",
    ),
    row(
        "stage_2_sigmas",
        &[],
        Numbers,
        Keys(&["two_stage.sigmas"]),
        "Noise levels of the second stage, decreasing from at most 1.",
    ),
    row(
        "max_sequence_length",
        &[],
        Integer(1, 65536),
        Keys(&["request.max_sequence_length"]),
        "Number of text tokens; must equal the server's.",
    ),
    row(
        "guidance_scale",
        &[],
        Number(0.0, 30.0),
        Keys(&["guidance.video.cfg", "guidance.audio.cfg"]),
        "Classifier-free guidance scale of video and audio; 1 disables it.",
    ),
    row(
        "stg_scale",
        &[],
        SCALE,
        Keys(&["guidance.video.stg", "guidance.audio.stg"]),
        "Spatio-temporal guidance scale of video and audio; 0 disables it.",
    ),
    row(
        "modality_scale",
        &[],
        SCALE,
        Keys(&["guidance.video.modality", "guidance.audio.modality"]),
        "Modality guidance scale of video and audio: guides away from the prediction without the other stream; 1 disables it.",
    ),
    row(
        "rescale_scale",
        &["guidance_rescale"],
        UNIT,
        Keys(&["guidance.video.rescale", "guidance.audio.rescale"]),
        "Guidance rescale of video and audio, towards the standard deviation before guidance; 0 disables it.",
    ),
    row(
        "stg_blocks",
        &[],
        Integers,
        Keys(&["guidance.stg_blocks"]),
        "Indices of the transformer blocks that spatio-temporal guidance perturbs.",
    ),
    row(
        "guidance_skip_step",
        &[],
        Integer(0, 255),
        Keys(&["guidance.video.skip", "guidance.audio.skip"]),
        "Number of steps after each computed step that reuse its prediction, for video and audio.",
    ),
    row(
        "video_cfg_scale",
        &["video_cfg_guidance_scale"],
        Number(0.0, 30.0),
        Keys(&["guidance.video.cfg"]),
        "Same as guidance_scale, for video only.",
    ),
    row(
        "audio_cfg_scale",
        &["audio_cfg_guidance_scale", "audio_guidance_scale"],
        Number(0.0, 30.0),
        Keys(&["guidance.audio.cfg"]),
        "Same as guidance_scale, for audio only.",
    ),
    row(
        "video_stg_scale",
        &["video_stg_guidance_scale"],
        SCALE,
        Keys(&["guidance.video.stg"]),
        "Same as stg_scale, for video only.",
    ),
    row(
        "audio_stg_scale",
        &["audio_stg_guidance_scale"],
        SCALE,
        Keys(&["guidance.audio.stg"]),
        "Same as stg_scale, for audio only.",
    ),
    row(
        "video_modality_scale",
        &["a2v_guidance_scale"],
        SCALE,
        Keys(&["guidance.video.modality"]),
        "Same as modality_scale, for video only.",
    ),
    row(
        "audio_modality_scale",
        &["v2a_guidance_scale"],
        SCALE,
        Keys(&["guidance.audio.modality"]),
        "Same as modality_scale, for audio only.",
    ),
    row("video_rescale_scale", &[], UNIT, Keys(&["guidance.video.rescale"]), "Same as rescale_scale, for video only."),
    row("audio_rescale_scale", &[], UNIT, Keys(&["guidance.audio.rescale"]), "Same as rescale_scale, for audio only."),
    row("video_stg_blocks", &[], Integers, Keys(&["guidance.video.stg_blocks"]), "Same as stg_blocks, for video only."),
    row("audio_stg_blocks", &[], Integers, Keys(&["guidance.audio.stg_blocks"]), "Same as stg_blocks, for audio only."),
    row(
        "video_skip_step",
        &[],
        Integer(0, 255),
        Keys(&["guidance.video.skip"]),
        "Same as guidance_skip_step, for video only.",
    ),
    row(
        "audio_skip_step",
        &[],
        Integer(0, 255),
        Keys(&["guidance.audio.skip"]),
        "Same as guidance_skip_step, for audio only.",
    ),
    row(
        "input_reference",
        &["image_reference", "reference_url", "image"],
        Image,
        Own,
        "Image of the first frame, as a file, data URL or base64; or a list of images with role first_frame or last_frame.",
    ),
    row(
        "images",
        &[],
        Images,
        Own,
        "Input images: [{file: name of a form part, or data: data URL; frame, strength, crf}].",
    ),
    row("image_cond_strength", &[], UNIT, Own, "Conditioning strength of images without their own strength, 0 to 1."),
    row(
        "image_crf",
        &[],
        Integer(0, 51),
        Own,
        "CRF of the H.264 compression applied to images without their own crf; 0 disables it.",
    ),
    row(
        "input_audio",
        &["audio_reference"],
        Sound,
        Own,
        "Audio to which the video is matched: a file, a data URL, or {data, start, duration} with times in seconds.",
    ),
    row(
        "input_video",
        &["video_reference", "video"],
        Video,
        Own,
        "Video to edit or extend: an MP4 as a file or data URL, or the id of a finished video.",
    ),
    row(
        "reference_videos",
        &[],
        Videos,
        Own,
        "Reference videos of an IC-LoRA: [{file or data, strength, attention_strength, mask, frames, preprocess}].",
    ),
    row("start", &[], Number(0.0, 1e6), Own, "Start of the time span that an edit regenerates, in seconds."),
    row(
        "end",
        &[],
        Number(0.0, 1e6),
        Own,
        "End of the span that an edit regenerates, in seconds. Default: the video's end.",
    ),
    row(
        "retake",
        &[],
        Retake,
        Own,
        "Time span to regenerate, in seconds, and whether its video and audio are regenerated: {start, end, video, audio}.",
    ),
    row(
        "mask",
        &[],
        Mask,
        Own,
        "White where the pipeline inpaint regenerates the input video: an image for all frames, or a video.",
    ),
    row(
        "region",
        &[],
        Rectangle,
        Keys(&["request.inpaint.region"]),
        "Rectangle of the input video to regenerate: [left, top, width, height] in pixels.",
    ),
    row(
        "keep",
        &[],
        Rectangle,
        Keys(&["request.inpaint.keep"]),
        "Rectangle of the output that shows the input video, in multiples of 32: [left, top, width, height] in pixels.",
    ),
    row("dub_strength", &[], UNIT, Keys(&["request.dub.strength"]), "Strength of the input video of dub_it, 0 to 1."),
    row(
        "before",
        &[],
        Flag,
        Own,
        "Whether an extension is added before the start of the video instead of after its end.",
    ),
    row(
        "overlap",
        &[],
        Integer(9, 1 << 20),
        Own,
        "Number of frames of the input video that an extension is conditioned on.",
    ),
    row(
        "lora",
        &["loras"],
        Loras,
        Own,
        "LoRAs by name: {name, scale}, or a list of these. /v1/list_loras lists the names.",
    ),
    row(
        "ic_lora",
        &[],
        IcLora,
        Own,
        "Published IC-LoRA that follows reference_videos: its name, or {name, scale}. /v1/models lists the names.",
    ),
    row("generate_audio", &["generate_sound"], Flag, Keys(&["output.audio"]), "Whether the MP4 has an audio track."),
    row(
        "preview_every",
        &[],
        Integer(1, MAX_STEPS as u64),
        Keys(&["output.preview_every"]),
        "Number of steps between two previews, which event streams with ?previews=true receive. Absent: no previews.",
    ),
    row("ltx2", &[], Tree, Own, "Configuration keys, as in YAML files, for options without a field."),
    row("user", &[], Word(64), Own, "Returned unchanged in the video object."),
    row("metadata", &[], Metadata, Own, "At most 16 key-value pairs of text, returned unchanged in the video object."),
    row(
        "n",
        &["num_outputs_per_prompt"],
        Word(64),
        Neutral(&["1"]),
        "Only 1; send several requests to generate several videos.",
    ),
    row("quality", &["output_quality"], Word(64), Neutral(&["standard", "default", "auto"]), "No effect."),
    row("format", &["output_format"], Word(64), Neutral(&["mp4", "auto"]), "Container format: only MP4."),
    row("response_format", &[], Word(64), Neutral(&["file"]), "Only file: the video is downloaded as a file."),
    row(
        "generator_device",
        &[],
        Word(64),
        Neutral(&["cpu", "cuda"]),
        "No effect: the noise is the same on any device.",
    ),
    row("guidance_scale_2", &[], Word(64), Neutral(&[]), "Not supported."),
    row("true_cfg_scale", &[], Word(64), Neutral(&[]), "Not supported."),
    row("boundary_ratio", &[], Word(64), Neutral(&[]), "Not supported."),
    row("flow_shift", &[], Word(64), Neutral(&[]), "Not supported."),
    row("enable_teacache", &[], Word(64), Neutral(&["false"]), "Not supported; only false is accepted."),
    row("enable_cache_dit", &[], Word(64), Neutral(&["false"]), "Not supported; only false is accepted."),
    row("enable_frame_interpolation", &[], Word(64), Neutral(&["false"]), "Not supported; only false is accepted."),
    row("frame_interpolation_exp", &[], Word(64), Neutral(&["1", "1.0"]), "Not supported; only 1 is accepted."),
    row("frame_interpolation_scale", &[], Word(64), Neutral(&["1", "1.0"]), "Not supported; only 1 is accepted."),
    row("enable_upscaling", &[], Word(64), Neutral(&["false"]), "Not supported; only false is accepted."),
    row("upscaling_scale", &[], Word(64), Neutral(&["4", "4.0"]), "No effect: upscaling is not supported."),
    row("profile", &[], Word(64), Neutral(&["false"]), "Not supported; only false is accepted."),
    row("profile_all_stages", &[], Word(64), Neutral(&["false"]), "Not supported; only false is accepted."),
    row(
        "return_stage_metrics",
        &[],
        Word(64),
        Neutral(&["false"]),
        "Only false: each video object has `timings` instead.",
    ),
];

/// Fields that contain server paths in the APIs of other servers. They are rejected.
pub(super) const PATHS: [&str; 8] =
    ["output_path", "perf_dump_path", "video_path", "image_path", "input_path", "output_dir", "save_path", "lora_path"];

/// Fields whose members are read as fields of the request.
pub(super) const WRAPPERS: [&str; 2] = ["extra_params", "extra_body"];

/// Returns the field with this name or alias.
pub fn find(name: &str) -> Option<&'static Spec> {
    FIELDS.iter().find(|spec| spec.name == name || spec.aliases.contains(&name))
}

/// Returns the field name that is most similar to an unknown name.
pub(super) fn nearest(name: &str) -> &'static str {
    let names = FIELDS.iter().flat_map(|spec| spec.aliases.iter().chain([&spec.name]));
    let name: String = name.chars().take(64).collect();
    let likeness = |known: &str| strsim::normalized_damerau_levenshtein(known, &name);
    names.max_by(|a, b| likeness(a).total_cmp(&likeness(b))).copied().unwrap_or("prompt")
}
