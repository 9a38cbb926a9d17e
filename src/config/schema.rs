//! The YAML schema. A field's doc comment is its description in `ltx2 schema`, and its initializer is its default.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::pipeline::Pipeline;
use super::{LoraApply, Serve};
use crate::kernels::AttentionKernel;
use crate::media::{HdrCodec, HdrTransform, ImageH264, Preprocess};
use crate::models::upsampler::Upsampling;
use crate::sampling::guiders::{GuiderKind, GuiderOptions};
use crate::sampling::schedules::{BetaSchedule, ScheduleKind};
use crate::sampling::step_cache::StepCacheConfig;
use crate::sampling::{MAX_STEPS, SamplerKind, SamplerOptions, StepDraws};
use crate::weights::{MergeOrder, Overrides};
use ltx2_base::with_defaults;
use ltx2_weights::for_each_override;

/// Value of `layout` that chooses a shipped layout for the available devices.
pub const AUTO: &str = "auto";

const NEGATIVE_PROMPT: &str = include_str!("../../configs/negative_prompt.txt");

with_defaults! {
    /// Configuration of a run: model, request, sampling, device layout, output.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Config {
        /// Base YAML file that this file overrides; the path is relative to this file.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub extends: Option<String> = None,
        /// Pipeline to run; determines the inputs and outputs.
        pub pipeline: Pipeline = Pipeline::TextToVideo,
        /// Paths of the model and its components.
        pub model: Model = Model::default(),
        /// The video to generate.
        pub request: RequestConfig = RequestConfig::default(),
        /// Reference implementation whose conventions apply where implementations of the model differ. Sets
        /// `sampler.sigma_shift`, `sampler.step_noise`, `sampler.noise_order`, `guidance.stg_streams`,
        /// `conditioning.cross_timestep`, `conditioning.keyframe_span`, `conditioning.noising`,
        /// `conditioning.clean_prediction`, `conditioning.given_stream`, `conditioning.first_frame_marker`,
        /// `two_stage.audio`, `vocoder.stage1_clamp`, `runtime.positions` and `model.lora_merge`, and the meaning of
        /// `text.bos: auto`. Each of these keys can also be set separately.
        pub reference: Reference = Reference::Official,
        /// Tokenization of prompts.
        pub text: Text = Text::default(),
        /// Prompt enhancement, which `request.enhance_prompt` enables.
        pub enhance: Enhance = Enhance::default(),
        /// Sampler and noise levels of the denoising loop.
        pub sampler: SamplerConfig = SamplerConfig::default(),
        /// Guidance of the video and the audio stream.
        pub guidance: Guidance = Guidance::default(),
        /// Conditioning on images, video and audio, and between the two streams.
        pub conditioning: Conditioning = Conditioning::default(),
        /// Second stage of two-stage pipelines, at full size.
        pub two_stage: TwoStage = TwoStage::default(),
        /// Options of the pipeline `dfr`: keyframes generated with the video, then rounds that double its frame rate.
        pub dfr: Dfr = Dfr::default(),
        /// Vocoder: converts the decoded spectrogram to a waveform.
        pub vocoder: Vocoder = Vocoder::default(),
        /// Device mesh; null uses the mesh of the layout.
        pub mesh: Option<Mesh> = None,
        /// Sharding of tensors over the mesh: a YAML file or the name of a shipped layout. `auto` chooses, among
        /// the shipped layouts that fit in memory, the one with the shortest predicted time on the available devices.
        pub layout: String = AUTO.into(),
        /// Device, numerics and memory.
        pub runtime: Runtime = Runtime::default(),
        /// Output files.
        pub output: Output = Output::default(),
        /// HTTP server, `ltx2 serve`.
        #[serde(skip_serializing_if = "Serve::is_default")]
        pub serve: Serve = Serve::default(),
    }
}

with_defaults! {
    /// Paths of the model and its components.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Model {
        /// Model: a diffusers folder, a folder of single files, a single file, or `org/name` in the local Hugging Face
        /// cache.
        pub path: String = "Lightricks/LTX-2".into(),
        /// Parts of a file name, separated by commas or spaces, such as `fp8`, `int8-convrot` or `distilled, Q4_K_M`.
        /// In a folder of single files, they select the transformer's file; for each other component, the file that
        /// contains the most parts is preferred. In a diffusers folder, they select the variant of the weights. Null
        /// prefers unquantized files.
        pub variant: Option<String> = None,
        /// Text encoder to use instead of the model's: a folder, a file or `org/name`. Null uses the model's.
        pub text_encoder: Option<String> = None,
        /// Tokenizer to use instead of the model's: `tokenizer.json` or its folder. Null uses the model's.
        pub tokenizer: Option<String> = None,
        /// Connectors to use instead of the model's: a folder, a file or `org/name`. The file may lack the blocks or the
        /// text projections, which then come from the transformer's or the text encoder's file. Null uses the model's.
        pub connectors: Option<String> = None,
        /// Video VAE to use instead of the model's: a folder, a file or `org/name`. Null uses the model's.
        pub vae: Option<String> = None,
        /// Audio VAE to use instead of the model's: a folder, a file or `org/name`. Null uses the model's.
        pub audio_vae: Option<String> = None,
        /// Vocoder to use instead of the model's: a folder, a file or `org/name`. Null uses the model's.
        pub vocoder: Option<String> = None,
        /// Spatial latent upsampler between two stages. Null uses the model's.
        pub upsampler: Option<String> = None,
        /// Temporal latent upsampler, for `temporal_x2` between two stages and for the rounds of the pipeline `dfr`.
        /// Null uses the model's.
        pub temporal_upsampler: Option<String> = None,
        /// LTX-2.5 duration head, which predicts `request.num_frames: auto`. Null uses the model's.
        pub duration_head: Option<String> = None,
        /// Video decoder; only LTX-2.5 models can have more than one.
        pub decoder: Decoder = Decoder::Auto,
        /// Whether to read the weights from files or generate random ones.
        pub weights: WeightSource = WeightSource::File,
        /// Seed of random weights (`weights: random`).
        pub weights_seed: u64 = 0,
        /// Number of transformer blocks to keep, from the first; null keeps all. Only with `weights: random`, to
        /// measure layouts in less time and memory.
        #[schemars(range(min = 1))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub blocks: Option<usize> = None,
        /// LoRAs of the transformer, applied in this order.
        pub loras: Vec<Lora> = Vec::new(),
        /// IC-LoRA of the first stage, which follows `request.reference_videos`. When the configuration is loaded, it is
        /// added to `loras`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub ic_lora: Option<IcLora> = None,
        /// Order of rounding when LoRAs are merged into the weights. `official` and `official_1_0`: as in the
        /// loaders of Lightricks 1.2.0 and 1.0.0; `diffusers`: as in `fuse_lora` of diffusers; `exact`: computes in f32
        /// and rounds once.
        pub lora_merge: MergeOrder = MergeOrder::Official,
    }
}

