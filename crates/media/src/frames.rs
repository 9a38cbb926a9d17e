//! Raw video frames in RGB.

use std::sync::Arc;

use ndarray::{Array4, ArrayView4, Axis};
use sha2::{Digest, Sha256};

use super::error::{MediaError, Result};

/// RGB frames `[frames, height, width, 3]` with 8 bits per channel. Clones share the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frames {
    data: Arc<Array4<u8>>,
}

impl Frames {
    /// Creates frames from bytes `[frames, height, width, 3]`.
    ///
    /// # Errors
    /// Returns an error if a dimension is 0 or the last one is not 3.
    pub fn new(data: Array4<u8>) -> Result<Self> {
        if data.is_empty() || data.len_of(Axis(3)) != 3 {
            return Err(MediaError::FramesShape { shape: data.shape().to_vec() });
        }
        let data = if data.is_standard_layout() { data } else { data.as_standard_layout().into_owned() };
        Ok(Self { data: data.into() })
    }

    /// Converts a decoded video `[frames, 3, height, width]` in 0..1 to bytes.
    ///
    /// Values are clamped to 0..1, scaled by 255 in f32 and rounded half to even, as in the reference pipeline's
    /// post-processing. NaN becomes black.
    ///
    /// # Errors
    /// Returns an error if the video is empty or does not have three channels.
    pub fn from_video(video: ArrayView4<'_, f32>) -> Result<Self> {
        let (f, c, h, w) = video.dim();
        if c != 3 || video.is_empty() {
            return Err(MediaError::VideoShape { shape: video.shape().to_vec() });
        }
        let standard = video.as_standard_layout();
        let mut data = Array4::<u8>::zeros((f, h, w, 3));
        if let (Some(source), Some(target)) = (standard.as_slice(), data.as_slice_mut()) {
            let plane = h * w;
            for (source, target) in source.chunks_exact(3 * plane).zip(target.chunks_exact_mut(3 * plane)) {
                let (r, gb) = source.split_at(plane);
                let (g, b) = gb.split_at(plane);
                for (((pixel, &r), &g), &b) in target.chunks_exact_mut(3).zip(r).zip(g).zip(b) {
                    pixel[0] = to_byte(r);
                    pixel[1] = to_byte(g);
                    pixel[2] = to_byte(b);
                }
            }
        }
        Ok(Self { data: data.into() })
    }

    /// Converts the frames to a video `[frames, 3, height, width]` in 0..1.
    pub fn to_video(&self) -> Array4<f32> {
        self.data.view().permuted_axes([0, 3, 1, 2]).mapv(|v| f32::from(v) / 255.0).as_standard_layout().into_owned()
    }

    /// Returns a video without frames, the result of a run that generates only sound.
    pub fn none() -> Frames {
        Frames { data: Array4::zeros((0, 0, 0, 3)).into() }
    }

    /// Copies a non-empty range of frames.
    pub fn part(&self, frames: std::ops::Range<usize>) -> Frames {
        Frames { data: self.data.slice_axis(Axis(0), ndarray::Slice::from(frames)).to_owned().into() }
    }

    /// Copies the frames with these indices. Panics if an index is out of range.
    pub fn select(&self, frames: impl IntoIterator<Item = usize>) -> Frames {
        Frames { data: self.data.select(Axis(0), &Vec::from_iter(frames)).into() }
    }

    /// Number of frames.
    pub fn count(&self) -> usize {
        self.data.len_of(Axis(0))
    }

    /// Height in pixels.
    pub fn height(&self) -> usize {
        self.data.len_of(Axis(1))
    }

    /// Width in pixels.
    pub fn width(&self) -> usize {
        self.data.len_of(Axis(2))
    }

    /// Returns the bytes `[frames, height, width, 3]`.
    pub fn data(&self) -> &Array4<u8> {
        &self.data
    }

    /// Converts the frames into their bytes `[frames, height, width, 3]`. Copies them only if a clone still exists.
    pub fn into_data(self) -> Array4<u8> {
        Arc::unwrap_or_clone(self.data)
    }

    /// Iterates over the frames as row-major RGB bytes.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let size = self.height() * self.width() * 3;
        // The constructors ensure standard layout, so the slice exists.
        self.data.as_slice().unwrap_or(&[]).chunks_exact(size.max(1))
    }

    /// Returns the SHA-256 (hex) of the bytes of all frames in order.
    pub fn sha256(&self) -> String {
        let mut hash = Sha256::new();
        for frame in self.iter() {
            hash.update(frame);
        }
        hex::encode(hash.finalize())
    }
}

/// Maps 0..1 to 0..255, rounding half to even.
fn to_byte(v: f32) -> u8 {
    // The cast converts NaN to 0.
    (v.clamp(0.0, 1.0) * 255.0).round_ties_even() as u8
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn to_byte_rounds_half_to_even_and_clamps() {
        for (v, want) in
            [(0.0, 0), (1.0, 255), (-0.5, 0), (7.0, 255), (f32::NAN, 0), (0.5, 128), (0.5 / 255.0, 0), (1.5 / 255.0, 2)]
        {
            assert_eq!(to_byte(v), want, "{v}");
        }
    }

    #[test]
    fn frames_round_trip_through_video() {
        let video = Array4::from_shape_fn((2, 3, 2, 3), |(f, c, y, x)| (f * 100 + c * 20 + y * 5 + x) as f32 / 255.0);
        let frames = Frames::from_video(video.view()).unwrap();
        assert_eq!((frames.count(), frames.height(), frames.width()), (2, 2, 3));
        assert_eq!(frames.data()[[1, 1, 2, 2]], 147);
        assert_eq!(frames.to_video(), video);
        // A view with different strides gives the same frames.
        let turned = video.view().permuted_axes([0, 1, 3, 2]).as_standard_layout().into_owned();
        assert_eq!(Frames::from_video(turned.view().permuted_axes([0, 1, 3, 2])).unwrap(), frames);
        assert_eq!(frames.sha256(), hex::encode(Sha256::digest(frames.data().as_slice().unwrap())));
        assert!(Frames::from_video(Array4::zeros((1, 4, 2, 2)).view()).is_err());
        assert!(Frames::from_video(Array4::zeros((0, 3, 2, 2)).view()).is_err());
    }
}
