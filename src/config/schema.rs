//! The YAML, key by key. The comment of a field is its description in `ltx2 schema`; its default is the program's.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::pipeline::Pipeline;
use super::serve::Serve;
use crate::defaults::with_defaults;
use crate::kernels::AttentionKernel;
use crate::media::ImageH264;
use crate::models::upsampler::Upsampling;
use crate::sampling::guiders::{GuiderKind, GuiderOptions};
use crate::sampling::schedules::{BetaSchedule, ScheduleKind};
use crate::sampling::{SamplerKind, SamplerOptions, StepDraws};
use crate::weights::MergeOrder;

/// The layout that is decided for the devices that are there.
pub const AUTO: &str = "auto";

/// Default of `negative_prompt`.
const NEGATIVE_PROMPT: &str = include_str!("../../configs/negative_prompt.txt");

with_defaults! {
    /// Configuration of a run: model, request, sampling, placement, output.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Config {
        /// Another YAML file that this one is laid over, relative to this one.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub extends: Option<String> = None,
        /// Inputs and outputs of a run.
        pub pipeline: Pipeline = Pipeline::TextToVideo,
        /// Where the model's parts are.
        pub model: Model = Model::default(),
        /// The video to generate.
        pub request: Request = Request::default(),
        /// Whose conventions hold where they differ: sets `sampler.sigma_shift`, `sampler.step_noise`, `sampler.noise_order`,
        /// `guidance.stg_streams`, `conditioning.cross_timestep`, `conditioning.keyframe_span`, `conditioning.noising`,
        /// `conditioning.clean_prediction`, `conditioning.given_stream`, `conditioning.first_frame_marker`, `two_stage.audio`,
        /// `vocoder.stage1_clamp`, `runtime.positions` and `model.lora_merge`, and what `auto` means of `text.bos`; each can be set
        /// alone.
        pub reference: Reference = Reference::Official,
        /// How prompts become tokens.
        pub text: Text = Text::default(),
        /// The denoising loop.
        pub sampler: Sampler = Sampler::default(),
        /// How strongly the prompt is followed.
        pub guidance: Guidance = Guidance::default(),
        /// How the streams condition each other.
        pub conditioning: Conditioning = Conditioning::default(),
        /// Pipelines with a second stage at full size.
        pub two_stage: TwoStage = TwoStage::default(),
        /// The pipeline `dfr`: keyframes generated beside the video, and rounds that double its frame rate.
        pub dfr: Dfr = Dfr::default(),
        /// From spectrogram to sound.
        pub vocoder: Vocoder = Vocoder::default(),
        /// The devices; null takes the layout's own mesh.
        pub mesh: Option<Mesh> = None,
        /// How tensors are spread over the mesh: a YAML file, or the name of one that is shipped; auto takes the
        /// shipped one that is predicted as the fastest for the devices that are there, of those that fit.
        pub layout: String = AUTO.into(),
        /// The device and how it computes.
        pub runtime: Runtime = Runtime::default(),
        /// Files to write.
        pub output: Output = Output::default(),
        /// The server, `ltx2 serve`.
        #[serde(skip_serializing_if = "Serve::is_default")]
        pub serve: Serve = Serve::default(),
    }
}

with_defaults! {
    /// Where the model's parts are.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Model {
        /// A diffusers folder, a single file, or org/name in the local Hugging Face cache.
        pub path: String = "Lightricks/LTX-2".into(),
        /// The text encoder from elsewhere: a folder or org/name.
        pub text_encoder: Option<String> = None,
        /// The tokenizer from elsewhere: a folder with `tokenizer.json`, or that file.
        pub tokenizer: Option<String> = None,
        /// The video VAE from elsewhere.
        pub vae: Option<String> = None,
        /// The audio VAE from elsewhere.
        pub audio_vae: Option<String> = None,
        /// The vocoder from elsewhere.
        pub vocoder: Option<String> = None,
        /// The latent upsampler between two stages.
        pub upsampler: Option<String> = None,
        /// The latent upsampler in time, of `temporal_x2` between two stages and of the pipeline dfr's rounds.
        pub temporal_upsampler: Option<String> = None,
        /// The duration head of LTX-2.5 from elsewhere, of `request.num_frames: auto`.
        pub duration_head: Option<String> = None,
        /// The decoder of the video, of which LTX-2.5 has two.
        pub decoder: Decoder = Decoder::Auto,
        /// Weights from the files, or random numbers made on the device.
        pub weights: WeightSource = WeightSource::File,
        /// Of random weights.
        pub weights_seed: u64 = 0,
        /// Of random weights: only so many of the transformer's blocks, the first ones, to measure layouts in less time and
        /// memory; null for all.
        #[schemars(range(min = 1))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub blocks: Option<usize> = None,
        /// LoRAs of the transformer, applied in order.
        pub loras: Vec<Lora> = Vec::new(),
        /// Where merging LoRAs into the weights rounds. Official: as Lightricks' loader; diffusers: as its `fuse_lora`;
        /// exact: once.
        pub lora_merge: MergeOrder = MergeOrder::Official,
    }
}

