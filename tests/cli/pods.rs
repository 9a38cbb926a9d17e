//! Runs the command blocks of `docs/guides/pods.md` unchanged in a shell where `gcloud`, `gcsfuse`, `docker`, `kubectl`
//! and `sbatch` are the stand-ins of `tests/fixtures/pods`. These start real `ltx2` processes, each in its own folder
//! and environment. Only the loopback network is used.

mod cluster;
mod rehearsal;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::vec::IntoIter;

use crate::support::{self, needs};
use rehearsal::{Block, FIXTURES, Ran, Rehearsal, Terminal, blocks, page};
use serde_json::Value;

const BUCKET: &str = "buckets/my-project-ltx2";

/// Takes half a minute: each of four workers computes the complete video, because CPU processes cannot exchange data,
/// and the first run of each section compiles. The page is one sequence of commands, so this is one test.
#[needs(cpu, full)]
fn pods_guide_commands_run_unchanged() {
    let rehearsal = Rehearsal::new();
    let mut walk = Walk::new(&rehearsal);
    walk.prepares();
    let video = walk.use_one_vm();
    let compiled = walk.use_several_vms(&video);
    walk.loses_a_worker(compiled);
    walk.uses_kubernetes(&video, compiled);
    walk.uses_gpus();
    walk.ends();
    assert_eq!(rehearsal.running(), [""; 0], "nothing runs any more");
}

/// State of following the page.
struct Walk<'a> {
    rehearsal: &'a Rehearsal,
    terminal: Terminal,
    /// Remaining blocks.
    blocks: IntoIter<Block>,
    /// First block, which sets the variables of a terminal.
    variables: Option<Block>,
}

impl<'a> Walk<'a> {
    fn new(rehearsal: &'a Rehearsal) -> Self {
        Walk { rehearsal, terminal: rehearsal.terminal(), blocks: blocks(&page()).into_iter(), variables: None }
    }

    /// Returns the next block, which must be under this heading, so that no block is skipped.
    fn next(&mut self, heading: &str) -> Block {
        let block = self.blocks.next().unwrap_or_else(|| panic!("no more blocks, but {heading}"));
        assert_eq!(block.heading, heading, "{}", block.text);
        block
    }

    /// Runs the next block, which must succeed.
    fn types(&mut self, heading: &str) -> Ran {
        let block = self.next(heading);
        self.terminal.succeeds(&block)
    }

    fn prepares(&mut self) {
        let variables = self.next("Prepare");
        self.terminal.succeeds(&variables);
        self.variables = Some(variables);
        self.types("Prepare");
        let compiled = self.types("Prepare");
        assert!(compiled.out.contains("\nprogram     denoise, "), "{}", compiled.out);
        self.types("Prepare");
        assert_eq!(self.rehearsal.names(BUCKET), ["ltx2", "models", "plugins"].map(String::from).into());
    }

    /// Returns the generated video.
    fn use_one_vm(&mut self) -> Vec<u8> {
        let rehearsal = self.rehearsal;
        for _ in ["create", "copy", "generate", "experiment"] {
            self.types("One VM, with files copied");
        }
        assert_eq!(rehearsal.names("tpus/ltx-one"), ["worker-0", "zone"].map(String::from).into(), "v6e-8 is one VM");
        let video = rehearsal.bytes("laptop/fox-one-vm.mp4");
        assert_eq!(video, rehearsal.bytes("tpus/ltx-one/worker-0/ltx2/out/fox.mp4"));
        let results = rehearsal.text("laptop/experiment-v6e-8/results.jsonl");
        let results: Vec<Value> = results.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(results.len(), 2, "compiled and measured: {results:?}");
        assert!(results[1]["result"]["programs"]["denoise_loop"]["median"].as_f64() > Some(0.0), "{}", results[1]);
        self.types("One VM, with files copied");
        assert!(rehearsal.names("tpus").is_empty());
        video
    }

