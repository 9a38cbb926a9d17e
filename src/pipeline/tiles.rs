//! Latents decoded tile by tile, where a whole video does not fit.

use ndarray::{Array5, ArrayViewMut5, Axis as Dim, s};

use super::clock::Clock;
use super::error::Result;
use super::runner::Runner;
use super::tensors::fixed;
use crate::models::pixels::Pixels;
use crate::request::{Tile, Tiling};

/// Un-normalised latents `[b, c, f, h, w]` to a video `[b, 3, frames, height, width]`, -1..1, tile by tile, in pieces of
/// frames, in their order, each as soon as no later tile reaches into it. Of the video no more is held than the frames of one
/// tile.
///
/// # Errors
/// Errors of program or device and of `each`.
pub fn decode(
    runner: &mut Runner,
    latents: &Array5<f32>,
    tiling: &Tiling,
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

/// Tiles of frames, rows and columns of `batch` videos to pieces of frames, by the tiles' weights.
///
/// # Errors
/// Those of `decode` and `each`.
pub(super) fn blended_pieces(
    axes: &[Vec<Tile>; 3],
    batch: usize,
    mut decode: impl FnMut([&Tile; 3]) -> Result<Array5<f32>>,
    mut each: impl FnMut(Array5<f32>) -> Result<()>,
) -> Result<()> {
    let [time, rows, columns] = axes;
    let size = |parts: &[Tile]| parts.last().map_or(0, |p| p.to[1]);
    let (height, width) = (size(rows), size(columns));
    // Frames that are not complete, from frame `begin` on, and the sums of their weights.
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

/// Pieces of a video one after the other.
pub(super) fn joined(pieces: &[Array5<f32>]) -> Array5<f32> {
    let pieces: Vec<_> = pieces.iter().map(|piece| piece.view()).collect();
    ndarray::concatenate(Dim(2), &pieces).expect("pieces differ in their number of frames alone")
}

/// Adds what is decoded, or one number, with its weights.
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
