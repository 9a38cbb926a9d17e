//! Metadata of image files that decides whether and how their pixels can be used.

use image::metadata::Orientation;

use super::edit_list::{boxes, number, within};
use super::image_kind::ImageKind;
use super::video_track::{HDR_IMAGE, pixel_fault};

/// Metadata of an image file.
#[derive(Default)]
pub(super) struct ImageMetadata {
    /// Reason why the image cannot be used. `None`: no reason found.
    pub(super) fault: Option<String>,
    /// Width and height of the complete image before rotation. `None`: not stated.
    pub(super) size: Option<[usize; 2]>,
    pub(super) orientation: Option<Orientation>,
    pub(super) profile: Option<Vec<u8>>,
}

impl ImageMetadata {
    /// Reads the metadata of an image; `bytes` are the file's contents.
    pub(super) fn read(kind: ImageKind, bytes: &[u8]) -> Self {
        match kind {
            ImageKind::Png => ImageMetadata::from_png(bytes),
            ImageKind::Jpeg => ImageMetadata::from_jpeg(bytes),
            ImageKind::Tiff => ImageMetadata::from_tiff(bytes),
            ImageKind::Heif => ImageMetadata::from_heif(bytes),
            _ => ImageMetadata::default(),
        }
    }

    /// Reads the chunks before the pixels of a PNG file (PNG, third edition, 11.3).
    pub(super) fn from_png(bytes: &[u8]) -> Self {
        let mut facts = ImageMetadata::default();
        let mut rest = bytes.get(8..).unwrap_or_default();
        while let Some((head, body)) = rest.split_at_checked(8) {
            let length = number(head) as usize;
            let Some(body) = body.get(..length) else { break };
            match &head[4..] {
                b"pHYs" if length >= 8 => facts.take_density([number(body), number(&body[4..])]),
                b"cICP" if matches!(body.get(1), Some(16 | 18)) => facts.fault = Some(HDR_IMAGE.into()),
                b"eXIf" => facts.orientation = Orientation::from_exif_chunk(body),
                b"IDAT" => break,
                _ => {}
            }
            rest = rest.get(12 + length..).unwrap_or_default();
        }
        facts
    }

    /// Reads the segments before the first scan of a JPEG file (ITU-T T.81, annex B).
    fn from_jpeg(bytes: &[u8]) -> Self {
        let mut facts = ImageMetadata::default();
        let mut rest = bytes.get(2..).unwrap_or_default();
        while let [0xff, marker, next @ ..] = rest {
            if *marker == 0xff {
                rest = &rest[1..];
                continue;
            }
            let length = next.get(..2).map_or(0, |size| usize::from(u16::from_be_bytes([size[0], size[1]])));
            let Some(body) = next.get(2..length) else { break };
            let density = |at: usize| body.get(at..at + 2).map_or(0, |n| u32::from(u16::from_be_bytes([n[0], n[1]])));
            match marker {
                0xda => break,
                0xe0 if body.starts_with(b"JFIF\0") => facts.take_density([density(8), density(10)]),
                0xe1 if body.starts_with(b"Exif\0\0") => facts.orientation = Orientation::from_exif_chunk(&body[6..]),
                // The profile may be split; a number and a count precede each part.
                0xe2 if body.starts_with(b"ICC_PROFILE\0") => {
                    facts.profile.get_or_insert_default().extend(body.get(14..).unwrap_or_default());
                }
                _ => {}
            }
            rest = &next[length..];
        }
        facts
    }

    /// Rejects non-square pixels. `density`: pixels per unit of width and of height, which ffmpeg treats as the pixel
    /// aspect ratio.
    fn take_density(&mut self, density: [u32; 2]) {
        if density.iter().all(|side| *side > 0) && self.fault.is_none() {
            self.fault = pixel_fault(density.map(f64::from), "image", "OUT.png");
        }
    }

    /// Reads the metadata of the first image of a TIFF 6.0 file.
    fn from_tiff(bytes: &[u8]) -> Self {
        const SUBFILE: u16 = 254;
        let is_reduced = tiff_number(bytes, SUBFILE).is_some_and(|kind| kind & 1 == 1);
        ImageMetadata {
            fault: is_reduced
                .then(|| "the first image is only a preview, as in raw photographs; convert the file to PNG".into()),
            // EXIF metadata has the layout of a TIFF file.
            orientation: Orientation::from_exif_chunk(bytes),
            ..ImageMetadata::default()
        }
    }