    /// Returns the number of programs of a run, which are now cached in the bucket.
    fn use_several_vms(&mut self, video: &[u8]) -> u64 {
        let (rehearsal, heading) = (self.rehearsal, "Several VMs, with the bucket mounted");
        self.types(heading);
        let workers = ["worker-0", "worker-1", "worker-2", "worker-3", "zone"].map(String::from).into();
        assert_eq!(rehearsal.names("tpus/ltx"), workers, "v6e-16 is four VMs");
        self.types(heading);
        let first = self.types(heading);
        for worker in 0..4 {
            let met = format!("worker {worker}:  INFO process {worker} of 4 on ");
            assert!(first.out.lines().any(|line| line.starts_with(&met)), "{met}: {}", first.out);
        }
        let (compiled, cached) = rehearsal.compiled_and_cached(&format!("{BUCKET}/out/fox.json"));
        assert_eq!((compiled > 0, cached), (true, 0), "the first run compiles");
        self.types(heading);
        assert_eq!(
            rehearsal.compiled_and_cached("laptop/fox-again.json"),
            (0, compiled),
            "the second compiles nothing"
        );
        let entries = rehearsal.names(&format!("{BUCKET}/cache"));
        assert_eq!(entries.len() as u64, compiled, "each program once: {entries:?}");
        // One process and four processes give the same video.
        assert!(video == rehearsal.bytes("laptop/fox-again.mp4"));
        assert!(video == rehearsal.bytes(&format!("{BUCKET}/out/fox.mp4")));

        // The CPU plugin has no profiler: the command fails with that error on every worker.
        let block = self.next(heading);
        let profile = self.terminal.run(&block);
        assert_ne!(profile.code, 0);
        for worker in 0..4 {
            let ended = format!("worker {worker}: error: ");
            let mut lines = profile.out.lines().filter(|line| line.starts_with(&ended));
            assert!(lines.any(|line| line.contains("this plugin has no profiler")), "{ended}: {}", profile.out);
        }
        compiled
    }

    fn loses_a_worker(&mut self, compiled: u64) {
        let (rehearsal, heading) = (self.rehearsal, "When a worker dies");
        let out = format!("{BUCKET}/out");
        let under_way = || rehearsal.names(&out).iter().filter(|name| name.starts_with(".ltx2-")).count();
        // Worker 0 stops before it renames the file, so that it is killed in the middle of the run.
        fs::write(rehearsal.path("on-worker-0"), "LTX2_FAILPOINT=rename night.mp4\n").expect("written");
        let block = self.next(heading);
        self.terminal.start(&block);
        self.terminal.wait_for("worker 0: at rename night.mp4");
        assert_eq!(under_way(), 1, "a file under way");
        let mut second = rehearsal.terminal();
        second.succeeds(self.variables.as_ref().expect("the first block"));
        second.succeeds(&self.next(heading));

        let killed = self.terminal.finish();
        assert_ne!(killed.code, 0);
        for worker in [0, 1, 3] {
            let error = format!("worker {worker}: error: ");
            let lines: Vec<&str> = killed.out.lines().filter_map(|line| line.strip_prefix(&error)).collect();
            let [line] = lines[..] else { panic!("worker {worker} says one error: {}", killed.out) };
            assert!(
                line.starts_with("process 2 (") && line.contains(" has not answered for 5 s: it died or"),
                "{line}"
            );
        }
        for (worker, status) in [(0, 1), (1, 1), (2, 137), (3, 1)] {
            let code = format!("worker {worker}: command failed with exit status {status}");
            assert!(killed.err.lines().any(|line| line.ends_with(&code)), "{code}: {}", killed.err);
        }
        let names = rehearsal.names(&out);
        assert!(under_way() == 0 && !names.iter().any(|name| name.starts_with("night")), "half-written: {names:?}");

        fs::remove_file(rehearsal.path("on-worker-0")).expect("removed");
        self.types(heading);
        assert!(rehearsal.names(&out).contains("night.mp4"));
        assert_eq!(rehearsal.compiled_and_cached(&format!("{out}/night.json")), (0, compiled));
        let listed = self.types("Delete");
        assert_eq!((listed.out.as_str(), rehearsal.names("tpus").len()), ("", 0), "no slice is left");
    }

    fn uses_kubernetes(&mut self, video: &[u8], compiled: u64) {
        let rehearsal = self.rehearsal;
        for _ in ["image", "cluster", "account"] {
            self.types("Kubernetes");
        }
        let logs = self.types("Kubernetes").out;
        for pod in 0..2 {
            let joined = format!("process {pod} of 2 on ");
            let named = |line: &&str| line.starts_with(&format!("[pod/ltx2-slice-0-{pod}")) && line.contains(&joined);
            let line = logs.lines().find(named).unwrap_or_else(|| panic!("{joined}: {logs}"));
            assert!(line.contains("(Kubernetes JobSet with overrides from flags, YAML or LTX2_*)"), "{line}");
        }
        let counts = rehearsal.compiled_and_cached(&format!("{BUCKET}/out/fox-gke.json"));
        assert_eq!(counts, (0, compiled), "the bucket has the programs");
        assert!(video == rehearsal.bytes(&format!("{BUCKET}/out/fox-gke.mp4")));
        self.types("Delete the rest");
        for left in ["buckets", "cluster", "images", "tpus", "requests"] {
            assert!(rehearsal.names(left).is_empty(), "{left}: {:?}", rehearsal.names(left));
        }
    }

