//! Converts decoded images to upright 8-bit sRGB.

use std::path::Path;

use image::DynamicImage;
use image::metadata::Orientation;
use moxcms::{ColorProfile, Layout, ProfileText, TransferCharacteristics, TransformOptions};
use ndarray::Array4;

use super::error::{MediaError, Result};
use super::frames::Frames;
use super::video_track::HDR_IMAGE;

/// Warning about a file with several images.
pub(super) const ANIMATED: &str = "is animated; using its first image";

/// Converts an image to one RGB frame: applies the metadata's rotation and converts from the ICC profile to sRGB.
///
/// # Errors
/// Returns an error if the ICC profile is that of an HDR image.
pub(super) fn upright_srgb(
    path: &Path,
    mut image: DynamicImage,
    orientation: Option<Orientation>,
    profile: Option<&[u8]>,
) -> Result<Frames> {
    let bad = |message: String| MediaError::Image { path: path.to_path_buf(), message };
    if let Some(turn @ (Orientation::Rotate90 | Orientation::Rotate180 | Orientation::Rotate270)) = orientation {
        image.apply_orientation(turn);
    }
    let image = eight_bits(image);
    let (w, h) = (image.width() as usize, image.height() as usize);
    let profile = profile.map(ColorProfile::new_from_slice).transpose();
    if profile.as_ref().is_ok_and(|profile| profile.as_ref().is_some_and(is_hdr)) {
        return Err(bad(HDR_IMAGE.into()));
    }
    let converted = profile.and_then(|profile| profile.map(|profile| to_srgb(&image, &profile)).transpose());
    let converted = converted.unwrap_or_else(|reason| {
        tracing::warn!("{}: ignoring its color profile: {reason}", path.display());
        None
    });
    let rgb = converted.unwrap_or_else(|| image.to_rgb8().into_raw());
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
fn to_srgb(image: &DynamicImage, profile: &ColorProfile) -> std::result::Result<Vec<u8>, moxcms::CmsError> {
    let layout = if matches!(image, DynamicImage::ImageLuma8(_)) { Layout::Gray } else { Layout::Rgb };
    let options = TransformOptions { prefer_fixed_point: false, ..TransformOptions::default() };
    let transform = profile.create_transform_8bit(layout, &ColorProfile::new_srgb(), Layout::Rgb, options)?;
    let mut rgb = vec![0; image.width() as usize * image.height() as usize * 3];
    transform.transform(image.as_bytes(), &mut rgb)?;
    Ok(rgb)
}

/// Returns whether an ICC profile has an HDR transfer function: it states so, or its name contains PQ or HLG.
fn is_hdr(profile: &ColorProfile) -> bool {
    use TransferCharacteristics::{Hlg, Smpte2084};
    let names: Vec<&str> = match &profile.description {
        Some(ProfileText::PlainString(name)) => vec![name],
        Some(ProfileText::Localizable(names)) => names.iter().map(|name| name.value.as_str()).collect(),
        Some(ProfileText::Description(name)) => vec![&name.ascii_string, &name.unicode_string],
        None => Vec::new(),
    };
    let is_named = names.iter().any(|name| name.contains("PQ") || name.contains("HLG"));
    is_named || profile.cicp.as_ref().is_some_and(|code| matches!(code.transfer_characteristics, Hlg | Smpte2084))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hdr_profiles_are_rejected() {
        let image = || DynamicImage::ImageRgb8(image::RgbImage::new(2, 2));
        let read = |profile: &ColorProfile| {
            let bytes = profile.encode().expect("a profile");
            upright_srgb(Path::new("a.png"), image(), None, Some(&bytes))
        };
        for profile in
            [ColorProfile::new_bt2020_pq(), ColorProfile::new_bt2020_hlg(), ColorProfile::new_display_p3_pq()]
        {
            let error = read(&profile).expect_err("HDR").to_string();
            assert!(error.contains("a.png") && error.contains("the image is HDR"), "{error}");
        }
        // A profile whose transfer function is stated only by its name.
        let mut named = ColorProfile::new_bt2020_pq();
        named.cicp = None;
        assert!(read(&named).is_err());
        for profile in [ColorProfile::new_srgb(), ColorProfile::new_bt2020(), ColorProfile::new_display_p3()] {
            assert!(read(&profile).is_ok());
        }
    }
}
