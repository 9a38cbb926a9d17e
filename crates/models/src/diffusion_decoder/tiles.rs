//! The decoder as two programs, for tiled decoding. The first computes features from the latents; these are the input
//! of the last context stage. The second decodes a tile of the features, together with noise for the tile, to pixels.

use super::COMPONENT;
use super::config::DiffusionDecoderConfig;
use super::model::{PaddedSizes, denoise, det_stage, features};
use crate::Network;
use ltx2_nn::{Axis, Build, Params, ShardedVideo};
use ltx2_stablehlo::{DType, Result, Type};

/// Grid of cells that tiles are sliced from. A cell is one position (frame, row, column) of the features. The three
/// elements of an array are for frames, rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureGrid {
    /// Number of cells of the video, including the padding of small latents.
    pub cells: [usize; 3],
    /// Number of additional frames of cells after those of the video. They come from copies of the last latent frame
    /// and belong to the last tile.
    pub appended_frames: usize,
    /// Number of pixels per cell.
    pub scale: [usize; 3],
    /// Smallest tile in which every attention window fits, in cells.
    pub min_tile: [usize; 3],
    /// Receptive field: maximum number of cells on each side that a result depends on.
    pub receptive_field: [usize; 3],
    /// Size of the video in pixels.
    pub pixels: [usize; 3],
    /// Number of pixels before the video that are decoded from the padding of small latents and must be cropped.
    pub crop_before: [usize; 3],
}

/// Size of a tile, and whether it is the first or the last in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FeatureTile {
    /// Number of cells along frames, rows and columns, without the frames of [`FeatureGrid::appended_frames`].
    pub cells: [usize; 3],
    /// Whether the tile starts at the first frame.
    pub is_first: bool,
    /// Whether the tile ends at the last frame of the video; the frames of [`FeatureGrid::appended_frames`] then follow
    /// its cells.
    pub is_last: bool,
}

/// Returns the feature grid of latents `[frames, rows, columns]`.
pub fn feature_grid(c: &DiffusionDecoderConfig, latents: [usize; 3]) -> FeatureGrid {
    let sizes = PaddedSizes::new(c, latents);
    let padded = sizes.padding.padded(latents);
    let before_last = &c.stages[..c.stages.len().saturating_sub(1)];
    let grow = |cells: [usize; 3]| {
        before_last.iter().fold(cells, |[t, h, w], stage| {
            let [st, sh, sw] = stage.stride;
            [t * st - usize::from(st == 2), h * sh, w * sw]
        })
    };
    let cells = grow(padded);
    let with_appended_frames = grow([padded[0] + c.appended_frames(), padded[1], padded[2]]);
    let (kernel, depth, stride) = c.stages.last().map_or(([1; 3], 0, [1; 3]), |s| (s.kernel, s.depth, s.stride));
    let receptive_field =
        |axis: usize| (depth * (kernel[axis] / 2)).max((c.depth * (c.kernel[axis] / 2)).div_ceil(stride[axis]));
    FeatureGrid {
        cells,
        appended_frames: with_appended_frames[0] - cells[0],
        scale: [stride[0], stride[1] * c.patch_size, stride[2] * c.patch_size],
        min_tile: [0, 1, 2].map(|axis| kernel[axis].max(c.kernel[axis].div_ceil(stride[axis]))),
        receptive_field: [0, 1, 2].map(receptive_field),
        pixels: sizes.pixels,
        crop_before: sizes.padding.before(c.ratios()),
    }
}

/// Returns the shape `[channels, frames, height, width]` of the noise and of the pixels of a tile. If the last tile is
/// shorter than the attention window, it includes some of the frames of [`FeatureGrid::appended_frames`].
pub fn tile_shape(c: &DiffusionDecoderConfig, grid: &FeatureGrid, tile: &FeatureTile) -> [usize; 4] {
    let [st, sh, sw] = grid.scale;
    let doubled = usize::from(tile.is_first && st == 2);
    let frames = |cells: usize| cells * st - doubled;
    let [t, h, w] = tile.cells;
    let frames = match tile.is_last {
        true => frames(t).max(c.kernel[0]).min(frames(t + grid.appended_frames)),
        false => frames(t),
    };
    [c.out_channels, frames, h * sh, w * sw]
}

/// Builds the program that computes features. Input: f32 un-normalized `latents [b, latent_channels, f, h, w]` for
/// `shape = [b, f, h, w]`. Output: `features [b, frames, rows, columns, channels]` in the compute type.
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes.
pub fn features_program(c: &DiffusionDecoderConfig, shape: [usize; 4], build: &Build) -> Result<Network> {
    let p = Params::new("diffusion_features", COMPONENT, build);
    let [b, f, h, w] = shape;
    let padding = PaddedSizes::new(c, [f, h, w]).padding;
    let latents =
        ShardedVideo::with_replicated_frames(&p, "latents", Type::new(DType::F32, [b, c.latent_channels, f, h, w]));
    let given = latents.input(&p);
    let made = latents.run_with(&p, &given, &[], |shards, given, _| {
        features(&p.pp("decoder"), c, &padding.pad(&given.to(p.dtype())), &shards.channels_last())
    });
    Network::finish(&p, vec![latents.output(&p, "features", &made)])
}

/// Builds the program that decodes a tile of the features of latents `[b, f, h, w]`. Inputs: `features`, f32 `noise` of
/// `tile_shape`, and `start`, i32 `[3]`: the tile's first cell. Output: f32 `video [b, channels, frames, height,
/// width]`, approximately -1..1.
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes.
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
    let dims = [b, grid.cells[0] + grid.appended_frames, rows, columns, c.stages[last].channels];
    let all = ShardedVideo::with_replicated_frames(&p, "features", Type::new(p.dtype(), dims));
    let noise =
        ShardedVideo::with_replicated_frames(&p, "noise", Type::new(DType::F32, [b, channels, frames, height, width]));
    let (given, drawn) = (all.input(&p), noise.input(&p));
    let start = p.input("start", Type::new(DType::I32, [3]), &[Axis::Replicated]);
    let operands = [noise.operand(&drawn), ShardedVideo::replicated(&start)];
    let own = p.pp("decoder");
    let video = all.run_with(&p, &given, &operands, |shards, given, operands| {
        let [noise, start] = [0, 1].map(|i| operands.get(i).unwrap_or(given));
        let [t, h, w] = tile.cells;
        let sizes = [t + if tile.is_last { grid.appended_frames } else { 0 }, h, w];
        let cut =
            (0..3).fold(given.clone(), |x, axis| x.dynamic_slice(axis as isize + 1, &start.at(0, axis), sizes[axis]));
        let context = det_stage(&own, c, last, &cut, tile.is_first, &shards).slice(1, 0, frames);
        denoise(&own, c, &context, &noise.to(p.dtype()), &shards).to(DType::F32)
    });
    Network::finish(&p, vec![all.output(&p, "video", &video)])
}