/// The decoder of the video.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decoder {
    /// The one that is there; of two, by `reference`: official decodes by diffusion, diffusers by convolution.
    Auto,
    /// The video VAE's, by convolution.
    Conv,
    /// LTX-2.5's, by diffusion.
    Diffusion,
}

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum WeightSource {
    /// The model's files.
    File,
    /// Random numbers made on the device, for benchmarks.
    Random,
}

/// A LoRA file and its strength.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// A safetensors file.
    pub path: String,
    /// Factor of the update.
    #[serde(default = "one")]
    pub strength: f64,
    /// The stages it holds for, in `in_context` the first unless they are written; rounds of the pipeline `dfr` have those of the
    /// first.
    #[serde(default = "both_stages")]
    pub stages: Vec<u8>,
}

fn one() -> f64 {
    1.0
}

pub(super) fn both_stages() -> Vec<u8> {
    vec![1, 2]
}

with_defaults! {
    /// The video to generate.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Request {
        /// Text prompt; an empty one is the unconditional video.
        pub prompt: Option<String> = None,
        /// Text prompt of what to avoid.
        pub negative_prompt: String = NEGATIVE_PROMPT.trim().into(),
        /// A file with what to avoid, instead of `negative_prompt`.
        pub negative_prompt_file: Option<String> = None,
        /// A file with one prompt a line, instead of `prompt`; blank lines are skipped.
        pub prompts: Option<String> = None,
        /// Videos a prompt, with consecutive seeds.
        #[schemars(range(min = 1, max = 10000))]
        pub num_videos: usize = 1,
        /// Pixels; a multiple of 32, of 64 with two stages, of 96 with `spatial_x1_5` between them.
        #[schemars(range(min = 1))]
        pub width: usize = 768,
        /// Pixels; a multiple of 32, of 64 with two stages, of 96 with `spatial_x1_5` between them.
        #[schemars(range(min = 1))]
        pub height: usize = 512,
        /// Frames; one more than a multiple of 8, of 16 with `temporal_x2` between two stages. Auto: as many as LTX-2.5's duration head predicts for the prompt.
        pub num_frames: NumFrames = NumFrames::Count(121),
        /// Frames a second.
        pub frame_rate: f64 = 24.0,
        /// Speed of the motion: positions of the video are computed for `frame_rate / motion_speed`, so that 0.2 with a slow-motion
        /// LoRA plays five times slower. Duration, sound and the frame rate of the file stay those of `frame_rate`.
        pub motion_speed: f64 = 1.0,
        /// Random seed of the first video's noise.
        pub seed: u64 = 10,
        /// Frames that are given.
        pub images: Vec<Image> = Vec::new(),
        /// Video that is given: a file, or a folder of PNG frames. What `width`, `height`, `num_frames` and `frame_rate` are not
        /// written anywhere are its own.
        pub video: Option<String> = None,
        /// Span of the given video that the pipeline `retake` makes anew.
        pub retake: Option<Retake> = None,
        /// How the pipeline `extend` goes on with the given video.
        pub extend: Option<Extend> = None,
        /// Videos that the first stage is given as references, beside the video it makes: what an IC-LoRA was trained to follow.
        pub reference_videos: Vec<ReferenceVideo> = Vec::new(),
        /// Makes the video of clips, each of which goes on where the one before ends.
        pub chain: Option<Chain> = None,
        /// Sound that is given: the video is made to it, and the file's samples go with the video. In `retake` and `extend`: the
        /// sound of a `video` that has none of its own, such as a folder of frames.
        pub audio: Option<GivenAudio> = None,
        /// Spans of sound that are kept.
        pub audio_latents: Vec<AudioLatents> = Vec::new(),
        /// Text tokens; a longer prompt is cut.
        #[schemars(range(min = 1))]
        pub max_sequence_length: usize = 1024,
    }
}

