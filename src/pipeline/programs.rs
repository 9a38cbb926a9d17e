//! The programs of a request, written without weights or a device: to compile them ahead of time and look at them.

use super::batch::videos_at_once;
use super::configs::ModelConfigs;
use super::error::{PipelineError, Result};
use super::origin::Origin;
use crate::config::{Config, Job};
use crate::models::Network;
use crate::models::connectors::Input;
use crate::models::transformer::{self, CrossTimestep, ForwardShape};
use crate::models::video_vae::Pixels;
use crate::nn::Build;
use crate::request;
use crate::request::{ModelSizes, Request, Shapes, Tiling};
use crate::sampling::denoise::{denoise, prepare};
use crate::sampling::guidance::Branch;

/// A program of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, clap::ValueEnum)]
#[value(rename_all = "kebab-case")]
pub enum ProgramKind {
    /// The loop over steps.
    #[default]
    Denoise,
    /// What runs once before it.
    Prepare,
    /// Latents to twice their size, between two stages.
    Upsampler,
    /// The second stage's loop.
    Refine,
    /// What runs once before that.
    RefinePrepare,
    /// Prompt to embeddings.
    TextEncoder,
    /// Embeddings to the transformer's contexts.
    Connectors,
    /// Latents to frames.
    VideoDecoder,
    /// Frames to latents.
    VideoEncoder,
    /// Latents to mel spectrogram.
    AudioDecoder,
    /// Mel spectrogram to samples.
    Vocoder,
    /// One forward pass on the reference's arguments.
    Transformer,
}

impl ProgramKind {
    /// The programs that a run may have.
    pub const RUN: [ProgramKind; 11] = [
        ProgramKind::TextEncoder,
        ProgramKind::Connectors,
        ProgramKind::VideoEncoder,
        ProgramKind::Prepare,
        ProgramKind::Denoise,
        ProgramKind::Upsampler,
        ProgramKind::RefinePrepare,
        ProgramKind::Refine,
        ProgramKind::VideoDecoder,
        ProgramKind::AudioDecoder,
        ProgramKind::Vocoder,
    ];

    /// As the sidecar of a run names it.
    pub fn name(self) -> &'static str {
        match self {
            ProgramKind::Denoise => "denoise",
            ProgramKind::Prepare => "prepare",
            ProgramKind::Upsampler => "upsampler",
            ProgramKind::Refine => "refine",
            ProgramKind::RefinePrepare => "refine_prepare",
            ProgramKind::TextEncoder => "text_encoder",
            ProgramKind::Connectors => "connectors",
            ProgramKind::VideoDecoder => "video_decoder",
            ProgramKind::VideoEncoder => "video_encoder",
            ProgramKind::AudioDecoder => "audio_decoder",
            ProgramKind::Vocoder => "vocoder",
            ProgramKind::Transformer => "transformer",
        }
    }

    /// The program that the command line names so.
    ///
    /// # Errors
    /// No such program; all there are.
    pub fn named(name: &str) -> std::result::Result<Self, String> {
        <ProgramKind as clap::ValueEnum>::from_str(name, false).map_err(|_| {
            let all: Vec<String> =
                <ProgramKind as clap::ValueEnum>::value_variants().iter().map(|p| p.flag()).collect();
            format!("no program '{name}'; there are {}", all.join(", "))
        })
    }

    /// As the command line names it.
    pub fn flag(self) -> String {
        let value = <ProgramKind as clap::ValueEnum>::to_possible_value(&self);
        value.map_or_else(|| self.name().to_string(), |v| v.get_name().to_string())
    }

    /// Whether it runs the transformer's blocks.
    pub fn has_blocks(self) -> bool {
        use ProgramKind::{Denoise, Prepare, Refine, RefinePrepare, Transformer};
        matches!(self, Denoise | Prepare | Refine | RefinePrepare | Transformer)
    }
}

/// A request whose programs can be written.
pub struct Programs {
    parts: ModelConfigs,
    sizes: ModelSizes,
    /// The stages' own requests.
    first: Request,
    second: Option<Request>,
    /// Whether frames leave the device as values.
    values: bool,
    /// What the model was read from.
    pub origin: String,
}

impl Programs {
    /// Of a configuration. Where its model is not on this machine and is a published one, the configuration that this
    /// program carries of it is taken. `layers` cuts the transformer to its first blocks.
    ///
    /// # Errors
    /// No such model; sizes that it does not take.
    pub fn of(config: &Config, layers: Option<usize>) -> Result<Self> {
        let origin = Origin::of(config)?;
        let (parts, origin) = (ModelConfigs::from(origin.clone()).for_run(config), origin.describe()?);
        let whole = parts.sizes()?;
        let mut request = request::of_job(config, &whole, &Job { index: 0, prompt: String::new(), seed: 0 })?;
        let of = |parts, sizes, request: Request| {
            let (first, second) = request.passes();
            Programs { parts, sizes, first, second, values: false, origin }
        };
        let Some(layers) = layers else { return Ok(of(parts, whole, request)) };
        let all = whole.transformer.num_layers;
        if layers == 0 || layers > all {
            return Err(PipelineError::Usage(format!("--layers {layers}: this model has 1 to {all} blocks")));
        }
        let parts = parts.cut(layers);
        // Which block is perturbed changes no work.
        request.stg_blocks.iter_mut().for_each(|b| *b = (*b).min(layers - 1));
        request.stg_blocks.dedup();
        let sizes = parts.sizes()?;
        Ok(of(parts, sizes, request))
    }

