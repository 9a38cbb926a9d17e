//! Converts a configuration to requests: passes, conditions and latent shapes. Uses no device and no files.

mod canvas;
mod chain;
mod condition;
mod dfr;
mod diffusion_tiles;
mod error;
mod guidance;
mod latent_tiles;
mod resolve;
mod shapes;
mod shared;
mod sizes;
#[cfg(test)]
pub(crate) mod tests;
mod tiling;
mod upsampling;

pub use canvas::{Canvas, KeyframeSource, TemporalTile};
pub use chain::ClipChain;
pub(crate) use condition::conditions;
pub use condition::{Condition, Content, InpaintArea, Placement, PositionSpan, Rectangle, ReferenceGrid, VideoPart};
pub use dfr::{DfrPlan, DfrReference};
pub(crate) use dfr::{Round, rounds};
pub(crate) use diffusion_tiles::Blend;
pub use diffusion_tiles::DiffusionTiles;
pub use error::RequestError;
pub use guidance::GuidanceTables;
pub(crate) use guidance::branches;
pub(crate) use latent_tiles::LatentTile;
pub use latent_tiles::LatentTiling;
pub(crate) use resolve::{frame_count, resolve, scheduler_mismatch_warning, sigmas};
pub use shapes::Shapes;
pub use shared::Shared;
pub use sizes::ModelSizes;
pub(crate) use sizes::coordinate_grids;
pub(crate) use tiling::Tile;
pub use tiling::TileSizes;
pub(crate) use upsampling::{UpsamplingStep, keyframe_step, upsampling_steps};

use std::path::PathBuf;

use crate::av::Av;
use crate::config;
use crate::hlo::DType;
use crate::media::{Audio, Clip, HdrTransform};
use crate::models::transformer::CrossModalTimestep;
use crate::models::upsampler::Upsampling;
use crate::sampling::denoise::{CleanPrediction, DenoiseShape, StreamRole};
use crate::sampling::guidance::{Branch, GuidanceScales, RescaleExtent};
use crate::sampling::guiders::Guider;
use crate::sampling::step_cache::{StepCache, StepCacheKind};
use crate::sampling::{AnySampler, GuidanceSteps};

/// Request for one video with sound.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Text prompt.
    pub prompt: String,
    /// Negative prompt of classifier-free guidance.
    pub negative_prompt: String,
    /// Frame width in pixels.
    pub width: usize,
    /// Frame height in pixels.
    pub height: usize,
    pub num_frames: usize,
    /// Frames per second.
    pub frame_rate: f64,
    /// Frame rate for which video positions are computed, before division by `motion_speed`. `None`: `frame_rate`.
    pub position_rate: Option<f64>,
    /// Divisor of the frame rate for which video positions are computed.
    pub motion_speed: f64,
    /// Number of frames and frame rate that determine the length of the audio. `None`: `num_frames` and `frame_rate`.
    pub sound_frames: Option<(usize, f64)>,
    /// Random seed.
    pub seed: u64,
    /// Where noise is generated.
    pub noise: config::Noise,
    /// Order in which torch's generator draws the initial noise of a pass.
    pub noise_order: NoiseOrder,
    /// Noise levels, from that of the first step to the final 0; one value more than there are steps.
    pub sigmas: Vec<f32>,
    /// Guidance scales of each stream.
    pub scales: Av<GuidanceScales>,
    /// Guidance scales by noise level, and skipped steps.
    pub guidance_steps: Av<GuidanceSteps>,
    /// Guidance method for the negative prompt.
    pub guider: Guider,
    /// Transformer blocks whose self-attention the perturbed branch skips, per stream.
    pub stg_blocks: Av<Vec<usize>>,
    /// Elements over which the rescale term computes standard deviations.
    pub rescale: RescaleExtent,
    /// File with the text contexts that replace those of the prompt. `None`: the prompt is encoded.
    pub text_embeddings: Option<PathBuf>,
    /// Number of text tokens to which prompts are padded or truncated.
    pub max_sequence_length: usize,
    /// Sampler of the first pass. The first use of a sampler other than the configured one compiles the denoising loop.
    pub sampler: AnySampler,
    /// Step cache of the first pass. `None`: every step runs the transformer.
    pub cache: Option<StepCache>,
    /// Noise level that modulates the cross-attention between the streams.
    pub cross: CrossModalTimestep,
    /// Whether models with a keyframe embedding add it to the first latent frame, which represents a single video
    /// frame.
    pub first_frame_marker: bool,
    /// Initial latents of tokens with a conditioning strength below 1, in a pass that starts from the latents of an
    /// earlier pass.
    pub noising: Noising,
    /// Noise level that converts the velocities of conditioned tokens to clean predictions.
    pub clean_prediction: CleanPrediction,
    /// Type to which video positions are rounded.
    pub positions: DType,
    /// Role of each stream.
    pub roles: Av<StreamRole>,
    /// Whether noise is also drawn for a kept stream and discarded, as in Lightricks' code. This changes all noise that
    /// is drawn later.
    pub draws_kept: bool,
    /// Decoded frames and sound of the input video. `None`: not decoded yet, or there is no input video. Programs do
    /// not depend on this field.
    pub clip: Option<Shared<Clip>>,
    /// Decoded input audio, as long as the video. `None`: not decoded yet, or there is no input audio.
    pub sound: Option<Shared<Audio>>,
    /// Parts of the input video that the output video contains in addition to generated frames and sound.
    pub composition: OutputComposition,
    /// Chain of clips whose first clip is this request; `None` for a single clip.
    pub chain: Option<ClipChain>,
    /// Conditions of each stream.
    pub conditions: Av<Vec<Condition>>,
    /// Second pass, which runs at the size of this request after a smaller first pass. `None`: a single pass.
    pub refine: Option<RefinePass>,
    /// Generated keyframes and temporal rounds of the pipeline `dfr`; `None` for other pipelines.
    pub dfr: Option<DfrPlan>,
    /// Tiled decoding; `None` disables tiling.
    pub tiling: Option<TileSizes>,
    /// Curve of the decoded values, if the video is HDR. `None`: the decoded values are SDR.
    pub hdr: Option<HdrTransform>,
}

