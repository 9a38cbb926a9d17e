//! Concurrency and long use: threads on one client, many videos in one process, several concurrent processes.

use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;

use crate::support::{self, cases, cpu, dumping, generate, needs, open, plain, request};
use ltx2::hlo::DType;
use ltx2::pipeline::plan::options::RunOptions;
use ltx2::pipeline::stages::text_to_video::Generated;
use ltx2::pjrt::Client;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn bits(generated: &Generated) -> (String, Vec<u8>) {
    let mut sound = Sha256::new();
    generated.audio.iter().for_each(|v| sound.update(v.to_le_bytes()));
    (generated.frames.sha256(), sound.finalize().to_vec())
}

/// Generates `count` videos of a pipeline case, each with a newly opened model.
fn videos(client: &Client, case: usize, count: usize) -> Vec<(String, Vec<u8>)> {
    let case = &cases("pipeline")[case];
    let one = |_| {
        let mut runner = open(client, case.model.to_str().expect("a path"), plain(DType::F32));
        let request = request(case, &runner.model);
        bits(&generate(&mut runner, &request, &dumping(None)))
    };
    (0..count).map(one).collect()
}

#[needs(cpu)]
fn two_threads_sharing_a_client_get_unchanged_results() {
    let client = cpu(8);
    // Two models, whose programs `it pipeline` compiles.
    let chosen = ["/tiny_2_3_guided", "/tiny_a_cfg"]
        .map(|name| cases("pipeline").iter().position(|case| case.name.ends_with(name)).expect("a case"));
    let alone = chosen.map(|case| videos(&client, case, 1).remove(0));
    assert_ne!(alone[0], alone[1]);
    let together = thread::scope(|scope| {
        let both = chosen.map(|case| {
            let client = &client;
            scope.spawn(move || videos(client, case, 2))
        });
        both.map(|thread| thread.join().expect("no panic"))
    });
    for (case, (all, alone)) in together.iter().zip(&alone).enumerate() {
        assert!(all.len() == 2 && all.iter().all(|one| one == alone), "case {case}");
    }
}

/// Returns the resident memory of this process in bytes.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a process");
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse::<f64>().expect("a number") * 1024.0
}

#[needs(cpu, full)]
fn two_hundred_videos_are_repeatable_and_use_constant_memory() {
    // Runs in a separate process, because other tests would affect the measured memory.
    if std::env::var_os("LTX2_ALONE").is_none() {
        let name = "concurrency::two_hundred_videos_are_repeatable_and_use_constant_memory";
        let own = std::env::current_exe().expect("this file");
        let ran = Command::new(own).args([name, "--exact", "--nocapture"]).env("LTX2_ALONE", "1").output();
        let ran = ran.expect("the process runs");
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let client = cpu(8);
    let case = &cases("pipeline")[0];
    let mut runner = open(&client, case.model.to_str().expect("a path"), plain(DType::F32));
    let mut request = request(case, &runner.model);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("out.mp4");
    let (mut first, mut before) = (None, 0.0);
    for n in 0..200 {
        // Every third request has another seed and prompt.
        (request.seed, request.prompt) = if n % 3 == 2 { (n, format!("video {n}")) } else { (5, "a red ball".into()) };
        let generated = generate(&mut runner, &request, &RunOptions::default());
        let options = ltx2::media::Mp4Options::default();
        ltx2::media::write_mp4(&path, &generated.frames, 24.0, None, &options).expect("written");
        if n % 3 != 2 {
            let bits = bits(&generated);
            assert_eq!(first.get_or_insert(bits.clone()), &bits, "video {n}");
        }
        if n == 39 {
            before = resident();
        }
    }
    let after = resident();
    eprintln!("{:.1} MB after 40 videos, {:.1} MB after 200", before / 1e6, after / 1e6);
    assert!(after <= before * 1.02, "{before} bytes after 40 videos, {after} after 200");
    let statistics = runner.executor.engine().statistics();
    assert!(statistics.values().all(|s| s.compiles + s.cache_hits == 1), "{statistics:?}");
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Starts a run without waiting for it.
    fn start(&self, out: &str, cache: &str) -> Child {
        self.command(out, cache).spawn().expect("starts")
    }

    /// Temporary files of the run go to `tmp`.
    fn command(&self, out: &str, cache: &str) -> Command {
        let temporary = self.path("tmp");
        std::fs::create_dir_all(&temporary).expect("a folder");
        let cache = format!("runtime.compile_cache={cache}");
        let mut run = support::ltx2();
        run.args(["generate", "-c", support::tiny(), "--set", &cache, "-o"]).arg(self.path(out));
        run.env("TMPDIR", temporary);
        run.stdout(Stdio::piped()).stderr(Stdio::piped());
        run
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).expect("a folder");
        let mut names: Vec<String> = entries.map(|e| e.expect("one").file_name().to_string_lossy().into()).collect();
        names.sort();
        names
    }
}

fn ended(run: Child) -> (Output, String) {
    let out = run.wait_with_output().expect("the process ends");
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    (out, stderr)
}

