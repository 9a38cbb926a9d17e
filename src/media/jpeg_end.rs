//! Whether a JPEG is whole. Its decoder fills what is missing of a baseline image with grey.

/// Refuses a JPEG that ends before its end-of-image marker. What follows the marker is no part of the image.
///
/// # Errors
/// The reason, in words.
pub(super) fn check_jpeg_end(bytes: &[u8]) -> Result<(), &'static str> {
    find_end(bytes).ok_or("it is cut short: its end-of-image marker is missing")
}

/// Walks from marker to marker (ITU-T T.81, annex B) to the end of the image; `None`: the file ends before.
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
            // A stuffed byte of the pixels, and markers without a length: TEM, RST0 to RST7, SOI.
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
    fn end_is_found_behind_segments_and_pixels() {
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
