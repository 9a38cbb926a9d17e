//! Tiles that the diffusion decoder decodes a video in, on the grid of features behind its first stages: those of either
//! reference.

use super::error::RequestError;
use super::tiling::{Tile, Tiling, trapezoid};
use crate::models::diffusion_decoder::{FeatureGrid, FeatureTile};

/// Tiles by frames, rows and columns, each from cells to pixels, and how they become one video.
#[derive(Clone, Debug, PartialEq)]
pub struct DiffusionTiles {
    pub(crate) axes: [Vec<Tile>; 3],
    pub(crate) blend: Blend,
}

/// How tiles become one video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blend {
    /// By the weights of their pixels (Lightricks).
    Weights,
    /// Each fades in over the end of its neighbour above, then over that of its left one, then over the frames before
    /// (diffusers); over so many pixels of frames, rows and columns.
    Fade([usize; 3]),
}

/// Cells of a tile along an axis, and those that it shares with the tile before and the one behind.
type Span = [usize; 4];

impl DiffusionTiles {
    /// Lightricks' tiles: of as much overlap as a result depends on, a last one that is too short begins earlier.
    ///
    /// # Errors
    /// Less overlap than that.
    pub fn official(tiling: &Tiling, grid: &FeatureGrid) -> Result<Self, RequestError> {
        let [frames, rows, columns] = [0, 1, 2].map(|axis| grid.reach[axis] * grid.scale[axis]);
        let [frames, pixels] = [frames.next_multiple_of(8), rows.max(columns).next_multiple_of(32)];
        if tiling.frame_overlap < frames || tiling.overlap < pixels {
            return Err(RequestError::Usage(format!(
                "runtime.tiling: overlap {} and frame_overlap {}, but what the diffusion decoder paints depends on {pixels} \
                 pixels and {frames} frames around it: set overlap to {pixels} and frame_overlap to {frames}, or reference to \
                 diffusers, which blends less",
                tiling.overlap, tiling.frame_overlap
            )));
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
            let mut spans: Vec<Span> = (0..count).map(span).collect();
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

    /// diffusers' tiles: a last one that is too short is part of the one before.
    pub fn diffusers(tiling: &Tiling, grid: &FeatureGrid) -> Self {
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
        tiling: &Tiling,
        grid: &FeatureGrid,
        cut: impl Fn(usize, usize, usize, usize) -> Vec<Span>,
    ) -> [Vec<Tile>; 3] {
        let sizes = Self::cells([tiling.frames, tiling.pixels, tiling.pixels], grid);
        let overlaps = Self::cells([tiling.frame_overlap, tiling.overlap, tiling.overlap], grid);
        [0, 1, 2].map(|axis| {
            let scale = grid.scale[axis];
            // A video's first cell in time stands for one frame less than the others.
            let doubled = usize::from(axis == 0 && scale == 2);
            let pixel = |cell: usize| (cell * scale).saturating_sub(doubled);
            let tile = |[start, end, left, right]: Span| {
                let to = [pixel(start), pixel(end)];
                Tile { from: [start, end], to, weights: trapezoid(to[1] - to[0], left * scale, right * scale, false) }
            };
            let spans = cut(grid.cells[axis], sizes[axis].max(1), overlaps[axis], grid.least[axis]);
            spans.into_iter().map(tile).collect()
        })
    }

    /// A tile's cells, as the decoder takes it.
    pub(crate) fn features(grid: &FeatureGrid, tile: [&Tile; 3]) -> FeatureTile {
        let cells = tile.map(|part| part.from[1] - part.from[0]);
        let [first, end] = tile[0].from;
        FeatureTile { cells, is_first: first == 0, is_last: end == grid.cells[0] }
    }

    /// The tile of most cells.
    pub(crate) fn largest(&self, grid: &FeatureGrid) -> FeatureTile {
        let cells = |part: &&Tile| part.from[1] - part.from[0];
        let with_appendix = |part: &&Tile| cells(part) + if part.from[1] == grid.cells[0] { grid.appendix } else { 0 };
        let [time, rows, columns] = &self.axes;
        let [rows, columns] = [rows, columns].map(|parts| parts.iter().max_by_key(cells).expect("a tile"));
        Self::features(grid, [time.iter().max_by_key(with_appendix).expect("a tile"), rows, columns])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published decoder's grid at 1920x1088x121.
    fn grid() -> FeatureGrid {
        FeatureGrid {
            cells: [61, 136, 240],
            appendix: 8,
            scale: [2, 8, 8],
            least: [6, 6, 6],
            reach: [20, 20, 20],
            pixels: [121, 1088, 1920],
            before: [0; 3],
        }
    }

    fn spans(tiles: &DiffusionTiles, axis: usize) -> Vec<[usize; 4]> {
        tiles.axes[axis].iter().map(|t| [t.from[0], t.from[1], t.to[0], t.to[1]]).collect()
    }

    #[test]
    fn official_tiles_share_what_a_result_depends_on() {
        let tiling = Tiling { pixels: 768, overlap: 160, frames: 80, frame_overlap: 40 };
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
        let less = DiffusionTiles::official(&Tiling { overlap: 64, ..tiling }, &grid()).expect_err("too little");
        assert!(less.to_string().contains("set overlap to 160 and frame_overlap to 40"), "{less}");
    }

    /// Of the published sizes: 704 pixels and 56 frames from one to the next.
    #[test]
    fn diffusers_tiles_take_in_what_is_too_short() {
        let tiling = Tiling { pixels: 768, overlap: 64, frames: 80, frame_overlap: 24 };
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