fn hashes(video: &Path) -> Value {
    let sidecar = std::fs::read_to_string(video.with_extension("json")).expect("a sidecar");
    serde_json::from_str::<Value>(&sidecar).expect("JSON")["sha256"].clone()
}

impl Folder {
    /// Creates a cache that lacks `denoise`, the program that compiles longest; returns its path.
    fn cache_without_denoise(&self) -> String {
        support::copy_programs(&self.path("cache"), &["denoise"]);
        assert_eq!(self.names("cache").len(), 6);
        self.path("cache").display().to_string()
    }
}

/// Of two concurrent runs that need the same program, one compiles it; the other waits and loads the result.
#[needs(cpu)]
fn concurrent_runs_share_one_cache() {
    let folder = Folder::new();
    let cache = folder.cache_without_denoise();
    let runs = ["a.mp4", "b.mp4"].map(|name| folder.start(name, &cache));
    let mut hits = 0;
    for run in runs {
        let (out, stderr) = ended(run);
        assert!(out.status.success() && !stderr.contains("recompiling"), "{stderr}");
        hits += stderr.lines().filter(|l| l.starts_with("  ") && l.ends_with(" s  cache hit")).count();
    }
    assert_eq!(hits, 13);
    assert_eq!(
        folder.names("cache").len(),
        7,
        "one entry a program and no temporary file: {:?}",
        folder.names("cache")
    );
    let (out, stderr) = ended(folder.start("d.mp4", &cache));
    assert!(out.status.success() && stderr.matches("cache hit").count() >= 7, "{stderr}");
    for name in ["b.mp4", "d.mp4"] {
        assert_eq!(hashes(&folder.path(name)), hashes(&folder.path("a.mp4")), "{name}");
    }
}

/// The first run hangs while compiling; the second waits for it until the first is killed.
#[needs(cpu)]
fn killed_compilation_does_not_block_other_runs() {
    let folder = Folder::new();
    let cache = folder.cache_without_denoise();
    let started = |out: &str, failpoint: &str| {
        let mut run = folder.command(out, &cache);
        run.env("LTX2_FAILPOINT", failpoint).spawn().expect("starts")
    };
    let mut first = started("a.mp4", "compile denoise");
    let mut lines = std::io::BufReader::new(first.stderr.take().expect("piped")).lines();
    assert!(lines.any(|line| line.expect("text") == "at compile denoise"));
    let mut second = started("b.mp4", "");
    let mut says =
        std::io::BufReader::new(second.stderr.take().expect("piped")).lines().map(|line| line.expect("text"));
    assert!(says.any(|line| line.contains("waiting for another process to compile denoise")));
    assert!(second.try_wait().expect("a process").is_none(), "the second run did not wait");
    first.kill().expect("killed");
    first.wait().expect("ended");
    let rest: Vec<String> = says.collect();
    assert!(second.wait().expect("ended").success(), "{rest:?}");
    assert_eq!(folder.names("cache").len(), 7, "{:?}", folder.names("cache"));
}

#[needs(cpu)]
fn second_run_with_same_output_saves_its_results_elsewhere() {
    let folder = Folder::new();
    let cache = support::programs().display().to_string();
    let runs = [folder.start("out.mp4", &cache), folder.start("out.mp4", &cache)];
    let mut ends = runs.map(ended);
    ends.sort_by_key(|(out, _)| out.status.code());
    let [(first, _), (second, stderr)] = ends;
    assert!(first.status.success());
    assert_eq!(second.status.code(), Some(1), "{stderr}");
    let error: Vec<&str> = stderr.lines().filter(|l| l.starts_with("error: ")).collect();
    assert!(error.len() == 1 && error[0].contains("out.mp4") && error[0].contains("are kept in"), "{stderr}");
    let kept = Path::new(support::kept_file(error[0]));
    assert!(kept.starts_with(folder.path("tmp")), "{}", kept.display());
    let tensors = ltx2::weights::Checkpoint::open(kept).expect("tensors");
    assert_eq!(tensors.shape("frames"), Some(&[9, 96, 64, 3][..]));
    assert_eq!(folder.names(""), ["out.json", "out.mp4", "tmp"], "nothing half-written");
}

/// Separate processes with and without a cache give the same hashes. On GPUs, `make test-processes-gpu` checks this.
#[needs(cpu, full)]
fn twenty_processes_give_equal_hashes_with_or_without_cache() {
    let folder = Folder::new();
    let warm = support::programs().display().to_string();
    let runs = (0..20).map(|n| {
        let (name, cold) = (format!("{n}.mp4"), folder.path(&format!("cold{n}")).display().to_string());
        let cache = if n % 2 == 0 { &warm } else { &cold };
        let (out, stderr) = ended(folder.start(&name, cache));
        assert!(out.status.success(), "{stderr}");
        (hashes(&folder.path(&name)), std::fs::read(folder.path(&name)).expect("a video"))
    });
    let all: Vec<_> = runs.collect();
    assert!(all.iter().all(|one| *one == all[0]), "{:?}", all.iter().map(|(hash, _)| hash).collect::<Vec<_>>());
}
