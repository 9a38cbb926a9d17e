//! Reads images in formats that need an installed ffmpeg.

use std::path::Path;

use image::metadata::Orientation;
use image::{DynamicImage, RgbImage};

use super::decode::{decode_limited, pixmaps};
use super::edit_list::{boxes, number, within};
use super::error::{Error, Result};
use super::frames::Frames;
use super::image_pixels::{ANIMATED, upright_srgb};

/// An image format, detected from the first bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageKind {
    Gif,
    Bmp,
    Tiff,
    JpegXl,
    Jpeg2000,
    /// HEIC and AVIF.
    Heif,
}

impl ImageKind {
    /// Detects the format. `None`: the file has none of these formats.
    pub(crate) fn of(bytes: &[u8]) -> Option<Self> {
        const HEIF: [&[u8]; 9] = [b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1", b"avif", b"avis"];
        let heads: [(&[u8], ImageKind); 8] = [
            (b"GIF87a", ImageKind::Gif),
            (b"GIF89a", ImageKind::Gif),
            (b"II*\0", ImageKind::Tiff),
            (b"MM\0*", ImageKind::Tiff),
            (b"\xff\x0a", ImageKind::JpegXl),
            (b"\0\0\0\x0cJXL ", ImageKind::JpegXl),
            (b"\0\0\0\x0cjP  ", ImageKind::Jpeg2000),
            (b"\xff\x4f\xff\x51", ImageKind::Jpeg2000),
        ];
        let is_heif = bytes.get(4..8) == Some(b"ftyp") && bytes.get(8..12).is_some_and(|brand| HEIF.contains(&brand));
        // Also checks the size of the second header, because text may start with "BM" too.
        let is_bmp = bytes.starts_with(b"BM")
            && matches!(bytes.get(14..18), Some([12 | 40 | 52 | 56 | 64 | 108 | 124, 0, 0, 0]));
        let head = heads.iter().find(|(head, _)| bytes.starts_with(head)).map(|(_, kind)| *kind);
        head.or(is_heif.then_some(ImageKind::Heif)).or(is_bmp.then_some(ImageKind::Bmp))
    }

    fn name(self) -> &'static str {
        match self {
            ImageKind::Gif => "GIF",
            ImageKind::Bmp => "BMP",
            ImageKind::Tiff => "TIFF",
            ImageKind::JpegXl => "JPEG XL",
            ImageKind::Jpeg2000 => "JPEG 2000",
            ImageKind::Heif => "HEIC or AVIF",
        }
    }

    /// Returns ffmpeg's demuxer for the format. It is passed to ffmpeg explicitly, because a demuxer that ffmpeg
    /// chooses itself may open further files.
    fn demuxer(self) -> &'static str {
        match self {
            ImageKind::Gif => "gif",
            ImageKind::Bmp => "bmp_pipe",
            ImageKind::Tiff => "tiff_pipe",
            ImageKind::JpegXl => "jpegxl_pipe",
            ImageKind::Jpeg2000 => "j2k_pipe",
            ImageKind::Heif => "mov",
        }
    }
}

