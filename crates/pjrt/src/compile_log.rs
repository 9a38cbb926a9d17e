//! The log of compiles: with `LTX2_COMPILE_LOG=FILE`, every compile of every process that inherits it appends a JSON line.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use sha2::{Digest, Sha256};

/// Appends a line: plugin, name of the program's module, a hash of program and options, seconds. A log that cannot be
/// written is a warning.
pub(super) fn compiled(plugin: &Path, mlir: &str, options: &[u8], started: Instant) {
    let Some(path) = std::env::var_os("LTX2_COMPILE_LOG") else { return };
    let module = mlir.split_whitespace().find(|word| word.starts_with('@')).unwrap_or("@unnamed");
    let file = plugin.file_name().unwrap_or_default().to_string_lossy();
    let seconds = started.elapsed().as_secs_f64();
    let hash = Sha256::new().chain_update(mlir).chain_update(options).finalize();
    let hash = hex::encode(&hash[..8]);
    let line = serde_json::json!({"plugin": file, "module": &module[1..], "hash": hash, "seconds": seconds});
    let line = format!("{line}\n");
    let log = OpenOptions::new().create(true).append(true).open(&path);
    if let Err(error) = log.and_then(|mut log| log.write_all(line.as_bytes())) {
        tracing::warn!("LTX2_COMPILE_LOG: {}: {error}", Path::new(&path).display());
    }
}
