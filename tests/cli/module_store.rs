//! Experiment figures are always computed from stored modules with the current program: no outdated figure is shown,
//! and no known program is compiled twice. On the CPU plugin with two virtual devices.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::OnceLock;
use std::time::SystemTime;

use crate::support::{self, full, needs};
use ltx2::config::read_experiment;
use ltx2::runtime::{CompileOutcome, ModuleStore};
use ltx2::tune::{CaseResult, LogRecord, TuneOptions, experiment};
use serde_json::Value;

const SMALL: &str = "config: nano_2_0\n\
    set: [model.path=nano, request.width=64, request.height=96, request.num_frames=9, \
    runtime.xla_flags.xla_backend_optimization_level=0]\n\
    layers: 1\ntargets: ['cpu:2']\n";

/// Folder with an experiment file of these cases.
struct Experiment {
    dir: tempfile::TempDir,
}

impl Experiment {
    fn new(cases: &str) -> Self {
        let experiment = Experiment { dir: tempfile::tempdir().expect("a folder") };
        std::fs::write(experiment.path("x.yml"), format!("{SMALL}{cases}\n")).expect("writes");
        experiment
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts with the compiled modules of `sequence` and `tensor` in the store.
    fn with_modules(cases: &str) -> Self {
        let experiment = Experiment::new(cases);
        copy_modules(&experiment.path("out"));
        experiment
    }

    fn run(&self, more: &[&str]) -> Output {
        let mut c = support::ltx2();
        c.arg("experiment").arg(self.path("x.yml")).arg("-o").arg(self.path("out")).args(more);
        c.output().expect("runs")
    }

    /// Runs the experiment in this process, with another binary for child processes.
    fn rows(&self, binary: &Path, retry: bool) -> Vec<CaseResult> {
        let file = read_experiment(&self.path("x.yml")).expect("an experiment");
        let (binary, folder) = (binary.to_path_buf(), self.path("out"));
        let options = TuneOptions { binary, folder, modules: None, jobs: 1, measure: false, retry, chip: None };
        let rows = experiment(&file, &options);
        assert!(rows.is_ok(), "{:?}", rows.err());
        rows.unwrap()
    }

    fn records(&self) -> Vec<LogRecord> {
        records(&self.path("out"))
    }

    /// Returns contents and modification times of the stored modules.
    fn modules(&self) -> BTreeMap<PathBuf, (Vec<u8>, SystemTime)> {
        stored(&self.path("out"))
    }

    /// Writes a script that replaces the binary.
    fn script(&self, text: &str) -> PathBuf {
        let path = self.path("child.sh");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("writes");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("may run");
        path
    }
}

/// Returns the files of the modules of `sequence` and `tensor` in the shared store, which compiles each once.
fn known() -> &'static [PathBuf] {
    static KNOWN: OnceLock<Vec<PathBuf>> = OnceLock::new();
    KNOWN.get_or_init(|| {
        let experiment = Experiment::new("layouts: [sequence, tensor]");
        let shared = support::modules();
        let ran = experiment.run(&["--modules", shared.to_str().expect("UTF-8")]);
        assert!(ran.status.success(), "{}", stderr(&ran));
        let store = ModuleStore::new(&shared);
        experiment.records().iter().map(|r| store.path(r.identity.as_ref().expect("a program"))).collect()
    })
}

/// Returns the shared store with the modules of `sequence` and `tensor` on `cpu:2`.
pub fn modules() -> PathBuf {
    known();
    support::modules()
}

/// Copies the modules of `sequence` and `tensor` to the store of an experiment in `out`.
pub fn copy_modules(out: &Path) {
    std::fs::create_dir_all(out.join("modules")).expect("a folder");
    for path in known() {
        std::fs::copy(path, out.join("modules").join(path.file_name().expect("a name"))).expect("copied");
    }
}

fn records(folder: &Path) -> Vec<LogRecord> {
    let text = std::fs::read_to_string(folder.join("results.jsonl")).expect("a log");
    text.lines().map(|l| serde_json::from_str(l).expect("a line")).collect()
}

