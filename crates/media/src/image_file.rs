//! Reads conditioning images, decoded as in Lightricks' code, and resizes them to the video.

use std::io::Cursor;
use std::path::Path;

use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader, ImageResult, Limits};
use ndarray::Array5;

use super::error::{MediaError, Result, check_rereadable};
use super::frames::Frames;
use super::image_facts::ImageMetadata;
use super::image_ffmpeg::{check_jpeg, read_by_ffmpeg};
use super::image_kind::ImageKind;
use super::image_pixels::{ANIMATED, upright_srgb};
use super::jpeg_end::check_jpeg_end;

/// Maximum number of pixels of an image that ffmpeg decodes. At three bytes per pixel, this is the memory limit of the
/// built-in decoders.
const MAX_FFMPEG_PIXELS: u64 = (512 << 20) / 3;

/// Reads an image as one sRGB frame; detects the format from the file's contents. Applies the rotation (but not the
/// mirroring) of the EXIF metadata, drops transparency, keeps the upper 8 bits of 16-bit values, and reads only the
/// first image of an animation. Built-in decoders read PNG, JPEG and WebP. The `ffmpeg` on PATH reads HEIC, AVIF, GIF,
/// BMP, TIFF, JPEG XL, JPEG 2000, PPM, QOI and the files that the built-in decoders cannot read, and detects damaged
/// JPEG files.
///
/// # Errors
/// Returns an error if the file is missing, damaged, HDR, tiled or of another format, if its pixels are not square, or if
/// ffmpeg is needed but not installed.
pub fn read_image(path: &Path) -> Result<Frames> {
    read_image_with(path, Path::new("ffmpeg"))
}

/// Reads an image like [`read_image`], but runs the ffmpeg program at the path `ffmpeg`.
///
/// # Errors
/// Fails for the same reasons as [`read_image`].
pub fn read_image_with(path: &Path, ffmpeg: &Path) -> Result<Frames> {
    read_image_by(path, ffmpeg, MAX_FFMPEG_PIXELS)
}

/// Reads an image like [`read_image`], but limits images that ffmpeg decodes to `most_pixels` pixels.
///
/// # Errors
/// Fails for the same reasons as [`read_image`].
pub fn read_image_limited(path: &Path, most_pixels: u64) -> Result<Frames> {
    read_image_by(path, Path::new("ffmpeg"), most_pixels)
}

fn read_image_by(path: &Path, ffmpeg: &Path, most_pixels: u64) -> Result<Frames> {
    let bad = |message: String| MediaError::Image { path: path.to_path_buf(), message };
    check_rereadable(path)?;
    let bytes = std::fs::read(path).map_err(MediaError::io("read", path))?;
    let kind = ImageKind::detect(&bytes).ok_or_else(|| bad(UNKNOWN.into()))?;
    let facts = ImageMetadata::read(kind, &bytes);
    if let Some(fault) = &facts.fault {
        return Err(bad(fault.clone()));
    }
    if let Some(why) = truncation(kind, &bytes) {
        return Err(bad(why.into()));
    }
    let decoded = match kind.builtin() {
        Some(format) => decode(&bytes, format).map_err(Some),
        None => Err(None),
    };
    match decoded {
        Ok(DecodedImage { image, orientation, profile }) => {
            if kind == ImageKind::Jpeg {
                check_jpeg(path, ffmpeg)?;
            }
            if kind.builtin().is_some_and(|format| is_animated(&bytes, format)) {
                tracing::warn!("{}: {ANIMATED}", path.display());
            }
            upright_srgb(path, image, orientation, profile.as_deref())
        }
        // The header may claim more pixels than fit in memory.
        Err(Some(error @ ImageError::Limits(_))) => Err(bad(error.to_string())),
        Err(own) => {
            let read = read_by_ffmpeg(path, ffmpeg, kind, &facts, most_pixels);
            read.map_err(|error| of_both(path, kind, own.map(|own| own.to_string()), error))
        }
    }
}

