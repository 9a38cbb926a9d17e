//! Random requests by seed: `check`, `--dry-run` and the run agree, a run that starts writes its video, and no existing
//! file is replaced.
//!
//! `LTX2_REQUEST_SEED=N` replays one seed: it prints the commands and their output, and keeps the files in
//! `target/tmp/random_requests`.

mod draws;
mod models;
mod requests;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use clap::ValueEnum;
use ltx2::config::Pipeline;
use serde_json::Value;

use self::draws::words;
use self::models::Models;
use self::requests::{Inputs, Request};
use crate::support::{self, full, needs};

/// Number of seeds of `make test` and of `make test-full`.
const SEEDS: [u64; 2] = [16, 200];
const AT_ONCE: usize = 2;

/// Result of a command.
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ended {
    fn run(arguments: &[String]) -> Self {
        let mut command = support::ltx2();
        // Log compilations. Hide ffmpeg and GPUs, so that a seed gives the same result on every machine.
        command.env("LTX2_LOG", "info,ltx2_runtime::engine=debug").env("CUDA_VISIBLE_DEVICES", "");
        let output = command.args(arguments).output().expect("the binary runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ended { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    fn succeeded(&self) -> bool {
        self.code == Some(0)
    }

    fn errors(&self) -> Vec<&str> {
        self.stderr.lines().filter_map(|line| line.strip_prefix("error: ")).collect()
    }

    /// Returns the exit code and the error.
    fn verdict(&self) -> String {
        match &self.errors()[..] {
            [] if self.succeeded() => "ready".into(),
            errors => format!("exit {:?}: {}", self.code, errors.join(" | ")),
        }
    }

    /// Returns whether a program was compiled or loaded from the cache.
    fn compiled(&self) -> bool {
        self.stderr.lines().any(|line| line.contains("DEBUG") && line.contains("program=") && line.contains("hash="))
    }

    /// Returns the last progress line of denoising steps.
    fn steps(&self) -> Option<&str> {
        self.stderr.lines().rfind(|line| line.ends_with(" steps"))
    }
}

/// Returns the files below a folder with their contents, and the folders.
fn snapshot(folder: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        match entry.is_dir() {
            true => {
                all.append(&mut snapshot(&entry));
                all.insert(entry, None);
            }
            false => drop(all.insert(entry.clone(), Some(fs::read(&entry).expect("bytes")))),
        }
    }
    all
}