fn stored(folder: &Path) -> BTreeMap<PathBuf, (Vec<u8>, SystemTime)> {
    let all = std::fs::read_dir(folder.join("modules")).expect("modules").map(|e| e.expect("an entry").path());
    let all = all.filter(|p| p.extension().is_some_and(|e| e == "module"));
    let read = |p: &PathBuf| {
        (std::fs::read(p).expect("bytes"), p.metadata().and_then(|m| m.modified()).expect("a time of writing"))
    };
    all.map(|p| (p.clone(), read(&p))).collect()
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// Replaces figures in every line of a log.
pub fn tamper(folder: &Path) {
    let lines = records(folder).into_iter().map(|mut r| {
        for field in ["/flops", "/collectives/per_layer_bytes", "/memory/temporaries", "/needed/bytes"] {
            if let Some(value) = r.result.as_mut().and_then(|v| v.pointer_mut(field)) {
                *value = Value::from(123_456_789_000_u64);
            }
        }
        format!("{}\n", serde_json::to_string(&r).expect("JSON"))
    });
    let lines: String = lines.collect();
    std::fs::write(folder.join("results.jsonl"), lines).expect("writes");
}

/// A path without a file, so that starting a child process fails.
fn nothing() -> &'static Path {
    Path::new("/no/such/binary")
}

#[needs(cpu)]
fn experiment_figures_are_computed_from_stored_modules() {
    let experiment = Experiment::with_modules("layouts: [sequence, tensor]");
    let first = experiment.run(&[]);
    assert!(first.status.success(), "{}", stderr(&first));
    let (right, stored) = (experiment.records(), experiment.modules());
    assert_eq!((right.len(), stored.len()), (2, 2));

    // Wrong figures in the log are ignored and corrected.
    tamper(&experiment.path("out"));
    let again = experiment.run(&[]);
    assert!(stderr(&again).contains("2 of 2 results are already stored"), "{}", stderr(&again));
    assert_eq!(String::from_utf8_lossy(&again.stdout), String::from_utf8_lossy(&first.stdout));
    assert_eq!(experiment.modules(), stored, "nothing was compiled");
    let last = experiment.records().split_off(2);
    // Index by key, because concurrent cases finish in any order.
    let of = |all: &[LogRecord]| -> BTreeMap<_, _> { all.iter().map(|r| (r.key.clone(), r.result.clone())).collect() };
    assert_eq!(of(&last), of(&right));
    experiment.run(&[]);
    assert_eq!(experiment.records().len(), 4, "correct results are not logged again");

    // Another module under the same key changes the figures immediately.
    let store = ModuleStore::new(&experiment.path("out/modules"));
    let key = |n: usize| right[n].identity.as_ref().expect("a program");
    let others = store.get(key(1)).expect("readable").expect("is stored");
    // The store does not overwrite an existing module.
    std::fs::remove_file(store.path(key(0))).expect("removed");
    store.put(key(0), &others).expect("is written");
    let rows = experiment.rows(nothing(), false);
    let flops = |row: &CaseResult| row.report.as_ref().expect("figures").flops;
    let was = |n: usize| right[n].result.as_ref().expect("figures")["flops"].as_f64().expect("a number");
    assert_ne!(was(0), was(1));
    assert_eq!(rows.iter().map(flops).collect::<Vec<_>>(), [was(1), was(1)]);
}

#[needs(cpu)]
fn experiment_results_are_keyed_by_program() {
    let experiment = Experiment::with_modules("layouts: [mine.yml]");
    let shipped = |name: &str| std::fs::read_to_string(format!("shardings/{name}.yml")).expect("a layout");
    let write = |text: &str| std::fs::write(experiment.path("mine.yml"), text).expect("writes");
    write(&shipped("sequence"));
    let first = experiment.run(&[]);
    assert!(
        first.status.success() && stderr(&first).contains("1 of 1 results are already stored"),
        "{}",
        stderr(&first)
    );
    assert_eq!(experiment.modules().len(), 2);

    // Another layout text that gives the same program.
    write(&format!("# A remark\n\n{}", shipped("sequence")));
    let same = experiment.run(&[]);
    assert!(stderr(&same).contains("1 of 1 results are already stored"), "{}", stderr(&same));
    assert_eq!((experiment.modules().len(), &same.stdout), (2, &first.stdout));

    // Another layout gives another program, as an edit of the module `nn` would.
    write(&shipped("before-385"));
    let other = experiment.run(&[]);
    assert!(!stderr(&other).contains("already stored"), "{}", stderr(&other));
    assert_eq!(experiment.modules().len(), 3);
    assert_ne!(other.stdout, first.stdout);

    // After restoring the layout, the first module is still stored.
    write(&shipped("sequence"));
    let back = experiment.run(&[]);
    assert!(stderr(&back).contains("1 of 1 results are already stored"), "{}", stderr(&back));
    assert_eq!((experiment.modules().len(), &back.stdout), (3, &first.stdout));

    // Another compile option gives another module of the same program.
    let text = std::fs::read_to_string(experiment.path("x.yml")).expect("the experiment");
    std::fs::write(experiment.path("x.yml"), format!("{text}flags: [{{xla_cpu_enable_fast_math: true}}]\n"))
        .expect("writes");
    let fast = experiment.run(&[]);
    assert!(fast.status.success() && !stderr(&fast).contains("already stored"), "{}", stderr(&fast));
    let identities: Vec<_> = experiment.records().into_iter().filter_map(|r| r.identity).collect();
    let (last, before) = identities.split_last().expect("lines");
    let twin = before.iter().find(|k| k.program == last.program).expect("the same program");
    assert_ne!((&twin.options, twin.hash()), (&last.options, last.hash()));
}

