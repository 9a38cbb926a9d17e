//! Trials of plugin files: a short-lived process of this program loads a new one first, so that a plugin that aborts or hangs
//! there is an error. A good result is kept by the file's checksum. Plugins also abort at a flag of the environment that they do
//! not know; where flags are set, the trial makes the plugin parse them, and its result is kept for these flags.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use super::hardware::hardware;
use super::plugin_flags;
use super::sealed::{replace, sha256, sha256_file};
use crate::failpoint;
use crate::pjrt::discover::Platform;
use crate::pjrt::{Error, Plugin, end_process};

/// Variable that names the file to a process that tries one.
const FILE: &str = "LTX2_TRY_PLUGIN";
/// Variable that is set in a process that tries a plugin for a run.
const TO_RUN: &str = "LTX2_TRY_PLUGIN_TO_RUN";
/// Time for a trial where nothing else is said: half a gigabyte may come over a network, and libtpu away from a TPU asks the
/// cloud's metadata server for minutes.
const PATIENCE: Duration = Duration::from_secs(600);
/// Time for parsing flags.
const FLAG_PATIENCE: Duration = Duration::from_secs(30);
/// Line that a trial prints when the plugin is loaded and will parse flags.
const LOADED: &str = "ltx2: the plugin is loaded";
/// Exit code of a trial whose file was refused in good order.
const REFUSED: i32 = 86;
/// Characters of a message that are told, at most.
const LONGEST: usize = 500;
/// Remedy of every failure.
const REMEDY: &str =
    "install another one with `ltx2 plugin install cpu|cuda|tpu`, or name one with LTX2_PJRT_PLUGIN=FILE.so";

/// This program, where it knows how to try a file.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// What a plugin is loaded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To run programs: a plugin for TPUs needs chips.
    Run,
    /// To compile, also for absent TPUs: a plugin for TPUs needs chips unless `TPU_SKIP_MDS_QUERY` is set.
    Compile,
}

/// Tries a file and ends the process, where it was started for that; otherwise new files are tried from here on. A program that
/// never calls this loads plugins at once: started again, it would do its own work.
pub(crate) fn begin() {
    if let Some(file) = std::env::var_os(FILE) {
        let purpose = if std::env::var_os(TO_RUN).is_some() { Purpose::Run } else { Purpose::Compile };
        let loaded = load_here(Path::new(&file), purpose);
        if let Ok(plugin) = &loaded
            && plugin_flags::are_set()
        {
            eprintln!("{LOADED}");
            // A plugin that hangs now hangs the run too, which has its own watchdog.
            thread::spawn(|| {
                thread::sleep(FLAG_PATIENCE);
                end_process(REFUSED)
            });
            plugin_flags::parse(plugin);
        }
        // Exit handlers of the plugin are no part of the trial.
        end_process(if loaded.is_err() { REFUSED } else { 0 });
    }
    if let Ok(program) = std::env::current_exe() {
        // Begun once a process.
        let _ = PROGRAM.set(program);
    }
}

/// Loads a plugin; a new file is tried first, for `limit` or [`PATIENCE`].
///
/// # Errors
/// Those of [`check`]; those of loading it.
pub(crate) fn load(path: &Path, limit: Option<Duration>, purpose: Purpose) -> Result<Plugin, Error> {
    check(path, limit, purpose)?;
    failpoint::within("plugin", "load", || load_here(path, purpose))
}

/// Tries a new plugin file, or new flags, without loading it into this process.
///
/// # Errors
/// A file that ends or holds up the process that tries it; a flag of the environment that it does not take.
pub(crate) fn check(path: &Path, limit: Option<Duration>, purpose: Purpose) -> Result<(), Error> {
    let Some(program) = PROGRAM.get() else { return Ok(()) };
    let attempt = || attempt(program, path, limit, purpose);
    let tried = match (folder(), plugin_flags::identity()) {
        (Some(folder), Some(flags)) => Known { folder, flags }.good_or(path, attempt),
        _ => attempt().map(drop),
    };
    tried.map_err(|fault| match fault {
        Fault::Load(reason) => Error::Load { plugin: path.into(), reason },
        Fault::Flags(reason) => Error::Flags { plugin: path.into(), reason },
    })
}

/// Loads a plugin into this process. libtpu looks for its chips for minutes where there are none, while it is initialised or, with
/// `TPU_SKIP_MDS_QUERY`, when a client is made: it is not initialised there, but to compile for absent chips.
fn load_here(path: &Path, purpose: Purpose) -> Result<Plugin, Error> {
    let check = |plugin: &Plugin| {
        let for_absent = purpose == Purpose::Compile && std::env::var_os("TPU_SKIP_MDS_QUERY").is_some();
        if !plugin.is_for_tpus() || for_absent {
            return Ok(());
        }
        let missing = |reason| Error::NoHardware { platform: Platform::Tpu.name(), reason };
        hardware(Platform::Tpu).map(drop).map_err(missing)
    };
    let plugin = Plugin::load_if(path, check)?;
    // It may have been loaded before, to compile.
    check(&plugin)?;
    Ok(plugin)
}

/// Why a trial failed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Fault {
    Load(String),
    Flags(String),
}

/// The folder of results; none where the environment wants nothing kept.
fn folder() -> Option<PathBuf> {
    let given = |name: &str| std::env::var_os(name).filter(|value: &OsString| !value.is_empty()).map(PathBuf::from);
    if given("LTX2_COMPILE_CACHE").is_some_and(|value| value == Path::new("off")) {
        return None;
    }
    let cache = given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")))?;
    Some(cache.join("ltx2/plugins"))
}