impl Model {
    /// Returns the components that replace the model's own.
    pub(crate) fn overrides(&self) -> Overrides {
        macro_rules! overrides {
            ($($field:ident $component:ident $flag:literal),*) => {
                Overrides { $($field: self.$field.clone(),)* variant: self.variant.clone() }
            };
        }
        for_each_override!(overrides)
    }
}

/// Decoder of video latents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decoder {
    /// The only decoder of the model. If the model has both: `conv` with `reference: diffusers`, otherwise `diffusion`.
    Auto,
    /// Convolutional decoder of the video VAE.
    Conv,
    /// Diffusion decoder of LTX-2.5.
    Diffusion,
}

/// Source of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum WeightSource {
    /// Read from the model's files.
    File,
    /// Random numbers generated on the device, for benchmarks.
    Random,
}

/// LoRA file with its strength and stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// Safetensors file, or a folder that PEFT saved.
    pub path: String,
    /// Factor by which the weight update is multiplied.
    #[serde(default = "one")]
    pub strength: f64,
    /// Stages that use the LoRA: 1, 2 or both. The pipeline `in_context` defaults to stage 1. Rounds of the pipeline
    /// `dfr` use the LoRAs of stage 1.
    #[serde(default = "both_stages")]
    pub stages: Vec<u8>,
    /// Whether the LoRA is merged into the weights or added in programs. `model.lora_merge` determines only whether
    /// the alphas of added LoRAs apply.
    #[serde(default)]
    pub apply: LoraApply,
}

/// IC-LoRA with its strength.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct IcLora {
    /// Name of a published IC-LoRA for the model's generation, such as `union-control`; or a safetensors file. A name
    /// also sets the spatial scale if the file does not state it, and the default of `preprocess`.
    pub path: String,
    /// Factor by which the weight update is multiplied; null uses the published strength, or 1 if none is published.
    #[serde(default)]
    pub strength: Option<f64>,
    /// Whether the LoRA is merged into the weights or added in programs.
    #[serde(default)]
    pub apply: LoraApply,
}

fn one() -> f64 {
    1.0
}

fn both_stages() -> Vec<u8> {
    vec![1, 2]
}

with_defaults! {
    /// The video to generate.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    #[schemars(rename = "Request")]
    pub struct RequestConfig {
        /// Text prompt; an empty prompt generates an unconditional video.
        pub prompt: Option<String> = None,
        /// Whether a language model rewrites each prompt into a detailed one before it is encoded: the text encoder or, if
        /// `enhance.endpoint` is set, a chat server. Negative prompts are never rewritten.
        pub enhance_prompt: bool = false,
        /// Negative prompt: what to avoid.
        pub negative_prompt: String = NEGATIVE_PROMPT.trim().into(),
        /// File with the negative prompt, instead of `negative_prompt`.
        pub negative_prompt_file: Option<String> = None,
        /// File with one prompt per line, instead of `prompt`; blank lines are skipped.
        pub prompts: Option<String> = None,
        /// Videos per prompt, with consecutive seeds.
        #[schemars(range(min = 1, max = 10000))]
        pub num_videos: usize = 1,
        /// Width in pixels; a multiple of 32, of 64 with two stages, or of 96 with `spatial_x1_5` between the stages.
        #[schemars(range(min = 1))]
        pub width: usize = 768,
        /// Height in pixels; a multiple of 32, of 64 with two stages, or of 96 with `spatial_x1_5` between the stages.
        #[schemars(range(min = 1))]
        pub height: usize = 512,
        /// Number of frames: one more than a multiple of 8, or of 16 with `temporal_x2` between two stages. `auto`:
        /// predicted from the prompt by the duration head of LTX-2.5.
        pub num_frames: NumFrames = NumFrames::Count(121),
        /// Frames per second.
        pub frame_rate: f64 = 24.0,
        /// Speed of the motion; 1 is normal. Positions of video tokens are computed for a frame rate of `frame_rate /
        /// motion_speed`, so that 0.2 with a slow-motion LoRA gives motion that is five times slower. The duration, the
        /// sound and the frame rate of the file still follow `frame_rate`.
        pub motion_speed: f64 = 1.0,
        /// Random seed of the first video.
        pub seed: u64 = 10,
        /// Conditioning images.
        pub images: Vec<Image> = Vec::new(),
        /// Input video of the pipelines `retake`, `extend`, `inpaint`, `dub_it` and `video_to_audio`: a file, or a folder of PNG
        /// frames. `width`, `height`, `num_frames` and `frame_rate` default to those of the video; `dub_it` rounds the
        /// sides up and the number of frames down to the nearest valid ones.
        pub video: Option<String> = None,
        /// Time span that the pipeline `retake` regenerates.
        pub retake: Option<Retake> = None,
        /// Extension of the input video, for the pipeline `extend`.
        pub extend: Option<Extend> = None,
        /// Mask of the pipeline `inpaint`: an image, or a video or folder of PNG frames with at least as many frames as
        /// the generated video. White regions are regenerated, black ones are kept. It is scaled and cropped like the
        /// input video.
        pub mask: Option<String> = None,
        /// Options of the pipeline `inpaint`. Exactly one of `mask`, `inpaint.region` and `inpaint.keep` is required.
        pub inpaint: Option<Inpaint> = None,
        /// Options of the pipeline `dub_it`.
        pub dub: Option<Dub> = None,
        /// Reference videos of the first stage, for an IC-LoRA that was trained to follow them.
        pub reference_videos: Vec<ReferenceVideo> = Vec::new(),
        /// Pipeline `hdr`: safetensors file with the text contexts `video_context` and `audio_context` (tokens x channels)
        /// that the LoRA was trained with; replaces the prompt.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub text_embeddings: Option<String> = None,
        /// Generates a long video as chained clips, each of which starts from the end of the previous one.
        pub chain: Option<Chain> = None,
        /// Input audio. The video is generated to match it, and its samples become the sound track. In `retake`,
        /// `extend`, `inpaint` and `dub_it`: sound of an input `video` without a sound track, such as a folder of frames.
        pub audio: Option<GivenAudio> = None,
        /// Time spans of audio latents to keep from an earlier run.
        pub audio_latents: Vec<AudioLatents> = Vec::new(),
        /// Length of the prompt in text tokens; longer prompts are truncated.
        #[schemars(range(min = 1))]
        pub max_sequence_length: usize = 1024,
    }
}