/// Combines the error messages of the built-in decoder (`own`) and of ffmpeg. `own` is `None` if the format has no
/// built-in decoder.
fn of_both(path: &Path, kind: ImageKind, own: Option<String>, error: MediaError) -> MediaError {
    let bad = |message: String| MediaError::Image { path: path.to_path_buf(), message };
    let name = kind.name();
    match (own, error) {
        (None, MediaError::NoDecoder { reason, .. }) => bad(format!(
            "{name} images need ffmpeg, which cannot be started ({reason}); install ffmpeg, or convert the image, e.g. \
             ffmpeg -i IN OUT.png"
        )),
        (Some(own), MediaError::NoDecoder { .. }) => bad(format!(
            "{own}; if the file is complete, install ffmpeg, or convert the image, e.g. ffmpeg -i IN OUT.png"
        )),
        (Some(own), MediaError::Image { message: words, .. } | MediaError::Ffmpeg { tail: words, .. }) => {
            bad(format!("{own}, and ffmpeg cannot decode the image: {words}"))
        }
        (_, error) => error,
    }
}

/// Returns a description of the truncation if a JPEG or WebP file is known to be truncated. `None`: the file is
/// complete or has another format.
fn truncation(kind: ImageKind, bytes: &[u8]) -> Option<&'static str> {
    match kind {
        ImageKind::Jpeg => check_jpeg_end(bytes).err(),
        ImageKind::WebP => {
            let size = bytes.get(4..8).map_or(0, |size| u32::from_le_bytes([size[0], size[1], size[2], size[3]]));
            let is_short = (bytes.len() as u64) < 8 + u64::from(size);
            is_short.then_some("the file is truncated: it is shorter than its header states")
        }
        _ => None,
    }
}

/// An image as the built-in decoders read it, with its metadata.
struct DecodedImage {
    image: DynamicImage,
    orientation: Option<Orientation>,
    profile: Option<Vec<u8>>,
}

/// Decodes an image with a built-in decoder.
///
/// # Errors
/// Returns an error if the image is damaged, of an unsupported kind, or too large.
fn decode(bytes: &[u8], format: ImageFormat) -> ImageResult<DecodedImage> {
    let mut decoder = ImageReader::with_format(Cursor::new(bytes), format).into_decoder()?;
    Limits::default().reserve(decoder.total_bytes())?;
    // Damaged metadata is ignored: the pixels are still usable.
    let (orientation, profile) = (decoder.orientation().ok(), decoder.icc_profile().ok().flatten());
    Ok(DecodedImage { image: DynamicImage::from_decoder(decoder)?, orientation, profile })
}

/// End of the error message for an unsupported format.
const UNKNOWN: &str = "the format is not PNG, JPEG, WebP, HEIC, AVIF, GIF, BMP, TIFF, JPEG XL, JPEG 2000, PPM or QOI; convert the \
                       file, e.g. ffmpeg -i IN OUT.png";

/// Returns whether a PNG or WebP is animated.
fn is_animated(bytes: &[u8], format: ImageFormat) -> bool {
    match format {
        // The animation control chunk precedes the pixels, so the pixels are not decoded.
        ImageFormat::Png => PngDecoder::new(Cursor::new(bytes)).and_then(|png| png.is_apng()).unwrap_or(false),
        ImageFormat::WebP => WebPDecoder::new(Cursor::new(bytes)).is_ok_and(|webp| webp.has_animation()),
        _ => false,
    }
}

