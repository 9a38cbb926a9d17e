//! Devices that hang, fail or abort the process, simulated by the stand-in plugin: a run exits promptly with one error
//! line that says where it failed, and resumes from its checkpoint.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::support::standin::{Fault, INTERNAL, Standin, UNAVAILABLE};
use crate::support::{self, needs};
use ltx2::pipeline::output::denoise_checkpoint;
use ltx2::runtime::processes::store::StoreServer;
use tempfile::TempDir;

/// Timeout after which a process counts as hung, even on a busy machine.
const HANGS: Duration = Duration::from_secs(120);
/// Short watchdog limit that nothing else reaches, even on a busy machine.
const SHORT_WATCHDOG: &str = "runtime.watchdog=2";

/// Running `ltx2` process of the `tiny` configuration.
struct Run {
    process: Child,
    said: JoinHandle<String>,
}

/// Result of a run.
struct Ended {
    status: ExitStatus,
    said: String,
}

impl Run {
    fn start(standin: Option<&Standin>, out: &Path, more: &[&str], variables: &[(&str, &Path)]) -> Self {
        let mut run = support::ltx2();
        run.args(["generate", "-c", support::tiny(), "--progress-every", "1", "-o"]).arg(out).args(more);
        run.envs(variables.iter().copied());
        if let Some(standin) = standin {
            standin.give(&mut run);
        }
        Run::spawn(&mut run)
    }

    fn spawn(command: &mut Command) -> Self {
        let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts");
        let mut stderr = process.stderr.take().expect("piped");
        let read = move || {
            let mut said = String::new();
            stderr.read_to_string(&mut said).expect("UTF-8");
            said
        };
        Run { process, said: thread::spawn(read) }
    }

    fn ended(mut self) -> Ended {
        let started = Instant::now();
        let status = loop {
            if let Some(status) = self.process.try_wait().expect("waits") {
                break status;
            }
            if started.elapsed() > HANGS {
                self.process.kill().expect("killed");
                panic!("the process still runs after {HANGS:?}: {}", self.said.join().expect("read"));
            }
            thread::sleep(Duration::from_millis(10));
        };
        Ended { status, said: self.said.join().expect("read") }
    }
}

impl Ended {
    /// Returns the only error line of a run that exited with 1.
    fn error(&self) -> &str {
        assert_eq!(self.status.code(), Some(1), "{}", self.said);
        let errors: Vec<&str> = self.said.lines().filter_map(|line| line.strip_prefix("error: ")).collect();
        let [error] = errors[..] else { panic!("one line says it: {}", self.said) };
        error
    }
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).expect("a folder");
        let mut names: Vec<String> = entries.map(|e| e.expect("one").file_name().to_string_lossy().into()).collect();
        names.sort();
        names
    }

    /// Returns the video of a run without faults.
    fn whole(&self) -> Vec<u8> {
        let ended = Run::start(None, &self.path("whole.mp4"), &[], &[]).ended();
        assert!(ended.status.success(), "{}", ended.said);
        let video = fs::read(self.path("whole.mp4")).expect("a video");
        ["whole.mp4", "whole.json"].iter().for_each(|name| fs::remove_file(self.path(name)).expect("removed"));
        video
    }

    /// Resumes a run after its first step; returns the video.
    fn resumed(&self) -> Vec<u8> {
        let resumed = Run::start(None, &self.path("out.mp4"), &["--resume"], &[]).ended();
        assert!(resumed.status.success(), "{}", resumed.said);
        assert!(resumed.said.contains("resuming in phase denoise after 1 evaluations"), "{}", resumed.said);
        fs::read(self.path("out.mp4")).expect("a video")
    }
}