impl RequestConfig {
    /// Returns the paths of all input images, audio files and videos.
    pub(crate) fn files(&self) -> impl Iterator<Item = &str> {
        let references = self.reference_videos.iter().flat_map(|v| [Some(&v.path), v.attention_mask.as_ref()]);
        let lists = self.images.iter().map(|i| &i.path).chain(self.audio_latents.iter().map(|a| &a.path));
        let sound = self.audio.as_ref().map(|audio| &audio.path);
        let single = [self.video.as_ref(), self.mask.as_ref(), sound, self.text_embeddings.as_ref()];
        lists.map(Some).chain(single).chain(references).flatten().map(String::as_str)
    }

    /// Returns mutable references to the paths of [`RequestConfig::files`].
    pub(crate) fn files_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let references = self.reference_videos.iter_mut().flat_map(|v| [Some(&mut v.path), v.attention_mask.as_mut()]);
        let images = self.images.iter_mut().map(|i| &mut i.path);
        let lists = images.chain(self.audio_latents.iter_mut().map(|a| &mut a.path));
        let sound = self.audio.as_mut().map(|audio| &mut audio.path);
        let single = [self.video.as_mut(), self.mask.as_mut(), sound, self.text_embeddings.as_mut()];
        lists.map(Some).chain(single).chain(references).flatten()
    }
}

/// Number of frames of a video.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum NumFrames {
    /// Predicted from the prompt by the model.
    Auto(AutoValue),
    /// Number of frames.
    Count(#[schemars(range(min = 1))] usize),
}

impl NumFrames {
    /// Returns the number of frames; `None` for `auto`.
    pub fn count(self) -> Option<usize> {
        match self {
            NumFrames::Auto(_) => None,
            NumFrames::Count(count) => Some(count),
        }
    }
}

/// Conditioning image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// Image file.
    pub path: String,
    /// Index of the frame that the image conditions, from 0.
    #[serde(default)]
    pub frame: usize,
    /// Strength of the conditioning, 0 to 1; 1 keeps the image unchanged.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1))]
    pub strength: f64,
    /// CRF of the H.264 round trip (encoding and decoding) of the image before it enters the VAE, 0 to 51; 0 skips the
    /// round trip. Null uses `conditioning.crf`.
    #[serde(default)]
    #[schemars(range(min = 0, max = 51))]
    pub crf: Option<u8>,
}

/// Reference video. It is scaled to cover the size of the stage (divided by `conditioning.reference_downscale_factor`)
/// and center-cropped. In the pipeline `hdr`, it is scaled down to fit instead, and its reflection fills the rest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReferenceVideo {
    /// Video file, or a folder of PNG frames.
    pub path: String,
    /// Strength of the conditioning, 0 to 1; 1 keeps the tokens of the reference video unchanged.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1))]
    pub strength: f64,
    /// Weight of the attention between the reference's tokens and the generated video's tokens, 0 to 1.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1))]
    pub attention_strength: f64,
    /// Mask video whose brightness at a location scales the attention between the reference's tokens and the generated
    /// video's tokens there; black disables the attention.
    #[serde(default)]
    pub attention_mask: Option<String>,
    /// Channel of `attention_mask`.
    #[serde(default, skip_serializing_if = "MaskChannel::is_default")]
    pub attention_mask_channel: MaskChannel,
    /// Number of frames to read, from the start, at most the length of the generated video; null for all.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub frames: Option<usize>,
    /// Conversion of the frames, at the size of the file, before they are scaled: `none`, `gray`, `canny`, `blur`,
    /// `downscale`, or a map with this `kind` and its parameters. Null uses the default of a published `model.ic_lora`,
    /// which is `canny` for `canny-control` and otherwise `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preprocess: Option<Preprocess>,
}

/// Channel of a mask video.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MaskChannel {
    /// Mean of red, green and blue.
    #[default]
    Brightness,
    /// Alpha of a folder of PNG frames: transparent disables the attention.
    Alpha,
}

impl MaskChannel {
    fn is_default(&self) -> bool {
        *self == MaskChannel::Brightness
    }
}

/// Input audio: a span of a file, as long as the video. If the file ends earlier, silence is appended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GivenAudio {
    /// Audio file, or video file with a sound track; any sample rate and number of channels.
    pub path: String,
    /// Time in the file at which the video starts, in seconds.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub start: f64,
    /// Duration to use, in seconds, followed by silence; null uses the file to its end.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub duration: Option<f64>,
}

/// Time span of audio latents from an earlier run, which the new video keeps. Both videos must have the same duration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AudioLatents {
    /// Safetensors file that `--dump` wrote.
    pub path: String,
    /// Start of the span, in seconds.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub start: f64,
    /// End of the span, in seconds; null for the end of the video.
    #[serde(default)]
    pub end: Option<f64>,
    /// Strength of the conditioning, 0 to 1; 1 keeps the span unchanged.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1))]
    pub strength: f64,
}

/// Time span of the input video to regenerate. Every latent frame that overlaps the span is regenerated completely.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Retake {
    /// Start of the span, in seconds.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub from: f64,
    /// End of the span, in seconds, limited to the end of the video; null for the end of the video.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub to: Option<f64>,
    /// Whether to regenerate the frames of the span.
    #[serde(default = "yes")]
    pub video: bool,
    /// Whether to regenerate the sound of the span. If the input video has no sound, the complete sound is
    /// generated.
    #[serde(default = "yes")]
    pub audio: bool,
    /// Source of the frames and sound outside the span.
    #[serde(default)]
    pub kept: RetakeSource,
}

/// Source of a retake's frames and sound outside the span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum RetakeSource {
    /// Latents of the input video, decoded together with the span, as in Lightricks' code.
    #[default]
    Decoded,
    /// Frames and samples of the input video; the sound is cross-faded over 20 ms.
    Source,
}

/// Options of the pipeline `inpaint`. Rectangles are lists of left, top, width and height in pixels of the generated
/// video.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Inpaint {
    /// Rectangle to regenerate.
    pub region: Option<[usize; 4]>,
    /// Rectangle to keep, in multiples of 32. The input video is scaled to cover it and center-cropped; everything
    /// outside of it is generated.
    pub keep: Option<[usize; 4]>,
    /// Whether to generate new sound instead of keeping that of the input video.
    pub audio: bool,
    /// Whether to append the input video, with the regenerated pixels in green (#66FF00), as a reference video, for an
    /// IC-LoRA that was trained to fill them.
    pub reference: bool,
}

