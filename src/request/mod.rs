//! Requests, their passes, conditions and latent sizes, resolved from a configuration. No device, no
//! files.

mod canvas;
mod chain;
mod condition;
mod dfr;
mod diffusion_tiles;
mod error;
mod guidance;
mod resolve;
mod shapes;
mod shared;
mod sizes;
#[cfg(test)]
mod tests;
mod tiling;
mod upsampling;

pub use canvas::{Canvas, KeyframeSource, TemporalTile};
pub use chain::Chain;
pub(crate) use condition::conditions;
pub use condition::{Condition, Content, Placement, ReferenceGrid, Span, VideoPart};
pub(crate) use dfr::Round;
pub use dfr::{Dfr, DfrForm};
pub(crate) use diffusion_tiles::Blend;
pub use diffusion_tiles::DiffusionTiles;
pub use error::RequestError;
pub use guidance::GuidanceTables;
pub(crate) use guidance::branches;
pub(crate) use resolve::{of_job, scheduler_of_another, sigmas};
pub use shapes::Shapes;
pub use shared::Shared;
pub use sizes::ModelSizes;
pub(crate) use sizes::coordinate_grids;
pub(crate) use tiling::Tile;
pub use tiling::Tiling;
pub(crate) use upsampling::{UpsamplingStep, keyframe_step, upsampling_steps};

use crate::av::Av;
use crate::config;
use crate::hlo::DType;
use crate::media::{Audio, Clip};
use crate::models::transformer::CrossTimestep;
use crate::models::upsampler::Upsampling;
use crate::sampling::denoise::{CleanPrediction, DenoiseShape, StreamRole};
use crate::sampling::guidance::{Branch, RescaleScope, Scales};
use crate::sampling::guiders::Guider;
use crate::sampling::{AnySampler, GuidanceSteps};

/// A request for one video with sound.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Text prompt.
    pub prompt: String,
    /// Negative prompt of classifier-free guidance.
    pub negative_prompt: String,
    /// Width of a frame, in pixels.
    pub width: usize,
    /// Height of a frame, in pixels.
    pub height: usize,
    pub num_frames: usize,
    /// Frames a second.
    pub frame_rate: f64,
    /// Frames a second that the video's positions are computed for at motion speed 1. `None`: `frame_rate`.
    pub position_rate: Option<f64>,
    /// Divides the frame rate that the video's positions are computed for.
    pub motion_speed: f64,
    /// Frames, and their rate, of the video that the sound is as long as, where these are others.
    pub sound_frames: Option<(usize, f64)>,
    /// Random seed.
    pub seed: u64,
    /// Where noise is drawn.
    pub noise: config::Noise,
    /// Order in which torch's generator draws the noise that passes start from.
    pub noise_order: NoiseOrder,
    /// Noise levels, from the first step's to the final 0: one more than steps.
    pub sigmas: Vec<f32>,
    /// Guidance of video and audio.
    pub scales: Av<Scales>,
    /// Scales by noise level, and skipped steps.
    pub guidance_steps: Av<GuidanceSteps>,
    /// Makes the term of the negative prompt.
    pub guider: Guider,
    /// Blocks whose self-attention the perturbed branch skips, of each stream.
    pub stg_blocks: Av<Vec<usize>>,
    /// Elements that the rescale term takes standard deviations over.
    pub rescale: RescaleScope,
    /// Text tokens.
    pub max_sequence_length: usize,
    /// Of the first pass. One that is not the configuration's compiles the denoising loop at first use.
    pub sampler: AnySampler,
    /// Noise level that the attention between the streams sees.
    pub cross: CrossTimestep,
    /// Whether the video's first latent frame is marked as a single one, by models that have the marker.
    pub first_frame_marker: bool,
    /// Start of known tokens where a pass starts from latents.
    pub noising: Noising,
    /// Noise level that turns velocities of known tokens into clean predictions.
    pub clean_prediction: CleanPrediction,
    /// Type that the video's positions are rounded to.
    pub positions: DType,
    /// Role of each stream.
    pub roles: Av<StreamRole>,
    /// Whether noise is drawn, and dropped, for a stream that is kept: what is drawn later is then other noise (Lightricks).
    pub draws_kept: bool,
    /// Frames and sound of the given video, where they are at hand: what is encoded of it, programs do not depend on.
    pub clip: Option<Shared<Clip>>,
    /// The given sound, as long as the video, where it is at hand.
    pub sound: Option<Shared<Audio>>,
    /// Parts of the given video in the finished one.
    pub assembly: Assembly,
    /// The video that it is the first clip of, where there are several.
    pub chain: Option<Chain>,
    /// Known tokens of video and audio.
    pub conditions: Av<Vec<Condition>>,
    /// A second pass at this size; the first then has a smaller one.
    pub refine: Option<RefinePass>,
    /// Keyframes that both passes generate, and rounds behind them.
    pub dfr: Option<Dfr>,
    /// Tiled decoding; the whole video at once without.
    pub tiling: Option<Tiling>,
}