impl Request {
    /// Paths of the images, sounds and videos that are given.
    pub(crate) fn files(&self) -> impl Iterator<Item = &str> {
        let references = self.reference_videos.iter().flat_map(|v| [Some(&v.path), v.attention_mask.as_ref()]);
        let lists = self.images.iter().map(|i| &i.path).chain(self.audio_latents.iter().map(|a| &a.path));
        let single = [self.video.as_ref(), self.audio.as_ref().map(|audio| &audio.path)];
        lists.map(Some).chain(single).chain(references).flatten().map(String::as_str)
    }

    /// The same, to be changed.
    pub(crate) fn files_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let references = self.reference_videos.iter_mut().flat_map(|v| [Some(&mut v.path), v.attention_mask.as_mut()]);
        let images = self.images.iter_mut().map(|i| &mut i.path);
        let lists = images.chain(self.audio_latents.iter_mut().map(|a| &mut a.path));
        let single = [self.video.as_mut(), self.audio.as_mut().map(|audio| &mut audio.path)];
        lists.map(Some).chain(single).chain(references).flatten()
    }
}

/// Frames of a video.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum NumFrames {
    /// As many as the model predicts for the prompt.
    Auto(Auto),
    /// Number of frames.
    Count(#[schemars(range(min = 1))] usize),
}

impl NumFrames {
    /// The number, where it is given.
    pub fn count(self) -> Option<usize> {
        match self {
            NumFrames::Auto(_) => None,
            NumFrames::Count(count) => Some(count),
        }
    }
}

/// A frame that is given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// Image file.
    pub path: String,
    /// The frame it stands for.
    #[serde(default)]
    pub frame: usize,
    /// How closely it is kept, 0 to 1.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1))]
    pub strength: f64,
    /// Quality of the H.264 round trip it goes through first, 0 for none; null for `conditioning.crf`.
    #[serde(default)]
    #[schemars(range(min = 0, max = 51))]
    pub crf: Option<u8>,
}

/// A video that is given as a reference: scaled to cover the stage's size, or a part of it, and cropped to the centre.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReferenceVideo {
    /// Video file, or a folder of PNG frames.
    pub path: String,
    /// How closely its tokens are kept, 0 to 1.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1))]
    pub strength: f64,
    /// How strongly the video's tokens and its own attend to each other, 0 to 1.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1))]
    pub attention_strength: f64,
    /// A video whose brightness weighs that attention by place: not at all where it is black.
    #[serde(default)]
    pub attention_mask: Option<String>,
    /// Frames of it that are read, from its start; null for all, at most as many as the video has.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub frames: Option<usize>,
}

/// Sound that is given: a span of a file, as long as the video. Silence follows a shorter one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GivenAudio {
    /// File with sound, of any rate and number of channels.
    pub path: String,
    /// Second of the file at which the video starts.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub start: f64,
    /// Seconds that are heard, then silence; null for all.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub duration: Option<f64>,
}

/// Kept sound: latents of an earlier run of the same duration, of which a time span stays.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AudioLatents {
    /// File that `--dump` wrote.
    pub path: String,
    /// Seconds at which the span starts.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub start: f64,
    /// Seconds at which the span ends; without it, the video's end.
    #[serde(default)]
    pub end: Option<f64>,
    /// How closely the span is kept, 0 to 1.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1))]
    pub strength: f64,
}

/// Span of a given video that is made anew; what a latent holds beyond it is too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Retake {
    /// Seconds at which the span starts.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub from: f64,
    /// Seconds at which the span ends; without it, and beyond the video's end, that end.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub to: Option<f64>,
    /// Whether the span's frames are made anew.
    #[serde(default = "yes")]
    pub video: bool,
    /// Whether the span's sound is made anew; all of it where the video has none.
    #[serde(default = "yes")]
    pub audio: bool,
    /// Frames and sound outside of what is made anew.
    #[serde(default)]
    pub kept: Kept,
}

