//! Reads images with an installed ffmpeg: formats without a built-in decoder, and files that the built-in decoders
//! cannot decode. Also checks JPEG files for damage.

use std::path::Path;

use image::{DynamicImage, RgbImage};

use super::decode::{decode_with_messages, pixmaps};
use super::error::{MediaError, Result};
use super::frames::Frames;
use super::image_facts::ImageMetadata;
use super::image_kind::ImageKind;
use super::image_pixels::{ANIMATED, upright_srgb};
use super::video_track::VideoTrack;

/// Decodes an image of at most `most_pixels` pixels with ffmpeg.
///
/// # Errors
/// Returns [`MediaError::NoDecoder`] if ffmpeg is not installed. Returns another error if the image is damaged (with
/// ffmpeg's message), tiled or HDR, or if its pixels are not square.
pub(super) fn read_by_ffmpeg(
    path: &Path,
    ffmpeg: &Path,
    kind: ImageKind,
    facts: &ImageMetadata,
    most_pixels: u64,
) -> Result<Frames> {
    let bad = |message: String| MediaError::Image { path: path.to_path_buf(), message };
    let pixels = most_pixels.to_string();
    let input = ["-f", kind.demuxer()];
    // A file that a built-in decoder rejects may be damaged. For other formats, ffmpeg also complains about harmless
    // metadata.
    let is_doubtful = kind.builtin().is_some();
    let checks: &[&str] = if is_doubtful { &["-err_detect", "crccheck+bitstream+buffer+explode"] } else { &[] };
    let before = [&["-xerror", "-noautorotate", "-max_pixels", &pixels][..], checks, &input].concat();
    // Request two frames: a second frame identifies an animation.
    let how = ["-frames:v", "2", "-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24"];
    let output = decode_with_messages(path, ffmpeg, &before, &how, 6 * most_pixels + 64)?;
    if let Some((_, said)) = output.as_ref().filter(|(_, said)| is_doubtful && !said.is_empty()) {
        return Err(bad(said.lines().next().unwrap_or_default().into()));
    }
    let frames = output.and_then(|(bytes, _)| pixmaps(&bytes));
    let frames = frames.ok_or_else(|| bad("ffmpeg cannot decode the image, which is damaged or truncated".into()))?;
    let size = [frames.width(), frames.height()];
    if let Some([width, height]) = facts.size.filter(|whole| *whole != size) {
        let why = "the image is tiled; convert it to PNG with another program, e.g. heif-convert IN OUT.png";
        return Err(bad(format!("ffmpeg decodes only {}x{} of {width}x{height} pixels: {why}", size[0], size[1])));
    }
    if let Some(fault) = VideoTrack::of_file(path, ffmpeg, &input)?.and_then(|track| track.image_fault()) {
        return Err(bad(fault));
    }
    if frames.count() > 1 {
        tracing::warn!("{}: {ANIMATED}", path.display());
    }
    let rgb = frames.iter().next().map(<[u8]>::to_vec).unwrap_or_default();
    let image = RgbImage::from_raw(size[0] as u32, size[1] as u32, rgb).map(DynamicImage::ImageRgb8);
    let image = image.ok_or_else(|| bad("ffmpeg cannot decode the image".into()))?;
    upright_srgb(path, image, facts.orientation, facts.profile.as_deref())
}

/// Substrings that identify ffmpeg's messages about JPEG kinds that it does not support.
const UNSUPPORTED: [&str; 4] = ["nsupported", "not supported", "not implemented", "nhandled"];
/// Substrings that identify ffmpeg's messages about metadata, which are ignored.
const METADATA: [&str; 4] = ["decode_app", "APP", "EXIF", "ICC"];

/// Checks with ffmpeg that the pixel data of a JPEG is complete and undamaged: the built-in decoder fills missing parts
/// without an error. Data after the image is ignored. Without ffmpeg, nothing is checked.
///
/// # Errors
/// Returns an error with ffmpeg's first message if the image is damaged.
pub(super) fn check_jpeg(path: &Path, ffmpeg: &Path) -> Result<()> {
    let how = ["-frames:v", "1", "-f", "null"];
    let input = ["-f", ImageKind::Jpeg.demuxer()];
    let said = match decode_with_messages(path, ffmpeg, &input, &how, u64::MAX) {
        Err(MediaError::NoDecoder { .. }) | Ok(None) => return Ok(()),
        Err(MediaError::Ffmpeg { tail, .. }) => tail.replace(" | ", "\n"),
        output => output?.map_or_else(String::new, |(_, said)| said),
    };
    if UNSUPPORTED.iter().any(|sign| said.contains(sign)) {
        return Ok(());
    }
    match said.lines().find(|line| !METADATA.iter().any(|sign| line.contains(sign))) {
        Some(line) => {
            let message = format!("the file is damaged or truncated ({line}); export the image again");
            Err(MediaError::Image { path: path.to_path_buf(), message })
        }
        None => Ok(()),
    }
}
