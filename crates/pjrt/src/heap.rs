//! Limits of the C library's heaps, which keep a server's memory flat.
//!
//! glibc gives threads heaps of their own, up to eight a core, and a heap keeps what is freed in it for its own threads. A run's
//! buffers are allocated by whichever threads XLA picks, so each heap grows to the largest share that it ever had. glibc also learns
//! from large blocks that were freed to take such from a heap and to keep up to 64 MiB free at its end, which it returns or not by
//! chance. On two cores the toy model's server took 4 to 5 % more memory after 200 videos than after 40, though what was in use stayed
//! the same.

/// A parameter of `mallopt`, its value, and the variables by which a user sets it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LIMITS: [(i32, i32, &str, &str); 3] = [
    // Heaps that all threads share: what one video frees is what the next one takes.
    (libc::M_ARENA_MAX, 2, "MALLOC_ARENA_MAX", "glibc.malloc.arena_max"),
    // Blocks of so many bytes are of no heap: they are returned when they are freed.
    (libc::M_MMAP_THRESHOLD, 4 << 20, "MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold"),
    // Free bytes that the end of a heap keeps.
    (libc::M_TRIM_THRESHOLD, 8 << 20, "MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold"),
];

/// Limits the heaps of this process, but for what the user sets. Heaps that exist stay, so call it before threads are started.
pub fn limit_heaps() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for (parameter, value, variable, tunable) in LIMITS {
        let tunables = std::env::var("GLIBC_TUNABLES");
        if std::env::var_os(variable).is_some() || tunables.is_ok_and(|all| all.contains(tunable)) {
            continue;
        }
        // SAFETY: `mallopt` may be called at any time; it takes no pointers.
        if unsafe { libc::mallopt(parameter, value) } == 0 {
            tracing::warn!("the C library does not take {variable}={value}: memory may grow over many videos");
        }
    }
}
