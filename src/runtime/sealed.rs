//! Files of a header and a payload: a line of JSON that `head -1` shows, with the payload's length and the SHA-256 of both.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::destination::{Destination, folder};
use crate::{failpoint, temporaries};

/// The first line.
#[derive(Serialize, Deserialize)]
struct HeaderLine<H> {
    #[serde(flatten)]
    header: H,
    /// Of the payload.
    bytes: usize,
    #[serde(skip_serializing)]
    sha256: String,
}

/// Separator between the sealed part of the line and the seal.
const SEAL: &str = ",\"sha256\":\"";

/// The hash of the line up to itself, and of the payload.
fn seal(line: &str, payload: &[u8]) -> String {
    hex::encode(Sha256::new().chain_update(line).chain_update(payload).finalize())
}

/// Writes a file of `name` under a temporary name and renames it, so that another process sees all of it or nothing;
/// returns its size.
///
/// # Errors
/// A folder or a file that cannot be written.
pub(crate) fn write(path: &Path, name: &str, header: &impl Serialize, payload: &[u8]) -> std::io::Result<usize> {
    let line = json(&HeaderLine { header, bytes: payload.len(), sha256: String::new() });
    let line = line.trim_end_matches('}');
    let line = format!("{line}{SEAL}{}\"}}\n", seal(line, payload));
    replace(path, name, &[line.as_bytes(), payload])?;
    Ok(line.len() + payload.len())
}

/// The header and the payload of a file's bytes.
pub(crate) fn read<H: DeserializeOwned>(bytes: &[u8]) -> Result<(H, &[u8]), String> {
    let end = bytes.iter().position(|b| *b == b'\n').ok_or("it has no header")?;
    let text = std::str::from_utf8(&bytes[..end]).map_err(|e| format!("its header: {e}"))?;
    let line: HeaderLine<H> = serde_json::from_str(text).map_err(|e| format!("its header: {e}"))?;
    let payload = &bytes[end + 1..];
    if line.bytes != payload.len() {
        return Err(format!("it has {} of {} bytes", payload.len(), line.bytes));
    }
    let sealed = text.rsplit_once(SEAL).map_or("", |(sealed, _)| sealed);
    if line.sha256 != seal(sealed, payload) {
        return Err("its bytes are not those that were written".into());
    }
    Ok((line.header, payload))
}

/// Puts a file in the place of what has its path; a link stays, and leads to the file.
///
/// # Errors
/// Those of the system; a path that is no file.
pub(crate) fn replace(path: &Path, name: &str, parts: &[&[u8]]) -> std::io::Result<()> {
    let Destination::File(path) = Destination::of(path)? else {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is a device or a pipe"));
    };
    let folder = folder(&path);
    fs::create_dir_all(&folder)?;
    // As any new file, not private as temporary ones: a folder may serve several users.
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

/// In hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// SHA-256 of a file, read a piece at a time.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn sha256_file(path: &Path) -> std::io::Result<String> {
    let (mut file, mut digest, mut part) = (fs::File::open(path)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut part)? {
            0 => return Ok(hex::encode(digest.finalize())),
            n => digest.update(&part[..n]),
        }
    }
}

/// JSON of a value that always has one.
pub(crate) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("structs of texts and numbers have a JSON form")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Header {
        name: String,
    }

    #[test]
    fn damage_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/x");
        let size = write(&path, "denoise", &Header { name: "denoise".into() }, b"code").unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(size, bytes.len());
        let of = |bytes: &[u8]| read::<Header>(bytes).map(|(h, p)| (h.name, p.to_vec()));
        assert_eq!(of(&bytes), Ok(("denoise".into(), b"code".to_vec())));
        assert_eq!(of(&bytes[..size - 1]), Err("it has 3 of 4 bytes".into()));
        let changed = [&bytes[..size - 1], b"f"].concat();
        assert_eq!(of(&changed), Err("its bytes are not those that were written".into()));
        assert_eq!(of(&bytes[..9]), Err("it has no header".into()));
        assert!(of(b"{}\ncode").is_err_and(|e| e.starts_with("its header: missing field")));
        // No temporary file stays beside it.
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