/// Composition of the output video from the input video and from generated frames and sound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputComposition {
    /// Generated frames and sound only.
    #[default]
    None,
    /// All frames of the input video with generated sound.
    Frames,
    /// The complete input video, followed by the generated frames after the overlap. The value is the number of
    /// overlapping frames.
    ExtendedAtEnd(usize),
    /// The generated frames, followed by the input video after the overlap. The value is the number of overlapping
    /// frames.
    ExtendedAtStart(usize),
    /// The input video, except for the frames and samples of regenerated latents.
    RegeneratedSpan,
}

/// Initial latents of tokens with a strength below 1, in a pass that starts from the latents of an earlier pass. `m` is
/// the token's noise level (1 - strength), `s` the first noise level of the pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noising {
    /// The latents of the earlier pass with noise: `m·(s·noise + (1-s)·latents) + (1-m)·known`, with zero latents for
    /// appended tokens (Lightricks 1.2.0).
    Latents,
    /// The conditioning latents with noise: `m·s·noise + (1-m·s)·known` (Lightricks 1.0.0, diffusers).
    Known,
}

/// Order in which the initial noise of a pass is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoiseOrder {
    /// Video in the shape of its latents, then audio, then appended tokens, in f32.
    Latents,
    /// The order of diffusers' pipelines (`prepare_latents`, `_create_noised_state`).
    Diffusers,
    /// All video tokens including appended ones, then the audio tokens.
    Tokens,
}

/// Second pass of a two-pass request.
#[derive(Clone, Debug, PartialEq)]
pub struct RefinePass {
    /// Upsampling of the first pass's latents, applied in order.
    pub upsample: Vec<Upsampling>,
    /// Noise levels, ending with 0. Noise of the first level is added to the upsampled latents.
    pub sigmas: Vec<f32>,
    pub sampler: AnySampler,
    /// Step cache of this pass. `None`: every step runs the transformer.
    pub cache: Option<StepCache>,
    /// Whether the output contains the audio of this pass instead of that of the first pass.
    pub keeps_audio: bool,
    /// Strength of AdaIN, 0 to 1: how far each channel of the upsampled latents is normalized to the mean and standard
    /// deviation of the same channel in the first pass.
    pub adain: f32,
    /// Strength of tone mapping, 0 to 1: how far large values of the upsampled latents are compressed.
    pub tone_map: f32,
    /// Tiles that are denoised one after the other, with the reference videos of the first pass. `None`: the pass denoises
    /// the complete video, without reference videos.
    pub tiles: Option<LatentTiling>,
}

impl Request {
    /// Returns whether two requests can share a batch, that is, differ only in prompt and seed.
    pub fn can_batch_with(&self, other: &Request) -> bool {
        let alike = Request { prompt: other.prompt.clone(), seed: other.seed, ..self.clone() };
        alike == *other
    }