/// Scales a frame until it covers `height` x `width` and center-crops it. Returns `[1, 3, 1, height, width]` in -1..1.
/// Interpolates bilinearly between pixel centers and, like the reference, without antialiasing when it shrinks the
/// frame.
pub fn covering(frame: &Frames, height: usize, width: usize) -> Array5<f32> {
    let (h, w) = (frame.height(), frame.width());
    let scale = f64::max(height as f64 / h as f64, width as f64 / w as f64);
    let scaled = |n: usize| (n as f64 * scale).ceil() as usize;
    let rows = taps(h, scaled(h), height);
    let columns = taps(w, scaled(w), width);
    let data = frame.data();
    Array5::from_shape_fn((1, 3, 1, height, width), |(_, c, _, y, x)| {
        let (top, bottom, v) = rows[y];
        let (left, right, u) = columns[x];
        let at = |row: usize, column: usize| f32::from(data[[0, row, column, c]]);
        let upper = at(top, left) * (1.0 - u) + at(top, right) * u;
        let lower = at(bottom, left) * (1.0 - u) + at(bottom, right) * u;
        (upper * (1.0 - v) + lower * v) / 127.5 - 1.0
    })
}

/// Scales a frame down until it fits in `height` x `width`, and fills the rest at the bottom and on the right with its
/// reflection. A frame that fits already is not scaled. If the reflection would be larger than the frame, its last row or
/// column is repeated instead. Returns `[1, 3, 1, height, width]` in -1..1. Interpolates like [`covering`].
pub(super) fn padded(frame: &Frames, height: usize, width: usize) -> Array5<f32> {
    let (h, w) = (frame.height(), frame.width());
    let scale = f64::min(height as f64 / h as f64, width as f64 / w as f64);
    let scaled = |n: usize| (n as f64 * scale).round_ties_even() as usize;
    let (new_h, new_w) = if height >= h && width >= w { (h, w) } else { (scaled(h), scaled(w)) };
    let reflects = height - new_h < new_h && width - new_w < new_w;
    let place = |at: usize, size: usize| match at < size {
        true => at,
        false if reflects => 2 * (size - 1) - at,
        false => size - 1,
    };
    let rows = taps(h, new_h, new_h);
    let columns = taps(w, new_w, new_w);
    let data = frame.data();
    Array5::from_shape_fn((1, 3, 1, height, width), |(_, c, _, y, x)| {
        let (top, bottom, v) = rows[place(y, new_h)];
        let (left, right, u) = columns[place(x, new_w)];
        let at = |row: usize, column: usize| f32::from(data[[0, row, column, c]]);
        let upper = at(top, left) * (1.0 - u) + at(top, right) * u;
        let lower = at(bottom, left) * (1.0 - u) + at(bottom, right) * u;
        ((upper * (1.0 - v) + lower * v) / 255.0).clamp(0.0, 1.0) * 2.0 - 1.0
    })
}

