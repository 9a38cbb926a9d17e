//! Trial loads of plugin files: a short-lived child process loads a new plugin first. If the plugin aborts or hangs
//! while loading, this process reports an error instead of aborting or hanging. A success is stored under the checksum
//! of the file. Plugins also abort on unknown flags in the environment. If flags are set, the trial therefore makes the
//! plugin parse them, and the result is stored for these flags.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use super::checksummed_file::{replace, sha256, sha256_file};
use super::platforms::spec;
use super::plugin_flags;
use ltx2_base::failpoint;
use ltx2_pjrt::discover::{PLUGIN_VARIABLE, Platform};
use ltx2_pjrt::{PjrtError, Plugin, end_process};

/// Environment variable with the plugin file, set in a trial process.
const FILE: &str = "LTX2_TRY_PLUGIN";
/// Environment variable that is set in a trial process if the plugin is loaded to run programs.
const TO_RUN: &str = "LTX2_TRY_PLUGIN_TO_RUN";
/// Default time limit of a trial. It is long, because half a gigabyte may be read over a network, and without a TPU
/// libtpu queries the cloud's metadata server for minutes.
const PATIENCE: Duration = Duration::from_secs(600);
/// Time limit for parsing flags.
const FLAG_PATIENCE: Duration = Duration::from_secs(30);
/// Line that a trial prints once the plugin is loaded, before it parses flags.
const LOADED: &str = "ltx2: the plugin is loaded";
/// Exit code of a trial in which loading returned an error.
const REFUSED: i32 = 86;
/// Maximum number of characters quoted from a message.
const LONGEST: usize = 500;
/// Path of this executable; set if it can act as a trial process.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Purpose for which a plugin is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadPurpose {
    /// Running programs: a TPU plugin needs chips.
    Run,
    /// Compiling, possibly for absent TPUs: a TPU plugin needs chips unless `TPU_SKIP_MDS_QUERY` is set.
    Compile,
}

/// In a trial process, loads the plugin and exits. Otherwise enables trials for later loads. A program that never calls
/// this loads plugins without a trial, because its child process would do the program's work instead of the trial.
pub fn begin() {
    if let Some(file) = std::env::var_os(FILE) {
        let purpose = if std::env::var_os(TO_RUN).is_some() { LoadPurpose::Run } else { LoadPurpose::Compile };
        let loaded = load_here(Path::new(&file), purpose);
        if let Ok(plugin) = &loaded
            && plugin_flags::are_set()
        {
            eprintln!("{LOADED}");
            // If the plugin hangs while parsing, stop the trial without a result. The run itself has a watchdog.
            thread::spawn(|| {
                thread::sleep(FLAG_PATIENCE);
                end_process(REFUSED)
            });
            plugin_flags::parse(plugin);
        }
        // Skip the plugin's exit handlers, which are not part of the trial.
        end_process(if loaded.is_err() { REFUSED } else { 0 });
    }
    if let Ok(program) = std::env::current_exe() {
        // Fails if it is already set, to the same path.
        let _ = PROGRAM.set(program);
    }
}

/// Loads a plugin. If the file is new, a trial process loads it first, for at most `limit` (`None`: ten minutes).
pub fn load(path: &Path, limit: Option<Duration>, purpose: LoadPurpose) -> Result<Plugin, PjrtError> {
    check(path, limit, purpose)?;
    failpoint::within("plugin", "load", || load_here(path, purpose))
}

/// Runs a trial of a new plugin file, or of new flags, without loading the file into this process. Fails if the plugin
/// crashes or hangs the trial process, or rejects a flag that is set in the environment.
pub fn check(path: &Path, limit: Option<Duration>, purpose: LoadPurpose) -> Result<(), PjrtError> {
    let Some(program) = PROGRAM.get() else { return Ok(()) };
    let attempt = || attempt(program, path, limit, purpose);
    let tried = match (folder(), plugin_flags::identity()) {
        (Some(folder), Some(flags)) => TrialResults { folder, flags }.check_or_try(path, attempt),
        _ => attempt().map(drop),
    };
    tried.map_err(|fault| match fault {
        TrialFailure::Load(reason) => PjrtError::Load { plugin: path.into(), reason },
        TrialFailure::Flags(reason) => PjrtError::Flags { plugin: path.into(), reason },
    })
}