/// Options of the pipeline `dub_it`, which generates new speech by the speaker of the input video, and a video whose
/// lips follow it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Dub {
    /// Strength of the conditioning on the frames of the input video, 0 to 1.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1))]
    pub strength: f64,
    /// Duration of the input video's sound that the new sound follows, in seconds, from the start; null for all of it.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub sound_seconds: Option<f64>,
}

impl Default for Dub {
    fn default() -> Self {
        Dub { strength: one(), sound_seconds: None }
    }
}

/// Extension of the input video.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Extend {
    /// Duration to add, in seconds, rounded to a multiple of 8 frames.
    #[serde(default)]
    pub seconds: f64,
    /// Whether to extend the end or the start of the video.
    #[serde(default)]
    pub at: ExtendAt,
    /// Number of frames of the input video that condition the new ones; one more than a multiple of 8.
    #[serde(default = "overlap")]
    #[schemars(range(min = 9))]
    pub overlap: usize,
}

/// Position of the new frames of an extension.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum ExtendAt {
    /// After the end of the input video.
    #[default]
    End,
    /// Before the start of the input video.
    Start,
}

/// Long video of chained clips. Each clip starts with the last latents of the previous one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Chain {
    /// Frames per clip; one more than a multiple of 8.
    #[serde(default = "clip")]
    #[schemars(range(min = 17))]
    pub clip: usize,
    /// Frames that a clip shares with the previous one; one more than a multiple of 8.
    #[serde(default = "overlap")]
    #[schemars(range(min = 9))]
    pub overlap: usize,
    /// Prompts of the second and later clips; the last one also applies to all remaining clips. If empty,
    /// `request.prompt` applies to every clip.
    #[serde(default)]
    pub prompts: Vec<String>,
}

fn yes() -> bool {
    true
}

/// Returns the default number of frames of a clip: 5 s at 24 frames per second.
fn clip() -> usize {
    121
}

/// Returns the default overlap of extensions and of chained clips, in frames. With this overlap, clips of the default
/// length start at whole seconds, and thus at whole audio latents, at 24 frames per second.
fn overlap() -> usize {
    25
}

/// Implementation whose conventions apply where implementations of the model differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// Lightricks' code, version 1.2.0.
    Official,
    /// Lightricks' code, version 1.0.0.
    #[serde(rename = "official_1_0")]
    #[value(name = "official_1_0")]
    Official1,
    /// The diffusers pipelines.
    Diffusers,
}

with_defaults! {
    /// Sampler and noise levels of the denoising loop.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    #[schemars(rename = "Sampler")]
    pub struct SamplerConfig {
        /// Sampler (integrator of the denoising ODE or SDE).
        pub kind: SamplerKind = SamplerKind::Euler,
        /// Stochasticity (eta, 0 to 1) of ancestral samplers; null uses the sampler's default.
        #[schemars(range(min = 0, max = 1))]
        pub eta: Option<f64> = None,
        /// Seed of the noise that sampling steps add; null derives it from the request's seed.
        pub noise_seed: Option<u64> = None,
        /// Weight of the current step's velocity in `gradient_estimation`, which mixes it with the velocity of the
        /// previous step; 1 is equivalent to `euler`, null uses 2.
        #[schemars(range(min = 0, max = 10))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub gamma: Option<f64> = None,
        /// Generator of the noise that the steps of `euler_ancestral` and `cfg_pp` add. `official`: a separate
        /// generator for each pass, in `runtime.dtype`; `diffusers`: one f32 generator for the complete request, which
        /// all passes and then the decoder use in turn.
        pub step_noise: Reference = Reference::Official,
        /// Order in which the initial noise of a pass is drawn. `official`: video in the shape of its latents, then
        /// audio, then appended tokens; `diffusers`: as in the diffusers pipelines, which draw complete token sequences
        /// if the pass starts from latents or tokens are appended.
        pub noise_order: Reference = Reference::Official,
        /// Number of denoising steps.
        #[schemars(range(min = 1, max = MAX_STEPS))]
        pub steps: usize = 40,
        /// Schedule that computes the noise levels from `steps`.
        pub schedule: ScheduleKind = ScheduleKind::Ltx2,
        /// Parameters of the schedule `beta`.
        #[serde(skip_serializing_if = "BetaSchedule::is_default")]
        pub beta: BetaSchedule = BetaSchedule::default(),
        /// Explicit noise levels instead of `steps`: strictly decreasing, at most 1; a final 0 is optional.
        pub sigmas: Option<Vec<f64>> = None,
        /// Token count that determines the shift of the schedule. `official`: a constant, or in `hq` the number of
        /// video tokens of the first stage; `diffusers`: the number of video tokens, including appended ones.
        pub sigma_shift: Reference = Reference::Official,
        /// Step cache of the only stage, or of the first of two.
        #[serde(skip_serializing_if = "StepCacheConfig::is_default")]
        pub cache: StepCacheConfig = StepCacheConfig::default(),
        /// Where the initial noise is generated.
        pub noise: Noise = Noise::Torch,
        /// Denoising steps per device call; progress is reported after each call.
        pub progress_every: ProgressEvery = ProgressEvery::Auto(AutoValue::Auto),
    }
}

impl Image {
    /// Returns the CRF of the image's H.264 round trip; 0 skips it.
    pub fn crf(&self, conditioning: &Conditioning) -> u8 {
        self.crf.unwrap_or(conditioning.crf)
    }
}

impl Conditioning {
    /// Returns `[downscale, step]`: the number of pixels of the generated video per pixel of a reference video, along
    /// each side, and the number of generated frames per frame of a reference video.
    pub(crate) fn reference_scales(&self) -> [usize; 2] {
        [self.reference_downscale_factor, self.reference_temporal_scale_factor].map(|factor| factor.unwrap_or(1))
    }
}

impl SamplerConfig {
    /// Returns the options that only some samplers accept, for latents of type `dtype`.
    pub fn options(&self, dtype: Dtype) -> SamplerOptions {
        let draws = match (self.step_noise, dtype) {
            (Reference::Diffusers, _) => StepDraws::Continued,
            (Reference::Official | Reference::Official1, Dtype::Bf16) => StepDraws::OwnBf16,
            (Reference::Official | Reference::Official1, Dtype::F32) => StepDraws::Own,
        };
        SamplerOptions { eta: self.eta, noise_seed: self.noise_seed, gamma: self.gamma, draws }
    }
}

