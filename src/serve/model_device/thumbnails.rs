//! Creates the JPEG thumbnail and the sprite sheet of a video.

use image::codecs::jpeg::JpegEncoder;
use image::imageops::{FilterType, resize};
use image::{ExtendedColorType, RgbImage};

use super::PipelineError;
use crate::media::Frames;

/// Maximum length of the longer side of a thumbnail, in pixels. `CELL` is the maximum for each frame of a sprite sheet.
const THUMBNAIL: usize = 512;
const CELL: usize = 256;
/// Number of rows and of columns of a sprite sheet.
const SHEET: usize = 5;
const QUALITY: u8 = 85;

/// Returns frame `at`, scaled down so that its longer side has at most `longest` pixels.
fn small(frames: &Frames, at: usize, longest: usize) -> Result<RgbImage, PipelineError> {
    let (width, height) = (frames.width() as u32, frames.height() as u32);
    let bytes = frames.iter().nth(at).map(<[u8]>::to_vec).unwrap_or_default();
    let no_frame = || PipelineError::Bug("cannot make a thumbnail: the video has no frames".into());
    let image = RgbImage::from_raw(width, height, bytes).filter(|_| width * height > 0).ok_or_else(no_frame)?;
    let part = (longest as f64 / f64::from(width.max(height))).min(1.0);
    let scaled = |side: u32| ((f64::from(side) * part).round() as u32).max(1);
    if part == 1.0 {
        return Ok(image);
    }
    Ok(resize(&image, scaled(width), scaled(height), FilterType::Triangle))
}

fn jpeg(image: &RgbImage) -> Result<Vec<u8>, PipelineError> {
    let mut bytes = Vec::new();
    let encoded = JpegEncoder::new_with_quality(&mut bytes, QUALITY).encode(
        image.as_raw(),
        image.width(),
        image.height(),
        ExtendedColorType::Rgb8,
    );
    encoded.map_err(|error| PipelineError::Bug(error.to_string()))?;
    Ok(bytes)
}

/// Returns the middle frame of a video as a JPEG.
pub(super) fn thumbnail(frames: &Frames) -> Result<Vec<u8>, PipelineError> {
    jpeg(&small(frames, frames.count() / 2, THUMBNAIL)?)
}

/// Returns a JPEG with a grid of evenly spaced frames. The first is in the upper left corner, the last in the lower
/// right.
pub(super) fn sprite_sheet(frames: &Frames) -> Result<Vec<u8>, PipelineError> {
    let last = frames.count().saturating_sub(1);
    let cells = SHEET * SHEET;
    let first = small(frames, 0, CELL)?;
    let (width, height) = first.dimensions();
    let mut sheet = RgbImage::new(width * SHEET as u32, height * SHEET as u32);
    for cell in 0..cells {
        let frame = small(frames, (last * cell + (cells - 1) / 2) / (cells - 1), CELL)?;
        let (x, y) = ((cell % SHEET) as i64, (cell / SHEET) as i64);
        image::imageops::replace(&mut sheet, &frame, x * i64::from(width), y * i64::from(height));
    }
    jpeg(&sheet)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ndarray::Array4;

    /// Returns uniform grey frames. The grey level of each frame is twice its index.
    fn frames(count: usize, height: usize, width: usize) -> Frames {
        let all = (0..count).map(|at| vec![(at * 2) as u8; height * width * 3]).collect::<Vec<_>>().concat();
        Frames::new(Array4::from_shape_vec((count, height, width, 3), all).unwrap()).unwrap()
    }

    #[test]
    fn sprite_sheet_spans_first_to_last_frame() {
        let sheet = image::load_from_memory(&sprite_sheet(&frames(121, 320, 512)).unwrap()).unwrap().to_rgb8();
        assert_eq!(sheet.dimensions(), (5 * 256, 5 * 160));
        let grey = |x: u32, y: u32| i32::from(sheet.get_pixel(256 * x + 128, 160 * y + 80)[0]);
        for (x, y, frame) in [(0, 0, 0), (1, 0, 5), (0, 1, 25), (4, 4, 120)] {
            assert!((grey(x, y) - 2 * frame).abs() <= 2, "{x} {y}: {}", grey(x, y));
        }
        // If the video has fewer frames than the grid, some occur more than once.
        let short = image::load_from_memory(&sprite_sheet(&frames(9, 64, 96)).unwrap()).unwrap();
        assert_eq!((short.width(), short.height()), (480, 320));
    }

    #[test]
    fn thumbnail_is_the_scaled_middle_frame() {
        let image = image::load_from_memory(&thumbnail(&frames(121, 704, 1280)).unwrap()).unwrap().to_rgb8();
        assert_eq!(image.dimensions(), (512, 282));
        assert!((i32::from(image.get_pixel(9, 9)[0]) - 120).abs() <= 2);
    }
}
