//! Files with a header and a payload. The header is one line of JSON, readable with `head -1`, that contains the
//! payload's length and a SHA-256 checksum of header and payload.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use ltx2_base::destination::{Destination, folder};
use ltx2_base::{failpoint, temporaries};

#[derive(Serialize, Deserialize)]
struct HeaderLine<H> {
    #[serde(flatten)]
    header: H,
    /// Payload size in bytes.
    bytes: usize,
    #[serde(skip_serializing)]
    sha256: String,
}

/// Separator between the checksummed part of the line and the checksum.
const CHECKSUM_SEPARATOR: &str = ",\"sha256\":\"";

/// Returns the SHA-256 of the line up to the checksum, and of the payload.
fn checksum(line: &str, payload: &[u8]) -> String {
    hex::encode(Sha256::new().chain_update(line).chain_update(payload).finalize())
}

/// Writes a file under a temporary name and renames it, so that other processes never see an incomplete file. Returns
/// its size in bytes. `name` is the name of its fail points, at which tests inject failures.
pub(crate) fn write(path: &Path, name: &str, header: &impl Serialize, payload: &[u8]) -> std::io::Result<usize> {
    let line = json(&HeaderLine { header, bytes: payload.len(), sha256: String::new() });
    let line = line.trim_end_matches('}');
    let line = format!("{line}{CHECKSUM_SEPARATOR}{}\"}}\n", checksum(line, payload));
    replace(path, name, &[line.as_bytes(), payload])?;
    Ok(line.len() + payload.len())
}

/// Parses a file's bytes into header and payload, checking length and checksum.
pub(crate) fn read<H: DeserializeOwned>(bytes: &[u8]) -> Result<(H, &[u8]), String> {
    let end = bytes.iter().position(|b| *b == b'\n').ok_or("missing header line")?;
    let text = std::str::from_utf8(&bytes[..end]).map_err(|e| format!("invalid header: {e}"))?;
    let line: HeaderLine<H> = serde_json::from_str(text).map_err(|e| format!("invalid header: {e}"))?;
    let payload = &bytes[end + 1..];
    if line.bytes != payload.len() {
        return Err(format!("the payload is truncated: it has {} of {} bytes", payload.len(), line.bytes));
    }
    let checked = text.rsplit_once(CHECKSUM_SEPARATOR).map_or("", |(checked, _)| checked);
    if line.sha256 != checksum(checked, payload) {
        return Err("checksum mismatch: the file is damaged".into());
    }
    Ok((line.header, payload))
}

/// Atomically replaces the file at `path`; a symbolic link stays and its target is replaced. Fails if `path` is a
/// device or a pipe.
pub(crate) fn replace(path: &Path, name: &str, parts: &[&[u8]]) -> std::io::Result<()> {
    let Destination::File(path) = Destination::classify(path)? else {
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            "the path is a device or a pipe; use a regular file",
        ));
    };
    let folder = folder(&path);
    fs::create_dir_all(&folder)?;
    // The usual mode of new files rather than the private mode of temporary files, because several users may share the
    // directory.
    let mode = fs::Permissions::from_mode(0o666);
    let mut file = tempfile::Builder::new().prefix(".ltx2-").permissions(mode).tempfile_in(&folder)?;
    temporaries::note(file.path());
    for part in parts {
        file.write_all(part)?;
        failpoint::reach("cache", name);
    }
    file.persist(&path)?;
    Ok(())
}

/// Returns the SHA-256 in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Returns the SHA-256 of a file in hexadecimal, reading it in pieces.
pub fn sha256_file(path: &Path) -> std::io::Result<String> {
    let (mut file, mut digest, mut part) = (fs::File::open(path)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut part)? {
            0 => return Ok(hex::encode(digest.finalize())),
            n => digest.update(&part[..n]),
        }
    }
}

/// Serializes a value whose serialization cannot fail.
pub(crate) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("structs of strings and numbers serialize to JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct ChecksumHeader {
        name: String,
    }

    #[test]
    fn damaged_files_are_detected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/x");
        let size = write(&path, "denoise", &ChecksumHeader { name: "denoise".into() }, b"code").unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(size, bytes.len());
        let of = |bytes: &[u8]| read::<ChecksumHeader>(bytes).map(|(h, p)| (h.name, p.to_vec()));
        assert_eq!(of(&bytes), Ok(("denoise".into(), b"code".to_vec())));
        assert_eq!(of(&bytes[..size - 1]), Err("the payload is truncated: it has 3 of 4 bytes".into()));
        let changed = [&bytes[..size - 1], b"f"].concat();
        assert_eq!(of(&changed), Err("checksum mismatch: the file is damaged".into()));
        assert_eq!(of(&bytes[..9]), Err("missing header line".into()));
        assert!(of(b"{}\ncode").is_err_and(|e| e.starts_with("invalid header: missing field")));
        // No temporary file is left in the directory.
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