with_defaults! {
    /// Tokenization of prompts.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Text {
        /// Whether prompts start with the BOS token.
        pub bos: Bos = Bos::Auto,
    }
}

with_defaults! {
    /// Prompt enhancement, which `request.enhance_prompt` enables.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Enhance {
        /// Text file with the system prompt. Null: `enhance_t2v.txt` or, with conditioning images, `enhance_i2v.txt` in
        /// the model's folder or its `text_encoder` folder, otherwise the built-in prompt.
        pub system: Option<String> = None,
        /// Maximum number of tokens of an enhanced prompt. Null: 600 for LTX-2.5, otherwise 512.
        #[schemars(range(min = 1, max = 4096))]
        pub max_new_tokens: Option<usize> = None,
        /// Sampling temperature; 0 always selects the most likely token. Null: 0 for LTX-2.5, otherwise 0.7; with
        /// `endpoint`, the server's default.
        #[schemars(range(min = 0, max = 2))]
        pub temperature: Option<f64> = None,
        /// Number of most likely tokens to sample from; 0 samples from all. Null: from the text encoder's
        /// `generation_config.json`. Not supported with `endpoint`.
        pub top_k: Option<usize> = None,
        /// Samples from the most likely tokens whose probabilities add up to this value. Null: from the text encoder's
        /// `generation_config.json`; with `endpoint`, the server's default.
        #[schemars(range(min = 0, max = 1))]
        pub top_p: Option<f64> = None,
        /// Random seed; null uses `request.seed`.
        pub seed: Option<u64> = None,
        /// Base URL of an OpenAI-compatible chat server that enhances the prompts, such as `http://localhost:8080/v1`.
        /// Null: the text encoder enhances them.
        pub endpoint: Option<String> = None,
        /// Name of the endpoint's model; required with `endpoint`.
        pub model: Option<String> = None,
        /// Name of the environment variable with the endpoint's API key. Null sends no key.
        pub key_env: Option<String> = None,
        /// Seconds to wait for the endpoint's answer to a prompt.
        #[schemars(range(min = 1, max = 3600))]
        pub timeout: u64 = 120,
    }
}

/// Whether prompts start with the BOS token. `add_bos_token` in `tokenizer_config.json` is ignored, as in version 5 of
/// transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Bos {
    /// Depends on `reference`. `official`: always; `official_1_0` and `diffusers`: if `tokenizer.json` adds it.
    Auto,
    /// Always; prepended if `tokenizer.json` does not add it.
    Always,
}

/// Where noise is generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Noise {
    /// On the host, bit-identical to `torch.Generator("cpu")`.
    Torch,
    /// On the device; faster, but the noise depends on the device.
    Device,
}

/// Denoising steps per progress report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ProgressEvery {
    /// One step if stderr is a terminal, otherwise all steps.
    Auto(AutoValue),
    /// Number of steps.
    Steps(#[schemars(range(min = 1))] usize),
}

/// The value `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AutoValue {
    /// The program chooses the value.
    Auto,
}

with_defaults! {
    /// Guidance of the video and the audio stream.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Guidance {
        /// Guidance method that combines the predictions for the prompt and the negative prompt, with the scale `cfg`.
        pub kind: GuiderKind = GuiderKind::Cfg,
        /// Parameters of `apg` and `legacy_apg`.
        #[serde(skip_serializing_if = "GuiderOptions::is_default")]
        pub apg: GuiderOptions = GuiderOptions::default(),
        /// Guidance scales of the video stream.
        pub video: Scales = Scales::default(),
        /// Guidance scales of the audio stream.
        pub audio: Scales = Scales::default(),
        /// Indices of the transformer blocks that spatiotemporal guidance (STG) perturbs, for streams without their own
        /// `stg_blocks`.
        pub stg_blocks: Vec<usize> = Vec::new(),
        /// Streams that are perturbed in the perturbed branch of STG. `official`: streams whose `stg` is not 0;
        /// `diffusers`: both streams, or neither if the model has no perturbed attention.
        pub stg_streams: Reference = Reference::Official,
        /// Elements over which the rescale term computes standard deviations. Each video is rescaled separately, even
        /// in a batch, so both values give the same result; `batch` is rejected as having no effect.
        pub rescale_scope: RescaleScope = RescaleScope::PerSample,
    }
}

/// Guidance scales of one stream. Null uses the value of the other stream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Scales {
    /// Classifier-free guidance scale, which moves the prediction away from the one for the negative prompt; 1 disables
    /// it.
    pub cfg: Option<f64>,
    /// Spatiotemporal guidance (STG) scale, which moves the prediction away from the perturbed one; 0 disables it.
    pub stg: Option<f64>,
    /// Modality guidance scale, which moves the prediction away from the one that ignores the other stream; 1 disables
    /// it.
    pub modality: Option<f64>,
    /// Strength of rescaling the guided prediction to the standard deviation of the prediction before guidance: 0
    /// disables it, 1 rescales fully.
    pub rescale: Option<f64>,
    /// Indices of the transformer blocks that STG perturbs in this stream; null uses `guidance.stg_blocks`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stg_blocks: Option<Vec<usize>>,
    /// Number of steps to skip after each evaluated step; a skipped step reuses the last prediction instead of running
    /// the transformer.
    #[schemars(range(min = 0, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skip: Option<usize>,
    /// Guidance scales by noise level, from the highest `sigma` to the lowest; each entry applies down to the `sigma`
    /// of the next entry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_sigma: Option<Vec<SigmaScales>>,
}

/// Guidance scales of a stream for noise levels up to `sigma`; the entry with the highest `sigma` also applies above
/// it. Omitted values are those of the stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SigmaScales {
    /// Highest noise level that the entry applies to.
    pub sigma: f64,
    /// See `guidance.video.cfg`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cfg: Option<f64>,
    /// See `guidance.video.stg`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stg: Option<f64>,
    /// See `guidance.video.modality`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modality: Option<f64>,
    /// See `guidance.video.rescale`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rescale: Option<f64>,
    /// See `guidance.video.skip`.
    #[schemars(range(min = 0, max = 255))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip: Option<usize>,
}

/// Elements over which the rescale term computes standard deviations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RescaleScope {
    /// Each sample separately, as in diffusers.
    #[default]
    PerSample,
    /// All samples of the batch together, as in the official code.
    Batch,
}

