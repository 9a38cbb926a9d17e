//! The fields of requests: a row each, from which they are read, documented and suggested.

use FieldKind::{
    Flag, Frames, Image, Images, Integer, Integers, Loras, Metadata, Number, Numbers, Retake, Seconds, Seed, Size,
    Sound, Text, Tree, Video, Videos, Word,
};
use Place::{Keys, Neutral, Own};

/// Kind of a field's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FieldKind {
    /// Text of at most so many bytes.
    Text(usize),
    /// A name, of at most so many characters.
    Word(usize),
    /// A whole number, from and to.
    Integer(u64, u64),
    /// A number, from and to.
    Number(f64, f64),
    /// True or false.
    Flag,
    /// A whole number below 2^64; -1 draws one.
    Seed,
    /// A number of frames, or `auto`.
    Frames,
    /// A duration, as a number or as text.
    Seconds,
    /// `WxH`, `auto`, or the name of an alias.
    Size,
    Numbers,
    Integers,
    Image,
    Images,
    Sound,
    Video,
    Videos,
    Loras,
    Metadata,
    /// `{start, end, video, audio}`.
    Retake,
    /// Keys of the YAML.
    Tree,
}

/// Where a field goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// These keys of the YAML.
    Keys(&'static [&'static str]),
    /// Code of its own.
    Own,
    /// Nowhere: other servers know it, and here only these values mean anything.
    Neutral(&'static [&'static str]),
}

/// A field of requests.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub name: &'static str,
    /// Other names of the same.
    pub aliases: &'static [&'static str],
    pub kind: FieldKind,
    pub place: Place,
    pub description: &'static str,
}

const fn row(
    name: &'static str,
    aliases: &'static [&'static str],
    kind: FieldKind,
    place: Place,
    description: &'static str,
) -> Spec {
    Spec { name, aliases, kind, place, description }
}

/// Bytes of a prompt.
pub const MAX_PROMPT: usize = 16 << 10;
/// Steps that a table of the denoising loop holds; a server takes `serve.max_steps`.
const MOST_STEPS: u64 = 256;
const SCALE: FieldKind = Number(-30.0, 30.0);
const UNIT: FieldKind = Number(0.0, 1.0);