/// After a change of the cost model (here of the chip file), every command computes new times from the same modules; in
/// the short form an experiment and `compile`.
#[needs(cpu)]
fn cost_model_change_updates_times_without_recompiling() {
    let experiment = Experiment::with_modules("layouts: [sequence, tensor]");
    let (chip, log) = (experiment.path("chip.toml"), experiment.path("compiles.jsonl"));
    let text = std::fs::read_to_string("examples/chips/a100.toml").expect("a chip");
    let write = |text: &str| std::fs::write(&chip, text).expect("writes");
    let model = ["-c", "nano_2_0", "--set", "model.path=nano", "--layers", "1", "--set", support::QUICK];
    let size = ["--set", "request.width=64", "--set", "request.height=96", "--set", "request.num_frames=9"];
    let file = experiment.path("x.yml").display().to_string();
    let searches: [&[&str]; 2] = [
        &["experiment", "--search", "--target", "cpu:2", "--budget", "2"],
        &["why", "--target", "cpu:2", "--layout", "tensor", "--budget", "1", "--json", "-"],
    ];
    let first: [&[&str]; 2] =
        [&["experiment", &file], &["compile", "--target", "cpu:2", "--layout", "tensor", "--json", "-"]];
    let mut commands = first.to_vec();
    commands.extend(searches.iter().filter(|_| full()));
    let ask = || {
        let run = |(n, command): (usize, &&[&str])| {
            let mut c = support::ltx2();
            c.args(*command).env("LTX2_COMPILE_LOG", &log).arg("--chip").arg(&chip);
            c.args(if n == 0 { &[][..] } else { &model }).args(if n == 0 { &[][..] } else { &size });
            c.arg("--modules").arg(experiment.path("out/modules"));
            c.args(if n == 1 { &[] } else { &["-o"][..] }).args((n != 1).then(|| experiment.path(&format!("{n}"))));
            let done = c.output().expect("runs");
            assert!(done.status.success(), "{command:?}: {}", stderr(&done));
            String::from_utf8_lossy(&done.stdout).into_owned()
        };
        commands.iter().enumerate().map(run).collect::<Vec<_>>()
    };
    write(&text);
    let first = ask();
    let stored = experiment.modules();
    if full() {
        std::fs::remove_file(&log).expect("the search and `why` compiled");
    }

    assert_eq!(ask(), first);
    write(&text.replace("bandwidth = 2039e9", "bandwidth = 1019.5e9"));
    let edited = ask();
    for ((command, was), now) in commands.iter().zip(&first).zip(&edited) {
        assert_ne!(was, now, "{command:?}");
    }
    assert!(!log.exists() && experiment.modules() == stored, "something was compiled");
    let memory = |answer: &str| {
        let report: Value = serde_json::from_str(answer).expect("JSON");
        report["predicted_ms"]["memory"].as_f64().expect("milliseconds")
    };
    // Half the bandwidth doubles the time.
    assert!((memory(&edited[1]) / memory(&first[1]) - 2.0).abs() < 1e-9, "{} then {}", first[1], edited[1]);
}

#[needs(cpu)]
fn damaged_module_is_recompiled() {
    let experiment = Experiment::with_modules("layouts: [sequence, tensor]");
    let first = experiment.run(&[]);
    assert!(first.status.success(), "{}", stderr(&first));
    let stored = experiment.modules();
    let (path, (bytes, _)) = stored.first_key_value().expect("a module");
    std::fs::write(path, &bytes[..bytes.len() - 1]).expect("writes");
    let again = experiment.run(&[]);
    let said = stderr(&again);
    assert!(said.contains("recompiling the program") && said.contains("1 of 2 results are already stored"), "{said}");
    let figures = |out: &Output| String::from_utf8_lossy(&out.stdout).into_owned();
    assert_eq!(figures(&again), figures(&first));
    let after = experiment.modules();
    assert_eq!(after.keys().collect::<Vec<_>>(), stored.keys().collect::<Vec<_>>());
    let untouched =
        |all: &BTreeMap<PathBuf, _>| all.last_key_value().map(|(_, entry): (_, &(Vec<u8>, SystemTime))| entry.clone());
    assert_eq!(untouched(&after), untouched(&stored));
    assert!(!stderr(&experiment.run(&[])).contains("anew"));
}

