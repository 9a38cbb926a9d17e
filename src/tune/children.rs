//! Runs commands of this binary as child processes: several at a time, each with a timeout.

use std::collections::VecDeque;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::error::{Result, TuneError};

/// A command of this binary that prints JSON.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Task {
    /// Hash of everything that the result depends on.
    pub(crate) key: String,
    pub(crate) label: String,
    pub(crate) command: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TaskResult {
    pub(crate) result: Option<Value>,
    /// Last message of a task that failed. If the program does not fit into device memory, both `result` and `error`
    /// are set.
    pub(crate) error: Option<String>,
    /// Whether the process crashed. An interruption or a timeout is not a crash.
    pub(crate) crashed: bool,
    pub(crate) seconds: f64,
}

/// Signals with which users stop a process.
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;
/// Signal that the kernel's out-of-memory killer sends.
const SIGKILL: i32 = 9;

/// Bytes of memory reserved per compilation of the published model. TPU compilations were observed to use 1.2 GB.
const MEMORY: u64 = 2_000_000_000;

/// Returns the number of child processes that the cores and the free memory allow; at least 1.
pub(crate) fn default_jobs() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let free = crate::host::free_memory();
    cores.min(free.map_or(cores, |bytes| usize::try_from(bytes / MEMORY).unwrap_or(cores))).max(1)
}

