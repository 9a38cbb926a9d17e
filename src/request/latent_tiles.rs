//! Tiles of latents that the second pass of the pipeline `hdr` denoises one after the other and then blends.

use ndarray::{Array5, ArrayView5, s};

use super::tiling::{cut, trapezoid};
use super::{Condition, Content, Placement, ReferenceGrid, Request};
use crate::av::Av;
use crate::sampling::latents::{VideoGrid, VideoShape};

/// Numbers of tiles and their overlaps in latents, for frames, rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentTiling {
    pub(crate) counts: [usize; 3],
    pub(crate) overlaps: [usize; 3],
}

/// A tile: its start and size in latents, and its blending weights, for frames, rows and columns.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LatentTile {
    pub(crate) start: [usize; 3],
    pub(crate) size: [usize; 3],
    weights: [Vec<f32>; 3],
}

/// Part of an axis: start, end (exclusive), and lengths of the ramps at both ends, in latents.
type Interval = [usize; 4];

/// Divides `length` latents into `count` overlapping parts. Like Lightricks' code, reduces the overlap to the largest
/// possible one, uses one part if there are fewer latents than parts, and enlarges the first parts by one latent if the
/// parts cannot have equal sizes.
fn divided(length: usize, count: usize, overlap: usize) -> Vec<Interval> {
    if count <= 1 || length < count {
        return vec![[0, length, 0, 0]];
    }
    let overlap = overlap.min(length - count);
    let total = length + overlap * (count - 1);
    let (size, larger) = (total / count, total % count);
    let equal = cut(length - larger, size, overlap).into_iter().enumerate();
    let shifted = equal.map(|(at, [start, end, left, right])| {
        let shift = at.min(larger);
        [start + shift, end + shift + usize::from(at < larger), left, right]
    });
    shifted.collect()
}

impl LatentTiling {
    /// The tiles of Lightricks' HDR pipeline.
    pub(crate) const HDR: LatentTiling = LatentTiling { counts: [2; 3], overlaps: [8, 6, 6] };

    /// Returns the tiles of latents of this shape, ordered by frame, row and column.
    pub(crate) fn tiles(&self, latents: &VideoShape) -> Vec<LatentTile> {
        let lengths = [latents.frames, latents.height, latents.width];
        let [frames, rows, columns] =
            [0, 1, 2].map(|axis| divided(lengths[axis], self.counts[axis], self.overlaps[axis]));
        let mut tiles = Vec::new();
        for frame in &frames {
            for row in &rows {
                for column in &columns {
                    let parts = [frame, row, column];
                    tiles.push(LatentTile {
                        start: parts.map(|[start, ..]| *start),
                        size: parts.map(|[start, end, ..]| end - start),
                        weights: parts.map(|[start, end, left, right]| trapezoid(end - start, *left, *right, false)),
                    });
                }
            }
        }
        tiles
    }
}

impl LatentTile {
    /// Returns the tile's part of latents `[b, c, f, h, w]`. Latents with fewer frames yield the frames that they have.
    pub(crate) fn part<'a>(&self, latents: &'a Array5<f32>) -> ArrayView5<'a, f32> {
        let [frame, row, column] = self.start;
        let [frames, rows, columns] = self.size;
        let all = latents.dim().2;
        let (first, last) = (frame.min(all), (frame + frames).min(all));
        latents.slice(s![.., .., first..last, row..row + rows, column..column + columns])
    }

    /// Adds the denoised tile `[b, c, f, h, w]`, multiplied by its weights, to the latents of the complete video.
    pub(crate) fn add(&self, tile: &Array5<f32>, latents: &mut Array5<f32>) {
        let [frame, row, column] = self.start;
        let [frames, rows, columns] = &self.weights;
        for ((b, c, f, y, x), value) in tile.indexed_iter() {
            latents[[b, c, frame + f, row + y, column + x]] += value * (frames[f] * rows[y] * columns[x]);
        }
    }

    /// Returns the request of the tile. `second` is the request of the complete second pass; the `n`-th reference video
    /// becomes latents that the caller supplies. A reference video that ends before the tile is omitted.
    pub(crate) fn request(&self, second: &Request, grid: &VideoGrid) -> Request {
        let [frames, rows, columns] = self.size;
        let temporal = grid.temporal_compression;
        let references = second.references().enumerate().filter_map(|(at, reference)| {
            let latents = (reference.frames - 1) / temporal + 1;
            let own = latents.min(self.start[0] + frames).saturating_sub(self.start[0]);
            let placement = Placement::AppendedReference(ReferenceGrid {
                frames: own.checked_sub(1)? * temporal + 1,
                ..*reference
            });
            let strength = second.conditions.video.iter().filter(|c| c.reference_grid().is_some()).nth(at)?.strength;
            Some(Condition { content: Content::ReferenceLatents(at), placement, strength })
        });
        Request {
            width: columns * grid.spatial_compression,
            height: rows * grid.spatial_compression,
            num_frames: (frames - 1) * temporal + 1,
            conditions: Av { video: references.collect(), audio: Vec::new() },
            cache: None,
            ..second.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(frames: usize, height: usize, width: usize) -> VideoShape {
        VideoShape { batch: 1, channels: 1, frames, height, width }
    }

    /// The intervals are those of Lightricks' `split_by_count` with the clamped overlap.
    #[test]
    fn tiles_follow_the_reference() {
        assert_eq!(divided(21, 2, 8), [[0, 15, 0, 8], [7, 21, 8, 0]]);
        assert_eq!(divided(34, 2, 6), [[0, 20, 0, 6], [14, 34, 6, 0]]);
        assert_eq!(divided(3, 2, 8), [[0, 2, 0, 1], [1, 3, 1, 0]]);
        assert_eq!(divided(4, 2, 6), [[0, 3, 0, 2], [1, 4, 2, 0]]);
        assert_eq!(divided(2, 2, 6), [[0, 1, 0, 0], [1, 2, 0, 0]]);
        assert_eq!(divided(1, 2, 6), [[0, 1, 0, 0]]);
        let tiles = LatentTiling::HDR.tiles(&shape(2, 4, 2));
        let starts: Vec<_> = tiles.iter().map(|tile| tile.start).collect();
        assert_eq!(starts[..4], [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]);
        assert_eq!((tiles.len(), tiles[7].start, tiles[7].size), (8, [1, 1, 1], [1, 3, 1]));
    }

    #[test]
    fn blended_tiles_of_equal_latents_equal_the_whole() {
        for size in [shape(21, 17, 30), shape(3, 2, 5), shape(1, 4, 4)] {
            let whole = Array5::from_elem((1, 1, size.frames, size.height, size.width), 1.5_f32);
            let mut sum = Array5::zeros(whole.raw_dim());
            for tile in LatentTiling::HDR.tiles(&size) {
                tile.add(&tile.part(&whole).to_owned(), &mut sum);
            }
            assert!(sum.iter().all(|value: &f32| (value - 1.5).abs() < 1e-5), "{size:?}");
        }
    }
}
