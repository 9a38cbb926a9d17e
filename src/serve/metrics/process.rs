//! Figures of the process, from `/proc`; zeros where there is none.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// Resident memory.
pub(super) fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or_default() * 1024
}

/// Open file descriptors.
pub(super) fn open_descriptors() -> u64 {
    fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count() as u64)
}

/// Seconds since 1970 at which the server began, which is as good as when its process did.
pub(super) fn start_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