/// Decodes an image of at most `most_pixels` pixels with ffmpeg; `bytes` are the file's contents.
///
/// # Errors
/// Returns an error if ffmpeg is not installed, or if the image is damaged (with ffmpeg's message), tiled, HDR, or a
/// preview of a raw photograph.
pub(super) fn read_by_ffmpeg(
    path: &Path,
    ffmpeg: &Path,
    bytes: &[u8],
    kind: ImageKind,
    most_pixels: u64,
) -> Result<Frames> {
    let bad = |message: String| Error::Image { path: path.to_path_buf(), message };
    let facts = match kind {
        ImageKind::Tiff => Facts::from_tiff(bytes),
        ImageKind::Heif => Facts::from_heif(bytes),
        _ => Facts::default(),
    };
    if let Some(fault) = facts.fault {
        return Err(bad(fault.into()));
    }
    let pixels = most_pixels.to_string();
    let before = ["-xerror", "-noautorotate", "-max_pixels", &pixels, "-f", kind.demuxer()];
    // Request two frames: a second frame identifies an animation.
    let how = ["-frames:v", "2", "-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24"];
    let pixmap = match decode_limited(path, ffmpeg, &before, &how, 6 * most_pixels + 64) {
        Err(Error::NoDecoder { reason, .. }) => {
            let name = kind.name();
            return Err(bad(format!(
                "{name} images need ffmpeg, which cannot be started ({reason}); install ffmpeg, or convert the image, e.g. \
                 ffmpeg -i IN OUT.png"
            )));
        }
        output => output?,
    };
    let frames = pixmap.and_then(|bytes| pixmaps(&bytes));
    let frames = frames.ok_or_else(|| bad("ffmpeg cannot decode the image, which is damaged or truncated".into()))?;
    let size = [frames.width(), frames.height()];
    if let Some([width, height]) = facts.size.filter(|whole| *whole != size) {
        let why = "the image is tiled; convert it to PNG with another program, e.g. heif-convert IN OUT.png";
        return Err(bad(format!("ffmpeg decodes only {}x{} of {width}x{height} pixels: {why}", size[0], size[1])));
    }
    if frames.count() > 1 {
        tracing::warn!("{}: {ANIMATED}", path.display());
    }
    let rgb = frames.iter().next().map(<[u8]>::to_vec).unwrap_or_default();
    let image = RgbImage::from_raw(size[0] as u32, size[1] as u32, rgb).map(DynamicImage::ImageRgb8);
    let image = image.ok_or_else(|| bad("ffmpeg cannot decode the image".into()))?;
    upright_srgb(path, image, facts.orientation, facts.profile.as_deref())
}

/// Metadata of an image file.
#[derive(Default)]
struct Facts {
    /// Why the image cannot be used. `None`: no reason found.
    fault: Option<&'static str>,
    /// Width and height of the complete image before rotation. `None`: not stated.
    size: Option<[usize; 2]>,
    orientation: Option<Orientation>,
    profile: Option<Vec<u8>>,
}

impl Facts {
    /// Reads the metadata of the first image of a TIFF 6.0 file.
    fn from_tiff(bytes: &[u8]) -> Self {
        const SUBFILE: u16 = 254;
        const ORIENTATION: u16 = 274;
        let is_reduced = tiff_number(bytes, SUBFILE).is_some_and(|kind| kind & 1 == 1);
        let orientation = tiff_number(bytes, ORIENTATION).and_then(|code| u8::try_from(code).ok());
        Facts {
            fault: is_reduced
                .then_some("the first image is only a preview, as in raw photographs; convert the file to PNG"),
            orientation: orientation.and_then(Orientation::from_exif),
            ..Facts::default()
        }
    }

    /// Reads the item properties of a HEIF file (ISO/IEC 23008-12).
    fn from_heif(bytes: &[u8]) -> Self {
        let meta = within(bytes, &[b"meta"]).and_then(|meta| meta.get(4..));
        let Some(properties) = meta.and_then(|meta| within(meta, &[b"iprp", b"ipco"])) else { return Facts::default() };
        let mut facts = Facts::default();
        for (name, body) in boxes(properties) {
            match name {
                // The complete image is larger than its tiles and thumbnails.
                b"ispe" if body.len() >= 12 => {
                    let size = [number(&body[4..8]), number(&body[8..12])].map(|side| side as usize);
                    let area = |size: [usize; 2]| size[0].saturating_mul(size[1]);
                    facts.size = facts.size.filter(|known| area(*known) >= area(size)).or(Some(size));
                }
                // The rotation in counterclockwise quarter turns.
                b"irot" => {
                    let turns =
                        [None, Some(Orientation::Rotate270), Some(Orientation::Rotate180), Some(Orientation::Rotate90)];
                    facts.orientation = body.first().and_then(|angle| turns[usize::from(angle & 3)]);
                }
                b"colr" if body.starts_with(b"prof") || body.starts_with(b"rICC") => {
                    facts.profile = Some(body[4..].to_vec())
                }
                b"colr" if matches!(body.get(6..8), Some([0, 16 | 18])) => {
                    facts.fault = Some("the image is HDR, but the models use SDR; export it as SDR, e.g. to PNG");
                }
                _ => {}
            }
        }
        facts
    }
}

