//! Latents of fewer cells than a window has, padded as the official decoder pads them: the last frame is repeated, and rows
//! and columns at both edges. What was added is cropped from the pixels.

use super::config::DiffusionDecoderConfig;
use crate::hlo::Value;

/// Cells before and behind the content, of frames, rows and columns of latents.
pub(super) struct SizePadding([[usize; 2]; 3]);

impl SizePadding {
    pub(super) fn new(c: &DiffusionDecoderConfig, size: [usize; 3]) -> Self {
        let least = c.least();
        let missing = [0, 1, 2].map(|axis| least[axis].saturating_sub(size[axis]));
        let [t, h, w] = missing;
        SizePadding([[0, t], [h / 2, h - h / 2], [w / 2, w - w / 2]])
    }

    /// Frames, rows and columns of pixels before the content's, at `ratios` pixels a latent.
    pub(super) fn before(&self, ratios: [usize; 3]) -> [usize; 3] {
        [0, 1, 2].map(|axis| self.0[axis][0] * ratios[axis])
    }

    /// Whether frames are larger than their content.
    pub(super) fn pads_frames(&self) -> bool {
        self.0[1..] != [[0; 2]; 2]
    }

    /// Padded frames, rows and columns of so many.
    pub(super) fn padded(&self, size: [usize; 3]) -> [usize; 3] {
        [0, 1, 2].map(|axis| size[axis] + self.0[axis].iter().sum::<usize>())
    }

    /// Latents `[b, c, f, h, w]`, padded.
    pub(super) fn pad(&self, latents: &Value) -> Value {
        let mut x = latents.clone();
        for (axis, [low, high]) in self.0.into_iter().enumerate().filter(|(_, sides)| *sides != [0; 2]) {
            x = x.pad_edge(axis as isize + 2, low, high);
        }
        x
    }

    /// The `size` frames, rows and columns of the content of a video `[b, c, f, h, w]`, at `ratios` pixels a latent. Frames
    /// without padding stay as they are: they may be one device's block.
    pub(super) fn crop(&self, video: &Value, size: [usize; 3], ratios: [usize; 3]) -> Value {
        let axes = if self.pads_frames() { 0..3 } else { 0..1 };
        axes.fold(video.clone(), |x, axis| {
            let first = self.0[axis][0] * ratios[axis];
            x.slice(axis as isize + 2, first, first + size[axis])
        })
    }
}