with_defaults! {
    /// Conditioning on images, video and audio, and between the two streams.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Conditioning {
        /// Noise level that modulates the cross-attention between the streams. The variants differ only if the two
        /// streams have tokens at different noise levels (images, input video or audio).
        pub cross_timestep: CrossTimestep = CrossTimestep::Official,
        /// Time span that the positions of a conditioning image cover if its tokens are appended to the video.
        /// `official` and `diffusers`: one frame; `official_1_0`: eight frames (one latent frame).
        pub keyframe_span: Reference = Reference::Official,
        /// In a pass that starts from latents: the latents to which noise is added to initialize tokens that are
        /// conditioned with a strength below 1. `official`, and `dfr` with any reference: the latents that the pass
        /// starts from; `official_1_0` and `diffusers`: the conditioning latents.
        pub noising: Reference = Reference::Official,
        /// Noise level that converts a token's velocity to its clean prediction. `official` and `official_1_0`: the
        /// token's own level, which is the level of the step times (1 - strength); `diffusers`: the level of the step,
        /// except in `dfr`, where it is the token's own.
        pub clean_prediction: Reference = Reference::Official,
        /// Noise level of a stream that is given completely as input. `official` and `diffusers`: 0; `official_1_0`:
        /// the level of the step, although its tokens are clean.
        pub given_stream: Reference = Reference::Official,
        /// Whether LTX-2.5 marks the first latent frame as one that holds a single video frame. `official`: in every
        /// pipeline; `diffusers`: only in `dfr`.
        pub first_frame_marker: Reference = Reference::Official,
        /// Number of evenly spaced keyframes that the first stage of `distilled` generates together with the video to
        /// guide it (LTX-2.5).
        pub generated_keyframes: usize = 0,
        /// Pixels of the generated video per pixel of a reference video, along each side; null reads the factor from
        /// the LoRA files, or uses 1 if they do not specify it.
        #[schemars(range(min = 1, max = 64))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub reference_downscale_factor: Option<usize> = None,
        /// Frames of the generated video per frame of a reference video; null reads the factor from the LoRA files, or
        /// uses 1 if they do not specify it.
        #[schemars(range(min = 1, max = 64))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub reference_temporal_scale_factor: Option<usize> = None,
        /// Curve of the values that the pipeline `hdr` decodes; null reads it from the LoRA files, or uses `logc3` if they
        /// do not specify it.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub hdr_transform: Option<HdrTransform> = None,
        /// CRF of the H.264 round trip of conditioning images without their own `crf`; 0 skips it.
        #[schemars(range(min = 0, max = 51))]
        pub crf: u8 = 33,
        /// H.264 encoder for the round trip of conditioning images.
        pub h264: ImageH264 = ImageH264::Auto,
    }
}

/// Noise level that modulates the cross-attention between the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CrossTimestep {
    /// The same as `gate_only`, as in Lightricks' version 1.2.0.
    Official,
    /// The same as `cross`, as in Lightricks' version 1.0.0.
    #[serde(rename = "official_1_0")]
    Official1,
    /// The same as `cross`, as in diffusers.
    Diffusers,
    /// Noise level of the stream itself.
    Own,
    /// Noise level of the other stream.
    Cross,
    /// Noise level of the other stream for the gate, and of the stream itself for scale and shift.
    GateOnly,
}

with_defaults! {
    /// Second stage of two-stage pipelines, at full size.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct TwoStage {
        /// Upsampling of the first stage's latents, applied in this order: one spatial, one temporal, or both. The
        /// first stage runs at half the width and height of the second, or two thirds with `spatial_x1_5`. With
        /// `temporal_x2` it generates every other frame at half the frame rate, and the second stage keeps the first
        /// stage's sound.
        pub upsample: Vec<Upsampling> = vec![Upsampling::SpatialX2],
        /// Sampler of the second stage; null uses `sampler.kind`.
        pub sampler: Option<SamplerKind> = None,
        /// Stage whose audio the output contains.
        pub audio: StageAudio = StageAudio::Official,
        /// Noise levels of the second stage: strictly decreasing, at most 1. Noise of the first level is added to the
        /// upsampled latents.
        pub sigmas: Vec<f64> = vec![0.909375, 0.725, 0.421875, 0.0],
        /// Step cache of the second stage.
        #[serde(skip_serializing_if = "StepCacheConfig::is_default")]
        pub cache: StepCacheConfig = StepCacheConfig::default(),
        /// Strength of AdaIN, 0 to 1: how far each channel of the upsampled latents is normalized to the mean and
        /// standard deviation of the same channel in the first stage's latents.
        #[schemars(range(min = 0, max = 1))]
        pub adain: f64 = 0.0,
        /// Strength of tone mapping, 0 to 1: how far large values of the upsampled latents are compressed.
        #[schemars(range(min = 0, max = 1))]
        pub tone_map: f64 = 0.0,
    }
}

with_defaults! {
    /// Options of the pipeline `dfr`. `reference` selects the kind of rounds (the passes that double the frame rate):
    /// official rounds have no audio stream, diffusers' rounds attend to the audio of the first stage. The spatial pass that
    /// diffusers can run after the rounds is not supported.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Dfr {
        /// Rounds after the two stages; each doubles the frame rate.
        #[schemars(range(min = 0, max = 2))]
        pub temporal_rounds: usize = 0,
        /// Noise levels of a round: strictly decreasing, at most 1. Noise of the first level is added to the upsampled
        /// latents.
        pub sigmas: Vec<f64> = vec![0.975, 0.909375, 0.725, 0.421875, 0.0],
        /// IC-LoRA of the second stage, which follows the video of the first stage at half the size, such as
        /// `pixel-spatial-upscaler-x2`. The rounds do not use it. When the configuration is loaded, it is added to
        /// `model.loras`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub detailing_lora: Option<IcLora> = None,
    }
}

/// Stage whose audio the output contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StageAudio {
    /// As in Lightricks' version 1.2.0: stage 2 in `distilled`, `in_context` and `keyframes`, stage 1 in other
    /// pipelines.
    Official,
    /// As in Lightricks' version 1.0.0: stage 2.
    #[serde(rename = "official_1_0")]
    Official1,
    /// As in diffusers: stage 2, or stage 1 in `dfr`.
    Diffusers,
    /// Stage 1.
    #[serde(rename = "stage_1")]
    Stage1,
    /// Stage 2.
    #[serde(rename = "stage_2")]
    Stage2,
}