    /// Returns whether a pass has an adaptive step cache. One decision then applies to all videos of a batch, so that the
    /// result depends on the others.
    pub(crate) fn has_adaptive_cache(&self) -> bool {
        let caches = [self.cache.as_ref(), self.refine.as_ref().and_then(|refine| refine.cache.as_ref())];
        caches.into_iter().flatten().any(|cache| cache.kind() == StepCacheKind::Adaptive)
    }

    /// Returns the request of clip `at` (from 0) of the chain, or a copy of `self` if there is no chain. Only the first
    /// clip has conditioning images.
    #[must_use]
    pub fn of_clip(&self, at: usize) -> Request {
        let Some(chain) = &self.chain else { return self.clone() };
        let mut own = Request { chain: None, seed: chain.seed(self.seed, at), ..self.clone() };
        if at > 0 {
            own.conditions.video.retain(|condition| !matches!(condition.content, Content::Image { .. }));
        }
        if let Some(prompt) = chain.prompt(at) {
            own.prompt.clone_from(prompt);
        }
        own
    }

    /// Returns the requests of the passes: one pass at full size, or a smaller first pass and a second pass without
    /// guidance.
    pub fn passes(&self) -> (Request, Option<Request>) {
        let mut whole = Request { refine: None, dfr: None, ..self.clone() };
        if let Some(dfr) = &self.dfr {
            whole.num_frames = dfr.canvas.frames;
            whole.conditions.video.extend(dfr.keyframes());
        }
        let Some(refine) = &self.refine else { return (whole, None) };
        let mut second = Request {
            sigmas: refine.sigmas.clone(),
            sampler: refine.sampler.clone(),
            cache: refine.cache.clone(),
            scales: Av::both(GuidanceScales::NEUTRAL),
            guidance_steps: Av::default(),
            guider: Guider::default(),
            stg_blocks: Av::default(),
            ..whole.clone()
        };
        if refine.upsample.contains(&Upsampling::TemporalX2) {
            second = second.at_full_rate();
        }
        if self.dfr.is_none() && refine.tiles.is_none() {
            second.conditions.video.retain(|condition| !condition.is_first_pass_only());
        }
        second.conditions.video.extend(self.dfr.as_ref().and_then(DfrPlan::first_pass_video));
        if self.conditions.audio.iter().any(|condition| condition.content == Content::ReferenceSound) {
            // As in Lightricks' pipeline, the second pass keeps the audio, which also replaces the reference.
            second.roles.audio = StreamRole::Kept;
            second.conditions.audio = vec![Condition::previous_sound()];
        }
        (whole.before(&refine.upsample), Some(second))
    }

    /// Returns the duration of the sound in seconds.
    pub(crate) fn seconds(&self) -> f64 {
        let (frames, rate) = self.sound_frames.unwrap_or((self.num_frames, self.frame_rate));
        frames as f64 / rate
    }

    /// Returns the number of frames of the output video.
    pub fn output_frames(&self) -> usize {
        let rounds = self.dfr.as_ref().map_or(0, |dfr| dfr.temporal_rounds);
        ((self.num_frames - 1) << rounds) + 1
    }

    /// Returns the frame rate of the output video.
    pub fn output_rate(&self) -> f64 {
        let rounds = self.dfr.as_ref().map_or(0, |dfr| dfr.temporal_rounds);
        self.frame_rate * (1 << rounds) as f64
    }

    /// Returns the frame rate for which video positions are computed.
    pub(crate) fn position_rate(&self) -> f64 {
        self.position_rate.unwrap_or(self.frame_rate) / self.motion_speed
    }

    /// Returns, for each stream, whether the initial noise is drawn as a sequence of tokens including appended ones,
    /// instead of in the shape of the latents. `refines` is whether the pass starts from latents. With the order of
    /// diffusers, video noise is drawn as tokens if a condition appends tokens, or if the pass starts from latents and
    /// has no video conditions. Audio noise is drawn as tokens if a condition appends video tokens, or if the pass
    /// starts from latents.
    pub fn draws_tokens(&self, refines: bool) -> Av<bool> {
        let video = &self.conditions.video;
        let appends =
            video.iter().any(|c| matches!(c.placement, Placement::Appended { .. } | Placement::AppendedReference(_)));
        match self.noise_order {
            NoiseOrder::Latents => Av::both(false),
            NoiseOrder::Diffusers => Av { video: appends || (refines && video.is_empty()), audio: appends || refines },
            NoiseOrder::Tokens => Av::both(true),
        }
    }

