//! Metrics of the process. Values from `/proc` are `None` on systems without it.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

pub(super) fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

pub(super) fn open_descriptors() -> Option<u64> {
    Some(fs::read_dir("/proc/self/fd").ok()?.count() as u64)
}

/// Returns the current time in seconds since 1970. The server calls this at startup, so the result approximates the
/// start time of the process.
pub(super) fn start_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
