//! Tiled decoding: overlapping tiles in space and time, blended by linear ramps, as in the official pipelines.

/// Tile sizes. The longer side of a frame is divided into tiles of `pixels`, the shorter side into proportionally
/// smaller tiles; tiles of the diffusion decoder are square.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileSizes {
    /// Pixels of a tile's longer side.
    pub pixels: usize,
    /// Overlap of neighboring tiles in pixels.
    pub overlap: usize,
    /// Frames per tile.
    pub frames: usize,
    /// Overlap of consecutive tiles in frames.
    pub frame_overlap: usize,
}

/// Tile along one axis: its range of latents, its range in the output, and its blending weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Tile {
    /// Start and end (exclusive) in latents.
    pub from: [usize; 2],
    /// Start and end (exclusive) in pixels or frames of the output.
    pub to: [usize; 2],
    /// Blending weight from 0 to 1 of each pixel or frame in `to`.
    pub weights: Vec<f32>,
}

/// Divides `length` latents into tiles of `size` latents that overlap by `overlap`, and returns each as `[start, end,
/// left ramp, right ramp]`.
pub(super) fn cut(length: usize, size: usize, overlap: usize) -> Vec<[usize; 4]> {
    if length <= size {
        return vec![[0, length, 0, 0]];
    }
    let step = size - overlap;
    let count = (length - overlap).div_ceil(step);
    let ramp = |inside: bool| if inside { overlap } else { 0 };
    let tile = |i: usize| {
        let end = if i + 1 == count { length } else { i * step + size };
        [i * step, end, ramp(i > 0), ramp(i + 1 < count)]
    };
    (0..count).map(tile).collect()
}

/// Returns `length` weights of at most 1, which rise over the first `left` and fall over the last `right` elements. The
/// ramps exclude their end points 0 and 1; with `from_zero`, the rise starts at 0.
pub(super) fn trapezoid(length: usize, left: usize, right: usize, from_zero: bool) -> Vec<f32> {
    let rise = |i: usize| match from_zero {
        true => i as f32 / left as f32,
        false => (i + 1) as f32 / (left + 1) as f32,
    };
    let fall = |i: usize| (length - i) as f32 / (right + 1) as f32;
    let (left, right) = (left.min(length), right.min(length));
    let at = |i: usize| {
        let up = if i < left { rise(i) } else { 1.0 };
        let down = if i >= length - right { fall(i) } else { 1.0 };
        up * down
    };
    (0..length).map(at).collect()
}

impl TileSizes {
    /// Returns the tiles along one axis of the frame, height or width. The axis has `length` latents, the frame's longer
    /// axis has `longest`, and each latent covers `scale` pixels.
    pub fn side(&self, length: usize, longest: usize, scale: usize) -> Vec<Tile> {
        let overlap = self.overlap / scale;
        let proportion = (self.pixels / scale) as f64 * length as f64 / longest as f64;
        // Round half to even, as the reference does.
        let size = (proportion.round_ties_even() as usize).max(2).max(overlap + 1);
        let part = |[start, end, left, right]: [usize; 4]| Tile {
            from: [start, end],
            to: [start * scale, end * scale],
            weights: trapezoid((end - start) * scale, left * scale, right * scale, false),
        };
        cut(length, size, overlap).into_iter().map(part).collect()
    }

    /// Returns the tiles along time of `length` latents, each of `scale` frames, except for the first latent, which
    /// represents one frame. Every tile except the first starts one latent earlier, because the first latent of a tile
    /// decodes to one frame.
    pub fn time(&self, length: usize, scale: usize) -> Vec<Tile> {
        let part = |[start, end, left, right]: [usize; 4]| {
            let (start, left) = if start > 0 { (start - 1, left + 1) } else { (start, left) };
            let to = [start * scale, 1 + (end - 1) * scale];
            let left = if left == 0 { 0 } else { 1 + (left - 1) * scale };
            Tile { from: [start, end], to, weights: trapezoid(to[1] - to[0], left, right * scale, true) }
        };
        cut(length, self.frames / scale, self.frame_overlap / scale).into_iter().map(part).collect()
    }

    /// Returns the tiles of latents `[frames, rows, columns]` along each axis.
    pub fn parts(&self, [f, h, w]: [usize; 3], spatial: usize, temporal: usize) -> [Vec<Tile>; 3] {
        let longest = h.max(w);
        [self.time(f, temporal), self.side(h, longest, spatial), self.side(w, longest, spatial)]
    }

    /// Returns the size of the largest tile in latents.
    pub fn largest(&self, size: [usize; 3], spatial: usize, temporal: usize) -> [usize; 3] {
        self.parts(size, spatial, temporal).map(|parts| parts.iter().map(|p| p.from[1] - p.from[0]).max().unwrap_or(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_overlap_and_end_at_the_last_latent() {
        assert_eq!(cut(5, 8, 2), [[0, 5, 0, 0]]);
        assert_eq!(cut(24, 10, 2), [[0, 10, 0, 2], [8, 18, 2, 2], [16, 24, 2, 0]]);
        assert_eq!(cut(25, 10, 2).last(), Some(&[16, 25, 2, 0]));
    }

    /// The reference's own example: tiles of 24 latents that overlap by 8 start at 0, 15, 31.
    #[test]
    fn later_time_tiles_start_one_latent_earlier() {
        let tiling = TileSizes { pixels: 64, overlap: 0, frames: 24 * 8, frame_overlap: 8 * 8 };
        let starts: Vec<[usize; 2]> = tiling.time(56, 8).iter().map(|p| p.from).collect();
        assert_eq!(starts, [[0, 24], [15, 40], [31, 56]]);
        let second = &tiling.time(56, 8)[1];
        assert_eq!((second.to, second.weights[0], second.weights.len()), ([120, 313], 0.0, 193));
    }

    #[test]
    fn spatial_weights_of_neighboring_tiles_sum_to_one() {
        let tiling = TileSizes { pixels: 128, overlap: 64, frames: 16, frame_overlap: 8 };
        let parts = tiling.side(6, 6, 32);
        let mut sum = vec![0.0; 192];
        for part in &parts {
            for (at, weight) in (part.to[0]..part.to[1]).zip(&part.weights) {
                sum[at] += weight;
            }
        }
        assert!(parts.len() > 1 && sum.iter().all(|s| (s - 1.0f32).abs() < 1e-6), "{sum:?}");
    }
}