/// Frames and sound of a retake outside of what is made anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Kept {
    /// Latents of the given video decoded together with the span, as Lightricks' code.
    #[default]
    Decoded,
    /// The given video's own frames and samples; sound turns from one to the other within 20 ms.
    Source,
}

/// How a given video goes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Extend {
    /// Seconds that are added, rounded to a multiple of 8 frames.
    #[serde(default)]
    pub seconds: f64,
    /// The end of the video that they are added at.
    #[serde(default)]
    pub at: ExtendAt,
    /// Frames of the given video that the new ones are made beside; one more than a multiple of 8.
    #[serde(default = "overlap")]
    #[schemars(range(min = 9))]
    pub overlap: usize,
}

/// An end of a given video that it is gone on from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum ExtendAt {
    /// Behind its end.
    #[default]
    End,
    /// Before its start.
    Start,
}

/// A video of clips. Each begins with the latents that the one before ends with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Chain {
    /// Frames of a clip; one more than a multiple of 8.
    #[serde(default = "clip")]
    #[schemars(range(min = 17))]
    pub clip: usize,
    /// Frames of a clip that the one before has too; one more than a multiple of 8.
    #[serde(default = "overlap")]
    #[schemars(range(min = 9))]
    pub overlap: usize,
    /// Prompts of the second clip and those behind it, of which the last holds to the end; without, `prompt` holds.
    #[serde(default)]
    pub prompts: Vec<String>,
}

fn yes() -> bool {
    true
}

/// Five seconds at 24 frames a second.
fn clip() -> usize {
    121
}

/// At 24 frames a second a whole number of audio latents.
fn overlap() -> usize {
    25
}

/// Whose conventions hold where two implementations of the model differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// Lightricks' own code, 1.2.0.
    Official,
    /// Lightricks' own code, 1.0.0.
    #[serde(rename = "official_1_0")]
    #[value(name = "official_1_0")]
    Official1,
    /// The diffusers pipelines.
    Diffusers,
}

with_defaults! {
    /// The denoising loop.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Sampler {
        /// Integrator of the denoising loop.
        pub kind: SamplerKind = SamplerKind::Euler,
        /// Part of each step's noise that is drawn anew, 0 to 1, of samplers that draw such.
        #[schemars(range(min = 0, max = 1))]
        pub eta: Option<f64> = None,
        /// Seed of the noise that steps draw; without it, it follows the request's seed.
        pub noise_seed: Option<u64> = None,
        /// Weight of a step's own velocity against that of the step before, of `gradient_estimation`; null for 2, and 1 is
        /// `euler`.
        #[schemars(range(min = 0, max = 10))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub gamma: Option<f64> = None,
        /// Generator of the noise that the steps of `euler_ancestral` and `cfg_pp` draw. Official: one for each pass, in the type of
        /// `runtime.dtype`; diffusers: the request's, which continues through all passes to the decoder's noise, in f32.
        pub step_noise: Reference = Reference::Official,
        /// Order of the noise that passes start from. Official: a video in the shape of its latents, its sound, then appended
        /// tokens; diffusers: as its pipelines draw it, whole sequences of tokens where a pass starts from latents or tokens are
        /// appended.
        pub noise_order: Reference = Reference::Official,
        /// Denoising steps.
        #[schemars(range(min = 1, max = 256))]
        pub steps: usize = 40,
        /// Noise levels by the number of steps.
        pub schedule: ScheduleKind = ScheduleKind::Ltx2,
        /// Settings of the schedule `beta`.
        #[serde(skip_serializing_if = "BetaSchedule::is_default")]
        pub beta: BetaSchedule = BetaSchedule::default(),
        /// The noise levels themselves, falling from at most 1, instead of `steps`; a closing 0 is optional.
        pub sigmas: Option<Vec<f64>> = None,
        /// Tokens that the schedule's shift is computed for. Official: a constant number; diffusers: all that the
        /// transformer reads, appended ones included.
        pub sigma_shift: Reference = Reference::Official,
        /// Where the noise is drawn.
        pub noise: Noise = Noise::Torch,
        /// Steps between two reports of progress: one call of the device each.
        pub progress_every: ProgressEvery = ProgressEvery::Auto(Auto::Auto),
    }
}

