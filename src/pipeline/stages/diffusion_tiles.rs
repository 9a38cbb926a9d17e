//! Decodes latents tile by tile with the diffusion decoder. The decoder's first part computes the features of the
//! complete video; its second, more expensive part decodes the features of one tile at a time.

use ndarray::{Array5, Axis as Dim, Slice, arr1};

use super::run::Run;
use super::tiles::blended_pieces;
use crate::models::diffusion_decoder::{FeatureGrid, feature_grid, tile_shape};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::output::tensors::fixed;
use crate::request::{Blend, DiffusionTiles, Tile, TileSizes};

impl Run<'_> {
    /// Decodes un-normalised latents `[b, c, f, h, w]` to frames `[b, 3, frames, height, width]` in -1..1. Passes
    /// consecutive pieces of the video to `each`. The noise is drawn per tile; tiles are ordered by frame, then by row,
    /// then by column.
    pub(crate) fn decode_diffusion_tiles(
        &mut self,
        latents: Array5<f32>,
        tiling: &TileSizes,
        mut each: impl FnMut(Array5<f32>) -> Result<()>,
    ) -> Result<()> {
        let (batch, _, f, h, w) = latents.dim();
        let (c, dtype) = (self.runner.model.configs.diffusion_decoder()?, self.runner.build.dtype);
        let grid = feature_grid(&c, [f, h, w]);
        let tiles = self.runner.model.configs.diffusion_tiles(tiling, &grid)?;
        let Run { noise, runner, clock, .. } = self;
        let outputs = runner.diffusion_features(latents)?.run(&runner.executor)?;
        clock.wait(&outputs)?;
        let features = outputs.get("features");
        let features = features.ok_or_else(|| PipelineError::Bug("the decoder returned no features".into()))?;
        let decode = |parts: [&Tile; 3]| -> Result<Array5<f32>> {
            let tile = DiffusionTiles::features(&grid, parts);
            let noise = noise.draw_one(&mut runner.executor, tile_shape(&c, &grid, &tile), dtype)?;
            let start = arr1(&parts.map(|part| part.from[0] as i32));
            let call = runner.diffusion_tile([batch, f, h, w], &tile, features, start.into(), noise.into())?;
            let decoded = call.run(&runner.executor)?;
            clock.wait(&decoded)?;
            let decoded: Array5<f32> = fixed(decoded.tensor("video")?.into_f32())?;
            // The last tile is padded at its end if it has fewer frames than the attention window; drop the padding.
            let frames = parts[0].to[1] - parts[0].to[0];
            Ok(decoded.slice_axis(Dim(2), Slice::from(..frames)).to_owned())
        };
        let mut done = 0;
        let each = |piece: Array5<f32>| {
            let frames = piece.dim().2.min(grid.pixels[0].saturating_sub(done));
            done += frames;
            if frames == 0 { Ok(()) } else { each(cropped(&piece, &grid, frames)) }
        };
        match tiles.blend {
            Blend::Weights => blended_pieces(&tiles.axes, batch, decode, each),
            Blend::Fade(overlaps) => faded_pieces(&tiles.axes, overlaps, decode, each),
        }
    }
}

/// Removes the pixels that were decoded from padding, and all frames after the first `frames`.
fn cropped(piece: &Array5<f32>, grid: &FeatureGrid, frames: usize) -> Array5<f32> {
    let part = |axis: usize| Slice::from(grid.crop_before[axis]..grid.crop_before[axis] + grid.pixels[axis]);
    let piece = piece.slice_axis(Dim(2), Slice::from(..frames));
    piece.slice_axis(Dim(3), part(1)).slice_axis(Dim(4), part(2)).to_owned()
}

