//! Builds the programs of all components with the sizes of a request.

use super::configs::ModelConfigs;
use crate::av::Av;
use crate::models::Network;
use crate::models::connectors::Input;
use crate::models::diffusion_decoder::feature_grid;
use crate::models::pixels::Pixels;
use crate::models::transformer::{self as forward, CrossTimestep, ForwardShape};
use crate::models::upsampler::Upsampling;
use crate::nn::Build;
use crate::pipeline::error::{PipelineError, Result};
use crate::request::{ModelSizes, Request, Shapes, Tiling, keyframe_step, upsampling_steps};
use crate::sampling::denoise::{self as sampling, DenoiseShape};

/// The model, the request and the sizes for which a program is built.
pub(in crate::pipeline) struct ProgramSpec<'a> {
    pub(crate) configs: &'a ModelConfigs,
    pub(crate) sizes: &'a ModelSizes,
    /// Request of the pass that the program belongs to.
    pub(crate) request: &'a Request,
    /// Request of the last pass.
    pub(crate) last: &'a Request,
    /// Upsampling steps between the two passes.
    pub(crate) upsample: &'a [Upsampling],
    /// Whether decoders return frames as floats instead of bytes.
    pub(crate) float_frames: bool,
    pub(crate) shapes: Shapes,
    pub(crate) shape: DenoiseShape,
    pub(crate) build: &'a Build,
}

impl ProgramSpec<'_> {
    fn batch(&self) -> usize {
        self.shape.batch
    }

    /// Returns the number of prompts in the batch, including negative prompts.
    fn prompts(&self) -> usize {
        self.batch() * self.request.prompts().max(self.last.prompts())
    }
}

pub(in crate::pipeline) fn denoise(s: &ProgramSpec) -> Result<Network> {
    Ok(sampling::denoise(&s.sizes.transformer, &s.shape, s.build)?)
}

pub(in crate::pipeline) fn prepare(s: &ProgramSpec) -> Result<Network> {
    Ok(sampling::prepare(&s.sizes.transformer, &s.shape, s.build)?)
}

/// Builds the program of the first upsampling step, between the two passes, for which `of` returns true.
fn upsampling(s: &ProgramSpec, of: impl Fn(Upsampling) -> bool) -> Result<Network> {
    let (from, to) = (&s.shapes.video, Shapes::of(s.sizes, s.last)?.video);
    let step = upsampling_steps(s.upsample, from, &to).into_iter().find(|step| of(step.upsampling));
    let step = step.ok_or_else(|| PipelineError::Bug("the request has no upsampling of this kind".into()))?;
    s.configs.upsampling_program(&step, [s.batch(), from.channels], s.build)
}

pub(in crate::pipeline) fn upsampler(s: &ProgramSpec) -> Result<Network> {
    upsampling(s, |upsampling| upsampling != Upsampling::TemporalX2)
}

pub(in crate::pipeline) fn frame_upsampler(s: &ProgramSpec) -> Result<Network> {
    upsampling(s, |upsampling| upsampling == Upsampling::TemporalX2)
}

pub(in crate::pipeline) fn keyframe_upsampler(s: &ProgramSpec) -> Result<Network> {
    let (from, to) = (&s.shapes.video, Shapes::of(s.sizes, s.last)?.video);
    let keyframes = s.shapes.generated(&s.request.conditions.video).len();
    let step = keyframe_step(keyframes.max(1), from, &to);
    s.configs.upsampling_program(&step, [s.batch(), from.channels], s.build)
}

pub(in crate::pipeline) fn text_encoder(s: &ProgramSpec) -> Result<Network> {
    s.configs.text_encoder_program(s.prompts(), s.request.max_sequence_length, true, s.build)
}

pub(in crate::pipeline) fn connectors(s: &ProgramSpec) -> Result<Network> {
    let tokens = s.request.max_sequence_length;
    s.configs.connectors_program(s.prompts(), tokens, Input::PromptEmbeds, s.build)
}

pub(in crate::pipeline) fn duration_head(s: &ProgramSpec) -> Result<Network> {
    s.configs.duration_head_program(1, Av::both(s.request.max_sequence_length), s.build)
}

