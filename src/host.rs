//! Free memory of the host.

use std::fs;

/// Bytes of memory that are free for this process, where the system says so: the host's, and what its control group leaves.
pub(crate) fn free_memory() -> Option<u64> {
    let host = fs::read_to_string("/proc/meminfo").ok().and_then(|info| available(&info));
    let number = |file: &str| fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?.trim().parse::<u64>().ok();
    let group = number("memory.max").zip(number("memory.current")).map(|(most, used)| most.saturating_sub(used));
    host.into_iter().chain(group).min()
}

/// Bytes that the kernel calls available.
fn available(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_s_words_are_bytes() {
        let info = "MemTotal:       16306660 kB\nMemFree:          264868 kB\nMemAvailable:    8000000 kB\n";
        assert_eq!(available(info), Some(8_192_000_000));
        assert_eq!((available(""), available("MemAvailable: much")), (None, None));
        assert_eq!(free_memory().is_some(), fs::exists("/proc/meminfo").unwrap_or(false));
    }
}
