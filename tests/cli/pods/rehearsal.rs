//! Simulated laptop of the rehearsal: its terminals and the files that they write.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::support::{self, full};
use ltx2::pjrt::discover::{self, Platform};
use serde_json::Value;
use tempfile::TempDir;

pub(super) const PAGE: &str = "docs/guides/pods.md";
pub(super) const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pods");
/// Timeout after which a command counts as hung, even on a busy machine.
const HANGS: Duration = Duration::from_secs(300);

/// Command block of the page.
pub(super) struct Block {
    pub(super) heading: String,
    pub(super) text: String,
}

pub(super) fn page() -> String {
    fs::read_to_string(PAGE).expect("the page")
}

/// Returns all fenced blocks of a page with their headings. All of them are commands.
pub(super) fn blocks(page: &str) -> Vec<Block> {
    let (mut all, mut heading, mut open): (Vec<Block>, String, Option<String>) = (Vec::new(), String::new(), None);
    for line in page.lines() {
        assert!(
            line.starts_with("```") || !line.trim_start().starts_with("```"),
            "an indented block is overlooked: {line}"
        );
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(language)) => {
                assert_eq!(language, "sh", "every block of {PAGE} is a command block");
                open = Some(String::new());
            }
            (Some(_), Some(_)) => all.extend(open.take().map(|text| Block { heading: heading.clone(), text })),
            (Some(text), None) => *text += &format!("{line}\n"),
            (None, None) if line.starts_with('#') => heading = line.trim_start_matches(['#', ' ']).into(),
            (None, None) => {}
        }
    }
    all
}

/// Simulated machines: folders for the laptop, the workers, buckets and images.
pub(super) struct Rehearsal {
    pub(super) folder: TempDir,
    /// First three octets of this rehearsal's loopback addresses; other rehearsals may run at the same time.
    pub(super) network: String,
}

impl Rehearsal {
    pub(super) fn new() -> Self {
        // On the file system of the binary, so that it can be hard-linked.
        let folder = tempfile::Builder::new().prefix("pods-").tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        let id = std::process::id();
        let network = format!("127.{}.{}", 1 + id / 250 % 250, 1 + id % 250);
        let rehearsal = Rehearsal { folder: folder.expect("a folder"), network };
        let laptop = rehearsal.path("laptop");
        for below in ["home", "models", "plugins", "scripts"] {
            fs::create_dir_all(laptop.join(below)).expect("a folder");
        }
        copy("Cargo.toml", &laptop.join("Cargo.toml"));
        copy("scripts/pod", &laptop.join("scripts/pod"));
        copy(if full() { "assets/nano" } else { "tests/fixtures/models/tiny_a" }, &laptop.join("models/LTX-2"));
        std::os::unix::fs::symlink(plugin(), laptop.join("plugins/cpu")).expect("a link");
        let flags = std::env::var("XLA_FLAGS").unwrap_or_default();
        fs::write(rehearsal.path("on-workers"), format!("LTX2_REHEARSE_PROCESSES=1\nXLA_FLAGS={flags}\n")).unwrap();
        rehearsal
    }

    pub(super) fn path(&self, below: &str) -> PathBuf {
        self.folder.path().join(below)
    }

