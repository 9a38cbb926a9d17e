//! A run that is killed in any phase leaves no partial file that a later run uses.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{self, full, needs};
use serde_json::Value;
use tempfile::TempDir;

/// Number of kills of videos and of experiments, at times spread over their duration.
const KILLS: [usize; 2] = [130, 10];

/// Kills a process with SIGKILL; returns false if it had already exited.
fn kill(mut child: Child) -> bool {
    child.kill().expect("is killed");
    child.wait().expect("is gone").signal() == Some(9)
}

/// Kills a process after `time` unless it exits before; returns whether it was killed.
fn kill_after(mut child: Child, time: Duration) -> bool {
    let started = Instant::now();
    while started.elapsed() < time {
        if child.try_wait().expect("a process").is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    kill(child)
}

/// Kills a process at a fail point (`crates/base/src/failpoint.rs`).
pub(crate) fn kill_at(moment: &str, run: &mut Command) {
    let mut child = run.env("LTX2_FAILPOINT", moment).stderr(Stdio::piped()).spawn().expect("starts");
    let said = BufReader::new(child.stderr.take().expect("piped")).lines().map_while(Result::ok);
    let mut before = Vec::new();
    let reached = said.inspect(|line| before.push(line.clone())).any(|line| line == format!("at {moment}"));
    assert!(reached, "the run never was at {moment}: {before:?}");
    assert!(kill(child), "the run ended at {moment}");
}

/// Returns low-discrepancy points in 0..1: multiples of the golden ratio.
fn moments() -> impl Iterator<Item = f64> {
    (0..).map(|n| (f64::from(n) * 0.618_034).fract())
}

fn hashes(video: &Path) -> Value {
    let sidecar = std::fs::read_to_string(video.with_extension("json")).expect("a sidecar");
    serde_json::from_str::<Value>(&sidecar).expect("JSON")["sha256"].clone()
}

/// Folder for short videos.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, out: &Path, cache: &Path, more: &[&str]) -> Command {
        let mut run = support::ltx2();
        run.args(["generate", "-c", support::tiny(), "-o"]).arg(out);
        run.arg("--set").arg(format!("runtime.compile_cache={}", cache.display()));
        run.args(more).stdout(Stdio::null()).stderr(Stdio::null());
        run
    }

    /// Returns the file names in a folder: final ones, then temporary ones.
    fn names(&self, folder: &str) -> [Vec<String>; 2] {
        let entries = std::fs::read_dir(self.path(folder)).expect("a folder").map(|e| e.expect("an entry").file_name());
        let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
        names.sort();
        let (temporary, last) = names.into_iter().partition(|name| name.starts_with(".ltx2-"));
        [last, temporary]
    }

    /// Removes the cache entries of a program.
    fn remove_entries(&self, cache: &str, program: &str) {
        for entry in self.names(cache)[0].iter().map(|name| self.path(cache).join(name)) {
            if support::header(&entry)["name"] == program {
                std::fs::remove_file(entry).expect("removed");
            }
        }
    }

    /// Kills a run at each moment. Afterwards, files with final names are complete, no partial file is used, and the
    /// resumed run gives the same bytes as an uninterrupted one.
    fn kill_and_resume_at_each(&self, moments: &[&str]) {
        let (whole, out, cache) = (self.path("whole.mp4"), self.path("out.mp4"), self.path("cache"));
        assert!(self.run(&whole, &support::programs(), &[]).status().expect("runs").success());
        let bytes = std::fs::read(&whole).expect("a video");
        support::copy_programs(&self.path("cache"), &[]);
        let more = ["--resume", "--checkpoint-every", "1", "--progress-every", "1"];

        for moment in moments {
            let (phase, what) = moment.split_once(' ').expect("a phase and what it is at");
            let writes = ["write", "rename"].contains(&phase) || phase == "encode" && !support::hides_ffmpeg();
            let compiles = ["compile", "cache"].contains(&phase);
            if compiles {
                self.remove_entries("cache", what);
            }
            let entries = self.names("cache")[0].len() + usize::from(compiles);
            let temporary = [self.names("")[1].len(), self.names("cache")[1].len()];
            kill_at(moment, &mut self.run(&out, &cache, &more));
            eprintln!("killed at {moment}");

            // The partial file has a temporary name, so the run was killed while it wrote.
            assert_eq!(self.names("")[1].len() > temporary[0], writes, "{moment}");
            assert_eq!(self.names("cache")[1].len() > temporary[1], phase == "cache", "{moment}");
            assert!(!writes || !self.names("")[0].contains(&what.into()), "{moment}");
            if out.exists() {
                assert_eq!(std::fs::read(&out).expect("a video"), bytes, "{moment}: a video is whole");
            }

            // A video without a sidecar may belong to another program, so --force is required.
            let force: &[&str] = if out.exists() { &["--force"] } else { &[] };
            if out.exists() {
                let refused = self.run(&out, &cache, &more).status().expect("runs");
                assert_eq!((refused.code(), std::fs::read(&out).ok().as_ref()), (Some(2), Some(&bytes)), "{moment}");
            }
            let mut ended = self.run(&out, &cache, &[&more[..], force].concat());
            let ended = ended.stderr(Stdio::piped()).output().expect("runs");
            let said = String::from_utf8_lossy(&ended.stderr);
            assert!(ended.status.success() && !said.contains("recompiling"), "{moment}: {said}");
            // The completed steps are not repeated.
            let on = phase == "step" || moment == &"encode out.mp4";
            assert!(!on || said.contains("resuming in phase denoise after"), "{moment}: {said}");
            assert_eq!(std::fs::read(&out).expect("a video"), bytes, "{moment}");
            assert_eq!(hashes(&out), hashes(&whole), "{moment}");
            assert_eq!(self.names("")[0], ["cache", "out.json", "out.mp4", "whole.json", "whole.mp4"], "{moment}");
            assert_eq!(self.names("cache")[0].len(), entries, "{moment}");
            [&out, &out.with_extension("json")]
                .into_iter()
                .for_each(|file| std::fs::remove_file(file).expect("removed"));
        }
    }
}