/// What disagrees, and the details.
type Fault = (&'static str, String);

/// Result of a request.
struct Outcome {
    request: Request,
    completed: bool,
    compiled: bool,
    faults: Vec<Fault>,
}

fn try_request(seed: u64, models: &Models, inputs: &Inputs, folder: &Path, tell: bool) -> Outcome {
    let request = Request::new(seed, models, inputs, folder);
    let before = snapshot(&request.out);
    let check = Ended::run(&request.check_arguments());
    let mut arguments = request.arguments();
    let run = arguments.clone();
    arguments.push("--dry-run".into());
    let dry = Ended::run(&arguments);
    let untouched = snapshot(&request.out) == before;
    let run = Ended::run(&run);
    if tell {
        for (name, ended) in [("check", &check), ("dry run", &dry), ("run", &run)] {
            eprintln!("--- {name}: exit {:?}\n{}{}", ended.code, ended.stdout, ended.stderr);
        }
    }
    let mut faults = Vec::new();
    if !untouched {
        faults.push(("check or the dry run writes files", String::new()));
    }
    compare_verdicts(&request, [&check, &dry, &run], &mut faults);
    judge_files(&request, &run, &before, &mut faults);
    let (completed, compiled) = (run.succeeded(), run.compiled());
    Outcome { request, completed, compiled, faults }
}

/// Compares the results of the three commands.
fn compare_verdicts(request: &Request, [check, dry, run]: [&Ended; 3], faults: &mut Vec<Fault>) {
    for (name, ended) in [("check", check), ("the dry run", dry), ("the run", run)] {
        let lines = ended.errors().len();
        let wrong = !matches!(ended.code, Some(0..=2)) || ended.stderr.contains("panicked");
        if wrong || lines != usize::from(!ended.succeeded()) {
            faults.push(("not one error line", format!("{name}, exit {:?}: {}", ended.code, ended.stderr)));
        }
    }
    let details = || format!("dry run: {}\n    run:     {}", dry.verdict(), run.verdict());
    match (dry.succeeded(), run.succeeded()) {
        (true, true) => {}
        (true, false) if run.steps().is_some() => faults.push(("fails after denoising steps", details())),
        (true, false) if run.compiled() => faults.push(("fails after compiling", details())),
        (true, false) => faults.push(("the dry run accepts what the run refuses", details())),
        (false, true) => faults.push(("the dry run refuses what runs", details())),
        (false, false) if run.compiled() => faults.push(("the dry run refuses it, the run compiles first", details())),
        (false, false) if dry.verdict() != run.verdict() => faults.push(("other errors", details())),
        (false, false) => {}
    }
    let (ready, error) = verdict_of_check(check);
    if ready != check.succeeded() {
        faults.push(("check's exit code is not its verdict", format!("ready: {ready}, exit {:?}", check.code)));
    }
    let details = || format!("check: {}\n    dry run: {}\n    run:     {}", error, dry.verdict(), run.verdict());
    // `check` does not know the outputs.
    let excused = dry.errors().iter().any(|error| request.is_about_outputs(error));
    match (ready, dry.succeeded()) {
        (true, false) if !excused => faults.push(("check accepts what the dry run refuses", details())),
        (false, true) => faults.push(("check refuses what the dry run accepts", details())),
        (false, false) if !excused && dry.errors() != [error.as_str()] => {
            faults.push(("check has another error", details()));
        }
        _ => {}
    }
}

/// Returns whether `check` accepts the request, and its error. `check` prints no JSON if it cannot open the model.
fn verdict_of_check(check: &Ended) -> (bool, String) {
    let json: Value = serde_json::from_str(&check.stdout).unwrap_or(Value::Null);
    match json["request"]["ready"].as_bool() {
        Some(ready) => (ready, json["request"]["error"].as_str().unwrap_or_default().to_string()),
        None => (false, check.errors().join(" | ")),
    }
}

/// Checks the files that a run leaves.
fn judge_files(request: &Request, run: &Ended, before: &BTreeMap<PathBuf, Option<Vec<u8>>>, faults: &mut Vec<Fault>) {
    let after = snapshot(&request.out);
    let own = |path: &Path| path.strip_prefix(&request.out).unwrap_or(path).display().to_string();
    let listed = |paths: &[&PathBuf]| paths.iter().map(|path| own(path)).collect::<Vec<_>>().join(", ");
    let changed: Vec<&PathBuf> =
        before.iter().filter(|(path, bytes)| after.get(*path) != Some(*bytes)).map(|(path, _)| path).collect();
    let is_other = |path: &PathBuf| own(path).starts_with("other.") || own(path) == "notes/note.txt";
    if !changed.is_empty() && (!request.force || changed.iter().any(|path| is_other(path))) {
        faults.push(("replaces files", format!("{} ({})", listed(&changed), run.verdict())));
    }
    let new: Vec<&PathBuf> = after.keys().filter(|path| !before.contains_key(*path)).collect();
    let is_video = |path: &&&PathBuf| path.extension().is_some_and(|end| end == request.pipeline.extension());
    if run.succeeded() {
        let videos = run.stdout.lines().filter(|line| fs::metadata(line).is_ok_and(|file| file.len() > 0)).count();
        if videos != request.videos {
            faults.push(("a video is missing", format!("{videos} of {} in {}", request.videos, listed(&new))));
        }
        let missing: Vec<&PathBuf> = request.more_outputs.iter().filter(|path| !path.exists()).collect();
        if !missing.is_empty() {
            faults.push(("outputs are missing", listed(&missing)));
        }
        return;
    }
    if run.steps().is_some() && !new.iter().any(|path| is_video(&path)) {
        faults.push(("a result is lost after its steps", format!("{:?}, {}", run.steps(), run.verdict())));
    }
    if !new.is_empty() {
        faults.push(("a run that fails leaves files", format!("{} ({})", listed(&new), run.verdict())));
    }
}

/// Formats the request, the disagreements and the command.
fn report(outcome: &Outcome) -> String {
    let Request { seed, generation, layout, pipeline, damage, options, .. } = &outcome.request;
    let damage = damage.as_ref().map_or("whole".into(), |(part, damage)| format!("{} {damage:?}", part.display()));
    let end = if outcome.completed { "completed" } else { "refused" };
    let faults = outcome.faults.iter().map(|(kind, details)| format!("  {kind}:\n    {details}\n"));
    let pipeline = pipeline.name();
    let request = format!("seed {seed}: {generation:?} {layout:?} {pipeline}, {damage}, {options:?}: {end}");
    let command = outcome.request.command();
    format!("{request}\n{}  LTX2_REQUEST_SEED={seed} replays it: {command}", faults.collect::<String>())
}

#[needs(cpu)]
fn check_dry_run_and_run_agree_on_random_requests() {
    let replayed: Option<u64> =
        std::env::var("LTX2_REQUEST_SEED").ok().map(|seed| seed.parse().expect("LTX2_REQUEST_SEED is a number"));
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("random_requests");
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let root = if replayed.is_some() { kept } else { folder.path().to_path_buf() };
    if root.exists() && replayed.is_some() {
        fs::remove_dir_all(&root).expect("removed");
    }
    let (models, inputs) = (Models::new(&root.join("models")), Inputs::new(&root));
    let seeds: Vec<u64> = replayed.map_or(0..SEEDS[usize::from(full())], |seed| seed..seed + 1).collect();
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
            let folder = root.join(format!("seed_{seed}"));
            let outcome = try_request(*seed, &models, &inputs, &folder, replayed.is_some());
            if replayed.is_some() || !outcome.faults.is_empty() {
                eprintln!("{}", report(&outcome));
            }
            outcomes.lock().expect("no panic").push(outcome);
        }
    };
    thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(work))));
    let outcomes = outcomes.into_inner().expect("no panic");
    assert_eq!(outcomes.len(), seeds.len(), "every seed ran");
    let completed = outcomes.iter().filter(|outcome| outcome.completed).count();
    let late = outcomes.iter().filter(|outcome| outcome.compiled && !outcome.completed).count();
    eprintln!("{} requests: {completed} completed, {late} failed after compiling", outcomes.len());
    let wrong: BTreeSet<u64> =
        outcomes.iter().filter(|outcome| !outcome.faults.is_empty()).map(|outcome| outcome.request.seed).collect();
    assert!(wrong.is_empty(), "LTX2_REQUEST_SEED=N replays these: {wrong:?}");
    if replayed.is_none() {
        let some = outcomes.len() / 5;
        assert!(completed >= some && outcomes.len() - completed >= some, "{completed} completed");
        let pipelines: BTreeSet<&str> = outcomes.iter().map(|outcome| outcome.request.pipeline.name()).collect();
        assert_eq!(pipelines.len(), Pipeline::value_variants().len(), "{pipelines:?}");
    }
}

#[needs(nothing)]
fn seeded_requests_are_repeatable_and_cover_all_pipelines() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path();
    let (models, inputs) = (Models::new(&root.join("models")), Inputs::new(root));
    let drawn = |name: &str, seed: u64| {
        let own = root.join(format!("{name}_{seed}"));
        let request = Request::new(seed, &models, &inputs, &own);
        request.command().replace(own.to_str().expect("UTF-8"), "FOLDER")
    };
    let commands: Vec<String> = (0..SEEDS[1]).map(|seed| drawn("first", seed)).collect();
    for seed in 0..SEEDS[0] {
        assert_eq!(drawn("second", seed), commands[seed as usize], "seed {seed}");
    }
    let pipelines = Pipeline::value_variants().iter().map(|pipeline| format!("pipeline={}", pipeline.name()));
    let keys = ["sampler.kind", "model.decoder"].into_iter();
    let words = keys.flat_map(|key| words(key).into_iter().map(move |word| format!("{key}={word}")));
    let platform = ["runtime.platform=auto".to_string()];
    for pair in pipelines.chain(words).chain(platform) {
        let has = |command: &&String| command.split(' ').any(|word| word == pair);
        assert!(commands.iter().any(|command| has(&command)), "no request has {pair}");
    }
}