/// Environment variable (name and value) that is set for the child processes of one worker. `None`: no variable is set.
pub(crate) type EnvVariable = Option<(&'static str, String)>;

/// Runs each task in a child process that executes `binary`, one at a time per worker. Calls `done` on the calling
/// thread when a task ends.
///
/// # Errors
/// Returns an error if `binary` cannot be started, or the error of `done`. In both cases, no further task is started.
pub(crate) fn run_tasks(
    binary: &Path,
    tasks: Vec<Task>,
    workers: &[EnvVariable],
    limit: Duration,
    mut done: impl FnMut(Task, TaskResult) -> Result<()>,
) -> Result<()> {
    let queue = Mutex::new(VecDeque::from(tasks));
    let next = || queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop_front();
    let stop = || queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clear();
    let (send, receive) = mpsc::channel();
    std::thread::scope(|scope| {
        for variable in workers {
            let send = send.clone();
            scope.spawn(move || {
                while let Some(task) = next() {
                    tracing::info!("started {}", task.label);
                    let ended = run(binary, &task.command, variable, limit);
                    if send.send((task, ended)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(send);
        let mut result = Ok(());
        for (task, ended) in receive {
            if result.is_ok() {
                result = ended.and_then(|ended| done(task, ended));
            }
            if result.is_err() {
                stop();
            }
        }
        result
    })
}

/// Start of the error message of a task that timed out.
const TIMED_OUT: &str = "timed out after ";

/// Returns whether an error is a timeout. A timeout says nothing about the program, which may compile in time on
/// another run.
pub(super) fn is_timeout(error: &str) -> bool {
    error.starts_with(TIMED_OUT)
}

/// Runs one command until it exits or times out.
fn run(binary: &Path, command: &[String], variable: &EnvVariable, limit: Duration) -> Result<TaskResult> {
    let fail = || |source| TuneError::Start { path: binary.into(), source };
    let (mut out, mut log) = (tempfile::tempfile().map_err(fail())?, tempfile::tempfile().map_err(fail())?);
    let started = Instant::now();
    let mut child = Command::new(binary)
        .args(command)
        .envs(variable.clone())
        .stdin(Stdio::null())
        .stdout(out.try_clone().map_err(fail())?)
        .stderr(log.try_clone().map_err(fail())?)
        .spawn()
        .map_err(fail())?;
    let status = loop {
        match child.try_wait().map_err(fail())? {
            Some(status) => break Some(status),
            None if started.elapsed() > limit => {
                // The child may have just exited.
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let seconds = started.elapsed().as_secs_f64();
    let read = |file: &mut std::fs::File| -> Result<String> {
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_end(&mut bytes)).map_err(fail())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let (out, log) = (read(&mut out)?, read(&mut log)?);
    let result = serde_json::from_str(&out).ok();
    let error = match status {
        Some(status) if status.success() && result.is_some() => None,
        Some(status) => Some(message(&log, status)),
        None => Some(format!("{TIMED_OUT}{:.0} s", limit.as_secs_f64())),
    };
    let interrupted = |s: &ExitStatus| s.signal().is_some_and(|n| [SIGINT, SIGTERM, SIGKILL].contains(&n));
    // A timeout is not a crash: another run may be faster.
    let crashed = status.is_some_and(|s| !matches!(s.code(), Some(0..=2)) && !interrupted(&s));
    Ok(TaskResult { result, error, crashed, seconds })
}

/// Returns the last message of a child process, on one line.
fn message(log: &str, status: ExitStatus) -> String {
    const LONGEST: usize = 500;
    let mut lines = log.lines().map(str::trim).filter(|l| !l.is_empty());
    let said = lines.clone().rev().find_map(|l| l.strip_prefix("error: "));
    // A crash prints its reason before a stack trace.
    let fatal = || lines.find(|l| l.starts_with('F') && l.contains("] ")).or_else(|| log.lines().last());
    let text: String = said.or_else(fatal).unwrap_or_default().chars().take(LONGEST).collect();
    match (status.code(), text.is_empty()) {
        (Some(1 | 2), false) => text,
        (_, true) => status.to_string(),
        (_, false) => format!("{status}: {text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(script: &str) -> Task {
        Task { key: script.into(), label: script.into(), command: vec!["-c".into(), script.into()] }
    }

    #[test]
    fn crash_or_timeout_fails_only_one_task() {
        let scripts = ["echo '{\"a\": 1}'", "echo error: no such >&2; exit 1", "kill -6 $$", "sleep 600", "kill -2 $$"];
        let mut all = Vec::new();
        let limit = Duration::from_secs(5);
        run_tasks(Path::new("/bin/sh"), scripts.map(task).into(), &[None, None], limit, |task, done| {
            all.push((task.label, done));
            Ok(())
        })
        .unwrap();
        all.sort_by_key(|(label, _)| scripts.iter().position(|s| s == label));
        assert_eq!(all[0].1.result, Some(serde_json::json!({"a": 1})));
        assert_eq!((all[0].1.error.as_deref(), all[1].1.error.as_deref()), (None, Some("no such")));
        let message = |n: usize| all[n].1.error.clone().unwrap();
        assert!(message(2).contains("signal: 6"), "{}", message(2));
        assert_eq!(message(3), "timed out after 5 s");
        assert_eq!([1, 2, 3].map(|n| is_timeout(&message(n))), [false, false, true]);
        // Interruptions and timeouts are not crashes.
        assert_eq!(all.iter().map(|(_, done)| done.crashed).collect::<Vec<_>>(), [false, false, true, false, false]);
    }

    #[test]
    fn each_worker_sets_its_own_variable() {
        let workers = ["a", "b"].map(|value| Some(("LTX2_OF_A_WORKER", value.to_string())));
        let mut said = Vec::new();
        // The first task waits until the second has started, so one worker cannot run both.
        let dir = tempfile::tempdir().unwrap();
        let began = dir.path().join("began").display().to_string();
        let say = "echo \\\"$LTX2_OF_A_WORKER\\\"";
        let tasks = vec![
            task(&format!("while [ ! -e {began} ]; do sleep 0.01; done; {say}")),
            task(&format!("touch {began}; {say}")),
        ];
        run_tasks(Path::new("/bin/sh"), tasks, &workers, Duration::from_secs(120), |_, done| {
            said.extend(done.result.and_then(|r| Some(r.as_str()?.to_string())));
            Ok(())
        })
        .unwrap();
        said.sort();
        assert_eq!(said, ["a", "b"]);
    }

    #[test]
    fn error_of_done_callback_stops_remaining_tasks() {
        let mut seen = 0;
        let tasks = vec![task("echo 1"), task("echo 2"), task("echo 3")];
        let error = run_tasks(Path::new("/bin/sh"), tasks, &[None], Duration::from_secs(9), |_, _| {
            seen += 1;
            Err(TuneError::Busy("x".into()))
        });
        assert!(error.is_err());
        assert_eq!(seen, 1);
    }
}