    /// Reads the item properties of a HEIF file (ISO/IEC 23008-12).
    fn from_heif(bytes: &[u8]) -> Self {
        let meta = within(bytes, &[b"meta"]).and_then(|meta| meta.get(4..));
        let Some(properties) = meta.and_then(|meta| within(meta, &[b"iprp", b"ipco"])) else {
            return ImageMetadata::default();
        };
        let mut facts = ImageMetadata::default();
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
                b"colr" if matches!(body.get(6..8), Some([0, 16 | 18])) => facts.fault = Some(HDR_IMAGE.into()),
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
    use super::super::edit_list::test_boxes::boxed;
    use super::*;

    #[test]
    fn tiff_tags_are_read_in_both_byte_orders() {
        let little = b"II*\0\x08\0\0\0\x02\0\xfe\0\x04\0\x01\0\0\0\x01\0\0\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0";
        let big = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x03\0\0";
        assert_eq!([254, 274, 300].map(|tag| tiff_number(little, tag)), [Some(1), Some(6), None]);
        assert_eq!(tiff_number(big, 274), Some(3));
        assert!(ImageMetadata::from_tiff(little).fault.is_some());
        assert_eq!(
            (ImageMetadata::from_tiff(big).fault, ImageMetadata::from_tiff(big).orientation),
            (None, Some(Orientation::Rotate180))
        );
        assert!((0..32).all(|cut| tiff_number(&little[..cut], 274).is_none()));
        assert_eq!(tiff_number(&little[..32], 274), Some(6));
    }

    #[test]
    fn heif_size_is_that_of_the_largest_item() {
        let size = |w: u8, h: u8| boxed(b"ispe", &[0, 0, 0, 0, 0, 0, 0, w, 0, 0, 0, h]);
        let file = |colour: &[u8]| {
            let all =
                [size(64, 64), size(200, 100), size(20, 10), boxed(b"irot", &[1]), boxed(b"colr", colour)].concat();
            let meta = [&[0; 4][..], &boxed(b"iprp", &boxed(b"ipco", &all))].concat();
            ImageMetadata::from_heif(&[boxed(b"ftyp", b"heic"), boxed(b"meta", &meta)].concat())
        };
        let facts = file(b"profICC");
        assert_eq!((facts.size, facts.orientation), (Some([200, 100]), Some(Orientation::Rotate270)));
        assert_eq!((facts.profile.as_deref(), facts.fault), (Some(&b"ICC"[..]), None));
        assert!(file(b"nclx\0\x09\0\x10\0\x09\0").fault.is_some());
        assert_eq!(ImageMetadata::from_heif(b"\0\0\0\x18ftypheic").size, None);
    }

    fn png(chunks: &[(&[u8; 4], &[u8])]) -> ImageMetadata {
        let chunk = |(name, body): &(&[u8; 4], &[u8])| {
            [&(body.len() as u32).to_be_bytes()[..], &name[..], body, &[0; 4]].concat()
        };
        let chunks: Vec<u8> = chunks.iter().flat_map(chunk).collect();
        let file = [&b"\x89PNG\r\n\x1a\n"[..], &chunks].concat();
        (0..file.len()).for_each(|cut| drop(ImageMetadata::from_png(&file[..cut])));
        ImageMetadata::from_png(&file)
    }

    #[test]
    fn hdr_and_pixel_aspect_of_png_are_read() {
        let density = |x: u32, y: u32| [&x.to_be_bytes()[..], &y.to_be_bytes(), &[1]].concat();
        for (transfer, is_hdr) in [(13, false), (16, true), (18, true)] {
            let facts = png(&[(b"IHDR", &[0; 13]), (b"cICP", &[9, transfer, 0, 1]), (b"IDAT", b"")]);
            assert_eq!(facts.fault.as_deref(), is_hdr.then_some(HDR_IMAGE), "{transfer}");
        }
        assert_eq!(png(&[(b"pHYs", &density(2835, 2836))]).fault, None);
        assert_eq!(png(&[(b"pHYs", &density(0, 1))]).fault, None);
        let fault = png(&[(b"pHYs", &density(4, 3))]).fault.unwrap();
        assert!(fault.contains("the pixels are not square but 4:3") && fault.contains("OUT.png"), "{fault}");
        assert_eq!(png(&[(b"IDAT", b""), (b"pHYs", &density(4, 3))]).fault, None, "it must precede the pixels");
    }

    #[test]
    fn density_rotation_and_profile_of_jpeg_are_read() {
        let segment = |marker: u8, body: &[u8]| [&[0xff, marker, 0, body.len() as u8 + 2][..], body].concat();
        let jfif = |x: u8, y: u8| segment(0xe0, &[&b"JFIF\0\x01\x01\x01\0"[..], &[x, 0, y, 0, 0]].concat());
        let exif = segment(0xe1, b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0");
        let profile = ["ab", "c"].map(|part| segment(0xe2, &[&b"ICC_PROFILE\0\x01\x02"[..], part.as_bytes()].concat()));
        let file = [&b"\xff\xd8"[..], &jfif(72, 72), &exif, b"\xff", &profile.concat(), b"\xff\xda\0\x02"].concat();
        let facts = ImageMetadata::from_jpeg(&file);
        assert_eq!((facts.fault, facts.orientation), (None, Some(Orientation::Rotate90)));
        assert_eq!(facts.profile.as_deref(), Some(&b"abc"[..]));
        (0..file.len()).for_each(|cut| drop(ImageMetadata::from_jpeg(&file[..cut])));
        let wide = ImageMetadata::from_jpeg(&[&b"\xff\xd8"[..], &jfif(4, 3)].concat()).fault.unwrap();
        assert!(wide.contains("the pixels are not square but 4:3"), "{wide}");
    }
}