impl Image {
    /// Quality of the H.264 round trip it goes through first, 0 for none.
    pub fn crf(&self, conditioning: &Conditioning) -> u8 {
        self.crf.unwrap_or(conditioning.crf)
    }
}

impl Conditioning {
    /// Pixels, and frames, of the video that one of a reference video stands for.
    pub(crate) fn reference_scales(&self) -> [usize; 2] {
        [self.reference_downscale_factor, self.reference_temporal_scale_factor].map(|factor| factor.unwrap_or(1))
    }
}

impl Sampler {
    /// The settings that only some samplers take, of latents of a type.
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
    /// How prompts become tokens.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Text {
        /// Whether prompts begin with the BOS token.
        pub bos: Bos = Bos::Auto,
    }
}

/// Whether prompts begin with the BOS token. `add_bos_token` in `tokenizer_config.json` has no effect, as in transformers 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Bos {
    /// By `reference`. Official: always; `official_1_0` and diffusers: if `tokenizer.json` adds it.
    Auto,
    /// Always: prepended where `tokenizer.json` does not add it.
    Always,
}

/// Where noise is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Noise {
    /// On the host, bit for bit as `torch.Generator("cpu")` draws it.
    Torch,
    /// On the device: faster, not portable.
    Device,
}

/// Steps between two reports of progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ProgressEvery {
    /// One on a terminal, all of them otherwise.
    Auto(Auto),
    /// Number of steps.
    Steps(#[schemars(range(min = 1))] usize),
}

/// The word `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Auto {
    /// The program chooses.
    Auto,
}

with_defaults! {
    /// How strongly the prompt is followed.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Guidance {
        /// How the prediction on the negative prompt is made use of, at the scale `cfg`.
        pub kind: GuiderKind = GuiderKind::Cfg,
        /// Settings of `apg` and `legacy_apg`.
        #[serde(skip_serializing_if = "GuiderOptions::is_default")]
        pub apg: GuiderOptions = GuiderOptions::default(),
        /// The video stream's scales.
        pub video: Scales = Scales::default(),
        /// The audio stream's scales.
        pub audio: Scales = Scales::default(),
        /// Transformer blocks that the perturbed branch perturbs, of streams that name none of their own.
        pub stg_blocks: Vec<usize> = Vec::new(),
        /// Streams that the perturbed branch perturbs. Official: those whose stg is not 0; diffusers: both, and none
        /// in a model without perturbed attention.
        pub stg_streams: Reference = Reference::Official,
        /// Elements over which the rescale term takes standard deviations. Each video is rescaled by itself, also in a batch: both
        /// values give the same video, and `batch` is refused.
        pub rescale_scope: RescaleScope = RescaleScope::PerSample,
    }
}

/// One stream's guidance. A number is meant literally; null uses the other stream's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Scales {
    /// Away from the negative prompt; 1 is off.
    pub cfg: Option<f64>,
    /// Away from the perturbed prediction; 0 is off.
    pub stg: Option<f64>,
    /// Away from the prediction without the other stream; 1 is off.
    pub modality: Option<f64>,
    /// Towards the standard deviation before guidance; 0 is off.
    pub rescale: Option<f64>,
    /// Transformer blocks that the perturbed branch perturbs in this stream; null for `guidance.stg_blocks`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stg_blocks: Option<Vec<usize>>,
    /// Steps behind each predicted one that take over its prediction instead of a forward pass of their own.
    #[schemars(range(min = 0, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skip: Option<usize>,
    /// Guidance by noise level, from the highest bound to the lowest, each down to the next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_sigma: Option<Vec<SigmaScales>>,
}

/// A stream's guidance at noise levels up to a bound: the highest holds above it too. What is left out is as at all levels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SigmaScales {
    /// Upper bound of the noise levels.
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

/// Elements over which the rescale term takes standard deviations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RescaleScope {
    /// Each sample for itself, as diffusers does.
    #[default]
    PerSample,
    /// All samples together, as the official code does.
    Batch,
}