/// Results that are kept: an empty file by the checksum of each good plugin and the flags that it parsed, and by place, size and
/// time of each plugin's file one with its checksum, so that it is read once.
struct Known {
    folder: PathBuf,
    /// Identity of the environment's flags; empty where none are set.
    flags: String,
}

impl Known {
    /// Whether a file is known as good, or else is so by a trial, which says whether that was seen.
    fn good_or(&self, path: &Path, trial: impl FnOnce() -> Result<bool, Fault>) -> Result<(), Fault> {
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
            tracing::debug!("the trial of a plugin is not kept in {}: {error}", self.folder.display());
        }
    }
}

/// A hash of place, size and time of a file.
fn identity(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let about = fs::metadata(&path).ok()?;
    let [seconds, nanoseconds] = [about.mtime(), about.mtime_nsec()];
    let text = format!("{}\n{} {} {seconds}.{nanoseconds}", path.display(), about.len(), about.ino());
    Some(sha256(text.as_bytes()))
}

/// Loads a file in a process of its own. False where that said nothing: it could not be started, or the file was refused, for
/// which loading it has the reason.
///
/// # Errors
/// The end of the process, or its hanging.
fn attempt(program: &Path, path: &Path, limit: Option<Duration>, purpose: Purpose) -> Result<bool, Fault> {
    let (limit, started) = (limit.unwrap_or(PATIENCE), Instant::now());
    let untried = |error: std::io::Error| {
        tracing::debug!("{} is loaded without a trial: {error}", path.display());
        Ok(false)
    };
    let (mut said, log) = match tempfile::tempfile().and_then(|file| Ok((file.try_clone()?, file))) {
        Ok(files) => files,
        Err(error) => return untried(error),
    };
    let mut command = Command::new(program);
    command.env(FILE, path).env_remove("LTX2_COMPILE_LOG").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    match purpose {
        Purpose::Run => command.env(TO_RUN, "1"),
        Purpose::Compile => command.env_remove(TO_RUN),
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
                // It may have ended just now.
                let _ = child.kill();
                let _ = child.wait();
                let seconds = limit.as_secs();
                let hung = format!("the process that tried it hung for {seconds} s while it was loaded; {REMEDY}");
                return Err(Fault::Load(hung));
            }
            Ok(None) => thread::sleep(Duration::from_millis(5)),
            Err(error) => return untried(error),
        }
    }
}

fn outcome(status: ExitStatus, said: &mut File) -> Result<bool, Fault> {
    match status.code() {
        Some(0) => return Ok(true),
        Some(REFUSED) => return Ok(false),
        _ => {}
    }
    let mut bytes = Vec::new();
    // A message that cannot be read is none.
    let _ = said.rewind().and_then(|()| said.read_to_end(&mut bytes));
    let text = String::from_utf8_lossy(&bytes);
    if let Some(reason) = plugin_flags::fault(&text).filter(|_| plugin_flags::are_set()) {
        return Err(Fault::Flags(reason));
    }
    if text.contains(LOADED) {
        // It is loaded; the run meets what ended the trial behind that.
        return Ok(false);
    }
    let last: String =
        text.lines().rev().map(str::trim).find(|l| !l.is_empty()).unwrap_or("").chars().take(LONGEST).collect();
    let words = if last.is_empty() { String::new() } else { format!(": {last}") };
    let ended = format!("the process that tried it ended with {status} while it was loaded{words}; {REMEDY}");
    Err(Fault::Load(ended))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_new_file_is_tried() {
        let folder = tempfile::tempdir().unwrap();
        let known = Known { folder: folder.path().join("plugins"), flags: String::new() };
        let file = folder.path().join("plugin.so");
        let tries = std::cell::Cell::new(0);
        let fault = Fault::Load("aborts".into());
        let (aborts, aborted) = (|| Err(fault.clone()), Err(fault.clone()));
        let tried = |outcome: Result<bool, Fault>| {
            let before = tries.get();
            let result = known.good_or(&file, || {
                tries.set(tries.get() + 1);
                outcome
            });
            (result, tries.get() - before)
        };
        fs::write(&file, "one").unwrap();
        assert_eq!(tried(aborts()), (aborted.clone(), 1));
        assert_eq!(tried(Ok(false)), (Ok(()), 1), "nothing was kept of a failure");
        assert_eq!(tried(Ok(true)), (Ok(()), 1), "nor of a trial that said nothing");
        assert_eq!(tried(aborts()), (Ok(()), 0), "it is known");
        fs::write(&file, "two, longer").unwrap();
        assert_eq!(tried(aborts()), (aborted.clone(), 1), "another file in its place");
        let flags = Known { folder: known.folder.clone(), flags: "-flags".into() };
        assert_eq!(flags.good_or(&file, aborts), aborted, "the same file with flags");
        assert_eq!(flags.good_or(&file, || Ok(true)), Ok(()));
        assert_eq!(flags.good_or(&file, aborts), Ok(()));
        // The first again, elsewhere: by its checksum.
        let copy = folder.path().join("copy.so");
        fs::write(&copy, "one").unwrap();
        assert_eq!(known.good_or(&copy, || panic!("it is known")), Ok(()));
        fs::remove_dir_all(&known.folder).unwrap();
        fs::write(&known.folder, "no folder").unwrap();
        assert_eq!([tried(Ok(true)).1, tried(Ok(true)).1], [1, 1], "results that cannot be kept cost a trial each");
    }
}