with_defaults! {
    /// Vocoder: converts the decoded spectrogram to a waveform.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Vocoder {
        /// LTX-2.3 and later: whether to clamp the output of the first vocoder stage to -1..1 before bandwidth
        /// extension. `official`: yes; `diffusers`: no.
        pub stage1_clamp: Reference = Reference::Official,
    }
}

with_defaults! {
    /// Number of devices along each mesh axis, from outermost to innermost; the innermost axis maps to neighboring
    /// chips. One axis may be -1: all remaining devices.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Mesh {
        /// Number of devices that split the videos of a batch (data parallelism).
        #[schemars(range(min = -1))]
        pub data: i64 = 1,
        /// Number of devices that split the guidance branches.
        #[schemars(range(min = -1))]
        pub cfg: i64 = 1,
        /// Number of devices that split the weights, which are gathered before use (FSDP).
        #[schemars(range(min = -1))]
        pub fsdp: i64 = 1,
        /// Number of devices that split the video tokens (context parallelism).
        #[schemars(range(min = -1))]
        pub context: i64 = 1,
        /// Number of devices that split attention heads and inner widths (tensor parallelism).
        #[schemars(range(min = -1))]
        pub tensor: i64 = 1,
        /// Parallelism between TPU slices, or other device groups that are connected by a slow network. The axes above
        /// describe one group.
        pub dcn: Dcn = Dcn::default(),
    }
}

with_defaults! {
    /// Parallelism between slices (device groups); the other axes of the mesh describe one slice.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Dcn {
        /// Number of slices; each processes its share of the videos of a batch.
        #[schemars(range(min = 1))]
        pub data: i64 = 1,
    }
}

with_defaults! {
    /// Device, numerics and memory.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Runtime {
        /// Platform: `auto`, a platform of `ltx2 plugin install`, or the path of a PJRT plugin. `auto` uses the first
        /// accelerator that works, or else the CPU, unless `LTX2_PJRT_PLUGIN` is set to a plugin file.
        pub platform: String = "auto".into(),
        /// Type of weights and activations; `f32` also computes matrix products in f32.
        pub dtype: Dtype = Dtype::Bf16,
        /// Storage type of the transformer block weights, regardless of the checkpoint's type.
        pub weights: WeightType = WeightType::Bf16,
        /// Type of the activations that are multiplied with `int8` or `int8-convrot` weights.
        pub activations: ActivationType = ActivationType::Bf16,
        /// Implementation whose rounding order the bf16 forward pass follows.
        pub numerics: Numerics = Numerics::Default,
        /// Type of the positions of video tokens. `official` and `diffusers`: f32; `official_1_0`: `runtime.dtype`.
        pub positions: Reference = Reference::Official,
        /// Attention kernel.
        pub attention: AttentionKernel = AttentionKernel::Auto,
        /// CUDA: fraction of each device's memory to allocate at startup, 0 to 1; null uses 0.9.
        #[schemars(range(min = 0, max = 1))]
        pub memory_fraction: Option<f32> = None,
        /// CUDA: ordinals of the devices to use; null for all.
        pub visible_devices: Option<Vec<i64>> = None,
        /// Tiled decoding of the video, to save memory; null disables tiling.
        pub tiling: Option<Tiling> = None,
        /// Whether programs loop over the layers of a network or unroll them.
        pub layers: LayerForm = LayerForm::Auto,
        /// Form of layers of the run that a sidecar records, which `layers: auto` repeats on the same platform. `None`: no
        /// sidecar, or the form was configured.
        #[serde(skip)]
        pub recorded_layers: Option<RecordedLayers> = None,
        /// Weights that stay on the devices between programs.
        pub residency: Residency = Residency::Auto,
        /// Whether programs read the weights of their blocks from pinned host memory instead of device memory. No effect
        /// on CPU.
        pub stream: WeightStreaming = WeightStreaming::Auto,
        /// Number of transformer blocks whose weights stay in device memory when weights are streamed. Null: with
        /// `stream: auto`, as many as fit, rounded down to a multiple of one eighth of the blocks; with `on`, none.
        pub resident_blocks: Option<usize> = None,
        /// Memory limit per device in GiB; null uses the free memory that the device reports.
        #[schemars(range(min = 0))]
        pub memory_limit: Option<f64> = None,
        /// Chip for which times are predicted, in `layout: auto` and reports: a chip name or a TOML file; null uses the
        /// detected device.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub chip_file: Option<String> = None,
        /// Cache of compiled programs: `off`, a folder, or `auto` for the user's cache folder (or
        /// `LTX2_COMPILE_CACHE`).
        pub compile_cache: String = "auto".into(),
        /// XLA compiler options by name, applied to every program.
        pub xla_flags: BTreeMap<String, FlagValue> = BTreeMap::new(),
        /// TPU: arguments for libtpu, such as `--xla_tpu_scoped_vmem_limit_kib=65536`; the environment variable
        /// `LIBTPU_INIT_ARGS` takes precedence.
        pub libtpu_init_args: String = String::new(),
        /// Timeout of a device execution or transfer, after which the device is considered hung and the process exits
        /// with code 1. Also limits the time to load a new plugin file (`auto`: 10 minutes).
        pub watchdog: Watchdog = Watchdog::Word(WatchdogWord::Auto),
        /// Multi-process runs, one process per host.
        pub distributed: Distributed = Distributed::default(),
    }
}

with_defaults! {
    /// Processes that run a request together. Null values are read from the environment: `LTX2_COORDINATOR`,
    /// `LTX2_PROCESS_ID` and `LTX2_NUM_PROCESSES`, or the variables of SLURM, Open MPI, a Kubernetes JobSet or GKE
    /// TPUs.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Distributed {
        /// Coordinator address: `HOST:PORT` of process 0, or `etcd://HOST:PORT/RUN`.
        pub coordinator: Option<String> = None,
        /// Index of this process, from 0.
        pub process_id: Option<usize> = None,
        /// Number of processes; 1 runs alone and ignores the environment.
        #[schemars(range(min = 1))]
        pub num_processes: Option<usize> = None,
        /// CUDA: devices per process, if several processes share a host; null uses all visible devices.
        #[schemars(range(min = 1))]
        pub devices_per_process: Option<usize> = None,
        /// Seconds without a heartbeat after which a process counts as lost and all processes exit.
        #[schemars(range(min = 1, max = 3600))]
        pub timeout: u64 = 20,
        /// Seconds to wait for all processes to connect.
        #[schemars(range(min = 1, max = 86400))]
        pub start_timeout: u64 = 600,
    }
}

