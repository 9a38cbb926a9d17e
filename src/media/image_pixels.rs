//! Converts decoded images to upright 8-bit sRGB.

use std::path::Path;

use image::DynamicImage;
use image::metadata::Orientation;
use moxcms::{ColorProfile, Layout, TransformOptions};
use ndarray::Array4;

use super::error::{Error, Result};
use super::frames::Frames;

/// Warning about a file with several images.
pub(super) const ANIMATED: &str = "is animated; using its first image";

/// Converts an image to one RGB frame: applies the metadata's rotation and converts from the ICC profile to sRGB.
pub(super) fn upright_srgb(
    path: &Path,
    mut image: DynamicImage,
    orientation: Option<Orientation>,
    profile: Option<&[u8]>,
) -> Result<Frames> {
    if let Some(turn @ (Orientation::Rotate90 | Orientation::Rotate180 | Orientation::Rotate270)) = orientation {
        image.apply_orientation(turn);
    }
    let image = eight_bits(image);
    let (w, h) = (image.width() as usize, image.height() as usize);
    let converted = profile.map(|profile| to_srgb(&image, profile)).transpose().unwrap_or_else(|reason| {
        tracing::warn!("{}: ignoring its color profile: {reason}", path.display());
        None
    });
    let rgb = converted.unwrap_or_else(|| image.to_rgb8().into_raw());
    let bad = |message: String| Error::Image { path: path.to_path_buf(), message };
    Frames::new(Array4::from_shape_vec((1, h, w, 3), rgb).map_err(|e| bad(e.to_string()))?)
}

/// Converts an image to 8-bit gray or RGB and drops transparency.
fn eight_bits(image: DynamicImage) -> DynamicImage {
    let upper = |values: &[u16]| values.iter().map(|v| (v >> 8) as u8).collect();
    let (w, h) = (image.width(), image.height());
    let made = match &image {
        DynamicImage::ImageLuma8(_) | DynamicImage::ImageRgb8(_) => return image,
        DynamicImage::ImageLumaA8(_) => return DynamicImage::ImageLuma8(image.to_luma8()),
        DynamicImage::ImageLuma16(_) | DynamicImage::ImageLumaA16(_) => {
            image::GrayImage::from_raw(w, h, upper(&image.to_luma16())).map(DynamicImage::ImageLuma8)
        }
        DynamicImage::ImageRgb16(_) | DynamicImage::ImageRgba16(_) => {
            image::RgbImage::from_raw(w, h, upper(&image.to_rgb16())).map(DynamicImage::ImageRgb8)
        }
        _ => None,
    };
    made.unwrap_or_else(|| DynamicImage::ImageRgb8(image.to_rgb8()))
}

/// Converts a result of [`eight_bits`] from its ICC profile to sRGB bytes.
///
/// # Errors
/// Returns an error if the profile does not match the image's color type.
fn to_srgb(image: &DynamicImage, profile: &[u8]) -> std::result::Result<Vec<u8>, moxcms::CmsError> {
    let layout = if matches!(image, DynamicImage::ImageLuma8(_)) { Layout::Gray } else { Layout::Rgb };
    let profile = ColorProfile::new_from_slice(profile)?;
    let options = TransformOptions { prefer_fixed_point: false, ..TransformOptions::default() };
    let transform = profile.create_transform_8bit(layout, &ColorProfile::new_srgb(), Layout::Rgb, options)?;
    let mut rgb = vec![0; image.width() as usize * image.height() as usize * 3];
    transform.transform(image.as_bytes(), &mut rgb)?;
    Ok(rgb)
}
