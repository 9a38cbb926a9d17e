//! Environment variables that plugins read when they are loaded.

/// Variable that contains libtpu's command-line flags.
const ARGUMENTS: &str = "LIBTPU_INIT_ARGS";

/// libtpu flag that keeps libtpu's code out of huge pages. On kernels without huge pages, libtpu otherwise logs an
/// error. The flag does not affect compiled programs.
pub const NO_HUGEPAGE_TEXT: &str = " --hugepage_text=false";

/// libtpu flag that sets the stack size of libtpu's threads.
const STACK_SIZE: &str = "default_thread_stack_size";

/// Returns the libtpu flags that the user has set. Invalid UTF-8 is replaced.
fn libtpu_flags() -> String {
    std::env::var_os(ARGUMENTS).map_or_else(String::new, |given| given.to_string_lossy().into_owned())
}

/// Sets defaults for environment variables of plugins: suppresses start-up logs, and raises the CUDA plugin's limit on
/// pinned memory from 64 GiB to 90 % of host memory. Keeps values that the user has set. Call it before the process
/// starts a thread. Does nothing if threads exist.
pub fn quiet_plugins() {
    let alone = std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    // SAFETY: both calls only read system constants.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let pinned = (pages.max(0) * size.max(0) / 10 * 9) >> 30;
    let variables =
        [("TF_CPP_MIN_LOG_LEVEL", "2".to_owned()), ("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", pinned.max(1).to_string())];
    for (name, value) in variables.into_iter().filter(|(name, _)| alone && std::env::var_os(name).is_none()) {
        // SAFETY: this is the only thread, so nothing reads the environment concurrently.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Sets the environment so that libtpu can compile on a machine without TPUs, and while other processes have libtpu
/// loaded. Call it before the process starts a thread. Returns false if the variables are not set yet but threads
/// already exist.
pub fn prepare_absent_tpus() -> bool {
    // The last two variables describe a machine. A topology that is created by name overrides them, but without them
    // libtpu logs errors.
    let fixed = [
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
    ];
    let mut wanted: Vec<(&str, String)> = fixed
        .into_iter()
        .filter(|(name, _)| std::env::var_os(name).is_none())
        .map(|(name, value)| (name, value.to_owned()))
        .collect();
    let given = libtpu_flags();
    // The huge page flag is optional, so only the stack size is checked.
    let ready = wanted.is_empty() && given.contains(STACK_SIZE);
    wanted.extend(add_compile_only_flags(&given).map(|arguments| (ARGUMENTS, arguments)));
    let alone = std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    if alone {
        for (name, value) in &wanted {
            // SAFETY: this is the only thread, so nothing reads the environment concurrently.
            unsafe { std::env::set_var(name, value) };
        }
    }
    alone || ready
}

/// Returns the user's libtpu flags plus the flags for compiling without TPUs that the user has not set. `None`: the
/// user has set all of these flags.
fn add_compile_only_flags(given: &str) -> Option<String> {
    // By default, the compiler's threads have 64 KB of stack. Deep fusions of TPU7x programs overflow it.
    let stack = format!(" --{STACK_SIZE}=1048576");
    let own = [(STACK_SIZE, &*stack), ("hugepage_text", NO_HUGEPAGE_TEXT)];
    let added: String = own.into_iter().filter(|(name, _)| !given.contains(name)).map(|(_, flag)| flag).collect();
    (!added.is_empty()).then(|| format!("{given}{added}").trim().to_owned())
}

/// Error message if [`prepare_absent_tpus`] returned false.
pub const TPUS_UNPREPARED: &str =
    "compiling for TPUs requires TPU_SKIP_MDS_QUERY=1 and ALLOW_MULTIPLE_LIBTPU_LOAD=1 in the environment";

/// Prepends flags to libtpu's flags, so that the user's flags take precedence. Call it before the process starts a
/// thread and before libtpu is loaded. Returns false if threads already exist.
pub fn prepend_libtpu_flags(arguments: &str) -> bool {
    let given = libtpu_flags();
    // The parent process has already added the flags.
    if given.starts_with(arguments) {
        return true;
    }
    let alone = std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    if alone {
        // SAFETY: this is the only thread, so nothing reads the environment concurrently.
        unsafe { std::env::set_var(ARGUMENTS, format!("{arguments} {given}").trim()) };
    }
    alone
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtpu_flags_are_added_unless_the_user_sets_them() {
        let (stack, pages) = ("--default_thread_stack_size=1048576", "--hugepage_text=false");
        let all = |given: &str| add_compile_only_flags(given);
        assert_eq!(all(""), Some(format!("{stack} {pages}")));
        assert_eq!(all("--a=1"), Some(format!("--a=1 {stack} {pages}")));
        let own_stack = "--default_thread_stack_size=9";
        assert_eq!(all(own_stack), Some(format!("{own_stack} {pages}")));
        assert_eq!(all("--hugepage_text=true --a"), Some(format!("--hugepage_text=true --a {stack}")));
        assert_eq!(all(&format!("{own_stack} --hugepage_text=true")), None);
        // The compile cache removes this flag from its keys, so the spelling must match.
        assert!(all("").is_some_and(|arguments| arguments.contains(NO_HUGEPAGE_TEXT)));
    }
}
