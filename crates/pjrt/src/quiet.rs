//! Environment variables of plugins, set before they are loaded.

/// Arguments that libtpu reads at its start.
const ARGUMENTS: &str = "LIBTPU_INIT_ARGS";

/// Keeps libtpu from moving its code into huge pages, and from an error line about it on kernels without them. Changes no program.
pub const NO_HUGEPAGE_TEXT: &str = " --hugepage_text=false";

/// Flag of the stack of libtpu's threads.
const STACK_SIZE: &str = "default_thread_stack_size";

/// Those of the user. None is lost for bytes that are no text.
fn given() -> String {
    std::env::var_os(ARGUMENTS).map_or_else(String::new, |given| given.to_string_lossy().into_owned())
}

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

/// Lets libtpu compile on a machine without TPUs, and beside other processes that have it loaded. Must be called before
/// the process starts a thread; false where that was too late and the user has not set the variables either.
pub fn prepare_absent_tpus() -> bool {
    // The last two stand for a machine that a topology made by name replaces; without them libtpu complains.
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
    let given = given();
    // The line about huge pages is harmless.
    let ready = wanted.is_empty() && given.contains(STACK_SIZE);
    wanted.extend(arguments_of_absent_tpus(&given).map(|arguments| (ARGUMENTS, arguments)));
    let alone = std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    if alone {
        for (name, value) in &wanted {
            // SAFETY: no other thread exists that could read the environment meanwhile.
            unsafe { std::env::set_var(name, value) };
        }
    }
    alone || ready
}

/// What libtpu's arguments become to compile for absent TPUs: the user's, and each of ours that those do not set. `None`: the
/// user's.
fn arguments_of_absent_tpus(given: &str) -> Option<String> {
    // The compiler's own threads have 64 KB of stack; deep fusions of TPU7x programs overflow it.
    let stack = format!(" --{STACK_SIZE}=1048576");
    let own = [(STACK_SIZE, &*stack), ("hugepage_text", NO_HUGEPAGE_TEXT)];
    let added: String = own.into_iter().filter(|(name, _)| !given.contains(name)).map(|(_, flag)| flag).collect();
    (!added.is_empty()).then(|| format!("{given}{added}").trim().to_owned())
}

/// Message where [`prepare_absent_tpus`] comes too late.
pub const TPUS_UNPREPARED: &str = "compiling for TPUs needs TPU_SKIP_MDS_QUERY=1 and ALLOW_MULTIPLE_LIBTPU_LOAD=1 set";

/// Adds to what libtpu reads at its start; what the user's environment says comes last, so that it holds. Must be called
/// before the process starts a thread and before libtpu is loaded; false where that was too late.
pub fn give_libtpu_arguments(arguments: &str) -> bool {
    let given = given();
    // A process that was started by one which gave them already.
    if given.starts_with(arguments) {
        return true;
    }
    let alone = std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    if alone {
        // SAFETY: no other thread exists that could read the environment meanwhile.
        unsafe { std::env::set_var(ARGUMENTS, format!("{arguments} {given}").trim()) };
    }
    alone
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_argument_of_absent_tpus_is_added_unless_it_is_given() {
        let (stack, pages) = ("--default_thread_stack_size=1048576", "--hugepage_text=false");
        let all = |given: &str| arguments_of_absent_tpus(given);
        assert_eq!(all(""), Some(format!("{stack} {pages}")));
        assert_eq!(all("--a=1"), Some(format!("--a=1 {stack} {pages}")));
        let own_stack = "--default_thread_stack_size=9";
        assert_eq!(all(own_stack), Some(format!("{own_stack} {pages}")));
        assert_eq!(all("--hugepage_text=true --a"), Some(format!("--hugepage_text=true --a {stack}")));
        assert_eq!(all(&format!("{own_stack} --hugepage_text=true")), None);
        // The compile cache leaves this out of what a program is filed under.
        assert!(all("").is_some_and(|arguments| arguments.contains(NO_HUGEPAGE_TEXT)));
    }
}