/// Computes how to resample one dimension from `size` to `scaled` pixels and keep the `wanted` center pixels. For each
/// of them, returns the indices of two neighboring source pixels and the weight of the second.
fn taps(size: usize, scaled: usize, wanted: usize) -> Vec<(usize, usize, f32)> {
    let skipped = (scaled - wanted) / 2;
    let ratio = size as f32 / scaled as f32;
    let place = |i: usize| {
        let at = (((i + skipped) as f32 + 0.5) * ratio - 0.5).max(0.0);
        let first = (at as usize).min(size - 1);
        (first, (first + 1).min(size - 1), at - first as f32)
    };
    (0..wanted).map(place).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ndarray::Array4;

    use super::*;

    fn gradient(h: usize, w: usize) -> Frames {
        Frames::new(Array4::from_shape_fn((1, h, w, 3), |(_, y, x, c)| (y * 20 + x * 7 + c * 3) as u8)).unwrap()
    }

    #[test]
    fn scaling_to_the_same_size_changes_no_pixel() {
        let frame = gradient(4, 6);
        let got = covering(&frame, 4, 6);
        assert_eq!(got.shape(), [1, 3, 1, 4, 6]);
        assert_eq!(got[[0, 2, 0, 3, 5]], f32::from(frame.data()[[0, 3, 5, 2]]) / 127.5 - 1.0);
    }

    /// The frame of 4x6 is scaled by 2 to 8x12, and two columns are cropped on each side.
    #[test]
    fn scaling_to_cover_crops_both_sides() {
        let got = covering(&gradient(4, 6), 8, 8);
        // Row 1 is at source row 1.5 / 2 - 0.5 = 0.25. Column 0 is column 2 before the crop, at source column 2.5 / 2 -
        // 0.5 = 0.75.
        let want = (0.25 * 20.0 + 0.75 * 7.0) / 127.5 - 1.0;
        assert!((got[[0, 0, 0, 1, 0]] - want).abs() < 1e-6, "{}", got[[0, 0, 0, 1, 0]]);
        // The source is extended by repeating its edges.
        assert!((got[[0, 0, 0, 0, 0]] - (0.75 * 7.0 / 127.5 - 1.0)).abs() < 1e-6);
    }

    #[test]
    fn frame_that_fits_is_padded_by_its_reflection() {
        let frame = gradient(4, 6);
        let at = |got: &Array5<f32>, y: usize, x: usize| (got[[0, 0, 0, y, x]] + 1.0) * 127.5;
        let near = |value: f32, want: f32| assert!((value - want).abs() < 1e-3, "{value} instead of {want}");
        let source = |y: usize, x: usize| f32::from(frame.data()[[0, y, x, 0]]);
        let got = padded(&frame, 6, 8);
        near(at(&got, 3, 5), source(3, 5));
        near(at(&got, 4, 6), source(2, 4));
        near(at(&got, 5, 7), source(1, 3));
        // A reflection of five rows would be larger than the frame.
        let got = padded(&frame, 9, 6);
        near(at(&got, 8, 2), source(3, 2));
        // A larger frame is scaled down to fit: 4x6 to 2x3, with one row of padding.
        let got = padded(&frame, 3, 3);
        near(at(&got, 0, 0), 13.5);
        near(at(&got, 2, 1), 27.5);
    }

    /// The file has 124 bytes, but its header claims 100,000 rows and columns, which take 30 GB.
    #[test]
    fn image_header_claiming_huge_size_is_an_error() {
        let error = read_image(Path::new("../../fuzz/seeds/media/huge.png")).unwrap_err().to_string();
        assert!(error.contains("huge.png") && error.contains("limit"), "{error}");
    }

    #[test]
    fn unsupported_image_format_error_lists_formats() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.png");
        std::fs::write(&path, b"no image at all").unwrap();
        let e = read_image(&path).unwrap_err().to_string();
        assert!(e.contains("image.png") && e.contains("PNG, JPEG, WebP") && e.contains("ffmpeg -i IN OUT.png"), "{e}");
        let e = read_image(&dir.path().join("none.png")).unwrap_err().to_string();
        assert!(e.contains("cannot read") && e.contains("none.png"), "{e}");
    }

    #[test]
    fn missing_ffmpeg_error_suggests_conversion() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"GIF89a\x01\0\x01\0\0\0\0").unwrap();
        let e = read_image_by(file.path(), Path::new("/nowhere/ffmpeg"), MAX_FFMPEG_PIXELS).unwrap_err().to_string();
        assert!(e.contains("GIF") && e.contains("ffmpeg -i IN OUT.png"), "{e}");
    }

    /// Data after the image is ignored, and the end-of-image marker of the thumbnail does not count.
    #[test]
    fn truncated_jpeg_is_an_error() {
        let whole =
            std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/images/turned_6.jpg")).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |bytes: &[u8]| {
            std::fs::write(file.path(), bytes).unwrap();
            read_image(file.path())
        };
        let image = read(&whole).unwrap();
        assert_eq!(read(&[&whole[..], b"trailing \xff\xd9 data"].concat()).unwrap(), image);
        for left in [whole.len() * 2 / 3, whole.len() - 2] {
            let e = read(&whole[..left]).unwrap_err().to_string();
            assert!(e.contains("truncated"), "{left}: {e}");
        }
    }
}