/// Loads a plugin into this process. On a machine without TPU chips, libtpu searches for chips for minutes: during
/// initialization or, if `TPU_SKIP_MDS_QUERY` is set, when a client is created. On such a machine, libtpu is therefore
/// initialized only for compiling with `TPU_SKIP_MDS_QUERY` set.
fn load_here(path: &Path, purpose: LoadPurpose) -> Result<Plugin, PjrtError> {
    let check = |plugin: &Plugin| {
        let for_absent = purpose == LoadPurpose::Compile && std::env::var_os("TPU_SKIP_MDS_QUERY").is_some();
        if !plugin.is_for_tpus() || for_absent {
            return Ok(());
        }
        let missing = |reason| PjrtError::NoHardware { platform: Platform::Tpu.name(), reason };
        (spec(Platform::Tpu).hardware)().map(drop).map_err(missing)
    };
    let plugin = Plugin::load_if(path, check)?;
    // `load_if` skips the check if the plugin was already loaded, for example for compiling.
    check(&plugin)?;
    Ok(plugin)
}

/// Returns the advice at the end of every error.
fn remedy() -> String {
    format!("install another plugin with `{}`, or set {PLUGIN_VARIABLE}=FILE.so", Platform::install_command())
}

/// Reason why a trial failed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TrialFailure {
    Load(String),
    Flags(String),
}

/// Returns the directory of stored results; `None` if the environment disables caching.
fn folder() -> Option<PathBuf> {
    let given = |name: &str| std::env::var_os(name).filter(|value: &OsString| !value.is_empty()).map(PathBuf::from);
    if given("LTX2_COMPILE_CACHE").is_some_and(|value| value == Path::new("off")) {
        return None;
    }
    let cache = given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")))?;
    Some(cache.join("ltx2/plugins"))
}

/// Stored trial results. A successful trial is an empty file, named after the plugin's checksum and the flags. For each
/// plugin file, a second file contains the checksum, so that a plugin is hashed only once. Its name is a hash of the
/// plugin's path, size, inode and modification time.
struct TrialResults {
    folder: PathBuf,
    /// Hash of the flags that are set in the environment; empty if no flags are set.
    flags: String,
}

impl TrialResults {
    /// Succeeds if a success is stored for the file, or if `trial` succeeds. `trial` returns whether its success is
    /// conclusive; only a conclusive success is stored.
    fn check_or_try(
        &self,
        path: &Path,
        trial: impl FnOnce() -> Result<bool, TrialFailure>,
    ) -> Result<(), TrialFailure> {
        let Some(about) = identity(path) else { return trial().map(drop) };
        let about = self.folder.join(format!("file-{about}"));
        let result = |checksum: &str| self.folder.join(format!("{checksum}{}", self.flags));
        let is_good = |checksum: &str| !checksum.is_empty() && result(checksum).exists();
        if fs::read_to_string(&about).is_ok_and(|checksum| is_good(&checksum)) {
            return Ok(());
        }
        let Ok(checksum) = sha256_file(path) else { return trial().map(drop) };
        if !is_good(&checksum) {
            if !trial()? {
                return Ok(());
            }
            self.keep(&result(&checksum), "");
        }
        self.keep(&about, &checksum);
        Ok(())
    }

    fn keep(&self, path: &Path, text: &str) {
        if let Err(error) = replace(path, "plugin", &[text.as_bytes()]) {
            tracing::debug!("cannot store a plugin trial result in {}: {error}", self.folder.display());
        }
    }
}

/// Returns a hash of a file's path, size, inode and modification time.
fn identity(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let about = fs::metadata(&path).ok()?;
    let [seconds, nanoseconds] = [about.mtime(), about.mtime_nsec()];
    let text = format!("{}\n{} {} {seconds}.{nanoseconds}", path.display(), about.len(), about.ino());
    Some(sha256(text.as_bytes()))
}

