//! Decodes latents tile by tile, for videos that do not fit in device memory.

use ndarray::{Array5, ArrayViewMut5, Axis as Dim, s};

use super::clock::Clock;
use crate::models::pixels::Pixels;
use crate::pipeline::error::Result;
use crate::pipeline::output::tensors::fixed;
use crate::pipeline::runner::Runner;
use crate::request::{Tile, TileSizes};

/// Decodes un-normalised latents `[b, c, f, h, w]` tile by tile to frames `[b, 3, frames, height, width]` in -1..1.
/// Passes the frames to `each` in consecutive pieces, as soon as no later tile overlaps them, so that memory holds the
/// frames of about one tile.
///
/// # Errors
/// Returns an error if the decoder's program fails, or the error of `each`.
pub fn decode(
    runner: &mut Runner,
    latents: &Array5<f32>,
    tiling: &TileSizes,
    clock: &mut Clock,
    each: impl FnMut(Array5<f32>) -> Result<()>,
) -> Result<()> {
    let (batch, _, f, h, w) = latents.dim();
    let grid = &runner.model.sizes.video_grid;
    let axes = tiling.parts([f, h, w], grid.spatial_compression, grid.temporal_compression);
    let decode = |[t, y, x]: [&Tile; 3]| {
        let tile = latents.slice(s![.., .., t.from[0]..t.from[1], y.from[0]..y.from[1], x.from[0]..x.from[1]]);
        let decoded = runner.video_decoder(tile.to_owned(), Pixels::Values)?.run(&runner.executor)?;
        clock.wait(&decoded)?;
        fixed(decoded.tensor("video")?.into_f32())
    };
    blended_pieces(&axes, batch, decode, each)
}

/// Decodes overlapping tiles of `batch` videos, blends them with the weights of the tiles, and passes pieces of
/// complete frames to `each`. `axes`: the tiles in time, rows and columns.
pub(in crate::pipeline) fn blended_pieces(
    axes: &[Vec<Tile>; 3],
    batch: usize,
    mut decode: impl FnMut([&Tile; 3]) -> Result<Array5<f32>>,
    mut each: impl FnMut(Array5<f32>) -> Result<()>,
) -> Result<()> {
    let [time, rows, columns] = axes;
    let size = |parts: &[Tile]| parts.last().map_or(0, |p| p.to[1]);
    let (height, width) = (size(rows), size(columns));
    // `video`: weighted sums of the frames that are incomplete, starting at frame `begin`; `sums`: the sums of their
    // weights.
    let mut begin = 0;
    let mut video = Array5::zeros((batch, 3, 0, height, width));
    let mut sums = Array5::zeros((1, 1, 0, height, width));
    for (n, t) in time.iter().enumerate() {
        for all in [&mut video, &mut sums] {
            let (b, c, known, ..) = all.dim();
            let new = Array5::zeros((b, c, t.to[1] - begin - known, height, width));
            *all = joined(&[std::mem::take(all), new]);
        }
        for y in rows {
            for x in columns {
                let decoded = decode([t, y, x])?;
                let place = s![.., .., t.to[0] - begin..t.to[1] - begin, y.to[0]..y.to[1], x.to[0]..x.to[1]];
                add(video.slice_mut(place), &decoded, [t, y, x]);
                add(sums.slice_mut(place), &Array5::ones((1, 1, 1, 1, 1)), [t, y, x]);
            }
        }
        let end = time.get(n + 1).map_or(t.to[1], |next| next.to[0]);
        if end > begin {
            let complete = s![.., .., ..end - begin, .., ..];
            each(&video.slice(complete) / &sums.slice(complete).mapv(|v: f32| v.max(1e-8)))?;
            let left = s![.., .., end - begin.., .., ..];
            (video, sums, begin) = (video.slice(left).to_owned(), sums.slice(left).to_owned(), end);
        }
    }
    Ok(())
}

/// Concatenates pieces of a video along time.
pub(in crate::pipeline) fn joined(pieces: &[Array5<f32>]) -> Array5<f32> {
    let pieces: Vec<_> = pieces.iter().map(|piece| piece.view()).collect();
    ndarray::concatenate(Dim(2), &pieces).expect("pieces differ only in their number of frames")
}

/// Multiplies `from`, a decoded tile or a scalar, by the weights of the tile, and adds the product to `to`.
fn add(mut to: ArrayViewMut5<f32>, from: &Array5<f32>, [t, y, x]: [&Tile; 3]) {
    let Some(from) = from.broadcast(to.dim()) else { return };
    for (i, (mut to, from)) in to.axis_iter_mut(Dim(2)).zip(from.axis_iter(Dim(2))).enumerate() {
        for (j, (mut to, from)) in to.axis_iter_mut(Dim(2)).zip(from.axis_iter(Dim(2))).enumerate() {
            let row = t.weights[i] * y.weights[j];
            for (k, (mut to, from)) in to.axis_iter_mut(Dim(2)).zip(from.axis_iter(Dim(2))).enumerate() {
                let weight = row * x.weights[k];
                to.zip_mut_with(&from, |to, v| *to += v * weight);
            }
        }
    }
}
