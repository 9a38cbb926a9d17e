//! Pads latents that are smaller than an attention window by repeating the last frame, and the edge rows and columns on
//! both sides, as the official decoder does. The padding is cropped from the decoded pixels.

use super::config::DiffusionDecoderConfig;
use ltx2_stablehlo::Value;

/// Padding before and after the frames, rows and columns of latents.
pub(super) struct SizePadding([[usize; 2]; 3]);

impl SizePadding {
    pub(super) fn new(c: &DiffusionDecoderConfig, size: [usize; 3]) -> Self {
        let min = c.min_latents();
        let missing = [0, 1, 2].map(|axis| min[axis].saturating_sub(size[axis]));
        let [t, h, w] = missing;
        SizePadding([[0, t], [h / 2, h - h / 2], [w / 2, w - w / 2]])
    }

    /// Returns the padding before the first frame, row and column, in frames and pixels of the video. `ratios` are the
    /// frames, rows and columns of pixels per latent.
    pub(super) fn before(&self, ratios: [usize; 3]) -> [usize; 3] {
        [0, 1, 2].map(|axis| self.0[axis][0] * ratios[axis])
    }

    /// Returns whether rows or columns are padded.
    pub(super) fn pads_frames(&self) -> bool {
        self.0[1..] != [[0; 2]; 2]
    }

    /// Returns the frames, rows and columns of latents of this size after padding.
    pub(super) fn padded(&self, size: [usize; 3]) -> [usize; 3] {
        [0, 1, 2].map(|axis| size[axis] + self.0[axis].iter().sum::<usize>())
    }

    /// Pads latents `[b, c, f, h, w]`.
    pub(super) fn pad(&self, latents: &Value) -> Value {
        let mut x = latents.clone();
        for (axis, [low, high]) in self.0.into_iter().enumerate().filter(|(_, sides)| *sides != [0; 2]) {
            x = x.pad_edge(axis as isize + 2, low, high);
        }
        x
    }

    /// Crops a video `[b, c, f, h, w]` to `size`, the number of frames, rows and columns of pixels without padding;
    /// `ratios` are the pixels per latent. Rows and columns without padding are not cropped, because the video may be
    /// one device's shard.
    pub(super) fn crop(&self, video: &Value, size: [usize; 3], ratios: [usize; 3]) -> Value {
        let axes = if self.pads_frames() { 0..3 } else { 0..1 };
        axes.fold(video.clone(), |x, axis| {
            let first = self.0[axis][0] * ratios[axis];
            x.slice(axis as isize + 2, first, first + size[axis])
        })
    }
}