#[needs(cpu)]
fn hung_execution_aborts_run_and_resume_is_identical() {
    let folder = Folder::new();
    let whole = folder.whole();
    let (log, kernel, out) = (folder.path("log"), folder.path("kernel"), folder.path("out.mp4"));
    fs::write(&kernel, "4,1,1,-;NVRM: Xid (PCI:0000:01:00): 13, of an earlier run\n").expect("written");
    fs::write(&log, "").expect("written");
    let hangs = Standin::new().execution("denoise", 2, &Fault::Hang).log(&log);
    let more = ["--checkpoint-every", "1", "--set", "runtime.watchdog=1"];
    let started = Instant::now();
    let run = Run::start(Some(&hangs), &out, &more, &[("LTX2_KERNEL_LOG", &kernel)]);
    while fs::read_to_string(&log).expect("a log").is_empty() {
        assert!(started.elapsed() < HANGS, "the stand-in was not asked");
        thread::sleep(Duration::from_millis(5));
    }
    let hung = Instant::now();
    let mut lines = fs::OpenOptions::new().append(true).open(&kernel).expect("the log");
    lines
        .write_all(b"6,2,2,-;usb 1-1: new device\n4,3,3,-;NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off\n")
        .unwrap();
    let ended = run.ended();
    assert!(hung.elapsed() < Duration::from_secs(15), "{:?}: {}", hung.elapsed(), ended.said);

    let error = ended.error();
    let start =
        "denoise, step 2 of 3: the execution on device 0 (cpu) has not finished after 1 s (runtime.watchdog: 1): ";
    assert!(error.starts_with(start), "{error}");
    assert!(error.contains("check dmesg") && error.contains("raise runtime.watchdog"), "{error}");
    let logged = "; kernel log: NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off";
    assert!(error.ends_with(logged), "only new driver lines: {error}");
    let kept = format!(
        "the finished steps are saved in {}; resume with --resume",
        denoise_checkpoint::path_of(&out).display()
    );
    assert!(ended.said.contains(&kept), "{}", ended.said);
    assert_eq!(folder.names(), ["kernel", "log", "out.mp4.steps.safetensors"]);
    assert!(folder.resumed() == whole, "the same bytes");
    assert_eq!(folder.names(), ["kernel", "log", "out.json", "out.mp4"]);
}

#[needs(cpu)]
fn hung_transfer_is_reported() {
    let folder = Folder::new();
    let cases = [
        ("PJRT_Client_BufferFromHostBuffer", Fault::Drop, "upload to"),
        ("PJRT_AsyncHostToDeviceTransferManager_TransferData", Fault::Drop, "upload to"),
        ("PJRT_AsyncHostToDeviceTransferManager_TransferData", Fault::Hang, "upload to"),
        ("PJRT_Client_CreateBuffersForAsyncHostToDevice", Fault::Hang, "upload to"),
        ("PJRT_Buffer_ToHostBuffer", Fault::Hang, "download from"),
        ("PJRT_Buffer_ToHostBuffer", Fault::Drop, "download from"),
        ("PJRT_Buffer_ReadyEvent", Fault::Drop, "execution on"),
    ];
    for (function, fault, what) in cases {
        let standin = Standin::new().at(function, 1, &fault);
        let ended = Run::start(Some(&standin), &folder.path("out.mp4"), &["--set", SHORT_WATCHDOG], &[]).ended();
        let error = ended.error();
        let words = format!(": the {what} device 0 (cpu) has not finished after 2 s (runtime.watchdog: 2): ");
        let (stage, _) = error.split_once(&words).unwrap_or_else(|| panic!("{function} {fault:?}: {error}"));
        assert!(!stage.is_empty() && !stage.contains(':'), "{function} {fault:?}: {error}");
        assert_eq!(stage.starts_with("loading "), what == "upload to", "{error}");
        assert!(!ended.said.contains("--resume"), "nothing was kept: {}", ended.said);
        assert_eq!(folder.names(), [""; 0], "{function} {fault:?}");
    }
}

/// An execution that is slower than usual is not a hang.
#[needs(cpu)]
fn delay_below_the_limit_is_tolerated() {
    let folder = Folder::new();
    let whole = folder.whole();
    let log = folder.path("log");
    let delay = Fault::Delay(500);
    let slow = Standin::new()
        .execution("denoise", 2, &delay)
        .at("PJRT_Client_BufferFromHostBuffer", 1, &delay)
        .at("PJRT_Buffer_ToHostBuffer", 1, &delay)
        .log(&log);
    for limit in ["30", "auto"] {
        let set = format!("runtime.watchdog={limit}");
        let started = Instant::now();
        let ended = Run::start(Some(&slow), &folder.path("out.mp4"), &["--force", "--set", &set], &[]).ended();
        assert!(ended.status.success(), "{limit}: {}", ended.said);
        assert!(started.elapsed() > Duration::from_millis(1500), "{limit}: the execution was not slow");
        assert_eq!(fs::read_to_string(&log).expect("a log").lines().count(), 3, "{limit}");
        assert!(fs::read(folder.path("out.mp4")).expect("a video") == whole, "{limit}");
        fs::remove_file(&log).expect("removed");
    }
}