    fn uses_gpus(&mut self) {
        let rehearsal = self.rehearsal;
        self.types("GPUs");
        let log = rehearsal.text("laptop/ltx2-4101.log");
        for process in 0..2 {
            assert!(log.contains(&format!("process {process} of 2 on ")) && log.contains(" (SLURM), "), "{log}");
        }
        self.types("GPUs");
        for video in ["fox.mp4", "fox-by-hand.mp4"] {
            assert!(!rehearsal.bytes(&format!("laptop/{video}")).is_empty());
        }
    }

    /// Checks that every block was run, and exits the shell.
    fn ends(mut self) {
        assert!(self.blocks.next().is_none(), "a block is left");
    }
}

/// Several CPU processes are rejected without the rehearsal variable, so that none start by mistake.
#[needs(cpu)]
fn several_cpu_processes_require_rehearsal_variable() {
    let id = std::process::id();
    let place = format!("127.{}.{}.251:8476", 1 + id / 250 % 250, 1 + id % 250);
    let folder = tempfile::tempdir().expect("a folder");
    let start = |process: &str| {
        let mut run = support::ltx2();
        run.args(["generate", "-c", &format!("{FIXTURES}/rehearsal.yml"), "--coordinator", &place]);
        run.args(["--num-processes", "2", "--process-id", process, "-o"]).arg(folder.path().join("out.mp4"));
        run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts")
    };
    for process in ["0", "1"].map(start) {
        let ended = process.wait_with_output().expect("ends");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{said}");
        assert!(said.contains("platform cpu runs in one process"), "{said}");
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "nothing is written");
}

/// The page lists the variables that the rehearsal sets, and no other variables can be set beforehand.
#[needs(nothing)]
fn pods_guide_lists_rehearsal_variables() {
    let page = page();
    let said = page.split("sets its own values for ").nth(1).and_then(|rest| rest.split(". ").next()).expect("a list");
    let said: BTreeSet<&str> = said.split('`').skip(1).step_by(2).collect();
    let commands: String = blocks(&page).into_iter().map(|block| block.text).collect();
    let settable: BTreeSet<&str> = commands
        .match_indices("=${")
        .filter_map(|(at, _)| {
            let name = commands[..at].rsplit(|c: char| !(c.is_ascii_uppercase() || c == '_')).next()?;
            commands[at..].starts_with(&format!("=${{{name}:-")).then_some(name)
        })
        .collect();
    let rehearsal = Rehearsal { folder: tempfile::tempdir().expect("a folder"), network: String::new() };
    let set: BTreeSet<&str> = rehearsal.variables().into_iter().map(|(name, _)| name).collect();
    assert_eq!((&said, &settable), (&set, &set));
}

/// The table of slices agrees with the stand-in, which rejects other slices, and with the meshes of the configurations.
#[needs(nothing)]
fn pods_guide_slices_match_their_configurations() {
    let known = fs::read_to_string(Path::new(FIXTURES).join("slices.tsv")).expect("slices");
    let known: Vec<Vec<&str>> = known.lines().map(|line| line.split('\t').collect()).collect();
    let page = page();
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.contains("| `tpu/"))
        .map(|line| line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`')).collect())
        .collect();
    assert_eq!(rows.len(), 8);
    for row in rows {
        let [name, vms, chips, devices, config, version] = row[..] else { panic!("{row:?}") };
        assert!(known.contains(&vec![name, version, vms, chips]), "{row:?}");
        let number = |text: &str| text.parse::<usize>().expect("a number");
        assert_eq!(number(vms) * number(chips), number(devices), "{row:?}");
        let text = fs::read_to_string(format!("configs/{config}.yml")).expect("a configuration");
        let mesh = text.lines().find_map(|line| line.strip_prefix("mesh: {")).expect("a mesh");
        let sizes =
            mesh.trim_end_matches('}').split(',').map(|axis| number(axis.split(':').nth(1).expect("a size").trim()));
        assert_eq!(sizes.product::<usize>(), number(devices), "{row:?}");
    }
}
