//! Decodes latents and noise to frames.

use super::COMPONENT;
use super::blocks::{Rope3d, StageLayers, affine, normed, upsample};
use super::config::{DiffusionDecoderConfig, OutputType};
use super::padding::SizePadding;
use super::sharding_limit::limit_spatial_sharding;
use crate::Network;
use crate::pixels::Pixels;
use crate::timestep::timestep_embedding;
use ltx2_nn::{Build, Params, ShardedVideo, SpatialShards, silu};
use ltx2_stablehlo::{DType, Result, Type, Value};

/// Number of modulation rows computed from the timestep.
const ROWS: usize = 7;

/// Padding of a video's latents, and the sizes that follow from it.
pub(super) struct PaddedSizes {
    pub(super) padding: SizePadding,
    /// Frames, rows and columns of the video without padding, in pixels.
    pub(super) pixels: [usize; 3],
    /// Frames, rows and columns of the denoising stage's tokens, with padding.
    tokens: [usize; 3],
}

impl PaddedSizes {
    pub(super) fn new(c: &DiffusionDecoderConfig, latents: [usize; 3]) -> Self {
        let (padding, ratios) = (SizePadding::new(c, latents), c.ratios());
        let frames = |latents: usize| (latents.max(1) - 1) * ratios[0] + 1;
        let [f, h, w] = padding.padded(latents);
        let side = |latents: usize, axis: usize| latents * ratios[axis] / c.patch_size;
        // A video shorter than the attention window keeps some of the frames that the appended copies add.
        let tokens = [frames(f).max(c.kernel[0]).min(frames(f + c.appended_frames())), side(h, 1), side(w, 2)];
        PaddedSizes { padding, pixels: [frames(latents[0]), latents[1] * ratios[1], latents[2] * ratios[2]], tokens }
    }
}

/// Returns the shape `[b, channels, frames, height, width]` of the noise for latents `[b, f, h, w]`. It equals the
/// shape of the video that is decoded from the padded latents.
pub fn noise_shape(c: &DiffusionDecoderConfig, [b, f, h, w]: [usize; 4]) -> [usize; 5] {
    let [t, rows, columns] = PaddedSizes::new(c, [f, h, w]).tokens;
    [b, c.out_channels, t, rows * c.patch_size, columns * c.patch_size]
}

/// Builds the decoder program. Inputs, f32: un-normalized `latents [b, latent_channels, f, h, w]` for `shape = [b, f,
/// h, w]`, and standard normal `noise` of shape [`noise_shape`]. Outputs: see [`Pixels`].
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes.
pub fn program(c: &DiffusionDecoderConfig, shape: [usize; 4], pixels: Pixels, build: &Build) -> Result<Network> {
    let [b, f, h, w] = shape;
    let sizes = PaddedSizes::new(c, [f, h, w]);
    let (build, notes) = match sizes.padding.pads_frames() {
        true => (build.clone(), Vec::new()),
        false => limit_spatial_sharding(c, [f, h, w], build),
    };
    let p = Params::new("diffusion_decoder", COMPONENT, &build);
    notes.into_iter().for_each(|note| p.note(note));
    let (latents, noise) = ([b, c.latent_channels, f, h, w], noise_shape(c, shape));
    let [_, rows, columns] = c.ratios();
    let [latents, noise] = match sizes.padding.pads_frames() {
        true => [("latents", latents), ("noise", noise)]
            .map(|(name, dims)| ShardedVideo::with_replicated_frames(&p, name, Type::new(DType::F32, dims))),
        false => {
            [ShardedVideo::new(&p, "latents", latents, [1; 2]), ShardedVideo::new(&p, "noise", noise, [rows, columns])]
        }
    };
    let [given, drawn] = [&latents, &noise].map(|video| video.input(&p));
    let own = p.pp("decoder");
    let video = latents.run_with(&p, &given, &[noise.operand(&drawn)], |shards, given, operands| {
        let shards = shards.channels_last();
        let features = features(&own, c, &sizes.padding.pad(&given.to(p.dtype())), &shards);
        let context = det_stage(&own, c, c.stages.len() - 1, &features, true, &shards).slice(1, 0, sizes.tokens[0]);
        let noise = operands.first().unwrap_or(given).to(p.dtype());
        let video = denoise(&own, c, &context, &noise, &shards).to(DType::F32);
        sizes.padding.crop(&video, sizes.pixels, c.ratios())
    });
    let results = pixels.results(&p, &latents, &video);
    Network::finish(&p, results)
}

/// Runs all context stages except the last on latents `[b, c, f, h, w]`. Returns `[b, frames, rows, columns,
/// channels]`.
pub(super) fn features(p: &Params, c: &DiffusionDecoderConfig, latents: &Value, shards: &SpatialShards) -> Value {
    let x = latents.pad_edge(2, 0, c.appended_frames()).transpose(&[0, 2, 3, 4, 1]);
    let x = affine(p, "conv_in", &x, c.stages.first().map_or(c.channels, |stage| stage.channels));
    (0..c.stages.len() - 1).fold(x, |x, i| det_stage(p, c, i, &x, true, shards))
}

