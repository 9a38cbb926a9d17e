//! Reads UTF-8 text files, with or without the byte-order mark that Windows programs write.

use std::fs;
use std::io::{self, Error, ErrorKind, Read};
use std::path::Path;

/// The UTF-8 byte-order mark.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// Returns the contents of a text file, without a leading byte-order mark.
///
/// # Errors
/// Returns an error if the file cannot be read or is not UTF-8.
pub fn read(path: &Path) -> io::Result<String> {
    text(fs::read(path)?)
}

/// Reads text like [`read`], but at most `limit` bytes from an open file.
pub fn read_from(file: impl Read, limit: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    text(bytes)
}

/// Returns `bytes` without a leading byte-order mark.
pub fn unmarked(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(MARK).unwrap_or(bytes)
}

fn text(mut bytes: Vec<u8>) -> io::Result<String> {
    if bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff") {
        return Err(Error::new(ErrorKind::InvalidData, "the file is UTF-16 text; save it as UTF-8"));
    }
    if bytes.starts_with(MARK) {
        bytes.drain(..MARK.len());
    }
    String::from_utf8(bytes).map_err(|e| Error::new(ErrorKind::InvalidData, format!("the file is not UTF-8 text: {e}")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn byte_order_mark_is_stripped() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (bytes, expected) in [(&b"\xef\xbb\xbfa cat\n"[..], "a cat\n"), (b"a cat", "a cat"), (b"\xef\xbb\xbf", "")]
        {
            fs::write(file.path(), bytes).unwrap();
            assert_eq!(read(file.path()).unwrap(), expected);
            assert_eq!(read_from(bytes, 64).unwrap(), expected);
            assert_eq!(unmarked(bytes), expected.as_bytes());
        }
        for (bytes, reason) in [
            (&b"\xff\xfea\0"[..], "the file is UTF-16 text; save it as UTF-8"),
            (b"\x80", "the file is not UTF-8 text"),
        ] {
            fs::write(file.path(), bytes).unwrap();
            assert!(read(file.path()).unwrap_err().to_string().starts_with(reason));
        }
    }
}
