//! Killed at any moment, a run leaves nothing that a later one trusts and that is not whole.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{self, needs};
use serde_json::Value;

/// Kills of videos and of experiments, at times spread over as long as the work takes.
const KILLS: [usize; 2] = [20, 10];

/// Ends a process that cannot do anything about it, unless it has ended by itself; whether it had.
fn killed_after(mut child: Child, time: Duration) -> bool {
    let started = Instant::now();
    while started.elapsed() < time {
        if child.try_wait().expect("a process").is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().expect("is killed");
    child.wait().expect("is gone").code().is_some()
}

/// Parts of a run, in no order: multiples of the golden section.
fn moments(kills: usize) -> impl Iterator<Item = f64> {
    (0..kills).map(|n| (n as f64 * 0.618_034).fract())
}

fn hashes(video: &Path) -> Value {
    let sidecar = std::fs::read_to_string(video.with_extension("json")).expect("a sidecar");
    serde_json::from_str::<Value>(&sidecar).expect("JSON")["sha256"].clone()
}

#[needs(cpu, full)]
fn a_video_its_steps_and_the_compile_cache() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    let model = path("nano");
    assert!(
        support::ltx2().args(["init", "--preset", "nano", "--seed", "3"]).arg(&model).status().expect("runs").success()
    );
    let run = |out: &Path, cache: &Path, more: &[&str]| -> Command {
        let mut run = support::ltx2();
        run.args(["generate", "-c", "nano_2_0", "--platform", "cpu", "-p", "a red ball", "--steps", "4", "--model"]);
        run.arg(&model).args(["--width", "64", "--height", "96", "--num-frames", "9", "-o"]).arg(out);
        run.args(["--set", "runtime.xla_flags.xla_backend_optimization_level=0", "--set"]);
        run.arg(format!("runtime.compile_cache={}", cache.display())).args(more);
        run.stdout(Stdio::null()).stderr(Stdio::null());
        run
    };
    let (out, whole) = (path("out.mp4"), path("whole.mp4"));
    let timed = || {
        let started = Instant::now();
        assert!(run(&whole, &path("warm"), &["--force"]).status().expect("runs").success());
        started.elapsed()
    };
    let (cold, warm) = (timed(), timed());
    let bytes = std::fs::read(&whole).expect("a video");
    let resumed = ["--resume", "--checkpoint-every", "1", "--progress-every", "1"];

    // What is killed goes on from the steps that are kept, and compiles what is not in the cache; both fill up on the way.
    let (mut finished, mut in_the_middle) = (0, 0);
    for (n, part) in moments(KILLS[0]).enumerate() {
        let empty = n % 10 == 0;
        if empty {
            // There is none at first.
            let _ = std::fs::remove_dir_all(path("cache"));
        }
        let time = if empty { cold } else { warm }.mul_f64(part);
        let ended = killed_after(run(&out, &path("cache"), &resumed).spawn().expect("starts"), time);
        in_the_middle += usize::from(!ended);
        if out.exists() {
            assert_eq!(std::fs::read(&out).expect("a video"), bytes, "kill {n} after {time:?}: a video is whole");
        }
        if ended {
            assert_eq!(hashes(&out), hashes(&whole), "kill {n}");
            finished += 1;
            std::fs::remove_file(&out).expect("the video");
        }
    }
    eprintln!("{in_the_middle} killed in the middle, {finished} had ended");
    assert!(in_the_middle >= KILLS[0] / 3, "{in_the_middle}");
    let last = run(&out, &path("cache"), &resumed).stderr(Stdio::piped()).output().expect("runs");
    let said = String::from_utf8_lossy(&last.stderr);
    assert!(last.status.success() && !said.contains("compiled anew"), "{said}");
    assert!(!out.with_extension("json").exists() || hashes(&out) == hashes(&whole));
    assert_eq!(std::fs::read(&out).expect("a video"), bytes);
}

#[needs(cpu, full)]
fn an_experiment() {
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
    // What is whole of a file that may end in half a line.
    let lines = || -> Vec<String> {
        let text = std::fs::read_to_string(out.join("results.jsonl")).unwrap_or_default();
        text.split_inclusive('\n').filter(|l| l.ends_with('\n')).map(str::to_string).collect()
    };
    let mut kills = 0;
    for time in moments(KILLS[1]).map(|part| Duration::from_secs(6).mul_f64(part)) {
        let before = lines();
        let ended = killed_after(run().spawn().expect("starts"), time);
        assert!(lines().starts_with(&before), "what was done is kept");
        if ended {
            break;
        }
        kills += 1;
    }
    assert!(kills >= 3, "{kills}");
    assert!(run().status().expect("runs").success());
    let all: Vec<Value> = lines().iter().map(|l| serde_json::from_str(l).expect("a whole line")).collect();
    let mut keys: Vec<&str> = all.iter().filter_map(|r| r["key"].as_str()).collect();
    keys.sort_unstable();
    keys.dedup();
    eprintln!("{kills} kills, {} lines of {} cases", all.len(), keys.len());
    assert_eq!((all.len(), keys.len()), (20, 20), "every case once");
}