with_defaults! {
    /// How the streams condition each other.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Conditioning {
        /// The noise level that modulates the attention between the streams. All agree unless frames are given.
        pub cross_timestep: CrossTimestep = CrossTimestep::Official,
        /// Time that an appended frame spans. Official and diffusers: one frame; `official_1_0`: a latent's eight.
        pub keyframe_span: Reference = Reference::Official,
        /// Start of known tokens of a strength below 1 where a pass starts from latents. Official, and in `dfr` all: those
        /// latents; `official_1_0` and diffusers: the known tokens.
        pub noising: Reference = Reference::Official,
        /// Noise level that turns a token's velocity into its clean prediction. Official and `official_1_0`: the token's own,
        /// the step's times 1 minus its strength; diffusers: the step's, but in `dfr` the token's own.
        pub clean_prediction: Reference = Reference::Official,
        /// Noise level that a stream has which is given whole. Official and diffusers: 0; `official_1_0`: the step's, though its
        /// tokens have none.
        pub given_stream: Reference = Reference::Official,
        /// Whether LTX-2.5's first latent frame is marked as a single frame. Official: in every pipeline; diffusers: in `dfr`
        /// alone.
        pub first_frame_marker: Reference = Reference::Official,
        /// Frames at equal distances that the first stage of `distilled` generates beside the video, to guide it (LTX-2.5).
        pub generated_keyframes: usize = 0,
        /// Pixels of the video that one of a reference video stands for, along each side; null for what the LoRAs' files say, 1
        /// where they say nothing.
        #[schemars(range(min = 1, max = 64))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub reference_downscale_factor: Option<usize> = None,
        /// Frames of the video that one of a reference video stands for; null as above.
        #[schemars(range(min = 1, max = 64))]
        #[serde(skip_serializing_if = "Option::is_none")]
        pub reference_temporal_scale_factor: Option<usize> = None,
        /// Quality of the H.264 round trip of conditioning images that say none of their own, 0 for none.
        #[schemars(range(min = 0, max = 51))]
        pub crf: u8 = 33,
        /// The H.264 encoder that conditioning images go through at their `crf`.
        pub h264: ImageH264 = ImageH264::Auto,
    }
}

/// The noise level that modulates the attention between the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CrossTimestep {
    /// As Lightricks' current code: `gate_only`.
    Official,
    /// As Lightricks' 1.0.0: `cross`.
    #[serde(rename = "official_1_0")]
    Official1,
    /// As diffusers: `cross`.
    Diffusers,
    /// Each stream's own.
    Own,
    /// The other stream's.
    Cross,
    /// The gate by the other stream's, the rest by the stream's own.
    GateOnly,
}

with_defaults! {
    /// Pipelines with a second stage at full size.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct TwoStage {
        /// Upsampling of the first stage's latents, in this order: one in space, one in time, or both. The first stage has half
        /// the size of the second, two thirds with `spatial_x1_5`; with `temporal_x2` half the frames but one at half the frame
        /// rate, and the second stage keeps its sound.
        pub upsample: Vec<Upsampling> = vec![Upsampling::SpatialX2],
        /// Integrator of the second stage; null for `sampler.kind`.
        pub sampler: Option<SamplerKind> = None,
        /// The stage whose sound is kept.
        pub audio: StageAudio = StageAudio::Official,
        /// The second stage's noise levels, falling from at most 1; as much noise as the first says is put in.
        pub sigmas: Vec<f64> = vec![0.909375, 0.725, 0.421875, 0.0],
        /// How far channels of the upsampled latents take over mean and deviation of the first stage's.
        #[schemars(range(min = 0, max = 1))]
        pub adain: f64 = 0.0,
        /// How far large values of the upsampled latents are compressed.
        #[schemars(range(min = 0, max = 1))]
        pub tone_map: f64 = 0.0,
    }
}

with_defaults! {
    /// The pipeline `dfr`. `reference` says whose rounds: official's have no sound, diffusers' attend to the first stage's.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Dfr {
        /// Rounds behind the two stages; each doubles the frame rate.
        #[schemars(range(min = 0, max = 2))]
        pub temporal_rounds: usize = 0,
        /// A round's noise levels, falling from at most 1; as much noise as the first says is put in.
        pub sigmas: Vec<f64> = vec![0.975, 0.909375, 0.725, 0.421875, 0.0],
    }
}