/// Timeout of device operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Watchdog {
    /// `auto` or `off`.
    Word(WatchdogWord),
    /// Fixed timeout in seconds, for every operation.
    Seconds(#[schemars(range(min = 1, max = 604_800))] u64),
}

/// Named values of `runtime.watchdog`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WatchdogWord {
    /// Ten times the longest run of the program so far or, until its first run has finished, ten times the predicted
    /// time; at least one minute, or ten minutes for a first execution and in multi-process runs.
    Auto,
    /// No timeout.
    Off,
}

/// Weights that stay on the devices between programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Residency {
    /// Keeps all components that fit; each of the others is loaded when needed and replaces another component.
    #[default]
    Auto,
    /// Keeps all weights; the run fails at startup if they do not fit.
    Resident,
    /// Keeps one component at a time.
    InTurn,
}

/// Whether programs loop over the layers of a network or unroll them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayerForm {
    /// The platform's form: unrolled on CUDA, otherwise a loop. On CUDA, `ltx2 generate` uses a loop if
    /// this is predicted to shorten the run by at least a third. A rerun of a sidecar uses the recorded form on the same
    /// platform.
    #[default]
    Auto,
    /// Each layer has separate operations and weights.
    Unrolled,
    /// A loop over the stacked weights of the layers.
    Loop,
}

impl LayerForm {
    /// Returns the value of `runtime.layers`.
    pub fn name(self) -> &'static str {
        match self {
            LayerForm::Auto => "auto",
            LayerForm::Unrolled => "unrolled",
            LayerForm::Loop => "loop",
        }
    }
}

/// Form of the loops over layers in the programs of a recorded run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedLayers {
    /// Name of the platform. `None`: every platform that unrolls layers by default.
    pub platform: Option<String>,
    /// The form: [`LayerForm::Unrolled`] or [`LayerForm::Loop`].
    pub form: LayerForm,
}

/// Streaming of weights from host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WeightStreaming {
    /// All weights are in device memory.
    Off,
    /// Streams weights only if a program does not fit in device memory.
    #[default]
    Auto,
    /// The weights of all blocks except `resident_blocks` are in host memory. Each is copied to the device while earlier
    /// blocks run. The layers of the other components are streamed, too.
    On,
}

with_defaults! {
    /// Tiled video decoding: overlapping tiles, blended by linear ramps. The diffusion decoder of LTX-2.5 needs an
    /// overlap of at least 160 pixels and 40 frames, unless `reference` is `diffusers`, which uses its own tiling.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Tiling {
        /// Pixels of a tile's longer side, a multiple of 32. The shorter side follows from the aspect ratio of the
        /// frame; tiles of the diffusion decoder are square.
        #[schemars(range(min = 64))]
        pub pixels: usize = 768,
        /// Overlap of neighboring tiles in pixels, a multiple of 32.
        pub overlap: usize = 64,
        /// Frames per tile, a multiple of 8.
        #[schemars(range(min = 16))]
        pub frames: usize = 80,
        /// Overlap of consecutive tiles in frames, a multiple of 8.
        pub frame_overlap: usize = 24,
    }
}

/// Element type of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
}

/// Storage and matmul type of the transformer block weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WeightType {
    /// The type of all other weights, `runtime.dtype`.
    Bf16,
    /// 8-bit floats; activations are converted to 8-bit floats too. CUDA only.
    Fp8,
    /// 8-bit integers; `runtime.activations` selects the type of the activations that are multiplied with them.
    Int8,
    /// 8-bit integers of rotated weights, as in ComfyUI's int8-convrot files: all blocks of transformer and connectors or,
    /// if the component's file stores such weights, only these. The text encoder is quantized only in the second case.
    /// Activations are rotated too.
    #[serde(rename = "int8-convrot")]
    Int8Convrot,
}

/// Type of the activations that are multiplied with 8-bit integer weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActivationType {
    /// The type `runtime.dtype`: the weights take half the memory, but matmuls are not faster.
    Bf16,
    /// 8-bit integers with one scale per token: twice the matmul speed on chips with int8 units (v5e, v5p, v6e).
    Int8,
}

/// Implementation whose rounding order the bf16 forward pass follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Numerics {
    /// Rounding order of diffusers: rotary embeddings in f32, rounded once.
    Default,
    /// Rounding order of Lightricks' fused kernel: rotary embeddings with bf16 tables.
    Official,
}

/// Value of an XLA compiler option.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum FlagValue {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
}

/// 10-bit video of the pipeline `hdr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HdrVideo {
    /// Hybrid log-gamma.
    Hlg,
    /// Perceptual quantizer (HDR10).
    Pq,
    /// No 10-bit video.
    None,
}

with_defaults! {
    /// Output files.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Output {
        /// MP4 file (in the pipeline `hdr`, an SDR preview), or WAV file in the pipeline `text_to_audio`; a folder if there are several videos. Null:
        /// `out/ltx2_SEED.mp4`, with a number appended if that file exists.
        pub path: Option<String> = None,
        /// Folder to write the frames to as PNG files.
        pub save_frames: Option<String> = None,
        /// WAV file to write the sound to, as long as the frames; a folder if there are several videos.
        pub save_audio: Option<String> = None,
        /// Pipeline `hdr`: folder to write the scene-linear frames to as EXR files. Null: `OUTPUT_exr`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub save_exr: Option<String> = None,
        /// Pipeline `hdr`: transfer function of the 10-bit video `OUTPUT_hdr.mp4`, which ffmpeg encodes. Null: `hlg`, or
        /// none if ffmpeg or its encoder is missing.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub hdr_video: Option<HdrVideo> = None,
        /// Pipeline `hdr`: codec of the 10-bit video. Null: `hevc`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub hdr_codec: Option<HdrCodec> = None,
        /// Whether to write a sidecar next to each video: a JSON file with the complete configuration, which can be
        /// passed to `-c` to generate the video again.
        pub sidecar: bool = true,
        /// Whether the video file has a sound track.
        pub audio: bool = true,
        /// Number of denoising steps between two previews: small frames of the current prediction. `ltx2 generate`
        /// writes them to the folder `OUTPUT.preview`; the server sends them to clients. Null: no previews.
        #[schemars(range(min = 1))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub preview_every: Option<usize> = None,
        /// Safetensors file with the linear map from latents to RGB for previews: `weight [1 or 7, channels, 48]` and
        /// `bias [48]`. Null: fitted to the model's decoder and stored in the folder of the compile cache.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub preview_decoder: Option<String> = None,
    }
}
