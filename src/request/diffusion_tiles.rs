//! Tiles of the diffusion decoder. They divide the feature grid after the first decoder stages; each reference
//! implementation divides it differently.

use super::error::RequestError;
use super::tiling::{Tile, TileSizes, trapezoid};
use crate::config::ConfigError;
use crate::config::ConfigErrorKind::OutOfRange;
use crate::models::diffusion_decoder::{FeatureGrid, FeatureTile};

/// Tiles along frames, rows and columns, and how to blend them. Each tile maps a range of feature-grid cells to a range
/// of pixels.
#[derive(Clone, Debug, PartialEq)]
pub struct DiffusionTiles {
    pub(crate) axes: [Vec<Tile>; 3],
    pub(crate) blend: Blend,
}

/// Blending of overlapping tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blend {
    /// Weighted sum, as in Lightricks' code.
    Weights,
    /// Cross-fades, as in diffusers: each tile is cross-faded with the tile above it, then with the tile to its left,
    /// then with the previous tile in time. The values are the lengths of the fades along `[frames, rows, columns]`, in
    /// output frames and pixels.
    Fade([usize; 3]),
}

/// `[start, end, left, right]`: range of a tile along an axis in feature-grid cells, and the number of cells that the
/// tile shares with the previous and with the next tile.
type TileSpan = [usize; 4];

impl DiffusionTiles {
    /// Returns the tiles of Lightricks' code: the overlap covers the receptive field, and a last tile that is too short
    /// starts earlier.
    ///
    /// # Errors
    /// Returns an error if the overlap is smaller than the receptive field.
    pub fn official(tiling: &TileSizes, grid: &FeatureGrid) -> Result<Self, RequestError> {
        let [frames, rows, columns] = [0, 1, 2].map(|axis| grid.receptive_field[axis] * grid.scale[axis]);
        let [frames, pixels] = [frames.next_multiple_of(8), rows.max(columns).next_multiple_of(32)];
        if tiling.frame_overlap < frames || tiling.overlap < pixels {
            let why = format!(
                "overlap {} or frame_overlap {} is smaller than the receptive field of the diffusion decoder \
                 ({pixels} pixels, {frames} frames); set overlap to {pixels} and frame_overlap to {frames}, or set \
                 reference to diffusers, whose tiles need less overlap",
                tiling.overlap, tiling.frame_overlap
            );
            return Err(ConfigError::key(OutOfRange, "runtime.tiling", why).into());
        }
        let axes = Self::axes(tiling, grid, |length, size, overlap, least| {
            let size = size.max(overlap + 1).max(2);
            if length <= size.max(least) {
                return vec![[0, length, 0, 0]];
            }
            let step = size - overlap;
            let count = (length - overlap).div_ceil(step);
            let ramp = |inside: bool| if inside { overlap } else { 0 };
            let span = |i: usize| {
                let end = if i + 1 == count { length } else { i * step + size };
                [i * step, end, ramp(i > 0), ramp(i + 1 < count)]
            };
            let mut spans: Vec<TileSpan> = (0..count).map(span).collect();
            if let [.., before, last] = &mut spans[..]
                && last[1] - last[0] < least
            {
                last[0] = last[1] - least;
                (before[3], last[2]) = (before[1] - last[0], before[1] - last[0]);
            }
            spans
        });
        Ok(DiffusionTiles { axes, blend: Blend::Weights })
    }

    /// Returns the tiles of diffusers: a last tile that is too short is merged with the previous tile.
    pub fn diffusers(tiling: &TileSizes, grid: &FeatureGrid) -> Self {
        let axes = Self::axes(tiling, grid, |length, size, overlap, least| {
            if length <= size {
                return vec![[0, length, 0, 0]];
            }
            let mut starts: Vec<usize> = (0..length).step_by((size - overlap).max(1)).collect();
            while starts.len() > 1 && length - starts[starts.len() - 1] < least {
                starts.pop();
            }
            let last = starts.len() - 1;
            let end = |(i, start): (usize, &usize)| if i == last { length } else { (start + size).min(length) };
            starts.iter().enumerate().map(|(i, start)| [*start, end((i, start)), 0, 0]).collect()
        });
        let overlaps = Self::cells([tiling.frame_overlap, tiling.overlap, tiling.overlap], grid);
        DiffusionTiles { axes, blend: Blend::Fade([0, 1, 2].map(|axis| overlaps[axis] * grid.scale[axis])) }
    }

    fn cells(pixels: [usize; 3], grid: &FeatureGrid) -> [usize; 3] {
        [0, 1, 2].map(|axis| pixels[axis] / grid.scale[axis])
    }

