//! Hashes of input files.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::error::{MediaError, Result, check_rereadable};
use super::png::png_paths;

/// Returns the SHA-256 (hex) of a file's bytes; for a folder, of its PNG files concatenated in name order.
///
/// # Errors
/// Returns an error if a file cannot be read or the folder contains no PNG files.
pub fn sha256_of(path: &Path) -> Result<String> {
    check_rereadable(path)?;
    let files = if path.is_dir() { png_paths(path)? } else { vec![path.to_path_buf()] };
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    for file in &files {
        let mut bytes = File::open(file).map_err(MediaError::io("read", file))?;
        loop {
            match bytes.read(&mut buffer).map_err(MediaError::io("read", file))? {
                0 => break,
                count => hash.update(&buffer[..count]),
            }
        }
    }
    Ok(hex::encode(hash.finalize()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn folder_hash_covers_png_files_in_name_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for (name, bytes) in [("b.png", "cd"), ("a.png", "ab"), ("note.txt", "x"), ("whole", "abcd")] {
            std::fs::write(path(name), bytes).unwrap();
        }
        let abcd = "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589";
        assert_eq!(sha256_of(folder.path()).unwrap(), abcd);
        assert_eq!(sha256_of(&path("whole")).unwrap(), abcd);
        assert!(sha256_of(&path("gone")).unwrap_err().to_string().contains("gone"));
    }
}
