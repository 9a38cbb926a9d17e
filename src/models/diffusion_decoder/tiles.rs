//! The decoder as two programs, for videos that are not decoded whole: latents to the features that the context's last stage
//! takes, and a tile of these with noise of its own to pixels.

use super::COMPONENT;
use super::config::DiffusionDecoderConfig;
use super::model::{Sizes, denoise, det_stage, features};
use crate::hlo::{DType, Result, Type};
use crate::models::Network;
use crate::nn::{Axis, Build, Params, ShardedVideo};

/// Grid of features that tiles are cut from, by frames, rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureGrid {
    /// Cells of the video, with what small latents are padded by.
    pub cells: [usize; 3],
    /// Cells of frames behind the video's: copies of the last, which go with the last tile.
    pub appendix: usize,
    /// Pixels of a cell.
    pub scale: [usize; 3],
    /// Cells from which on every window fits into a tile.
    pub least: [usize; 3],
    /// Cells that a result depends on at one side.
    pub reach: [usize; 3],
    /// Pixels of the video, and before it the padding's.
    pub pixels: [usize; 3],
    pub(crate) before: [usize; 3],
}

/// A tile's cells, and whether it is the first or last in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureTile {
    /// Frames, rows and columns without the appendix.
    pub(crate) cells: [usize; 3],
    pub(crate) is_first: bool,
    pub(crate) is_last: bool,
}

/// The grid of latents `[frames, rows, columns]`.
pub fn feature_grid(c: &DiffusionDecoderConfig, latents: [usize; 3]) -> FeatureGrid {
    let sizes = Sizes::new(c, latents);
    let padded = sizes.padding.padded(latents);
    let before_last = &c.stages[..c.stages.len().saturating_sub(1)];
    let grow = |cells: [usize; 3]| {
        before_last.iter().fold(cells, |[t, h, w], stage| {
            let [st, sh, sw] = stage.stride;
            [t * st - usize::from(st == 2), h * sh, w * sw]
        })
    };
    let cells = grow(padded);
    let with_appendix = grow([padded[0] + c.appendix(), padded[1], padded[2]]);
    let (kernel, depth, stride) = c.stages.last().map_or(([1; 3], 0, [1; 3]), |s| (s.kernel, s.depth, s.stride));
    let reach = |axis: usize| (depth * (kernel[axis] / 2)).max((c.depth * (c.kernel[axis] / 2)).div_ceil(stride[axis]));
    FeatureGrid {
        cells,
        appendix: with_appendix[0] - cells[0],
        scale: [stride[0], stride[1] * c.patch_size, stride[2] * c.patch_size],
        least: [0, 1, 2].map(|axis| kernel[axis].max(c.kernel[axis].div_ceil(stride[axis]))),
        reach: [0, 1, 2].map(reach),
        pixels: sizes.pixels,
        before: sizes.padding.before(c.ratios()),
    }
}

/// Shape `[channels, frames, height, width]` of a tile's noise and pixels: of a last tile shorter than the window with some of
/// the appendix.
pub(crate) fn tile_shape(c: &DiffusionDecoderConfig, grid: &FeatureGrid, tile: &FeatureTile) -> [usize; 4] {
    let [st, sh, sw] = grid.scale;
    let doubled = usize::from(tile.is_first && st == 2);
    let frames = |cells: usize| cells * st - doubled;
    let [t, h, w] = tile.cells;
    let frames = match tile.is_last {
        true => frames(t).max(c.kernel[0]).min(frames(t + grid.appendix)),
        false => frames(t),
    };
    [c.out_channels, frames, h * sh, w * sw]
}

/// Un-normalised latents `[b, latent_channels, f, h, w]`, f32, for `shape = [b, f, h, w]` to `features [b, frames, rows,
/// columns, channels]` in the type that is computed in.
///
/// # Errors
/// The first mistake made while building, with op, scope and shapes.
pub fn features_program(c: &DiffusionDecoderConfig, shape: [usize; 4], build: &Build) -> Result<Network> {
    let p = Params::new("diffusion_features", COMPONENT, build);
    let [b, f, h, w] = shape;
    let padding = Sizes::new(c, [f, h, w]).padding;
    let latents = ShardedVideo::of_whole_frames(&p, "latents", Type::new(DType::F32, [b, c.latent_channels, f, h, w]));
    let given = latents.input(&p);
    let made = latents.run_with(&p, &given, &[], |shards, given, _| {
        features(&p.pp("decoder"), c, &padding.pad(&given.to(p.dtype())), &shards.channels_last())
    });
    Network::finish(&p, vec![latents.output(&p, "features", &made)])
}

/// A tile of `features`, of latents of `shape`, that begins at the cell `start [3]`, i32, and `noise` of `tile_shape` to
/// `video [b, channels, frames, height, width]`, f32, about -1..1.
///
/// # Errors
/// As of [`features_program`].
pub fn tile_program(
    c: &DiffusionDecoderConfig,
    [b, f, h, w]: [usize; 4],
    tile: &FeatureTile,
    build: &Build,
) -> Result<Network> {
    let p = Params::new("diffusion_decoder", COMPONENT, build);
    let grid = feature_grid(c, [f, h, w]);
    let ([rows, columns], [channels, frames, height, width]) =
        ([grid.cells[1], grid.cells[2]], tile_shape(c, &grid, tile));
    let last = c.stages.len() - 1;
    let dims = [b, grid.cells[0] + grid.appendix, rows, columns, c.stages[last].channels];
    let all = ShardedVideo::of_whole_frames(&p, "features", Type::new(p.dtype(), dims));
    let noise = ShardedVideo::of_whole_frames(&p, "noise", Type::new(DType::F32, [b, channels, frames, height, width]));
    let (given, drawn) = (all.input(&p), noise.input(&p));
    let start = p.input("start", Type::new(DType::I32, [3]), &[Axis::Replicated]);
    let beside = [noise.beside(&drawn), ShardedVideo::replicated(&start)];
    let own = p.pp("decoder");
    let video = all.run_with(&p, &given, &beside, |shards, given, beside| {
        let [noise, start] = [0, 1].map(|i| beside.get(i).unwrap_or(given));
        let [t, h, w] = tile.cells;
        let sizes = [t + if tile.is_last { grid.appendix } else { 0 }, h, w];
        let cut =
            (0..3).fold(given.clone(), |x, axis| x.dynamic_slice(axis as isize + 1, &start.at(0, axis), sizes[axis]));
        let context = det_stage(&own, c, last, &cut, tile.is_first, &shards).slice(1, 0, frames);
        denoise(&own, c, &context, &noise.to(p.dtype()), &shards).to(DType::F32)
    });
    Network::finish(&p, vec![all.output(&p, "video", &video)])
}