    /// Returns whether any condition is an image, which requires the video encoder.
    pub fn has_images(&self) -> bool {
        self.conditions.video.iter().any(|c| matches!(c.content, Content::Image { .. }))
    }

    /// Returns whether video latents are decoded: there is a video stream, and the output does not contain all frames
    /// of the input video instead.
    pub(crate) fn decodes_video(&self) -> bool {
        self.roles.video != StreamRole::Absent && self.composition != OutputComposition::Frames
    }

    /// Returns whether audio latents are decoded: the run generates sound.
    pub(crate) fn decodes_audio(&self) -> bool {
        self.roles.audio != StreamRole::Absent && !self.input_streams().audio
    }

    /// Returns the number of input video frames that the video encoder encodes; `None` without an input video.
    pub(crate) fn given_frames(&self) -> Option<usize> {
        self.conditions.video.iter().find_map(|c| match &c.content {
            Content::Video(part) => Some(part.frames),
            _ => None,
        })
    }

    /// Returns the grids of the reference videos.
    pub(crate) fn references(&self) -> impl Iterator<Item = &ReferenceGrid> {
        self.conditions.video.iter().filter_map(Condition::reference_grid)
    }

    /// Returns which streams are complete inputs and therefore have no guidance. Returns false for a stream that a
    /// retake keeps, because it has the guidance of the regenerated stream.
    pub(crate) fn input_streams(&self) -> Av<bool> {
        let whole = |all: &Vec<Condition>| all.iter().any(|c| c.placement == Placement::Whole);
        let own_sound = self.conditions.audio.iter().any(|c| matches!(c.content, Content::Sound { .. }))
            || self.conditions.video.iter().any(|c| matches!(c.placement, Placement::Kept(_)));
        Av {
            video: whole(&self.conditions.video) && self.composition == OutputComposition::Frames,
            audio: whole(&self.conditions.audio) && own_sound,
        }
    }

    /// Returns the conditions of denoised streams.
    pub(crate) fn denoised_conditions(&self) -> impl Iterator<Item = &Condition> {
        let denoised = self.conditions.as_ref().zip(self.roles).into_iter();
        denoised.filter(|(_, role)| *role == StreamRole::Denoised).flat_map(|(all, _)| all)
    }

    /// Returns the distinct noise levels of the tokens of denoised streams, as fractions of the noise level of the
    /// step; the first is 1.
    pub(crate) fn noise_levels(&self) -> Vec<f32> {
        condition::noise_levels(self.denoised_conditions())
    }

    /// Returns whether there is input audio, which requires the audio encoder.
    pub fn has_sound(&self) -> bool {
        let encoded = |c: &Condition| {
            matches!(c.content, Content::Sound { .. } | Content::VideoSound { .. } | Content::ReferenceSound)
        };
        self.conditions.audio.iter().any(encoded)
    }

    /// Returns the shape of the denoising programs for a batch of `batch` requests.
    pub fn denoise_shape(&self, sizes: &ModelSizes, shapes: &Shapes, batch: usize) -> DenoiseShape {
        let plan = self.guidance_plan();
        let branches = plan.branches();
        let conditioned = self
            .conditions
            .as_ref()
            .zip(self.roles)
            .map(|(all, role)| role == StreamRole::Denoised && all.iter().any(|c| c.noise_level() != 1.0));
        DenoiseShape {
            batch,
            tokens: shapes.tokens,
            text: self.max_sequence_length,
            text_channels: sizes.text_channels,
            stg_blocks: if branches.contains(&Branch::Perturbed) { self.stg_blocks.clone() } else { Av::default() },
            // Each video in a batch is a separate request, so statistics must not include other videos.
            rescale: if batch > 1 { RescaleExtent::PerSample } else { self.rescale },
            branches,
            sets: plan.sets(),
            scales_by_step: plan.varies(),
            guider: plan.guider,
            levels: self.noise_levels().len(),
            conditioned,
            keyframes: sizes.transformer.use_keyframes_abs_pos_embedding
                && self.roles.video != StreamRole::Absent
                && (self.first_frame_marker || self.conditions.video.iter().any(|c| c.content == Content::Generated)),
            self_mask: self.roles.video == StreamRole::Denoised
                && self.conditions.video.iter().any(Condition::is_masked),
            roles: self.roles,
            cross: self.cross,
            clean_prediction: match conditioned.into_iter().any(|any| any) {
                true => self.clean_prediction,
                false => CleanPrediction::default(),
            },
            sampler: self.sampler.clone(),
            cache: self.cache.as_ref().map(StepCache::kind),
        }
    }
}