/// Loads a file in a child process. Returns `false` if the trial was inconclusive: the process could not be started, or
/// loading returned an error, which this process reports when it loads the file. Fails if the process crashed or hung.
fn attempt(program: &Path, path: &Path, limit: Option<Duration>, purpose: LoadPurpose) -> Result<bool, TrialFailure> {
    let (limit, started) = (limit.unwrap_or(PATIENCE), Instant::now());
    let untried = |error: std::io::Error| {
        tracing::debug!("loading {} without a trial process: {error}", path.display());
        Ok(false)
    };
    let (mut said, log) = match tempfile::tempfile().and_then(|file| Ok((file.try_clone()?, file))) {
        Ok(files) => files,
        Err(error) => return untried(error),
    };
    let mut command = Command::new(program);
    command.env(FILE, path).env_remove("LTX2_COMPILE_LOG").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    match purpose {
        LoadPurpose::Run => command.env(TO_RUN, "1"),
        LoadPurpose::Compile => command.env_remove(TO_RUN),
    };
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return untried(error),
    };
    failpoint::reach("plugin", "trial");
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return outcome(status, &mut said),
            Ok(None) if started.elapsed() > limit => {
                // The process may have just exited by itself.
                let _ = child.kill();
                let _ = child.wait();
                let seconds = limit.as_secs();
                let hung = format!("a trial process hung for {seconds} s while loading the plugin; {}", remedy());
                return Err(TrialFailure::Load(hung));
            }
            Ok(None) => thread::sleep(Duration::from_millis(5)),
            Err(error) => return untried(error),
        }
    }
}

fn outcome(status: ExitStatus, said: &mut File) -> Result<bool, TrialFailure> {
    match status.code() {
        Some(0) => return Ok(true),
        Some(REFUSED) => return Ok(false),
        _ => {}
    }
    let mut bytes = Vec::new();
    // An unreadable message counts as empty.
    let _ = said.rewind().and_then(|()| said.read_to_end(&mut bytes));
    let text = String::from_utf8_lossy(&bytes);
    if let Some(reason) = plugin_flags::fault(&text).filter(|_| plugin_flags::are_set()) {
        return Err(TrialFailure::Flags(reason));
    }
    if text.contains(LOADED) {
        // Loading succeeded; whatever ended the trial afterwards will also occur in the run and be reported there.
        return Ok(false);
    }
    let last: String =
        text.lines().rev().map(str::trim).find(|l| !l.is_empty()).unwrap_or("").chars().take(LONGEST).collect();
    let words = if last.is_empty() { String::new() } else { format!(": {last}") };
    let ended = format!("a trial process ended with {status} while loading the plugin{words}; {}", remedy());
    Err(TrialFailure::Load(ended))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_new_plugin_files_run_a_trial() {
        let folder = tempfile::tempdir().unwrap();
        let known = TrialResults { folder: folder.path().join("plugins"), flags: String::new() };
        let file = folder.path().join("plugin.so");
        let tries = std::cell::Cell::new(0);
        let fault = TrialFailure::Load("aborts".into());
        let (aborts, aborted) = (|| Err(fault.clone()), Err(fault.clone()));
        let tried = |outcome: Result<bool, TrialFailure>| {
            let before = tries.get();
            let result = known.check_or_try(&file, || {
                tries.set(tries.get() + 1);
                outcome
            });
            (result, tries.get() - before)
        };
        fs::write(&file, "one").unwrap();
        assert_eq!(tried(aborts()), (aborted.clone(), 1));
        assert_eq!(tried(Ok(false)), (Ok(()), 1), "a failure is not stored");
        assert_eq!(tried(Ok(true)), (Ok(()), 1), "an inconclusive trial is not stored");
        assert_eq!(tried(aborts()), (Ok(()), 0), "the file is known to be good");
        fs::write(&file, "two, longer").unwrap();
        assert_eq!(tried(aborts()), (aborted.clone(), 1), "another file in its place");
        let flags = TrialResults { folder: known.folder.clone(), flags: "-flags".into() };
        assert_eq!(flags.check_or_try(&file, aborts), aborted, "the same file with flags");
        assert_eq!(flags.check_or_try(&file, || Ok(true)), Ok(()));
        assert_eq!(flags.check_or_try(&file, aborts), Ok(()));
        // A copy of the first file is recognized by its checksum.
        let copy = folder.path().join("copy.so");
        fs::write(&copy, "one").unwrap();
        assert_eq!(known.check_or_try(&copy, || panic!("the file is known to be good")), Ok(()));
        fs::remove_dir_all(&known.folder).unwrap();
        fs::write(&known.folder, "no folder").unwrap();
        assert_eq!(
            [tried(Ok(true)).1, tried(Ok(true)).1],
            [1, 1],
            "if results cannot be stored, every load runs a trial"
        );
    }
}
