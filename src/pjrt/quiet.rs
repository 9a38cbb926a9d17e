//! The plugins' own logging.

/// Keeps plugins from writing their start-up chatter to stderr; warnings of the user's own making stay. Must be called
/// before the process starts a thread, and does nothing otherwise, or where the user has set the variable.
pub fn quiet_plugins() {
    const LEVEL: &str = "TF_CPP_MIN_LOG_LEVEL";
    let alone = std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    if alone && std::env::var_os(LEVEL).is_none() {
        // SAFETY: no other thread exists that could read the environment meanwhile.
        unsafe { std::env::set_var(LEVEL, "2") };
    }
}