/// The stage whose sound is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StageAudio {
    /// As Lightricks' current code does in the pipeline.
    Official,
    /// As Lightricks' 1.0.0: the second's.
    #[serde(rename = "official_1_0")]
    Official1,
    /// As diffusers: the second's, in `dfr` the first's.
    Diffusers,
    /// The first's.
    #[serde(rename = "stage_1")]
    Stage1,
    /// The second's.
    #[serde(rename = "stage_2")]
    Stage2,
}

with_defaults! {
    /// From spectrogram to sound.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Vocoder {
        /// LTX-2.3: whether the first stage is limited to -1..1 before its bandwidth is extended. Official: it is;
        /// diffusers: it is not.
        pub stage1_clamp: Reference = Reference::Official,
    }
}

with_defaults! {
    /// Devices along each axis, outer to inner, the innermost on neighbouring chips; -1 is what is left of them.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Mesh {
        /// Videos of one run.
        #[schemars(range(min = -1))]
        pub data: i64 = 1,
        /// Guidance branches.
        #[schemars(range(min = -1))]
        pub cfg: i64 = 1,
        /// Weights, gathered before use.
        #[schemars(range(min = -1))]
        pub fsdp: i64 = 1,
        /// Video tokens.
        #[schemars(range(min = -1))]
        pub context: i64 = 1,
        /// Heads and inner widths.
        #[schemars(range(min = -1))]
        pub tensor: i64 = 1,
        /// Slices of a TPU, or other groups of devices with a slow network between them: the axes above are one
        /// group's.
        pub dcn: Dcn = Dcn::default(),
    }
}

with_defaults! {
    /// Split over slices, outside of a mesh's axes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Dcn {
        /// Videos of one run: as many slices, each with its part of them.
        #[schemars(range(min = 1))]
        pub data: i64 = 1,
    }
}

with_defaults! {
    /// The device and how it computes.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Runtime {
        /// auto, cpu, cuda, tpu, or a PJRT plugin's path. Only auto tries one after the other.
        pub platform: String = "auto".into(),
        /// Weights and activations; f32 also computes every product in f32.
        pub dtype: Dtype = Dtype::Bf16,
        /// The transformer's block weights, whatever the checkpoint's are.
        pub weights: WeightType = WeightType::Bf16,
        /// Type of the activations that weights of `int8` are multiplied with.
        pub activations: ActivationType = ActivationType::Bf16,
        /// Whose rounding order the bf16 forward follows.
        pub numerics: Numerics = Numerics::Default,
        /// Type of the video's positions. Official and diffusers: f32; `official_1_0`: that of `runtime.dtype`.
        pub positions: Reference = Reference::Official,
        /// How attention is computed.
        pub attention: AttentionKernel = AttentionKernel::Auto,
        /// CUDA: the part of each device's memory that is taken at the start, 0 to 1; null for 0.9.
        #[schemars(range(min = 0, max = 1))]
        pub memory_fraction: Option<f32> = None,
        /// CUDA: the devices to use, by their numbers; null for all.
        pub visible_devices: Option<Vec<i64>> = None,
        /// Tiles that the video is decoded in, where a whole one does not fit; null for the whole.
        pub tiling: Option<Tiling> = None,
        /// Which weights stay on the devices between programs.
        pub residency: Residency = Residency::Auto,
        /// GiB of each device's memory that a run may take; null for what the device says is free.
        #[schemars(range(min = 0))]
        pub memory_limit: Option<f64> = None,
        /// Chip that times are predicted with, for `layout: auto` and reports: a name or a TOML file; null for the device's.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub chip_file: Option<String> = None,
        /// Where compiled programs are kept: off, a folder, or auto for the user's cache folder.
        pub compile_cache: String = "auto".into(),
        /// Compiler options by name, for every program.
        pub xla_flags: BTreeMap<String, FlagValue> = BTreeMap::new(),
        /// TPU: arguments that libtpu reads at its start, such as `--xla_tpu_scoped_vmem_limit_kib=65536`; what
        /// `LIBTPU_INIT_ARGS` of the environment says holds over them.
        pub libtpu_init_args: String = String::new(),
        /// How long an execution or a transfer may take before the process ends with exit code 1, since the device hangs; also how
        /// long a new plugin file may take to load (auto: ten minutes).
        pub watchdog: Watchdog = Watchdog::Word(WatchdogWord::Auto),
        /// Several processes, one a host.
        pub distributed: Distributed = Distributed::default(),
    }
}

