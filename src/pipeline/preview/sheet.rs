//! Contact sheets: the frames of a preview in one image.

use std::io::Cursor;

use image::codecs::jpeg::JpegEncoder;
use image::codecs::webp::WebPEncoder;
use image::imageops::{FilterType, replace, resize};
use image::{ExtendedColorType, RgbImage};

use crate::media::Frames;
use crate::pipeline::error::{PipelineError, Result};

/// Maximum number of frames of a JPEG sheet.
const MAX_FRAMES: usize = 16;
/// Maximum width and height of a JPEG sheet in pixels.
const MAX_SIDE: u32 = 768;
/// Maximum size of a JPEG sheet in bytes.
const MAX_BYTES: usize = 64 << 10;
/// JPEG qualities, tried in this order until the sheet is small enough.
const QUALITIES: [u8; 3] = [82, 60, 35];

/// A contact sheet as a JPEG file. Its frames all have the same size; they are in rows, the first in the upper left
/// corner.
#[derive(Clone, Debug, PartialEq)]
pub struct JpegSheet {
    /// The file.
    pub jpeg: Vec<u8>,
    /// Number of frames.
    pub frames: usize,
    /// Number of frames per row.
    pub columns: usize,
    /// Width of a frame in pixels.
    pub width: u32,
    /// Height of a frame in pixels.
    pub height: u32,
}

/// Returns the number of frames per row for `count` frames: as many as there are rows, or one more.
fn columns(count: usize) -> usize {
    (1..).find(|n| n * n >= count).unwrap_or(1)
}

/// Draws the frames with these indices in one image.
fn sheet(frames: &Frames, shown: &[usize]) -> RgbImage {
    let (width, height, per_row) = (frames.width() as u32, frames.height() as u32, columns(shown.len()));
    let rows = shown.len().div_ceil(per_row);
    let mut image = RgbImage::new(width * per_row as u32, height * rows as u32);
    let all: Vec<&[u8]> = frames.iter().collect();
    for (at, frame) in shown.iter().enumerate() {
        if let Some(frame) = RgbImage::from_raw(width, height, all[*frame].to_vec()) {
            let (x, y) = ((at % per_row) as i64, (at / per_row) as i64);
            replace(&mut image, &frame, x * i64::from(width), y * i64::from(height));
        }
    }
    image
}

/// Returns all frames as a lossless WebP file.
///
/// # Errors
/// Returns the encoder's error.
pub fn webp(frames: &Frames) -> Result<Vec<u8>> {
    let image = sheet(frames, &(0..frames.count()).collect::<Vec<_>>());
    let mut bytes = Cursor::new(Vec::new());
    let encoder = WebPEncoder::new_lossless(&mut bytes);
    let encoded = encoder.encode(image.as_raw(), image.width(), image.height(), ExtendedColorType::Rgb8);
    encoded.map_err(|error| PipelineError::Bug(format!("cannot encode a preview: {error}")))?;
    Ok(bytes.into_inner())
}

/// Returns at most 16 evenly spaced frames as a JPEG file of at most 64 KiB and 768 pixels along each side. Reduces the
/// quality, then the size, to fit.
///
/// # Errors
/// Returns the encoder's error.
pub fn jpeg(frames: &Frames) -> Result<JpegSheet> {
    let count = frames.count().min(MAX_FRAMES);
    let last = frames.count() - 1;
    let shown: Vec<usize> = (0..count).map(|at| if count == 1 { 0 } else { at * last / (count - 1) }).collect();
    let (per_row, mut image) = (columns(count), sheet(frames, &shown));
    let rows = count.div_ceil(per_row) as u32;
    let (mut width, mut height) = (frames.width() as u32, frames.height() as u32);
    let mut bytes = Vec::new();
    loop {
        let side = image.width().max(image.height());
        if side > MAX_SIDE || !bytes.is_empty() {
            let part = (f64::from(MAX_SIDE) / f64::from(side)).min(if bytes.is_empty() { 1.0 } else { 0.5 });
            let scaled = |pixels: u32| ((f64::from(pixels) * part) as u32).max(1);
            (width, height) = (scaled(width), scaled(height));
            image = resize(&image, width * per_row as u32, height * rows, FilterType::Triangle);
        }
        for quality in QUALITIES {
            bytes.clear();
            let mut encoder = JpegEncoder::new_with_quality(&mut bytes, quality);
            let encoded = encoder.encode(image.as_raw(), image.width(), image.height(), ExtendedColorType::Rgb8);
            encoded.map_err(|error| PipelineError::Bug(format!("cannot encode a preview: {error}")))?;
            if bytes.len() <= MAX_BYTES || width.min(height) == 1 {
                return Ok(JpegSheet { jpeg: bytes, frames: count, columns: per_row, width, height });
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ndarray::Array4;

    /// Uniform frames whose grey level is ten times their index, or noise.
    fn frames(count: usize, height: usize, width: usize, noise: bool) -> Frames {
        let at = |(n, y, x, c): (usize, usize, usize, usize)| match noise {
            true => (n * 7919 + y * 104_729 + x * 1_299_709 + c * 15_485_863).wrapping_mul(2_654_435_761) as u8,
            false => (n * 10) as u8,
        };
        Frames::new(Array4::from_shape_fn((count, height, width, 3), at)).unwrap()
    }

    #[test]
    fn webp_sheet_has_every_frame_unchanged() {
        let image = image::load_from_memory(&webp(&frames(5, 12, 16, false)).unwrap()).unwrap().to_rgb8();
        assert_eq!(image.dimensions(), (48, 24));
        for at in 0..5u32 {
            assert_eq!(image.get_pixel(at % 3 * 16 + 5, at / 3 * 12 + 5)[0], (at * 10) as u8);
        }
    }

    #[test]
    fn jpeg_sheet_spans_the_video_and_is_small() {
        let sheet = jpeg(&frames(25, 12, 16, false)).unwrap();
        assert_eq!((sheet.frames, sheet.columns, sheet.width, sheet.height), (16, 4, 16, 12));
        let image = image::load_from_memory(&sheet.jpeg).unwrap().to_rgb8();
        for (at, frame) in [(0u32, 0i32), (15, 24)] {
            let grey = i32::from(image.get_pixel(at % 4 * 16 + 8, at / 4 * 12 + 6)[0]);
            assert!((grey - 10 * frame).abs() <= 2, "{at}: {grey}");
        }
        let one = jpeg(&frames(1, 12, 16, false)).unwrap();
        assert_eq!((one.frames, one.columns), (1, 1));
        let large = jpeg(&frames(16, 136, 240, true)).unwrap();
        assert!(large.jpeg.len() <= MAX_BYTES, "{}", large.jpeg.len());
        let image = image::load_from_memory(&large.jpeg).unwrap();
        assert!(image.width() <= MAX_SIDE && image.height() <= MAX_SIDE);
        assert_eq!((image.width(), image.height()), (4 * large.width, 4 * large.height));
    }
}