/// Every field. Where several write one key, that of a later row holds.
pub static FIELDS: [Spec; 72] = [
    row("prompt", &[], Text(MAX_PROMPT), Keys(&["request.prompt"]), "What the video shows and how it sounds."),
    row("model", &[], Word(256), Own, "A name that the server gives its model, or nothing."),
    row(
        "pipeline",
        &[],
        Word(64),
        Own,
        "A pipeline that the server was started for. Images turn text_to_video into image_to_video.",
    ),
    row(
        "size",
        &[],
        Size,
        Own,
        "Pixels, WIDTHxHEIGHT: multiples of 32, of 64 with two stages. auto: the server's own.",
    ),
    row("width", &[], Integer(32, 16384), Own, "Pixels; with height, in place of size."),
    row("height", &[], Integer(32, 16384), Own, "Pixels; with width, in place of size."),
    row("fps", &["frame_rate"], Number(1.0, 60.0), Keys(&["request.frame_rate"]), "Frames a second."),
    row(
        "seconds",
        &[],
        Seconds,
        Own,
        "Duration: the nearest number of frames that is one more than a multiple of 8. Of an extension, what is added.",
    ),
    row(
        "num_frames",
        &[],
        Frames,
        Own,
        "Frames, one more than a multiple of 8; wins over seconds. auto: as many as the model predicts for the prompt.",
    ),
    row("auto_duration", &[], Flag, Own, "true: num_frames is auto. Together with a length it is refused."),
    row(
        "use_diffusion_decoder",
        &[],
        Flag,
        Own,
        "Which decoder of LTX-2.5 makes the frames; false where there is but one.",
    ),
    row("negative_prompt", &[], Text(MAX_PROMPT), Own, "What to avoid. Empty text in JSON is an empty one."),
    row("seed", &[], Seed, Own, "Random seed, 0 to 2^64-1. Absent or -1: one is drawn, and said in the answer."),
    row(
        "num_inference_steps",
        &["steps"],
        Integer(1, MOST_STEPS),
        Keys(&["sampler.steps"]),
        "Denoising steps; not where the model fixes its noise levels.",
    ),
    row(
        "sigmas",
        &["stage_1_sigmas"],
        Numbers,
        Keys(&["sampler.sigmas"]),
        "Noise levels themselves, falling from at most 1.",
    ),
    row("stage_2_sigmas", &[], Numbers, Keys(&["two_stage.sigmas"]), "Noise levels of the second stage."),
    row(
        "max_sequence_length",
        &[],
        Integer(1, 65536),
        Keys(&["request.max_sequence_length"]),
        "Text tokens; only the server's own number.",
    ),
    row(
        "guidance_scale",
        &[],
        Number(0.0, 30.0),
        Keys(&["guidance.video.cfg", "guidance.audio.cfg"]),
        "Away from the negative prompt, of both streams; 1 is off.",
    ),
    row(
        "stg_scale",
        &[],
        SCALE,
        Keys(&["guidance.video.stg", "guidance.audio.stg"]),
        "Spatio-temporal guidance of both streams; 0 is off.",
    ),
    row(
        "modality_scale",
        &[],
        SCALE,
        Keys(&["guidance.video.modality", "guidance.audio.modality"]),
        "Away from the prediction without the other stream, of both; 1 is off.",
    ),
    row(
        "rescale_scale",
        &["guidance_rescale"],
        UNIT,
        Keys(&["guidance.video.rescale", "guidance.audio.rescale"]),
        "Towards the standard deviation before guidance, of both streams; 0 is off.",
    ),
    row(
        "stg_blocks",
        &[],
        Integers,
        Keys(&["guidance.stg_blocks"]),
        "Transformer blocks that the perturbed branch perturbs.",
    ),
    row(
        "guidance_skip_step",
        &[],
        Integer(0, 255),
        Keys(&["guidance.video.skip", "guidance.audio.skip"]),
        "Steps behind each predicted one that take over its prediction, of both streams.",
    ),
    row(
        "video_cfg_scale",
        &["video_cfg_guidance_scale"],
        Number(0.0, 30.0),
        Keys(&["guidance.video.cfg"]),
        "As guidance_scale, of the video.",
    ),
    row(
        "audio_cfg_scale",
        &["audio_cfg_guidance_scale", "audio_guidance_scale"],
        Number(0.0, 30.0),
        Keys(&["guidance.audio.cfg"]),
        "As guidance_scale, of the sound.",
    ),
    row(
        "video_stg_scale",
        &["video_stg_guidance_scale"],
        SCALE,
        Keys(&["guidance.video.stg"]),
        "As stg_scale, of the video.",
    ),
    row(
        "audio_stg_scale",
        &["audio_stg_guidance_scale"],
        SCALE,
        Keys(&["guidance.audio.stg"]),
        "As stg_scale, of the sound.",
    ),
    row(
        "video_modality_scale",
        &["a2v_guidance_scale"],
        SCALE,
        Keys(&["guidance.video.modality"]),
        "As modality_scale, of the video.",
    ),
    row(
        "audio_modality_scale",
        &["v2a_guidance_scale"],
        SCALE,
        Keys(&["guidance.audio.modality"]),
        "As modality_scale, of the sound.",
    ),
    row("video_rescale_scale", &[], UNIT, Keys(&["guidance.video.rescale"]), "As rescale_scale, of the video."),
    row("audio_rescale_scale", &[], UNIT, Keys(&["guidance.audio.rescale"]), "As rescale_scale, of the sound."),
    row("video_stg_blocks", &[], Integers, Keys(&["guidance.video.stg_blocks"]), "As stg_blocks, of the video."),
    row("audio_stg_blocks", &[], Integers, Keys(&["guidance.audio.stg_blocks"]), "As stg_blocks, of the sound."),
    row(
        "video_skip_step",
        &[],
        Integer(0, 255),
        Keys(&["guidance.video.skip"]),
        "As guidance_skip_step, of the video.",
    ),
    row(
        "audio_skip_step",
        &[],
        Integer(0, 255),
        Keys(&["guidance.audio.skip"]),
        "As guidance_skip_step, of the sound.",
    ),
    row(
        "input_reference",
        &["image_reference", "reference_url", "image"],
        Image,
        Own,
        "The first frame, as a file, a data URL or base64; a list with role first_frame or last_frame.",
    ),
    row(
        "images",
        &[],
        Images,
        Own,
        "Frames that are given: [{file: name of a part, or data: data URL, frame, strength, crf}].",
    ),
    row("image_cond_strength", &[], UNIT, Own, "How closely images are kept that say nothing of their own, 0 to 1."),
    row(
        "image_crf",
        &[],
        Integer(0, 51),
        Own,
        "Quality of the H.264 round trip of images that say nothing of their own, 0 for none.",
    ),
    row(
        "input_audio",
        &["audio_reference"],
        Sound,
        Own,
        "Sound that the video is made to, as a file, a data URL, or {data, start, duration}.",
    ),
    row(
        "input_video",
        &["video_reference", "video"],
        Video,
        Own,
        "The video that an edit or an extension starts from: an MP4 as a file or a data URL, or the id of a finished video.",
    ),
    row(
        "reference_videos",
        &[],
        Videos,
        Own,
        "Videos that an IC-LoRA follows: [{file or data, strength, attention_strength, mask, frames}].",
    ),
    row("start", &[], Number(0.0, 1e6), Own, "Seconds at which the span starts that an edit makes anew."),
    row("end", &[], Number(0.0, 1e6), Own, "Seconds at which it ends; the video's end without."),
    row("retake", &[], Retake, Own, "The span with what of it is made anew: {start, end, video, audio}."),
    row("before", &[], Flag, Own, "Adds an extension before the video's start."),
    row("overlap", &[], Integer(9, 1 << 20), Own, "Frames of the given video that an extension is made beside."),
    row("lora", &["loras"], Loras, Own, "LoRAs that the server knows, by name: {name, scale}, or a list of such."),
    row("generate_audio", &["generate_sound"], Flag, Keys(&["output.audio"]), "Whether the MP4 has a sound track."),
    row("ltx2", &[], Tree, Own, "Keys of the YAML, for what has no field of its own."),
    row("user", &[], Word(64), Own, "Returned as it is."),
    row("metadata", &[], Metadata, Own, "At most 16 pairs of text, returned as they are."),
    row("n", &["num_outputs_per_prompt"], Word(64), Neutral(&["1"]), "1: several requests are made together."),
    row("quality", &["output_quality"], Word(64), Neutral(&["standard", "default", "auto"]), "Of other servers."),
    row("format", &["output_format"], Word(64), Neutral(&["mp4", "auto"]), "MP4."),
    row("response_format", &[], Word(64), Neutral(&["file"]), "A file."),
    row("generator_device", &[], Word(64), Neutral(&["cpu", "cuda"]), "Noise is drawn by one rule on any device."),
    row("guidance_scale_2", &[], Word(64), Neutral(&[]), "Of other models."),
    row("true_cfg_scale", &[], Word(64), Neutral(&[]), "Of other models."),
    row("boundary_ratio", &[], Word(64), Neutral(&[]), "Of other models."),
    row("flow_shift", &[], Word(64), Neutral(&[]), "Of other models."),
    row("enable_teacache", &[], Word(64), Neutral(&["false"]), "Of other servers."),
    row("enable_cache_dit", &[], Word(64), Neutral(&["false"]), "Of other servers."),
    row("enable_frame_interpolation", &[], Word(64), Neutral(&["false"]), "Of other servers."),
    row("frame_interpolation_exp", &[], Word(64), Neutral(&["1", "1.0"]), "Of other servers."),
    row("frame_interpolation_scale", &[], Word(64), Neutral(&["1", "1.0"]), "Of other servers."),
    row("enable_upscaling", &[], Word(64), Neutral(&["false"]), "Of other servers."),
    row("upscaling_scale", &[], Word(64), Neutral(&["4", "4.0"]), "Of other servers."),
    row("enhance_prompt", &[], Word(64), Neutral(&["false"]), "Prompts are taken as they are."),
    row("profile", &[], Word(64), Neutral(&["false"]), "Of other servers."),
    row("profile_all_stages", &[], Word(64), Neutral(&["false"]), "Of other servers."),
    row("return_stage_metrics", &[], Word(64), Neutral(&["false"]), "Of other servers; each video has `timings`."),
];

/// Fields that hold paths of the server.
pub(super) const PATHS: [&str; 8] =
    ["output_path", "perf_dump_path", "video_path", "image_path", "input_path", "output_dir", "save_path", "lora_path"];

/// Fields whose members are fields themselves.
pub(super) const WRAPPERS: [&str; 2] = ["extra_params", "extra_body"];

/// The field of a name.
pub fn find(name: &str) -> Option<&'static Spec> {
    FIELDS.iter().find(|spec| spec.name == name || spec.aliases.contains(&name))
}

/// The name that is most like one that no field has.
pub(super) fn nearest(name: &str) -> &'static str {
    let names = FIELDS.iter().flat_map(|spec| spec.aliases.iter().chain([&spec.name]));
    let name: String = name.chars().take(64).collect();
    let likeness = |known: &str| strsim::normalized_damerau_levenshtein(known, &name);
    names.max_by(|a, b| likeness(a).total_cmp(&likeness(b))).copied().unwrap_or("prompt")
}