    /// The programs of a run that keeps its intermediate tensors.
    #[must_use]
    pub fn dumping(self, dump: bool) -> Self {
        Programs { values: dump, ..self }
    }

    /// Blocks of the transformer.
    pub fn layers(&self) -> usize {
        self.sizes.transformer.num_layers
    }

    /// The stacked layers of a program: the length of its stacks' leading dimension.
    ///
    /// # Errors
    /// What is wrong with the model's configuration.
    pub fn stacked(&self, kind: ProgramKind) -> Result<usize> {
        match kind {
            ProgramKind::TextEncoder => Ok(self.parts.text_encoder()?.layers.len()),
            _ => Ok(self.layers()),
        }
    }

    /// Writes every program of a run, so that a layout that does not fit is found before anything has run.
    ///
    /// # Errors
    /// As [`Programs::network`].
    pub fn check(&self, build: &Build) -> Result<()> {
        self.kinds().try_for_each(|kind| self.network(kind, build).map(drop))
    }

    /// The programs of a run of this request.
    pub fn kinds(&self) -> impl Iterator<Item = ProgramKind> {
        let two = self.second.is_some();
        let pictures = !self.first.images.is_empty();
        ProgramKind::RUN.into_iter().filter(move |kind| match kind {
            ProgramKind::Upsampler | ProgramKind::RefinePrepare | ProgramKind::Refine => two,
            ProgramKind::VideoEncoder => pictures,
            _ => true,
        })
    }

    /// Writes a program, the one that a run of the same configuration executes.
    ///
    /// # Errors
    /// What is wrong with model, sizes or layout.
    pub fn network(&self, kind: ProgramKind, build: &Build) -> Result<Network> {
        let (parts, c) = (&self.parts, &self.sizes.transformer);
        let last = self.second.as_ref().unwrap_or(&self.first);
        let r = match kind {
            ProgramKind::Refine | ProgramKind::RefinePrepare if self.second.is_none() => {
                return Err(PipelineError::Usage(format!("program '{}' needs a pipeline of two stages", kind.name())));
            }
            // Both stages encode what is given at their own sizes.
            ProgramKind::Refine | ProgramKind::RefinePrepare | ProgramKind::VideoDecoder => last,
            _ => &self.first,
        };
        let shapes = Shapes::of(&self.sizes, r)?;
        let batch = videos_at_once(&build.layout);
        let shape = r.denoise_shape(&self.sizes, &shapes, batch);
        let prompts = batch * (1 + usize::from(shape.branches.contains(&Branch::Negative)));
        let tokens = r.max_sequence_length;
        let (v, a) = (&shapes.video, &shapes.audio);
        match kind {
            ProgramKind::Denoise | ProgramKind::Refine => Ok(denoise(c, &shape, build)?),
            ProgramKind::Prepare | ProgramKind::RefinePrepare => Ok(prepare(c, &shape, build)?),
            ProgramKind::Upsampler => {
                let to = Shapes::of(&self.sizes, last)?.video;
                parts.upsampler_between(
                    [v.channels, v.frames, v.height, v.width],
                    [to.channels, to.frames, to.height, to.width],
                )?;
                parts.upsampler_program([batch, v.channels, v.frames, v.height, v.width], build)
            }
            ProgramKind::TextEncoder => parts.text_encoder_program(prompts, tokens, true, build),
            ProgramKind::Connectors => parts.connectors_program(prompts, tokens, Input::PromptEmbeds, build),
            ProgramKind::VideoDecoder => {
                let (grid, size) = (&self.sizes.video_grid, [v.frames, v.height, v.width]);
                let tile = |t: &Tiling| t.largest(size, grid.spatial_compression, grid.temporal_compression);
                let pixels = if r.tiling.is_some() || self.values { Pixels::Values } else { Pixels::Bytes };
                let [f, h, w] = r.tiling.as_ref().map_or(size, tile);
                parts.video_decoder_program([batch, v.channels, f, h, w], pixels, build)
            }
            ProgramKind::VideoEncoder => {
                let frames = if self.first.images.is_empty() { r.num_frames } else { 1 };
                parts.video_encoder_program([v.batch, 3, frames, r.height, r.width], build)
            }
            ProgramKind::AudioDecoder => parts.audio_decoder_program([batch, a.channels, a.length, a.mel_bins], build),
            ProgramKind::Vocoder => {
                let decoder = self.network(ProgramKind::AudioDecoder, build)?;
                let mel = decoder.program.results.first().map(|o| o.logical_dims.clone()).unwrap_or_default();
                let dims =
                    <[usize; 4]>::try_from(mel).map_err(|d| PipelineError::Input(format!("mel has shape {d:?}")))?;
                parts.vocoder_program(dims, build)
            }
            ProgramKind::Transformer => {
                let forward = ForwardShape {
                    batch: shape.batch * shape.branches.len(),
                    tokens: shape.tokens,
                    text: [tokens; 2].into(),
                    text_channels: shape.text_channels,
                    cross: CrossTimestep::Own,
                    stg_blocks: shape.stg_blocks.clone(),
                    ..ForwardShape::default()
                };
                Ok(transformer::program(c, &forward, build)?)
            }
        }
    }
}
