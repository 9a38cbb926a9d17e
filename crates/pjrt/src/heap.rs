//! Limits glibc's malloc arenas, so that a server's memory use does not grow.
//!
//! glibc gives threads separate arenas, up to eight per core, and only the threads of an arena reuse memory that was
//! freed in it. XLA allocates a run's buffers from arbitrary threads, so each arena grows to the largest amount that it
//! ever held. glibc also raises its mmap threshold when large blocks are freed; later blocks of that size then come
//! from an arena, which may keep up to 64 MiB free at its end. On two cores, the server of the toy model used 4 to 5 %
//! more memory after 200 videos than after 40, although the live memory was the same.

/// `mallopt` parameters, each with its value, and with the environment variable and the glibc tunable that users can
/// set instead.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LIMITS: [(i32, i32, &str, &str); 3] = [
    // Two arenas for all threads, so that the next video reuses memory that the previous video freed.
    (libc::M_ARENA_MAX, 2, "MALLOC_ARENA_MAX", "glibc.malloc.arena_max"),
    // Blocks of at least this many bytes use mmap, so freeing them returns their memory to the system.
    (libc::M_MMAP_THRESHOLD, 4 << 20, "MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold"),
    // Number of free bytes that an arena may keep at its end.
    (libc::M_TRIM_THRESHOLD, 8 << 20, "MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold"),
];

/// Limits the malloc arenas of this process. Parameters that the user has set do not change. Existing arenas remain, so
/// call this before starting threads.
pub fn limit_heaps() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for (parameter, value, variable, tunable) in LIMITS {
        let tunables = std::env::var("GLIBC_TUNABLES");
        if std::env::var_os(variable).is_some() || tunables.is_ok_and(|all| all.contains(tunable)) {
            continue;
        }
        // SAFETY: `mallopt` may be called at any time and takes no pointers.
        if unsafe { libc::mallopt(parameter, value) } == 0 {
            tracing::warn!("the C library rejected {variable}={value}: memory use may grow over many videos");
        }
    }
}