with_defaults! {
    /// Several processes that run a request together. What is null is taken from the environment: `LTX2_COORDINATOR`,
    /// `LTX2_PROCESS_ID`, `LTX2_NUM_PROCESSES`, or what SLURM, Open MPI, a Kubernetes JobSet or GKE's TPUs set.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Distributed {
        /// Coordinator address: `HOST:PORT` of process 0, or `etcd://HOST:PORT/RUN`.
        pub coordinator: Option<String> = None,
        /// This process, from 0.
        pub process_id: Option<usize> = None,
        /// All processes; 1 runs alone, whatever the environment says.
        #[schemars(range(min = 1))]
        pub num_processes: Option<usize> = None,
        /// CUDA: devices of each process, where several are on one host; null for all that it sees.
        #[schemars(range(min = 1))]
        pub devices_per_process: Option<usize> = None,
        /// Seconds without a heartbeat after which a process counts as lost, and all end.
        #[schemars(range(min = 1, max = 3600))]
        pub timeout: u64 = 20,
        /// Seconds until all processes must have come.
        #[schemars(range(min = 1, max = 86400))]
        pub start_timeout: u64 = 600,
    }
}

/// Limit of a wait for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Watchdog {
    /// Chosen by the program, or none.
    Word(WatchdogWord),
    /// Seconds, whatever is waited for.
    Seconds(#[schemars(range(min = 1, max = 604_800))] u64),
}

/// The words of `runtime.watchdog`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WatchdogWord {
    /// Ten times the longest that the program has taken so far, before its first end ten times the predicted time; a minute
    /// at least, of a first execution and among several processes ten.
    Auto,
    /// No limit.
    Off,
}

/// Which weights stay on the devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Residency {
    /// All that have room; what has not is loaded when it is needed, in the place of another part.
    #[default]
    Auto,
    /// All, or the run does not begin.
    Resident,
    /// Those of one component at a time.
    InTurn,
}

with_defaults! {
    /// Overlapping tiles of a video that is decoded, blended by linear ramps. Those of LTX-2.5's diffusion decoder share at least
    /// 160 pixels and 40 frames, or are diffusers' (`reference`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Tiling {
        /// Pixels of a tile's longer side, a multiple of 32; the other side in proportion, or as long (diffusion decoder).
        #[schemars(range(min = 64))]
        pub pixels: usize = 768,
        /// Pixels that neighbours share, a multiple of 32.
        pub overlap: usize = 64,
        /// Frames of a tile, a multiple of 8.
        #[schemars(range(min = 16))]
        pub frames: usize = 80,
        /// Frames that neighbours share, a multiple of 8.
        pub frame_overlap: usize = 24,
    }
}

/// An element type of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
}

/// How the weights of the transformer's blocks are kept and multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WeightType {
    /// As all others, in `runtime.dtype`.
    Bf16,
    /// 8-bit floats, as are the activations that they are multiplied with; on CUDA.
    Fp8,
    /// 8-bit integers, multiplied as `runtime.activations` says.
    Int8,
}

/// Element type of the activations that 8-bit integers are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActivationType {
    /// That of all others, `runtime.dtype`: half the memory of weights, matmuls at their usual speed.
    Bf16,
    /// 8-bit integers, scaled for each token: twice the speed on chips that have such units (v5e, v5p, v6e).
    Int8,
}

/// Whose rounding order the bf16 forward follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Numerics {
    /// Rotary embeddings in f32, rounded once, as diffusers.
    Default,
    /// Rotary embeddings with bf16 tables, as Lightricks' fused kernel.
    Official,
}

/// The value of a compiler option.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum FlagValue {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
}

with_defaults! {
    /// Files to write.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Output {
        /// The MP4, or the folder of several; null numbers them in `out/`.
        pub path: Option<String> = None,
        /// A folder for the frames as PNG.
        pub save_frames: Option<String> = None,
        /// A WAV file of the sound, as long as the frames; a folder with several videos.
        pub save_audio: Option<String> = None,
        /// Write a JSON beside each video that repeats the run.
        pub sidecar: bool = true,
        /// Whether the video has its sound track.
        pub audio: bool = true,
    }
}