/// Parts of the given video in the finished one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Assembly {
    /// Nothing: all is decoded.
    #[default]
    None,
    /// All of its frames, with the sound that is made.
    Frames,
    /// All of it, then what is made behind so many frames of both.
    Before(usize),
    /// First what is made, then all of it from so many common frames on.
    Behind(usize),
    /// All of it but for the latents that are made anew.
    Around,
}

/// Start of known tokens of strength below 1, in a pass that starts from latents of an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noising {
    /// Those latents with noise: `m·(s·noise + (1-s)·latents) + (1-m)·known`, of zero latents where tokens are appended
    /// (Lightricks 1.2.0).
    Latents,
    /// The known tokens: `m·s·noise + (1-m·s)·known` (Lightricks 1.0.0, diffusers).
    Known,
}

/// Order of the noise that a pass starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoiseOrder {
    /// The video's in the shape of its latents, the sound's, then that of appended tokens, in f32.
    Latents,
    /// As diffusers' pipelines draw it (`prepare_latents`, `_create_noised_state`).
    Diffusers,
    /// All of the video's tokens, appended ones included, then those of the sound.
    Tokens,
}

/// The second pass of a two-pass request.
#[derive(Clone, Debug, PartialEq)]
pub struct RefinePass {
    /// Upsampling of the first pass' latents, in turn.
    pub upsample: Vec<Upsampling>,
    /// Noise levels, to the final 0; as much noise as the first one says is put in.
    pub sigmas: Vec<f32>,
    pub sampler: AnySampler,
    /// Keeps its own sound, not the first pass'.
    pub keeps_audio: bool,
    /// How far channels of the upsampled latents take over mean and deviation of the first pass', 0 to 1.
    pub adain: f32,
    /// How far large values of the upsampled latents are compressed, 0 to 1.
    pub tone_map: f32,
}

impl Request {
    /// Whether both fit one batch: they differ in prompt and seed only.
    pub fn can_batch_with(&self, other: &Request) -> bool {
        let alike = Request { prompt: other.prompt.clone(), seed: other.seed, ..self.clone() };
        alike == *other
    }

    /// The request of clip `at` of a video of several, from 0; itself of any other. Conditioning images are the first one's alone.
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