#[needs(cpu)]
fn compiler_failures_are_remembered_until_retry() {
    // The plugin rejects an unknown option.
    let experiment = Experiment::new("layouts: [sequence]\nflags: [{xla_no_such_option: 1}]");
    let error = |rows: &[CaseResult]| rows[0].error.clone().unwrap_or_default();
    let first = experiment.rows(Path::new(env!("CARGO_BIN_EXE_ltx2")), false);
    assert!(error(&first).contains("xla_no_such_option"), "{}", error(&first));
    assert_eq!(error(&experiment.rows(nothing(), false)), error(&first));
    let again = std::panic::catch_unwind(|| experiment.rows(nothing(), true));
    assert!(again.is_err(), "--retry starts a child");

    // A compiler crash is remembered as the result, too.
    let experiment = Experiment::new("layouts: [sequence]");
    let crash = experiment.script("echo 'F0000 check.cc:1] Check failed: no' >&2; kill -6 $$");
    let crashed = error(&experiment.rows(&crash, false));
    assert!(crashed.contains("signal: 6") && crashed.contains("Check failed: no"), "{crashed}");
    assert_eq!(error(&experiment.rows(nothing(), false)), crashed);
    // Errors that the compiler did not cause are not remembered.
    let full = experiment.script("echo 'error: no space left' >&2; exit 1");
    assert_eq!(error(&experiment.rows(&full, true)), "no space left");
    let done = experiment.rows(Path::new(env!("CARGO_BIN_EXE_ltx2")), false);
    assert!(done[0].report.is_some() && done[0].error.is_none(), "{:?}", done[0].error);
    let outcome = |r: &LogRecord| {
        let store = ModuleStore::new(&experiment.path("out/modules"));
        store.get(r.identity.as_ref().expect("a program")).expect("readable")
    };
    let last = experiment.records().pop().expect("a line");
    assert!(matches!(outcome(&last), Some(CompileOutcome::Module(_))));
}

#[needs(cpu)]
fn why_command_computes_figures_from_stored_modules() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("experiment");
    let ask = || {
        let mut c = support::ltx2();
        c.args(["why", "--target", "cpu:2", "-c", "nano_2_0", "--model", "nano", "--layers", "1", "--layout"]);
        c.args(["before-385", "--set", "request.width=64", "--set", "request.height=96", "--budget", "1"]);
        c.args(["--set", "request.num_frames=9", "--set", "runtime.xla_flags.xla_backend_optimization_level=0"]);
        let done = c.args(["--json", "-", "-o"]).arg(&out).output().expect("runs");
        assert!(done.status.success(), "{}", stderr(&done));
        done
    };
    let first = ask();
    let modules = stored(&out);
    assert_eq!((records(&out).len(), modules.len()), (2, 2), "the program and one change of it");
    tamper(&out);
    let again = ask();
    assert_eq!(String::from_utf8_lossy(&again.stdout), String::from_utf8_lossy(&first.stdout));
    assert_eq!(stored(&out), modules, "nothing was compiled");
    // A module folder that was copied from elsewhere.
    let other = dir.path().join("other");
    std::fs::create_dir(&other).expect("a folder");
    std::fs::rename(out.join("modules"), other.join("modules")).expect("moves");
    std::fs::remove_dir_all(&out).expect("the log is gone");
    let mut c = support::ltx2();
    c.args(["compile", "--target", "cpu:2", "-c", "nano_2_0", "--model", "nano", "--layers", "1", "--layout"]);
    c.args(["before-385", "--set", "request.width=64", "--set", "request.height=96", "--json", "-", "--modules"]);
    c.arg(other.join("modules")).args(["--set", "request.num_frames=9"]);
    let done = c.args(["--set", "runtime.xla_flags.xla_backend_optimization_level=0"]).output().expect("runs");
    assert!(stderr(&done).contains("denoise is not recompiled: using the stored module"), "{}", stderr(&done));
    let (figures, answer): (Value, Value) =
        (serde_json::from_slice(&done.stdout).expect("JSON"), serde_json::from_slice(&first.stdout).expect("JSON"));
    assert_eq!(figures["collectives"]["per_layer_bytes"], answer["per_layer_bytes"]);
}