/// Stops the process with a signal for longer than the limit, during an execution.
#[needs(cpu)]
fn stopped_process_does_not_count_as_hung() {
    let folder = Folder::new();
    let (log, out) = (folder.path("log"), folder.path("out.mp4"));
    let slow = Standin::new().execution("denoise", 2, &Fault::Delay(9000)).log(&log);
    let run = Run::start(Some(&slow), &out, &["--set", "runtime.watchdog=5"], &[]);
    let started = Instant::now();
    while !log.exists() {
        assert!(started.elapsed() < HANGS, "the stand-in was not asked");
        thread::sleep(Duration::from_millis(5));
    }
    let signal = |name: &str| {
        let sent = Command::new("kill").args([name, &run.process.id().to_string()]).status().expect("kill runs");
        assert!(sent.success());
    };
    signal("-STOP");
    thread::sleep(Duration::from_secs(7));
    signal("-CONT");
    let ended = run.ended();
    assert!(ended.status.success() && out.exists(), "{}", ended.said);
}

#[needs(cpu)]
fn failed_execution_gives_one_error_line() {
    let folder = Folder::new();
    let cases =
        [(INTERNAL, "INTERNAL", "CUDA_ERROR_ILLEGAL_ADDRESS"), (UNAVAILABLE, "UNAVAILABLE", "the device was lost")];
    for (code, name, message) in cases {
        let standin = Standin::new().execution("denoise", 2, &Fault::Fail(code, message));
        let ended = Run::start(Some(&standin), &folder.path("out.mp4"), &[], &[]).ended();
        let error = ended.error();
        let words = format!("PJRT_LoadedExecutable_Execute failed ({name}): {message}");
        assert!(error.ends_with(&words), "{error}");
        assert_eq!(folder.names(), [""; 0], "nothing is left");
    }
}

#[needs(cpu)]
fn plugin_abort_loses_only_the_current_step() {
    let folder = Folder::new();
    let whole = folder.whole();
    let standin = Standin::new().execution("denoise", 2, &Fault::Abort);
    let ended = Run::start(Some(&standin), &folder.path("out.mp4"), &["--checkpoint-every", "1"], &[]).ended();
    let error = ended.error();
    let at =
        "denoise, step 2 of 3: the execution on device 0 (cpu) aborted this process: see the output of the plugin ";
    assert!(error.starts_with(at), "{error}");
    assert!(error.contains("; if it ran out of memory: denoise needs 0.00 GiB per device"), "{error}");
    assert!(ended.said.contains("out.mp4.steps.safetensors; resume with --resume"), "{}", ended.said);
    assert_eq!(folder.names(), ["out.mp4.steps.safetensors"]);
    assert!(folder.resumed() == whole, "the same bytes");
}

/// On the CPU, each process computes everything. The devices of both processes hang, but only one process has a
/// watchdog.
#[needs(cpu)]
fn hung_device_of_one_process_aborts_both_processes() {
    let folder = Folder::new();
    let place = StoreServer::start("127.0.0.1:0").expect("listens").address().to_string();
    let hangs = Standin::new().execution("denoise", 2, &Fault::Hang);
    let start = |(process, limit): (&str, &str)| {
        let mut run = support::ltx2();
        run.args(["generate", "-c", support::tiny(), "--progress-every", "1", "--coordinator", &place]);
        run.args(["--num-processes", "2", "--process-id", process, "-o"]).arg(folder.path("out.mp4"));
        run.args(["--set", &format!("runtime.watchdog={limit}")]).env("LTX2_REHEARSE_PROCESSES", "1");
        Run::spawn(hangs.give(&mut run))
    };
    let [first, second] = [("0", "off"), ("1", "2")].map(start).map(Run::ended);
    let hang = "denoise, step 2 of 3: the execution on device 0 (cpu) has not finished after 2 s";
    assert!(second.error().starts_with(hang), "{}", second.said);
    let error = first.error();
    assert!(error.starts_with("process 1 (") && error.contains(&format!(") hangs: {hang}")), "{error}");
    assert!(error.ends_with("; the run is aborted"), "{error}");
    assert_eq!(folder.names(), [""; 0], "nothing is written");
}
