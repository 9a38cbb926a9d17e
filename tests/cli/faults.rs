//! Injects one fault per seed into any plugin call of a run. The run must either give the right result, or end soon
//! with one clear error line and no partial files.
//!
//! `LTX2_FAULT_SEED=N` replays one seed and prints the output.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::standin::{self, Fault, INTERNAL, RESOURCE_EXHAUSTED, Standin};
use crate::support::{self, full, needs};
use rustix::process::{Pid, test_kill_process_group};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Number of seeds of `make test` and of `make test-full`.
const SEEDS: [usize; 2] = [10, 1000];
/// Number of concurrent runs: runs with a dropped event mostly wait.
const AT_ONCE: usize = 4;
/// Timeout after which a process counts as hung, even on a busy machine.
const HANGS: Duration = Duration::from_secs(120);
/// `runtime.watchdog` in seconds; longer than any injected delay and any normal wait on a busy machine.
const LIMIT: u64 = 5;
const DELAYS: std::ops::Range<u64> = 50..500;
/// Error message of a failing call.
const MESSAGE: &str = "a planted fault";
/// Program that runs with an incomplete cache compile: the smallest.
const COMPILED: &str = "prepare";

/// Functions that return an event, which can be dropped.
const WITH_EVENTS: [&str; 4] = [
    "PJRT_AsyncHostToDeviceTransferManager_TransferData",
    "PJRT_Buffer_ReadyEvent",
    "PJRT_Buffer_ToHostBuffer",
    "PJRT_Client_BufferFromHostBuffer",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Action {
    Fail,
    Exhausted,
    Delay,
    Abort,
    Drop,
}

/// Faults of any call, then the one fault of calls that return an event.
const ACTIONS: [Action; 5] = [Action::Fail, Action::Exhausted, Action::Delay, Action::Abort, Action::Drop];

/// Number of calls per function during a run: with a full cache, and with one program to compile.
type Calls = BTreeMap<String, [usize; 2]>;

/// Fault selected by a seed.
#[derive(Debug)]
struct Drawn {
    seed: usize,
    action: Action,
    function: String,
    nth: usize,
    delay: u64,
    /// Whether a program must be compiled: the function is not called otherwise.
    cold: bool,
}

impl Drawn {
    /// Selects a fault. Each action gets a fifth of the seeds. Faults of any call cycle through all functions, and over
    /// many seeds through all pairs of function and action.
    fn from_seed(seed: usize, calls: &Calls) -> Self {
        let (round, action) = (seed / ACTIONS.len(), ACTIONS[seed % ACTIONS.len()]);
        let any = ACTIONS.len() - 1;
        let function = if action == Action::Drop {
            let called: Vec<_> = WITH_EVENTS.iter().filter(|name| calls.contains_key(**name)).collect();
            (*called[round % called.len()]).to_string()
        } else {
            let turn = round * any + seed % ACTIONS.len();
            // If the number of functions is even, shift by one each round, so that an action reaches other functions.
            // Functions that the Drop action also covers come last.
            let step = if calls.len().is_multiple_of(2) { turn / calls.len() } else { 0 };
            let (last, first): (Vec<_>, Vec<_>) = calls.keys().partition(|name| takes(Action::Drop, name));
            [first, last].concat()[(turn + step) % calls.len()].clone()
        };
        let [warm, cold] = calls[&function];
        let drawn = |what: &str, below: u64| {
            let mut hasher = DefaultHasher::new();
            (seed, what).hash(&mut hasher);
            hasher.finish() % below
        };
        let nth = drawn("call", if warm > 0 { warm } else { cold } as u64) as usize + 1;
        let delay = DELAYS.start + drawn("delay", DELAYS.end - DELAYS.start);
        Drawn { seed, action, function, nth, delay, cold: warm == 0 }
    }

    fn fault(&self) -> Fault {
        match self.action {
            Action::Fail => Fault::Fail(INTERNAL, MESSAGE),
            Action::Exhausted => Fault::Fail(RESOURCE_EXHAUSTED, MESSAGE),
            Action::Delay => Fault::Delay(self.delay),
            Action::Abort => Fault::Abort,
            Action::Drop => Fault::Drop,
        }
    }
}

/// Video of a run without faults, and the cache that all runs start with.
struct Clean {
    video: Vec<u8>,
    hashes: Value,
    cache: PathBuf,
    folder: TempDir,
}

/// Result of a run.
struct Ended {
    status: ExitStatus,
    said: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Right,
    OneLine,
}

macro_rules! ensure {
    ($holds:expr, $($why:tt)*) => {
        if !$holds {
            return Err(format!($($why)*));
        }
    };
}

/// Runs `ltx2` in a folder, with its cache; writes `out/out.mp4`.
fn run(folder: &Path, standin: &Standin, more: &[&str]) -> Result<Ended, String> {
    let mut command = support::ltx2();
    command.args(["generate", "-c", support::tiny(), "--set", &format!("runtime.watchdog={LIMIT}"), "-o"]);
    command.arg(folder.join("out/out.mp4")).args(more);
    // In a process group, which must be empty afterwards.
    let command = standin.give(&mut command).process_group(0);
    command.env("LTX2_COMPILE_CACHE", folder.join("cache"));
    ended(command)
}

fn ended(command: &mut Command) -> Result<Ended, String> {
    let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts");
    let group = Pid::from_child(&process);
    let mut stderr = process.stderr.take().expect("piped");
    let reader = thread::spawn(move || {
        let mut said = String::new();
        stderr.read_to_string(&mut said).map(|_| said)
    });
    let started = Instant::now();
    let status = loop {
        if let Some(status) = process.try_wait().expect("waits") {
            break status;
        }
        if started.elapsed() > HANGS {
            process.kill().expect("killed");
            process.wait().expect("ends");
            return Err(format!("the process still runs after {HANGS:?}: {:?}", reader.join()));
        }
        thread::sleep(Duration::from_millis(5));
    };
    ensure!(test_kill_process_group(group).is_err(), "a process of it is left");
    let said = reader.join().expect("reads").map_err(|error| format!("reading its stderr: {error}"))?;
    Ok(Ended { status, said })
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> = entries.map(|e| e.expect("one").file_name().to_string_lossy().into()).collect();
    names.sort();
    names
}

fn hashes(video: &Path) -> Result<Value, String> {
    let text = fs::read_to_string(video.with_extension("json")).map_err(|error| format!("sidecar: {error}"))?;
    let sidecar: Value = serde_json::from_str(&text).map_err(|error| format!("sidecar: {error}"))?;
    // Include the plugin version: no other plugin may replace the failing one.
    Ok(json!([sidecar["sha256"], sidecar["versions"]["plugin"]]))
}

impl Clean {
    /// Fills the cache from the shared one, then counts the calls with a full cache and with one program missing.
    fn new() -> (Self, Calls) {
        let folder = tempfile::tempdir().expect("a folder");
        let here = |name: &str| folder.path().join(name);
        let standin = Standin::new().calls(&here("calls"));
        share_cache(folder.path());
        let mut calls = Calls::new();
        let mut clean = None;
        for round in 0..3 {
            fs::create_dir_all(here("out")).expect("a folder");
            if round == 1 {
                // From here on, use a separate cache.
                fs::remove_file(here("cache")).expect("removed");
                fs::create_dir(here("cache")).expect("a folder");
                for entry in entries(&standin::programs()) {
                    fs::copy(&entry, here("cache").join(entry.file_name().expect("a name"))).expect("copied");
                }
            }
            if round == 2 {
                remove_program(&here("cache"));
            }
            let ended = run(folder.path(), &standin, &[]).expect("ends");
            assert!(ended.status.success(), "{}", ended.said);
            if round > 0 {
                for (name, count) in counted(&here("calls")) {
                    calls.entry(name).or_default()[round - 1] = count;
                }
            }
            let video =
                (fs::read(here("out/out.mp4")).expect("a video"), hashes(&here("out/out.mp4")).expect("hashes"));
            assert!(clean.as_ref().is_none_or(|clean| *clean == video), "the same each time");
            clean = Some(video);
            fs::remove_dir_all(here("out")).expect("removed");
        }
        let (video, hashes) = clean.expect("three");
        (Clean { video, hashes, cache: here("cache"), folder }, calls)
    }

    /// Checks that the folder contains exactly the right video and its sidecar.
    fn is_right(&self, folder: &Path) -> Result<(), String> {
        let names = names(&folder.join("out"));
        ensure!(names == ["out.json", "out.mp4"], "{names:?} are there");
        let video = folder.join("out/out.mp4");
        ensure!(hashes(&video)? == self.hashes, "other frames or samples");
        ensure!(fs::read(&video).expect("a video") == self.video, "another file");
        Ok(())
    }

    fn try_fault(&self, drawn: &Drawn) -> Result<Outcome, String> {
        let folder = tempfile::tempdir_in(self.folder.path()).expect("a folder");
        let here = |name: &str| folder.path().join(name);
        fs::create_dir(here("out")).expect("a folder");
        fs::create_dir(here("cache")).expect("a folder");
        for entry in entries(&self.cache) {
            // A run replaces entries by renaming, so hard links keep the entries of other runs.
            fs::hard_link(&entry, here("cache").join(entry.file_name().expect("a name"))).expect("linked");
        }
        if drawn.cold {
            remove_program(&here("cache"));
        }
        let standin = Standin::new().at(&drawn.function, drawn.nth, &drawn.fault()).log(&here("log"));
        let ended = run(folder.path(), &standin, &[])?;
        let outcome =
            self.judge(drawn, folder.path(), &ended).map_err(|why| format!("{why}; it said: {}", ended.said))?;
        if drawn.cold {
            // The cache that the run wrote contains no partial entry that the next run uses.
            let again = run(folder.path(), &Standin::new(), &["--force"])?;
            ensure!(again.status.success(), "the next run: {}", again.said);
            ensure!(!again.said.contains("recompiling"), "an entry is damaged: {}", again.said);
            ensure!(hashes(&here("out/out.mp4"))? == self.hashes, "the next run has other frames or samples");
        }
        Ok(outcome)
    }

    fn judge(&self, drawn: &Drawn, folder: &Path, ended: &Ended) -> Result<Outcome, String> {
        ensure!(folder.join("log").exists(), "the call never came");
        let [out, cache] = ["out", "cache"].map(|name| names(&folder.join(name)));
        let temporary: Vec<_> = out.iter().chain(&cache).filter(|name| name.starts_with(".ltx2-")).collect();
        ensure!(temporary.is_empty(), "{temporary:?} are left");
        for word in ["panicked", "backtrace", "thread '"] {
            ensure!(!ended.said.contains(word), "a panic");
        }
        if ended.status.success() {
            ensure!(drawn.action != Action::Abort, "an abort that is none");
            return self.is_right(folder).map(|()| Outcome::Right);
        }
        ensure!(ended.status.code() == Some(1), "{}", ended.status);
        ensure!(drawn.action != Action::Delay, "a delay is no error");
        // A plugin may abort after the work is complete.
        match drawn.action == Action::Abort && !out.is_empty() {
            true => self.is_right(folder)?,
            false => ensure!(out.is_empty(), "{out:?} are left"),
        }
        let errors: Vec<&str> = ended.said.lines().filter_map(|line| line.strip_prefix("error: ")).collect();
        let [error] = errors[..] else { return Err("not one line says it".into()) };
        let says = match drawn.action {
            Action::Fail => error.contains(&format!("{} failed (INTERNAL): {MESSAGE}", drawn.function)),
            Action::Drop => error.contains(&format!(" device 0 (cpu) has not finished after {LIMIT} s")),
            Action::Abort => {
                error.contains(" aborted this process: ") || error.starts_with("this process was aborted: ")
            }
            _ => error.contains(MESSAGE) && error.contains("RESOURCE_EXHAUSTED"),
        };
        ensure!(says, "the line does not name what failed");
        ensure!(ended.said.trim_end().lines().last() == Some(&format!("error: {error}")), "lines behind the error");
        Ok(Outcome::OneLine)
    }
}

/// Links the shared cache into a folder.
fn share_cache(folder: &Path) {
    let shared = standin::programs();
    fs::create_dir_all(&shared).expect("a folder");
    symlink(shared, folder.join("cache")).expect("a link");
}

/// Returns the number of calls per function.
fn counted(file: &Path) -> BTreeMap<String, usize> {
    let text = fs::read_to_string(file).expect("counted");
    let counts = text.lines().filter_map(|line| line.split_once(' '));
    counts
        .map(|(name, count)| (name.into(), count.parse().expect("a number")))
        .filter(|(_, count)| *count > 0)
        .collect()
}

/// Returns the entries of a cache.
fn entries(cache: &Path) -> Vec<PathBuf> {
    names(cache).iter().filter(|name| name.ends_with(".pjrt")).map(|name| cache.join(name)).collect()
}

/// Removes one program from a cache.
fn remove_program(cache: &Path) {
    let before = entries(cache);
    for path in &before {
        if support::header(path)["name"] == COMPILED {
            fs::remove_file(path).expect("removed");
        }
    }
    assert!(entries(cache).len() < before.len(), "an entry of {COMPILED}");
}

/// Returns whether the action applies to the function: only returned events can be dropped.
fn takes(action: Action, function: &str) -> bool {
    action != Action::Drop || WITH_EVENTS.contains(&function)
}

/// Formats a table of functions and actions with the number of seeds of each pair.
fn table(calls: &Calls, drawn: &[Drawn]) -> String {
    let mut table = format!("{:52}{}\n", "", ACTIONS.map(|action| format!("{action:?}").to_lowercase()).join("  "));
    for function in calls.keys() {
        let counts = ACTIONS.map(|action| {
            let width = format!("{action:?}").len();
            let seeds = drawn.iter().filter(|one| one.action == action && one.function == *function).count();
            format!("{:>width$}", if takes(action, function) { seeds.to_string() } else { "-".to_string() })
        });
        writeln!(table, "{function:52}{}", counts.join("  ")).expect("a string takes all");
    }
    table
}

/// Fails unless every action was tested equally often; in full test runs, with every function.
fn assert_covered(calls: &Calls, drawn: &[Drawn]) {
    for function in calls.keys().filter(|_| full()) {
        let met = |action: &Action| drawn.iter().any(|one| one.action == *action && one.function == *function);
        let missing: Vec<_> = ACTIONS.iter().filter(|action| takes(**action, function) && !met(action)).collect();
        assert!(missing.is_empty(), "{function}: {missing:?}");
    }
    let each = ACTIONS.map(|action| drawn.iter().filter(|one| one.action == action).count());
    assert!(each.iter().all(|count| *count == drawn.len() / ACTIONS.len()), "evenly: {each:?}");
}

#[needs(cpu)]
fn plugin_fault_gives_one_error_or_correct_result() {
    let (clean, calls) = Clean::new();
    let replayed = std::env::var("LTX2_FAULT_SEED").ok().map(|seed| seed.parse().expect("LTX2_FAULT_SEED is a number"));
    let seeds = replayed.map_or(0..SEEDS[usize::from(full())], |seed| seed..seed + 1);
    let drawn: Vec<Drawn> = seeds.map(|seed| Drawn::from_seed(seed, &calls)).collect();
    let (next, ends) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(one) = drawn.get(next.fetch_add(1, Ordering::Relaxed)) {
            let end = clean.try_fault(one);
            if replayed.is_some() || end.is_err() {
                eprintln!("{one:?}: {end:?}");
            }
            ends.lock().expect("no panic").push((one, end));
        }
    };
    thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(work))));
    let ends = ends.into_inner().expect("no panic");
    let count = |wanted: Outcome| ends.iter().filter(|(_, end)| end.as_ref() == Ok(&wanted)).count();
    let [right, line] = [Outcome::Right, Outcome::OneLine].map(count);
    eprint!("{}", table(&calls, &drawn));
    eprintln!("{} faults in {} functions: {right} right, {line} one line", drawn.len(), calls.len());
    let wrong: Vec<_> = ends.iter().filter(|(_, end)| end.is_err()).map(|(one, _)| one.seed).collect();
    assert!(wrong.is_empty(), "LTX2_FAULT_SEED=N replays these: {wrong:?}");
    assert_eq!(right + line, drawn.len(), "every seed ran");
    if replayed.is_none() {
        assert_covered(&calls, &drawn);
    }
}