/// Returns the value of a tag in the first directory of a TIFF file.
fn tiff_number(bytes: &[u8], tag: u16) -> Option<u32> {
    let is_little = bytes.starts_with(b"II");
    let read = |at: usize, size: usize| {
        let own = bytes.get(at..at.checked_add(size)?)?.iter();
        let join = |sum: u32, byte: &u8| sum << 8 | u32::from(*byte);
        Some(if is_little { own.rev().fold(0, join) } else { own.fold(0, join) })
    };
    let directory = read(4, 4)? as usize;
    let entries = read(directory, 2)? as usize;
    let entry = (0..entries).map(|n| directory + 2 + 12 * n).find(|at| read(*at, 2) == Some(u32::from(tag)))?;
    // A value of type SHORT or LONG is stored in the entry itself.
    match read(entry + 2, 2)? {
        3 => read(entry + 8, 2),
        4 => read(entry + 8, 4),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn image_format_is_detected_by_first_bytes() {
        let bmp = [&b"BM"[..], &[0; 12], &[40, 0, 0, 0]].concat();
        for (bytes, kind) in [
            (&b"GIF89a"[..], Some(ImageKind::Gif)),
            (&bmp, Some(ImageKind::Bmp)),
            (b"BMW makes cars, and motorcycles too", None),
            (b"MM\0*\0\0\0\x08", Some(ImageKind::Tiff)),
            (b"\0\0\0\x18ftypheic\0\0\0\0", Some(ImageKind::Heif)),
            (b"\0\0\0\x18ftypavif\0\0\0\0", Some(ImageKind::Heif)),
            (b"\0\0\0\x18ftypisom\0\0\0\0", None),
            (b"#EXTM3U\nfile:///etc/passwd", None),
            (b"", None),
        ] {
            assert_eq!(ImageKind::of(bytes), kind);
        }
    }

    #[test]
    fn tiff_tags_are_read_in_both_byte_orders() {
        let little = b"II*\0\x08\0\0\0\x02\0\xfe\0\x04\0\x01\0\0\0\x01\0\0\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0";
        let big = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x03\0\0";
        assert_eq!([254, 274, 300].map(|tag| tiff_number(little, tag)), [Some(1), Some(6), None]);
        assert_eq!(tiff_number(big, 274), Some(3));
        assert!(Facts::from_tiff(little).fault.is_some());
        assert_eq!(
            (Facts::from_tiff(big).fault, Facts::from_tiff(big).orientation),
            (None, Some(Orientation::Rotate180))
        );
        assert!((0..32).all(|cut| tiff_number(&little[..cut], 274).is_none()));
        assert_eq!(tiff_number(&little[..32], 274), Some(6));
    }

    #[test]
    fn heif_size_is_that_of_the_largest_item() {
        fn boxed(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
            [&(body.len() as u32 + 8).to_be_bytes()[..], name, body].concat()
        }
        let size = |w: u8, h: u8| boxed(b"ispe", &[0, 0, 0, 0, 0, 0, 0, w, 0, 0, 0, h]);
        let file = |colour: &[u8]| {
            let all =
                [size(64, 64), size(200, 100), size(20, 10), boxed(b"irot", &[1]), boxed(b"colr", colour)].concat();
            let meta = [&[0; 4][..], &boxed(b"iprp", &boxed(b"ipco", &all))].concat();
            Facts::from_heif(&[boxed(b"ftyp", b"heic"), boxed(b"meta", &meta)].concat())
        };
        let facts = file(b"profICC");
        assert_eq!((facts.size, facts.orientation), (Some([200, 100]), Some(Orientation::Rotate270)));
        assert_eq!((facts.profile.as_deref(), facts.fault), (Some(&b"ICC"[..]), None));
        assert!(file(b"nclx\0\x09\0\x10\0\x09\0").fault.is_some());
        assert_eq!(Facts::from_heif(b"\0\0\0\x18ftypheic").size, None);
    }
}