/// Runs context stage `i`. `is_first`: whether `x` starts with the video's first frame.
pub(super) fn det_stage(
    p: &Params,
    c: &DiffusionDecoderConfig,
    i: usize,
    x: &Value,
    is_first: bool,
    shards: &SpatialShards,
) -> Value {
    let stage = &c.stages[i];
    let _scope = p.builder().scope(format!("stage_{}", i + 1));
    let layers = layers(p, c, stage.kernel, x, shards);
    let block = |p: &Params, _: &Value, state: &[Value]| vec![layers.block(p, &state[0])];
    let x = p.pp("det_stages").each_layer(&i.to_string(), stage.depth, std::slice::from_ref(x), block).remove(0);
    upsample(&p.pp(format!("upsamples.{i}")), &x, stage.stride, stage.reduction, is_first)
}

fn layers(
    p: &Params,
    c: &DiffusionDecoderConfig,
    kernel: [usize; 3],
    x: &Value,
    shards: &SpatialShards,
) -> StageLayers {
    let rope = Rope3d::new(p, x, c.head_dim, shards);
    StageLayers { kernel, head_dim: c.head_dim, rope, shards: shards.clone() }
}

/// Denoises `noise [b, c, frames, height, width]` conditioned on the context, by Euler steps with noise levels that
/// decrease linearly from 1 to 0. If the network predicts clean pixels, the velocity at level `t` is
/// `(x - prediction) / t`. With a single step, that prediction is the result.
pub(super) fn denoise(
    p: &Params,
    c: &DiffusionDecoderConfig,
    context: &Value,
    noise: &Value,
    shards: &SpatialShards,
) -> Value {
    let b = p.builder();
    if c.is_one_step() {
        return predict(p, c, context, noise, &b.scalar(1.0, DType::F32), shards);
    }
    let levels: Vec<f32> = (0..c.steps).map(|i| (c.steps - i) as f32 / c.steps as f32).collect();
    let next = [&levels[1..], &[0.0]].concat();
    let [levels, next] = [levels, next].map(|values| b.constant(&[c.steps], &values));
    let step = |i: &Value, state: &[Value]| {
        let (t, next) = (levels.index(i), next.index(i));
        let x = state[0].to(DType::F32);
        let prediction = predict(p, c, context, &state[0], &t, shards).to(DType::F32);
        let velocity = match c.output {
            OutputType::Clean => (&x - prediction) / &t,
            OutputType::Velocity => prediction,
        };
        vec![(x - velocity * (&t - next)).to(noise.dtype())]
    };
    b.repeat(c.steps, std::slice::from_ref(noise), step).remove(0)
}

/// Evaluates the denoising stage on pixels `x [b, c, frames, height, width]` at the scalar noise level `t`.
fn predict(
    p: &Params,
    c: &DiffusionDecoderConfig,
    context: &Value,
    x: &Value,
    t: &Value,
    shards: &SpatialShards,
) -> Value {
    let _scope = p.builder().scope("stage_5");
    let rows = timestep_rows(p, c, &(t * c.timestep_scale).reshape(vec![1]));
    let x = patchify(x, c.patch_size);
    let x = affine(p, "conv_in_x_t", &x, c.channels);
    let layers = layers(p, c, c.kernel, &x, shards);
    let block = |p: &Params, _: &Value, state: &[Value]| vec![layers.modulated(p, &state[0], context, &rows)];
    let x = p.each_layer("diff_blocks", c.depth, &[x], block).remove(0);
    let x = affine(p, "conv_out", &normed(p, "norm_out", &x), c.out_channels * c.patch_size.pow(2));
    unpatchify(&x, c.patch_size)
}

/// Returns the modulation rows `[1, 7, channels]`, f32, of a timestep `[1]`. Each block adds its scale-shift table to
/// them.
fn timestep_rows(p: &Params, c: &DiffusionDecoderConfig, t: &Value) -> Value {
    let embedded = timestep_embedding(&p.pp("t_embedder.timestep_embedder"), t, c.t_emb_dim);
    let rows = affine(&p.pp("shared_adaln"), "proj", &silu(&embedded), ROWS * c.channels);
    rows.reshape(vec![1, ROWS, c.channels]).to(DType::F32)
}

/// Moves squares of pixels into the channels `(c, column, row)` of tokens `[b, frames, rows, columns, channels]`.
fn patchify(x: &Value, patch: usize) -> Value {
    let [b, c, f, h, w] = [0, 1, 2, 3, 4].map(|axis| x.dim(axis));
    let y = x.reshape(vec![b, c, f, h / patch, patch, w / patch, patch]).transpose(&[0, 2, 3, 5, 1, 6, 4]);
    y.reshape(vec![b, f, h / patch, w / patch, c * patch * patch])
}

/// Moves the channels of tokens to squares of pixels, the inverse of [`patchify`].
fn unpatchify(x: &Value, patch: usize) -> Value {
    let [b, f, h, w, all] = [0, 1, 2, 3, 4].map(|axis| x.dim(axis));
    let c = all / (patch * patch);
    let y = x.reshape(vec![b, f, h, w, c, patch, patch]).transpose(&[0, 4, 1, 2, 6, 3, 5]);
    y.reshape(vec![b, c, f, h * patch, w * patch])
}