#[needs(cpu)]
fn run_killed_in_any_phase_resumes_to_identical_bytes() {
    let folder = Folder::new();
    let moments = ["cache prepare", "step 2", "write out.mp4.steps.safetensors", "encode out.mp4", "rename out.mp4"];
    let others = [
        "load transformer.proj_in.weight",
        "compile denoise",
        "rename out.mp4.steps.safetensors",
        "write out.mp4",
        "write out.json",
        "rename out.json",
    ];
    // Full test runs cover the phases without results, and the write and rename of every file.
    folder.kill_and_resume_at_each(&[&moments[..], if full() { &others } else { &[] }].concat());
}

#[needs(cpu, ffmpeg)]
fn run_killed_during_ffmpeg_resumes_to_identical_bytes() {
    Folder::new().kill_and_resume_at_each(&["encode out.mp4", "rename out.mp4"]);
}

#[needs(cpu, full)]
fn randomly_killed_runs_leave_no_partial_files() {
    let folder = Folder::new();
    let (out, whole, cache) = (folder.path("out.mp4"), folder.path("whole.mp4"), folder.path("cache"));
    let timed = || {
        let started = Instant::now();
        assert!(folder.run(&whole, &folder.path("warm"), &["--force"]).status().expect("runs").success());
        started.elapsed()
    };
    let (cold, warm) = (timed(), timed());
    let bytes = std::fs::read(&whole).expect("a video");
    // A video without a sidecar may belong to another program, so it is only replaced with --force.
    let resumed = ["--resume", "--force", "--checkpoint-every", "1", "--progress-every", "1"];

    // Killed runs resume from their checkpoint and compile missing programs; the checkpoint and the cache fill up along
    // the way.
    let (mut kills, mut ended) = (0, 0);
    for part in moments() {
        if kills == KILLS[0] {
            break;
        }
        let empty = kills % 10 == 0;
        if empty {
            // The cache does not exist at first.
            let _ = std::fs::remove_dir_all(&cache);
        }
        let time = if empty { cold } else { warm }.mul_f64(part);
        let killed = kill_after(folder.run(&out, &cache, &resumed).spawn().expect("starts"), time);
        if out.exists() {
            assert_eq!(std::fs::read(&out).expect("a video"), bytes, "kill {kills} after {time:?}: a video is whole");
        }
        if killed {
            kills += 1;
        } else {
            ended += 1;
            assert!(ended <= 5 * KILLS[0], "{kills} killed, {ended} had ended");
            assert_eq!(hashes(&out), hashes(&whole), "kill {kills}");
            std::fs::remove_file(&out).expect("the video");
        }
    }
    eprintln!("{kills} killed in the middle, {ended} had ended");
    let last = folder.run(&out, &cache, &resumed).stderr(Stdio::piped()).output().expect("runs");
    let said = String::from_utf8_lossy(&last.stderr);
    assert!(last.status.success() && !said.contains("recompiling"), "{said}");
    assert!(!out.with_extension("json").exists() || hashes(&out) == hashes(&whole));
    assert_eq!(std::fs::read(&out).expect("a video"), bytes);
}

#[needs(cpu, full)]
fn randomly_killed_experiment_keeps_completed_cases() {
    let dir = tempfile::tempdir().expect("a folder");
    let (yaml, out) = (dir.path().join("x.yml"), dir.path().join("out"));
    let model = "config: nano_2_0\nset: [model.path=nano, request.width=64, request.height=96, request.num_frames=9]\n";
    let cases = "layers: 1\nlayouts: [sequence, ulysses, ring, tensor, fsdp-ulysses]\ntargets: ['cpu:2', 'cpu:4']\n\
                 flags: [{}, {xla_backend_optimization_level: 0}]\n";
    std::fs::write(&yaml, format!("{model}{cases}")).expect("writes");
    let run = || {
        let mut run = support::ltx2();
        run.arg("experiment").arg(&yaml).arg("-o").arg(&out).args(["--jobs", "2"]);
        run.stdout(Stdio::null()).stderr(Stdio::null());
        run
    };
    // Returns the complete lines of the log, whose last line may be partial.
    let lines = || -> Vec<String> {
        let text = std::fs::read_to_string(out.join("results.jsonl")).unwrap_or_default();
        text.split_inclusive('\n').filter(|l| l.ends_with('\n')).map(str::to_string).collect()
    };
    // Every other kill waits for a case to complete, so that there is a result to keep.
    for (n, part) in moments().take(KILLS[1]).enumerate() {
        let before = lines();
        let mut child = run().spawn().expect("starts");
        while n % 2 == 1 && lines().len() == before.len() {
            assert_eq!(child.try_wait().expect("a process"), None, "kill {n}: the experiment ended with cases to do");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(kill_after(child, Duration::from_millis(500).mul_f64(part)), "kill {n}: the experiment had ended");
        assert!(lines().starts_with(&before), "results of the killed run are kept");
    }
    assert!(run().status().expect("runs").success());
    let all: Vec<Value> = lines().iter().map(|l| serde_json::from_str(l).expect("a whole line")).collect();
    let mut keys: Vec<&str> = all.iter().filter_map(|r| r["key"].as_str()).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!((all.len(), keys.len()), (20, 20), "every case once");
}
