//! Detects truncated JPEG files. Without this check, the decoder would silently fill missing parts of a baseline image
//! with gray.

/// Returns an error if a JPEG ends before its end-of-image marker. Ignores data after the marker.
pub(super) fn check_jpeg_end(bytes: &[u8]) -> Result<(), &'static str> {
    find_end(bytes).ok_or("the file is truncated: the end-of-image marker is missing")
}

/// Steps from marker to marker (ITU-T T.81, annex B) to the end of the image. `None`: the file ends earlier.
fn find_end(bytes: &[u8]) -> Option<()> {
    const END: u8 = 0xd9;
    let mut at = 2;
    loop {
        at += bytes.get(at..)?.iter().position(|byte| *byte == 0xff)?;
        at += bytes[at..].iter().position(|byte| *byte != 0xff)?;
        let marker = bytes[at];
        at += 1;
        match marker {
            END => return Some(()),
            // A stuffed byte in the pixel data, or a marker without a length field: TEM, RST0 to RST7, SOI.
            0 | 1 | 0xd0..=0xd8 => {}
            _ => at += usize::from(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn end_marker_is_found_after_segments_and_scan_data() {
        let head = b"\xff\xd8\xff\xe1\0\x06\xff\xd9\xff\xd9";
        let scan = b"\xff\xda\0\x04\0\0pixels\xff\0\xff\xd0more";
        let image = [&head[..], scan, b"\xff\xff\xd9"].concat();
        assert_eq!(check_jpeg_end(&image), Ok(()));
        assert_eq!(check_jpeg_end(&[&image[..], b"video"].concat()), Ok(()));
        for left in 0..image.len() {
            assert!(check_jpeg_end(&image[..left]).is_err(), "{left}");
        }
    }
}
