//! Free host memory.

use std::fs;
use std::path::Path;

/// Returns the number of bytes of memory available to this process: the smallest of the host's available memory and what
/// remains under the limits of its control groups. `None` if the system reports neither.
pub fn free_memory() -> Option<u64> {
    let host = fs::read_to_string("/proc/meminfo").ok().and_then(|info| available(&info));
    host.into_iter().chain(left_in_groups(Path::new("/"))).min()
}

/// Returns the bytes that remain under the memory limits of this process's control group and the groups that contain it,
/// in version 2 or 1. `root`: folder of `proc` and `sys`.
fn left_in_groups(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let left = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        let (mount, limit, used) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max", "memory.current"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => return None,
        };
        let folders = Path::new(group).ancestors().map(|group| root.join(mount).join(group));
        folders.filter_map(|folder| left(&folder, limit, used)).min()
    });
    left.min()
}

/// Returns the bytes that remain under the limit of a control group. `limit` and `used` are names of its files. `None`:
/// it has no limit.
fn left(folder: &Path, limit: &str, used: &str) -> Option<u64> {
    let number = |file: &str| fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
    let cached = fs::read_to_string(folder.join("memory.stat")).map_or(0, |stat| reclaimable(&stat));
    Some(number(limit)?.saturating_sub(number(used)?.saturating_sub(cached)))
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

    #[test]
    fn smallest_limit_of_nested_groups_counts_in_both_versions() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(left_in_groups(root.path()), None);
        write("proc/self/cgroup", "0::/user.slice/job\n");
        write("sys/fs/cgroup/user.slice/job/memory.max", "max\n");
        write("sys/fs/cgroup/user.slice/job/memory.current", "10\n");
        assert_eq!(left_in_groups(root.path()), None);
        write("sys/fs/cgroup/user.slice/memory.max", "1000\n");
        write("sys/fs/cgroup/user.slice/memory.current", "400\n");
        write("sys/fs/cgroup/user.slice/memory.stat", "active_file 100\n");
        assert_eq!(left_in_groups(root.path()), Some(700));
        write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n");
        write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        write("sys/fs/cgroup/memory/memory.usage_in_bytes", "400\n");
        write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "600\n");
        write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "100\n");
        assert_eq!(left_in_groups(root.path()), Some(500));
    }
}