pub(in crate::pipeline) fn temporal_upsampler(s: &ProgramSpec) -> Result<Network> {
    let v = &s.shapes.video;
    s.configs.temporal_upsampler_program([s.batch(), v.channels, v.frames, v.height, v.width], s.build)
}

pub(in crate::pipeline) fn video_decoder(s: &ProgramSpec) -> Result<Network> {
    let (grid, v, tiling) = (&s.sizes.video_grid, &s.shapes.video, s.request.tiling.as_ref());
    let size = [v.frames, v.height, v.width];
    let tile = |t: &Tiling| t.largest(size, grid.spatial_compression, grid.temporal_compression);
    let pixels = if tiling.is_some() || s.float_frames { Pixels::Values } else { Pixels::Bytes };
    let [f, h, w] = tiling.map_or(size, tile);
    s.configs.video_decoder_program([s.batch(), v.channels, f, h, w], pixels, s.build)
}

pub(in crate::pipeline) fn diffusion_features(s: &ProgramSpec) -> Result<Network> {
    let v = &s.shapes.video;
    s.configs.diffusion_features_program([s.batch(), v.channels, v.frames, v.height, v.width], s.build)
}

pub(in crate::pipeline) fn diffusion_decoder(s: &ProgramSpec) -> Result<Network> {
    let v = &s.shapes.video;
    if let Some(tiling) = &s.request.tiling {
        let grid = feature_grid(&s.configs.diffusion_decoder()?, [v.frames, v.height, v.width]);
        let tile = s.configs.diffusion_tiles(tiling, &grid)?.largest(&grid);
        return s.configs.diffusion_tile_program([s.batch(), v.frames, v.height, v.width], &tile, s.build);
    }
    let pixels = if s.float_frames { Pixels::Values } else { Pixels::Bytes };
    s.configs.diffusion_decoder_program([s.batch(), v.channels, v.frames, v.height, v.width], pixels, s.build)
}

pub(in crate::pipeline) fn video_encoder(s: &ProgramSpec) -> Result<Network> {
    let r = s.request;
    // Of several reference videos, use the one with the most frames, which needs the most memory.
    if let Some(grid) = r.references().max_by_key(|grid| grid.frames) {
        let size = [r.height, r.width].map(|side| side / grid.downscale);
        return s.configs.video_encoder_program([s.shapes.video.batch, 3, grid.frames, size[0], size[1]], s.build);
    }
    let all = if r.has_images() { 1 } else { r.num_frames };
    let frames = r.given_frames().unwrap_or(all);
    s.configs.video_encoder_program([s.shapes.video.batch, 3, frames, r.height, r.width], s.build)
}

pub(in crate::pipeline) fn audio_encoder(s: &ProgramSpec) -> Result<Network> {
    let (audio, a) = (s.configs.audio_vae()?, &s.shapes.audio);
    s.configs.audio_encoder_program([1, audio.in_channels, audio.frames_of(a.length), audio.bins()], s.build)
}

pub(in crate::pipeline) fn audio_decoder(s: &ProgramSpec) -> Result<Network> {
    let a = &s.shapes.audio;
    s.configs.audio_decoder_program([s.batch(), a.channels, a.length, a.mel_bins], s.build)
}

pub(in crate::pipeline) fn vocoder(s: &ProgramSpec) -> Result<Network> {
    let decoder = audio_decoder(s)?;
    let mel = decoder.program.results.first().map(|o| &o.logical_dims[..]);
    let dims = mel.and_then(|mel| <[usize; 4]>::try_from(mel).ok());
    let dims = dims.ok_or_else(|| PipelineError::Bug(format!("the audio decoder's mel has shape {mel:?}")))?;
    s.configs.vocoder_program(dims, s.build)
}

pub(in crate::pipeline) fn transformer(s: &ProgramSpec) -> Result<Network> {
    let forward = ForwardShape {
        batch: s.batch() * s.shape.branches.len(),
        tokens: s.shape.tokens,
        text: Av::both(s.request.max_sequence_length),
        text_channels: s.shape.text_channels,
        cross: CrossTimestep::Own,
        stg_blocks: s.shape.stg_blocks.clone(),
        keyframes: s.shape.keyframes,
        ..ForwardShape::default()
    };
    Ok(forward::program(&s.sizes.transformer, &forward, s.build)?)
}
