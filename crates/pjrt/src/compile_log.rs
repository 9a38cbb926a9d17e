//! The compile log: if `LTX2_COMPILE_LOG=FILE` is set, this process and its children append a JSON line to FILE for
//! each compilation.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use sha2::{Digest, Sha256};

/// If `LTX2_COMPILE_LOG` is set, appends a JSON line to that file: the plugin's file name, the module name, a hash of
/// the program and its compile options, and the compile time in seconds. Logs a write error instead of returning it.
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
        tracing::warn!("LTX2_COMPILE_LOG: cannot append to {}: {error}", Path::new(&path).display());
    }
}