    /// Returns the variables of the page that have other values here. Everything else is run unchanged.
    pub(super) fn variables(&self) -> [(&'static str, String); 8] {
        let of = if full() { "-nano" } else { "" };
        let fixture = |name: &str| format!("{FIXTURES}/{name}{of}.yml");
        [
            ("PLATFORM", "cpu".into()),
            ("EIGHT_CHIPS", fixture("rehearsal")),
            ("SIXTEEN_CHIPS", fixture("rehearsal")),
            ("TARGET", "cpu:2".into()),
            ("EXPERIMENT", fixture("experiment")),
            ("GPUS", fixture("gpus")),
            ("GPU_MESH", "cfg=2".into()),
            ("COORDINATOR", format!("{}.250:8476", self.network)),
        ]
    }

    /// Starts a shell in the laptop's checkout.
    pub(super) fn terminal(&self) -> Terminal {
        let mut bash = Command::new("bash");
        bash.args(["--noprofile", "--norc"]).current_dir(self.path("laptop")).env_clear().envs(self.variables());
        bash.env("PATH", format!("{FIXTURES}/laptop:/usr/local/bin:/usr/bin:/bin"))
            .env("HOME", self.path("laptop/home"));
        bash.env("STANDIN", self.folder.path()).env("STANDIN_NETWORK", &self.network);
        bash.env("STANDIN_LTX2", env!("CARGO_BIN_EXE_ltx2")).env("STANDIN_TEST", std::env::current_exe().unwrap());
        bash.env("LTX2_REHEARSE_PROCESSES", "1").env("LTX2_COMPILE_CACHE", support::programs());
        // `--platform auto` selects this plugin on any machine.
        bash.env("LTX2_PJRT_PLUGIN", plugin_file());
        bash.env("XLA_FLAGS", std::env::var("XLA_FLAGS").unwrap_or_default());
        let mut bash = bash.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("bash");
        let lines = BufReader::new(bash.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let (said, ended) = channel();
        // The thread ends with the shell.
        std::thread::spawn(move || lines.into_iter().try_for_each(|line| said.send(line)));
        let typed = tempfile::Builder::new().prefix("typed-").tempdir_in(self.folder.path()).expect("a folder").keep();
        Terminal { bash, ended, typed, count: 0 }
    }

    /// Returns the running processes of the rehearsal: those with its folder in their environment.
    pub(super) fn running(&self) -> Vec<String> {
        let mark = format!("STANDIN={}", self.folder.path().display());
        let processes = fs::read_dir("/proc").expect("processes").flatten().map(|p| p.path());
        let ours = processes.filter(|process| {
            let environment = fs::read(process.join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
        });
        ours.filter_map(|process| Some(process.file_name()?.to_str()?.to_string())).collect()
    }

    pub(super) fn bytes(&self, below: &str) -> Vec<u8> {
        fs::read(self.path(below)).unwrap_or_else(|e| panic!("{below}: {e}"))
    }

    pub(super) fn text(&self, below: &str) -> String {
        String::from_utf8_lossy(&self.bytes(below)).into_owned()
    }

    /// Returns the file names in a folder.
    pub(super) fn names(&self, below: &str) -> BTreeSet<String> {
        let entries = fs::read_dir(self.path(below)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Returns the numbers of compiled programs and of cache hits from a sidecar.
    pub(super) fn compiled_and_cached(&self, sidecar: &str) -> (u64, u64) {
        let sidecar: Value = serde_json::from_slice(&self.bytes(sidecar)).expect("JSON");
        let programs = sidecar["timings"]["programs"].as_object().expect("programs");
        let count = |key: &str| programs.values().filter_map(|program| program[key].as_u64()).sum();
        (count("compiles"), count("cache_hits"))
    }
}

impl Drop for Rehearsal {
    fn drop(&mut self) {
        // Only a failed test leaves processes.
        for process in self.running() {
            let _ = Command::new("kill").args(["-9", &process]).status();
        }
    }
}

fn copy(from: &str, to: &Path) {
    let copied = Command::new("cp").arg("-r").arg(from).arg(to).status().expect("cp runs");
    assert!(copied.success(), "{from}");
}

/// Returns the installed folder of the CPU plugin, so that `ltx2 plugin install cpu` downloads nothing.
fn plugin() -> PathBuf {
    let file = plugin_file();
    let installed = file.ancestors().find(|folder| folder.join("installed.txt").is_file());
    installed.expect("a plugin by `ltx2 plugin install cpu`").to_path_buf()
}

fn plugin_file() -> PathBuf {
    let found = discover::find(Platform::Cpu, None).found;
    found.into_iter().next().expect("a plugin by `ltx2 plugin install cpu`").path
}

/// Shell that runs the page's commands.
pub(super) struct Terminal {
    bash: Child,
    /// Exit codes of the shell, one per block.
    ended: Receiver<String>,
    typed: PathBuf,
    count: usize,
}

/// Result of a block: its last nonzero exit code, or 0, and its output.
pub(super) struct Ran {
    pub(super) code: i32,
    pub(super) out: String,
    pub(super) err: String,
}

impl Terminal {
    /// Starts a block without waiting for it.
    pub(super) fn start(&mut self, block: &Block) {
        self.count += 1;
        let at = |end: &str| self.typed.join(format!("{}.{end}", self.count)).display().to_string();
        fs::write(at("sh"), &block.text).expect("written");
        // As in any shell, a failing command does not end the block; its exit code is recorded.
        let line = format!(
            "set -o pipefail; failed=0; trap 'failed=$?' ERR; . {} </dev/null >{} 2>{}; trap - ERR; echo $failed",
            at("sh"),
            at("out"),
            at("err")
        );
        writeln!(self.bash.stdin.as_mut().expect("piped"), "{line}").expect("bash reads");
    }

    fn said(&self, end: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.typed.join(format!("{}.{end}", self.count))).unwrap_or_default()).into()
    }

    /// Waits until the block prints a line.
    pub(super) fn wait_for(&self, line: &str) {
        let started = Instant::now();
        while !self.said("out").lines().any(|l| l == line) {
            let now = || format!("{}{}", self.said("out"), self.said("err"));
            assert!(self.ended.try_recv().is_err(), "ended without '{line}': {}", now());
            assert!(started.elapsed() < HANGS, "no '{line}': {}", now());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(super) fn finish(&self) -> Ran {
        let code = self.ended.recv_timeout(HANGS);
        let (out, err) = (self.said("out"), self.said("err"));
        let code = code.unwrap_or_else(|e| panic!("{e}: {out}{err}")).parse().expect("a code");
        Ran { code, out, err }
    }

    pub(super) fn run(&mut self, block: &Block) -> Ran {
        self.start(block);
        self.finish()
    }

    /// Runs a block that must succeed.
    pub(super) fn succeeds(&mut self, block: &Block) -> Ran {
        let started = Instant::now();
        let ran = self.run(block);
        eprintln!(
            "{:5.1} s  {}: {}",
            started.elapsed().as_secs_f64(),
            block.heading,
            block.text.lines().next().unwrap()
        );
        assert_eq!(ran.code, 0, "{}\n{}{}{}", block.heading, block.text, ran.out, ran.err);
        ran
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        drop(self.bash.stdin.take());
        if std::thread::panicking() {
            let _ = self.bash.kill();
        }
        let _ = self.bash.wait();
    }
}