    /// The request of each pass: one of its own size, or a smaller one and one without guidance.
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
            scales: Av::both(Scales::NEUTRAL),
            guidance_steps: Av::default(),
            guider: Guider::default(),
            stg_blocks: Av::default(),
            ..whole.clone()
        };
        if refine.upsample.contains(&Upsampling::TemporalX2) {
            second = second.at_full_rate();
        }
        if self.dfr.is_none() {
            second.conditions.video.retain(|condition| !condition.is_of_first_pass());
        }
        (whole.before(&refine.upsample), Some(second))
    }

    /// Seconds that its sound lasts.
    pub(crate) fn seconds(&self) -> f64 {
        let (frames, rate) = self.sound_frames.unwrap_or((self.num_frames, self.frame_rate));
        frames as f64 / rate
    }

    /// Frames of the finished video.
    pub fn output_frames(&self) -> usize {
        let rounds = self.dfr.as_ref().map_or(0, |dfr| dfr.temporal_rounds);
        ((self.num_frames - 1) << rounds) + 1
    }

    /// Frames a second of the finished video.
    pub fn output_rate(&self) -> f64 {
        let rounds = self.dfr.as_ref().map_or(0, |dfr| dfr.temporal_rounds);
        self.frame_rate * (1 << rounds) as f64
    }

    /// Frames a second that the video's positions are computed for.
    pub(crate) fn position_rate(&self) -> f64 {
        self.position_rate.unwrap_or(self.frame_rate) / self.motion_speed
    }

    /// Streams whose starting noise is drawn as a sequence of tokens, appended ones included, where others' has the shape of
    /// latents; of a pass that `refines` latents or not. diffusers' pipeline from a first frame keeps the video's shape.
    pub fn draws_tokens(&self, refines: bool) -> Av<bool> {
        let video = &self.conditions.video;
        let appends = video.iter().any(|c| matches!(c.placement, Placement::Appended { .. } | Placement::Beside(_)));
        match self.noise_order {
            NoiseOrder::Latents => Av::both(false),
            NoiseOrder::Diffusers => Av { video: appends || (refines && video.is_empty()), audio: appends || refines },
            NoiseOrder::Tokens => Av::both(true),
        }
    }

    /// Whether any condition is an image, which the video encoder encodes.
    pub fn has_images(&self) -> bool {
        self.conditions.video.iter().any(|c| matches!(c.content, Content::Image { .. }))
    }

    /// Whether the video is decoded: not where its frames are given, or there is none.
    pub(crate) fn decodes_video(&self) -> bool {
        self.roles.video != StreamRole::Absent && self.assembly != Assembly::Frames
    }

    /// Frames of a given video that the video encoder encodes, where there is one.
    pub(crate) fn given_frames(&self) -> Option<usize> {
        self.conditions.video.iter().find_map(|c| match &c.content {
            Content::Video(part) => Some(part.frames),
            _ => None,
        })
    }

    /// Grids of the reference videos.
    pub(crate) fn references(&self) -> impl Iterator<Item = &ReferenceGrid> {
        self.conditions.video.iter().filter_map(Condition::reference_grid)
    }

    /// Streams that are given whole for the other one to be made to: nothing guides them. What a retake leaves as it is has
    /// the guidance of what it makes anew.
    pub(crate) fn given(&self) -> Av<bool> {
        let whole = |all: &Vec<Condition>| all.iter().any(|c| c.placement == Placement::Whole);
        let own_sound = self.conditions.audio.iter().any(|c| matches!(c.content, Content::Sound { .. }));
        Av {
            video: whole(&self.conditions.video) && self.assembly == Assembly::Frames,
            audio: whole(&self.conditions.audio) && own_sound,
        }
    }

    /// Conditions of the streams that are denoised.
    pub(crate) fn denoised_conditions(&self) -> impl Iterator<Item = &Condition> {
        let denoised = self.conditions.as_ref().zip(self.roles).into_iter();
        denoised.filter(|(_, role)| *role == StreamRole::Denoised).flat_map(|(all, _)| all)
    }

    /// Noise levels of tokens as parts of a step's: 1 first, then each other one of the conditions. A stream that is kept has
    /// none of its own.
    pub(crate) fn noise_levels(&self) -> Vec<f32> {
        condition::noise_levels(self.denoised_conditions())
    }

    /// Whether sound is given, which the audio encoder encodes.
    pub fn has_sound(&self) -> bool {
        self.conditions.audio.iter().any(|c| matches!(c.content, Content::Sound { .. } | Content::VideoSound { .. }))
    }

    /// Shape of the denoising programs for `batch` such requests.
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
            // Each video is a request of its own: its neighbours have no part in its statistics.
            rescale: if batch > 1 { RescaleScope::PerSample } else { self.rescale },
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
        }
    }
}