    fn axes(
        tiling: &TileSizes,
        grid: &FeatureGrid,
        cut: impl Fn(usize, usize, usize, usize) -> Vec<TileSpan>,
    ) -> [Vec<Tile>; 3] {
        let sizes = Self::cells([tiling.frames, tiling.pixels, tiling.pixels], grid);
        let overlaps = Self::cells([tiling.frame_overlap, tiling.overlap, tiling.overlap], grid);
        [0, 1, 2].map(|axis| {
            let scale = grid.scale[axis];
            // The first cell along time covers one frame less than the others.
            let doubled = usize::from(axis == 0 && scale == 2);
            let pixel = |cell: usize| (cell * scale).saturating_sub(doubled);
            let tile = |[start, end, left, right]: TileSpan| {
                let to = [pixel(start), pixel(end)];
                Tile { from: [start, end], to, weights: trapezoid(to[1] - to[0], left * scale, right * scale, false) }
            };
            let spans = cut(grid.cells[axis], sizes[axis].max(1), overlaps[axis], grid.min_tile[axis]);
            spans.into_iter().map(tile).collect()
        })
    }

    /// Returns the number of cells of a tile, and whether the tile is the first or the last in time.
    pub(crate) fn features(grid: &FeatureGrid, tile: [&Tile; 3]) -> FeatureTile {
        let cells = tile.map(|part| part.from[1] - part.from[0]);
        let [first, end] = tile[0].from;
        FeatureTile { cells, is_first: first == 0, is_last: end == grid.cells[0] }
    }

    /// Returns a tile with the largest extent along each axis. The appended copies of the last latent frame count as
    /// cells of the last tile in time.
    pub(crate) fn largest(&self, grid: &FeatureGrid) -> FeatureTile {
        let cells = |part: &&Tile| part.from[1] - part.from[0];
        let with_appended_frames =
            |part: &&Tile| cells(part) + if part.from[1] == grid.cells[0] { grid.appended_frames } else { 0 };
        let [time, rows, columns] = &self.axes;
        let [rows, columns] = [rows, columns].map(|parts| parts.iter().max_by_key(cells).expect("a tile"));
        Self::features(grid, [time.iter().max_by_key(with_appended_frames).expect("a tile"), rows, columns])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Grid of the published decoder for 1920x1088 pixels and 121 frames.
    fn grid() -> FeatureGrid {
        FeatureGrid {
            cells: [61, 136, 240],
            appended_frames: 8,
            scale: [2, 8, 8],
            min_tile: [6, 6, 6],
            receptive_field: [20, 20, 20],
            pixels: [121, 1088, 1920],
            crop_before: [0; 3],
        }
    }

    fn spans(tiles: &DiffusionTiles, axis: usize) -> Vec<[usize; 4]> {
        tiles.axes[axis].iter().map(|t| [t.from[0], t.from[1], t.to[0], t.to[1]]).collect()
    }

    #[test]
    fn official_tiles_overlap_by_the_receptive_field() {
        let tiling = TileSizes { pixels: 768, overlap: 160, frames: 80, frame_overlap: 40 };
        let tiles = DiffusionTiles::official(&tiling, &grid()).expect("enough");
        assert_eq!(spans(&tiles, 0), [[0, 40, 0, 79], [20, 60, 39, 119], [40, 61, 79, 121]]);
        assert_eq!(spans(&tiles, 1), [[0, 96, 0, 768], [76, 136, 608, 1088]]);
        for axis in &tiles.axes {
            let mut sum = vec![0.0; axis.last().expect("a tile").to[1]];
            for tile in axis {
                (tile.to[0]..tile.to[1]).zip(&tile.weights).for_each(|(at, weight)| sum[at] += weight);
            }
            assert!(sum.iter().all(|s: &f32| (s - 1.0).abs() < 1e-6), "{sum:?}");
        }
        let less = DiffusionTiles::official(&TileSizes { overlap: 64, ..tiling }, &grid()).expect_err("too little");
        assert!(less.to_string().contains("set overlap to 160 and frame_overlap to 40"), "{less}");
    }

    /// With the published tile sizes, tiles start 704 pixels and 56 frames apart.
    #[test]
    fn diffusers_tiles_merge_a_short_last_tile() {
        let tiling = TileSizes { pixels: 768, overlap: 64, frames: 80, frame_overlap: 24 };
        let tiles = DiffusionTiles::diffusers(&tiling, &grid());
        assert_eq!(spans(&tiles, 0), [[0, 40, 0, 79], [28, 61, 55, 121]]);
        assert_eq!(spans(&tiles, 2), [[0, 96, 0, 768], [88, 184, 704, 1472], [176, 240, 1408, 1920]]);
        assert_eq!(tiles.blend, Blend::Fade([24, 64, 64]));
        let short = FeatureGrid { cells: [61, 93, 99], ..grid() };
        assert_eq!(spans(&DiffusionTiles::diffusers(&tiling, &short), 2), [[0, 96, 0, 768], [88, 99, 704, 792]]);
        let merged = FeatureGrid { cells: [61, 93, 181], ..grid() };
        let merged = DiffusionTiles::diffusers(&tiling, &merged);
        assert_eq!(spans(&merged, 2), [[0, 96, 0, 768], [88, 181, 704, 1448]]);
        assert_eq!(merged.largest(&grid()), FeatureTile { cells: [33, 93, 96], is_first: false, is_last: true });
    }
}
