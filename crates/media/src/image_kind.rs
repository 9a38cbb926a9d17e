//! Detects image formats by the first bytes of a file.

use image::ImageFormat;

/// An image format, detected from the first bytes of a file. A file's name does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// PNG, including APNG; built-in decoder.
    Png,
    /// JPEG; built-in decoder.
    Jpeg,
    /// WebP in a RIFF container; built-in decoder.
    WebP,
    /// GIF87a and GIF89a; decoded by ffmpeg.
    Gif,
    /// Windows bitmap; decoded by ffmpeg.
    Bmp,
    /// TIFF of either byte order; decoded by ffmpeg.
    Tiff,
    /// JPEG XL, as a codestream or in a container; decoded by ffmpeg.
    JpegXl,
    /// JPEG 2000, as a codestream or in a container; decoded by ffmpeg.
    Jpeg2000,
    /// HEIC and AVIF; decoded by ffmpeg.
    Heif,
    /// Quite OK Image format; decoded by ffmpeg.
    Qoi,
    /// PBM, PGM, PPM and PAM; decoded by ffmpeg. The value is the name of ffmpeg's demuxer.
    Netpbm(&'static str),
}

impl ImageKind {
    /// Detects the format. `None`: the file has none of these formats.
    pub fn detect(bytes: &[u8]) -> Option<Self> {
        const HEIF: [&[u8]; 9] = [b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1", b"avif", b"avis"];
        let heads: [(&[u8], ImageKind); 12] = [
            (b"\x89PNG\r\n\x1a\n", ImageKind::Png),
            (b"\xff\xd8\xff", ImageKind::Jpeg),
            (b"GIF87a", ImageKind::Gif),
            (b"GIF89a", ImageKind::Gif),
            (b"II*\0", ImageKind::Tiff),
            (b"MM\0*", ImageKind::Tiff),
            (b"\xff\x0a", ImageKind::JpegXl),
            (b"\0\0\0\x0cJXL ", ImageKind::JpegXl),
            (b"\0\0\0\x0cjP  ", ImageKind::Jpeg2000),
            (b"\xff\x4f\xff\x51", ImageKind::Jpeg2000),
            (b"qoif", ImageKind::Qoi),
            (b"P7\n", ImageKind::Netpbm("pam_pipe")),
        ];
        let is_webp = bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP");
        let is_heif = bytes.get(4..8) == Some(b"ftyp") && bytes.get(8..12).is_some_and(|brand| HEIF.contains(&brand));
        // Also checks the size of the second header, because text may start with "BM" too.
        let is_bmp = bytes.starts_with(b"BM")
            && matches!(bytes.get(14..18), Some([12 | 40 | 52 | 56 | 64 | 108 | 124, 0, 0, 0]));
        let head = heads.iter().find(|(head, _)| bytes.starts_with(head)).map(|(_, kind)| *kind);
        head.or(is_webp.then_some(ImageKind::WebP))
            .or(is_heif.then_some(ImageKind::Heif))
            .or(is_bmp.then_some(ImageKind::Bmp))
            .or(netpbm(bytes))
    }

    /// Returns the format of the built-in decoder. `None`: only ffmpeg decodes the format.
    pub fn builtin(self) -> Option<ImageFormat> {
        match self {
            ImageKind::Png => Some(ImageFormat::Png),
            ImageKind::Jpeg => Some(ImageFormat::Jpeg),
            ImageKind::WebP => Some(ImageFormat::WebP),
            _ => None,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            ImageKind::Png => "PNG",
            ImageKind::Jpeg => "JPEG",
            ImageKind::WebP => "WebP",
            ImageKind::Gif => "GIF",
            ImageKind::Bmp => "BMP",
            ImageKind::Tiff => "TIFF",
            ImageKind::JpegXl => "JPEG XL",
            ImageKind::Jpeg2000 => "JPEG 2000",
            ImageKind::Heif => "HEIC or AVIF",
            ImageKind::Qoi => "QOI",
            ImageKind::Netpbm(_) => "PPM",
        }
    }

    /// Returns ffmpeg's demuxer for the format. It is passed to ffmpeg explicitly, because a demuxer that ffmpeg
    /// chooses itself may open further files.
    pub(super) fn demuxer(self) -> &'static str {
        match self {
            ImageKind::Png => "png_pipe",
            ImageKind::Jpeg => "jpeg_pipe",
            ImageKind::WebP => "webp_pipe",
            ImageKind::Gif => "gif",
            ImageKind::Bmp => "bmp_pipe",
            ImageKind::Tiff => "tiff_pipe",
            ImageKind::JpegXl => "jpegxl_pipe",
            ImageKind::Jpeg2000 => "j2k_pipe",
            ImageKind::Heif => "mov",
            ImageKind::Qoi => "qoi_pipe",
            ImageKind::Netpbm(demuxer) => demuxer,
        }
    }
}

/// Detects PBM, PGM and PPM: `P1` to `P6`, then white space, then the width or a comment.
fn netpbm(bytes: &[u8]) -> Option<ImageKind> {
    let [b'P', kind, space, next, ..] = bytes else { return None };
    let demuxer = match kind {
        b'1' | b'4' => "pbm_pipe",
        b'2' | b'5' => "pgm_pipe",
        b'3' | b'6' => "ppm_pipe",
        _ => return None,
    };
    let is_header = space.is_ascii_whitespace() && (next.is_ascii_digit() || *next == b'#');
    is_header.then_some(ImageKind::Netpbm(demuxer))
}

#[cfg(test)]
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
            (b"\x89PNG\r\n\x1a\n", Some(ImageKind::Png)),
            (b"RIFF\0\0\0\0WEBPVP8 ", Some(ImageKind::WebP)),
            (b"RIFF\0\0\0\0WAVEfmt ", None),
            (b"P6\n64 48\n255\n", Some(ImageKind::Netpbm("ppm_pipe"))),
            (b"P5\n# a comment\n", Some(ImageKind::Netpbm("pgm_pipe"))),
            (b"P6 is a number", None),
            (b"#EXTM3U\nfile:///etc/passwd", None),
            (b"", None),
        ] {
            assert_eq!(ImageKind::detect(bytes), kind);
        }
    }
}