/// Decodes all tiles and joins them. Passes pieces of consecutive frames to `each`. Adjacent tiles are crossfaded over
/// `overlaps` (frames, rows and columns of pixels).
fn faded_pieces(
    axes: &[Vec<Tile>; 3],
    overlaps: [usize; 3],
    mut decode: impl FnMut([&Tile; 3]) -> Result<Array5<f32>>,
    mut each: impl FnMut(Array5<f32>) -> Result<()>,
) -> Result<()> {
    let [time, rows, columns] = axes;
    let [frames, height, width] = overlaps;
    let mut before: Option<Array5<f32>> = None;
    for (n, t) in time.iter().enumerate() {
        let mut tiles: Vec<Vec<Array5<f32>>> = Vec::new();
        for y in rows {
            tiles.push(columns.iter().map(|x| decode([t, y, x])).collect::<Result<_>>()?);
        }
        let mut bands = Vec::new();
        for i in 0..rows.len() {
            let mut band = Vec::new();
            for j in 0..columns.len() {
                let mut tile = std::mem::take(&mut tiles[i][j]);
                if i > 0 {
                    fade(&tiles[i - 1][j], &mut tile, 3, height);
                }
                if j > 0 {
                    fade(&tiles[i][j - 1], &mut tile, 4, width);
                }
                band.push(kept(&kept(&tile, rows, i, 3), columns, j, 4));
                tiles[i][j] = tile;
            }
            bands.push(concatenated(&band, 4)?);
        }
        let mut group = concatenated(&bands, 3)?;
        if let Some(before) = &before {
            fade(before, &mut group, 2, frames);
        }
        each(kept(&group, time, n, 2))?;
        before = Some(group);
    }
    Ok(())
}

/// Returns the part of tile `i` that is before the next tile along `axis`.
fn kept(tile: &Array5<f32>, parts: &[Tile], i: usize, axis: usize) -> Array5<f32> {
    let end = parts.get(i + 1).map_or(tile.shape()[axis], |next| next.to[0] - parts[i].to[0]);
    tile.slice_axis(Dim(axis), Slice::from(..end)).to_owned()
}

/// Crossfades from the last `overlap` frames, rows or columns of `neighbour` to the first ones of `tile`. The weight of
/// `tile` starts at 0.
fn fade(neighbour: &Array5<f32>, tile: &mut Array5<f32>, axis: usize, overlap: usize) {
    let overlap = overlap.min(neighbour.shape()[axis]).min(tile.shape()[axis]);
    let first = neighbour.shape()[axis] - overlap;
    for i in 0..overlap {
        let part = i as f32 / overlap as f32;
        let old = neighbour.index_axis(Dim(axis), first + i);
        tile.index_axis_mut(Dim(axis), i).zip_mut_with(&old, |new, old| *new = old * (1.0 - part) + *new * part);
    }
}

fn concatenated(parts: &[Array5<f32>], axis: usize) -> Result<Array5<f32>> {
    let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
    ndarray::concatenate(Dim(axis), &views).map_err(|e| PipelineError::Bug(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tiles of six frames, rows or columns that overlap by two.
    fn two() -> Vec<Tile> {
        let tile = |first| Tile { from: [0, 6], to: [first, first + 6], weights: Vec::new() };
        vec![tile(0), tile(4)]
    }

    /// Returns the video joined from constant tiles. `value` returns the value of a tile, given the tile's first frame,
    /// row and column.
    fn joined(value: impl Fn([usize; 3]) -> f32) -> Array5<f32> {
        let axes = [two(), two(), two()];
        let decode = |parts: [&Tile; 3]| Ok(Array5::from_elem((1, 3, 6, 6, 6), value(parts.map(|part| part.to[0]))));
        let mut pieces = Vec::new();
        faded_pieces(&axes, [2; 3], decode, |piece| {
            pieces.push(piece);
            Ok(())
        })
        .expect("joined");
        concatenated(&pieces, 2).expect("equal sizes")
    }

    #[test]
    fn adjacent_tiles_are_crossfaded_along_each_axis() {
        for axis in 0..3 {
            let video = joined(|first| if first[axis] == 0 { 1.0 } else { 3.0 });
            assert_eq!(video.shape(), [1, 3, 10, 10, 10]);
            for (at, value) in video.indexed_iter() {
                let mut positions = [at.2, at.3, at.4];
                let position = std::mem::take(&mut positions[axis]);
                // As in diffusers, elements in two overlaps are crossfaded twice.
                if positions.iter().any(|other| (4..6).contains(other)) {
                    continue;
                }
                // The second tile's weight is 0 in its first element and 0.5 in the next.
                let expected = if position < 5 {
                    1.0
                } else if position == 5 {
                    2.0
                } else {
                    3.0
                };
                assert_eq!(*value, expected, "axis {axis}, {at:?}");
            }
        }
    }
}