/// Functions that create an object, and the function that destroys it.
const OBJECTS: [(&[&str], &str); 5] = [
    (&["PJRT_Client_Create"], "PJRT_Client_Destroy"),
    (&["PJRT_Client_Compile", "PJRT_Executable_DeserializeAndLoad"], "PJRT_LoadedExecutable_Destroy"),
    (&["PJRT_LoadedExecutable_GetExecutable"], "PJRT_Executable_Destroy"),
    (&["PJRT_Client_CreateBuffersForAsyncHostToDevice"], "PJRT_AsyncHostToDeviceTransferManager_Destroy"),
    (&WITH_EVENTS, "PJRT_Event_Destroy"),
];

#[needs(cpu)]
fn every_plugin_object_is_destroyed() {
    let folder = tempfile::tempdir().expect("a folder");
    share_cache(folder.path());
    let ended = run(folder.path(), &Standin::new().calls(&folder.path().join("calls")), &[]).expect("ends");
    assert!(ended.status.success(), "{}", ended.said);
    let calls = counted(&folder.path().join("calls"));
    let count = |name: &str| calls.get(name).copied().unwrap_or_default();
    for (made, destroy) in OBJECTS {
        let made: usize = made.iter().map(|name| count(name)).sum();
        assert_eq!((made, made > 0), (count(destroy), true), "{destroy}");
    }
    // All other destroyed buffers are outputs of executions.
    let uploaded =
        ["PJRT_Client_BufferFromHostBuffer", "PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer"].map(count);
    let outputs = count("PJRT_Buffer_Destroy").checked_sub(uploaded.iter().sum()).expect("as many as were made");
    assert!(outputs >= count("PJRT_LoadedExecutable_Execute"), "{outputs} outputs");
}
