//! The C library's heaps, which bound how much freed memory a server keeps.
//!
//! glibc gives threads heaps of their own, up to eight a core, and a heap keeps what is freed in it for its own threads. A run's
//! buffers are allocated by whichever threads XLA picks, so each heap grows to the largest share that it ever had: on two cores the
//! toy model's server took 4 to 5 % more memory after 200 videos than after 40, with 16 heaps of which half was free. With two heaps
//! what one video frees is what the next one takes.

/// Heaps that the threads of a server share.
const HEAPS: i32 = 2;
/// Variables by which a user sets the number of heaps.
const LIMITS: [(&str, &str); 2] = [("MALLOC_ARENA_MAX", ""), ("GLIBC_TUNABLES", "glibc.malloc.arena_max")];

/// Limits the heaps of this process, unless the user did. Heaps that exist stay, so call it before threads are started.
pub fn limit() {
    let is_set = |(name, part): &(&str, &str)| std::env::var(name).is_ok_and(|value| value.contains(part));
    if LIMITS.iter().any(is_set) {
        return;
    }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` may be called at any time; it takes no pointers.
    if unsafe { libc::mallopt(libc::M_ARENA_MAX, HEAPS) } == 0 {
        tracing::warn!("the C library does not limit its heaps: memory may grow over many videos");
    }
}
