//! Free host memory.

use std::fs;

/// Returns the number of bytes of memory available to this process: the smaller of the host's available memory and what
/// remains under the limit of the control group (cgroup v2). `None` if the system reports neither.
pub fn free_memory() -> Option<u64> {
    let host = fs::read_to_string("/proc/meminfo").ok().and_then(|info| available(&info));
    let text = |file: &str| fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok();
    let number = |file: &str| text(file)?.trim().parse::<u64>().ok();
    let cached = text("memory.stat").map_or(0, |stat| reclaimable(&stat));
    let left = |(most, used): (u64, u64)| most.saturating_sub(used.saturating_sub(cached));
    host.into_iter().chain(number("memory.max").zip(number("memory.current")).map(left)).min()
}

/// Returns the control group's page-cache bytes, which the kernel reclaims on demand (for example weights that were
/// read from disk).
fn reclaimable(stat: &str) -> u64 {
    let files = stat.lines().filter_map(|line| line.split_once(' '));
    let files = files.filter(|(name, _)| ["active_file", "inactive_file"].contains(name));
    files.filter_map(|(_, bytes)| bytes.parse::<u64>().ok()).sum()
}

/// Returns `MemAvailable` of `/proc/meminfo` in bytes.
fn available(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_files_are_parsed_to_bytes() {
        let info = "MemTotal:       16306660 kB\nMemFree:          264868 kB\nMemAvailable:    8000000 kB\n";
        assert_eq!(available(info), Some(8_192_000_000));
        assert_eq!((available(""), available("MemAvailable: much")), (None, None));
        let stat = "anon 5000\nfile 900\ninactive_anon 1\nactive_anon 2\ninactive_file 300\nactive_file 400\n";
        assert_eq!((reclaimable(stat), reclaimable("")), (700, 0));
        assert_eq!(free_memory().is_some(), fs::exists("/proc/meminfo").unwrap_or(false));
    }
}
