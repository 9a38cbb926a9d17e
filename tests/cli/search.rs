//! `ltx2 experiment --search`: which layouts it compiles, which it skips, and that its result is reproducible.

use std::path::Path;
use std::process::Output;

use crate::module_store::{modules, tamper};
use crate::support::{self, needs};
use ltx2::analysis::Chip;
use ltx2::config::{CliOverrides, load, read_layout_source};
use ltx2::hlo::DeviceMesh;
use ltx2::nn::{Build, Lowering, Quantization};
use ltx2::pipeline::plan::layouts::{Bound, bound, placed};
use ltx2::pipeline::programs::build::{ProgramKind, Programs};
use ltx2::tune::LogRecord;

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

fn records(folder: &Path) -> Vec<LogRecord> {
    let text = std::fs::read_to_string(folder.join("results.jsonl")).unwrap_or_default();
    text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

/// Runs a search with small sizes.
fn search(folder: &Path, more: &[&str]) -> Output {
    let mut command = support::ltx2();
    command.args(["experiment", "--search", "--shape", "64x96x9", "-c", "nano_2_0", "--set", "model.path=nano"]);
    command.arg("--modules").arg(modules()).args(["--set", support::QUICK, "--layers", "1"]);
    command.arg("-o").arg(folder).args(more).output().expect("runs")
}

#[needs(cpu)]
fn search_is_reproducible_and_resumable() {
    let dir = tempfile::tempdir().expect("a folder");
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let question = ["--target", "cpu:2", "--budget", "2", "--seed", "3"];
    let first = search(&one, &question);
    assert!(first.status.success(), "{}", stderr(&first));
    let done = records(&one);
    assert_eq!(done.len(), 2, "{}", stderr(&first));
    let best = std::fs::read_to_string(one.join("best.yml")).expect("a layout");
    assert!(best.contains("predicted to be the fastest of") && best.contains("# Compiled:\n"), "{best}");
    assert!(std::fs::read_to_string(one.join("report.html")).expect("a report").contains("Compare two cases"));

    // All results are stored: the same answer without compiling.
    let again = search(&one, &question);
    assert_eq!(again.stdout, first.stdout, "{}", stderr(&again));
    assert_eq!(records(&one), done);
    assert_eq!(std::fs::read_to_string(one.join("best.yml")).expect("a layout"), best);
    // The result is the same in another folder and with another number of jobs; --shape overrides `num_frames: auto`.
    let elsewhere = search(&two, &[&question[..], &["--jobs", "1", "--set", "request.num_frames=auto"]].concat());
    assert_eq!(String::from_utf8_lossy(&elsewhere.stdout), String::from_utf8_lossy(&first.stdout));
    // Figures in the log are ignored; they are computed from the modules.
    tamper(&two);
    let read = search(&two, &question);
    assert_eq!(String::from_utf8_lossy(&read.stdout), String::from_utf8_lossy(&first.stdout), "{}", stderr(&read));

    // Compiling the winner gives the cost with which it was compared, the lowest in the table.
    let costs = |r: &LogRecord| r.result.as_ref().and_then(|r| r["collectives"]["per_step_wire_bytes"].as_f64());
    let least = done.iter().filter_map(costs).fold(f64::INFINITY, f64::min);
    let path = one.join("best.yml");
    let mut command = support::ltx2();
    command.args(["compile", "--target", "cpu:2", "-c", "nano_2_0", "--set", "model.path=nano", "--layers", "1"]);
    command.args(["--set", "request.width=64", "--set", "request.height=96", "--set", "request.num_frames=9"]);
    command.arg("--modules").arg(support::modules());
    let out = command.args(["--set", support::QUICK, "--json", "-", "--layout"]).arg(&path).output().expect("runs");
    assert!(out.status.success(), "{}", stderr(&out));
    let figures: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(figures["devices"], 2);
    assert!(figures["collectives"]["per_step_wire_bytes"].as_f64().is_some_and(|b| b <= 1.1 * least), "{least}");
}

/// Parses the numbers of each layout in a table of totals: the sum, then the step time of each part.
fn totals(stdout: &str, parts: usize) -> Vec<Vec<f64>> {
    let rows = stdout.lines().skip_while(|line| !line.contains("all steps")).skip(1);
    let numbers = |line: &str| {
        let mut cells: Vec<f64> = line.split_whitespace().rev().map_while(|cell| cell.parse().ok()).collect();
        cells.reverse();
        cells.pop();
        cells
    };
    rows.take_while(|line| !line.is_empty()).map(numbers).filter(|row| row.len() == parts + 1).collect()
}

/// Finds one layout for both passes, weighted by their numbers of steps, under a memory limit. `best.yml` lists the
/// compiled and the skipped layouts.
#[needs(cpu, full)]
fn search_weights_passes_by_their_step_counts() {
    let dir = tempfile::tempdir().expect("a folder");
    let search = |more: &[&str]| {
        let mut command = support::ltx2();
        command.args(["experiment", "--search", "-c", "nano_two_stage", "--set", "model.path=nano", "--layers", "1"]);
        command.args(["--set", "request.max_sequence_length=128", "--target", "cpu:2", "--chip", "h200"]);
        command.args(["--set", support::QUICK, "--modules"]).arg(support::modules()).arg("-o").arg(dir.path());
        command.args(more).output().expect("runs")
    };
    let out = search(&["--budget", "5", "--memory", "1"]);
    let words = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{}", stderr(&out));
    // Two layouts with two programs each: a fifth program would be half a layout.
    assert_eq!(records(dir.path()).len(), 4, "{words}");
    let rows = totals(&words, 2);
    assert_eq!(rows.len(), 2, "{words}");
    for row in &rows {
        let [sum, denoise, refine] = row[..] else { panic!("{words}") };
        assert!((sum / (20.0 * denoise + 3.0 * refine) - 1.0).abs() < 0.01, "{words}");
    }
    assert!(rows[0][0] <= rows[1][0], "the fastest first: {words}");
    let best = std::fs::read_to_string(dir.path().join("best.yml")).expect("a layout");
    assert!(best.contains("# Times are for 20 x denoise + 3 x refine.") && best.contains(" of 1.00 GiB"), "{best}");
    assert!(
        best.contains("# Not compiled:") && best.contains("\n#   same as ") && best.contains("\n#   at least "),
        "{best}"
    );

    // Every layout needs more than a megabyte.
    let out = search(&["--budget", "4", "--memory", "0.001"]);
    assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
    let words = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(words.contains("found no layout that fits") && words.contains(" of 0.00 GiB"), "{words}");
    assert_eq!(records(dir.path()).len(), 4);
    // A budget below one layout is rejected, and so is a layout that is not a file.
    let out = search(&["--budget", "1"]);
    assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
    assert!(stderr(&out).contains("each layout has 2 programs"), "{}", stderr(&out));
    let out = search(&["--layout", "auto"]);
    assert!(out.status.code() == Some(2) && stderr(&out).contains("--layout auto"), "{}", stderr(&out));
    // A single pass is compared by its step time.
    let out = search(&["--budget", "1", "--program", "refine"]);
    assert!(String::from_utf8_lossy(&out.stdout).contains(" ms per step"), "{}", stderr(&out));
}

/// Each batch size has its own candidate meshes; all are compared by the time per video.
#[needs(cpu, full)]
fn sizes_and_batch_sizes_are_compared() {
    let dir = tempfile::tempdir().expect("a folder");
    let more = ["--shape", "96x96x17", "--target", "cpu:2", "--videos", "1,2,2", "--budget", "12", "--chip", "v5p"];
    let out = search(dir.path(), &more);
    let words = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{}", stderr(&out));
    let best = std::fs::read_to_string(dir.path().join("best.yml")).expect("a layout");
    // Two devices with one video each need no communication, and otherwise take the time of one video.
    assert!(best.starts_with("# ") && best.contains(" data=2, 2 videos: predicted to be the fastest of"), "{best}");
    let twice = |line: &&str| line.contains("as ") && line.contains(", 1 video:") && line.contains(", 2 videos");
    assert!(best.lines().any(|line| twice(&line)), "a layout for two videos one by one is that for one: {best}");
    assert!(
        best.contains("# Times are for 8 x 64x96x9 + 8 x 96x96x17.") && best.contains("\nmesh: {data: 2}\n"),
        "{best}"
    );
    assert!(words.contains("cpu:2, 64x96x9, ") && words.contains("cpu:2, 96x96x17, 2 videos\n"), "{words}");
}

/// Runs the commands of the tuning guide on two CPU devices with the toy model.
#[needs(cpu, full)]
fn search_accepts_custom_chip_and_layout() {
    let settings = format!(
        " -c nano_2_0 --set model.path=nano --set request.width=64 --set request.height=96 --set request.num_frames=9 \
         --set {} --modules {} --layers 1",
        support::QUICK,
        support::modules().display()
    );
    let quick = [
        ("cuda:a100:1x1x2", "cpu:2"),
        (" -c ltx2 --layers 3", settings.as_str()),
        (" -c ltx2", &settings),
        ("--budget 6", "--budget 4"),
    ];
    let (folder, done) = support::tuning_guide::run_custom_chip_and_layout(&quick);
    let words = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success(), "{words}\n{}", stderr(&done));
    let best = std::fs::read_to_string(folder.path().join("out/mine/best.yml")).expect("a layout");
    // The user's layout was compiled, whether it won or lost.
    let (compiled, _) = best.split_once("# Not compiled").expect("both lists");
    assert!(compiled.contains("mine.yml context=2") && compiled.contains(" of 70.00 GiB"), "{best}");
    assert!(best.contains("--chip my-gpu.toml") && best.contains(", for the chip a100"), "{best}");
    assert!(words.contains("predicted ms") && words.contains("best.yml"), "{words}");
}

#[needs(cpu)]
fn invalid_search_options_give_one_error_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let fail = |arguments: &[&str]| {
        let out = support::ltx2().arg("experiment").args(arguments).arg("-o").arg(dir.path()).output().expect("runs");
        assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
        stderr(&out)
    };
    let message = fail(&["--search", "--target", "tpu:v9:2x2", "-c", "ltx2"]);
    assert!(message.starts_with("error: --target: invalid target 'tpu:v9:2x2': unknown chip 'v9'"), "{message}");
    assert_eq!(message.trim().lines().count(), 1, "{message}");
    // `runtime.chip_file` has the same effect as `--chip`.
    let a100 = ["--search", "--target", "cuda:a100:1x1x2", "-c", "nano_2_0", "--layout", "auto"];
    assert!(fail(&a100).contains("unknown chip 'a100'"));
    let message = fail(&[&a100[..], &["--set", "runtime.chip_file=examples/chips/a100.toml"]].concat());
    assert!(message.starts_with("error: --layout auto: a search always tries the shipped layouts"), "{message}");
    let yaml = dir.path().join("chips.yml");
    let cases = "config: nano_2_0\nset: [model.path=nano, runtime.chip_file=nowhere.toml]\nlayouts: [cfg]\ntargets: ['cpu:2']\n";
    std::fs::write(&yaml, cases).expect("written");
    let message = fail(&[yaml.to_str().expect("UTF-8")]);
    assert!(message.starts_with("error: runtime.chip_file = nowhere.toml (--set): nowhere.toml: "), "{message}");
    let message = fail(&["--search", "--target", "tpu:v5p:2x2x1:2", "-c", "ltx2"]);
    assert!(message.starts_with("error: --target tpu:v5p:2x2x1:2: a search is for one slice"), "{message}");
    assert_eq!(message.trim().lines().count(), 1, "{message}");
    let auto = ["-c", "nano_2_0", "--set", "model.path=nano", "--set", "request.num_frames=auto"];
    let message = fail(&[&["--search", "--target", "cpu:2"], &auto[..]].concat());
    assert!(message.contains("request.num_frames: auto") && message.contains("pass a number of frames"), "{message}");
    let message = fail(&["--search", "--target", "cpu:2", "--shape", "768x512", "-c", "nano_2_0"]);
    assert!(message.contains("shape '768x512' is not WIDTHxHEIGHTxFRAMES"), "{message}");
    let message = fail(&["--search", "--target", "cpu:2", "--memory-fit", "-c", "nano_2_0"]);
    assert!(message.contains("--memory-fit: the device memory of 'cpu:2' is unknown"), "{message}");
    let message =
        fail(&["--search", "--target", "cpu:2", "--program", "refine", "-c", "nano_2_0", "--set", "model.path=nano"]);
    assert!(message.contains("program 'refine' needs a two-stage pipeline"), "{message}");
    let message = fail(&["--search", "--target", "cpu:2", "--layout", "none.yml", "-c", "nano_2_0"]);
    assert!(message.contains("none.yml"), "{message}");
    let message = fail(&["--search", "--target", "cpu:2", "--memory", "0", "-c", "nano_2_0"]);
    assert!(message.contains("--memory") && message.contains("GiB above 0"), "{message}");
    assert!(fail(&["--search", "--target", "cpu:2", "--videos", "0", "-c", "nano_2_0"]).contains("--videos"));
    assert!(fail(&["x.yml", "--search", "--target", "cpu:2"]).contains("cannot be used with"), "a file and --search");
    assert!(fail(&["--search", "-c", "ltx2"]).contains("--target"), "no target");
    assert!(fail(&["x.yml", "--budget", "3"]).contains("--search"), "a budget without --search");
    assert!(fail(&["x.yml", "--set", "sampler.steps=3"]).contains("require --search"));
}

/// Programs of the published model at 768x512x121, lowered as for TPUs but without custom kernels.
struct Published {
    programs: Programs,
    products: f64,
}

impl Published {
    fn new() -> Self {
        let given = CliOverrides { files: vec!["ltx2".into()], ..CliOverrides::default() };
        let config = load(&given).expect("a shipped configuration").config;
        let programs = Programs::from_config(&config, None).expect("the published model's sizes");
        let alone = programs.network(ProgramKind::Denoise, &build()).expect("builds");
        Published { programs, products: alone.program.dot_flops }
    }

    fn bound(&self, layout: &str, mesh: &[(&str, usize)], chip: &str) -> Bound {
        let source = read_layout_source(layout).expect("a layout");
        let point = placed(layout.into(), None, &source, &DeviceMesh::new(mesh)).expect("a mesh that it uses");
        let layout = point.source.on(point.mesh.clone()).expect("rules");
        let build = Build { layout: layout.clone(), ..build() };
        let network = self.programs.network(ProgramKind::Denoise, &build).expect("builds");
        let chip = Chip::named(chip).expect("a chip").uncalibrated();
        bound(&network, &layout, Some(&chip), Quantization::None, self.programs.layers())
    }
}

fn build() -> Build {
    Build { lowering: Lowering::default(), ..Build::new(ltx2::hlo::DType::BF16) }
}

/// Compares lower bounds with figures of the layout guide and with hand-computed costs of the model.
#[needs(cpu)]
fn lower_bounds_are_close_to_known_costs() {
    let published = Published::new();
    // Two batch rows of 6144 tokens through 48 blocks: 2 x 48 x (235 M weights or more per token, attention 0.62
    // TFLOP).
    assert!((300e12..450e12).contains(&published.products), "{:.3e}", published.products);
    let ulysses = published.bound("ulysses", &[("context", 8)], "v5p");
    let compute = published.products / 8.0 / 459e12 * 1e3;
    // An eighth of the video, and the complete audio stream.
    assert!((0.98..=1.06).contains(&(ulysses.compute / compute)), "{ulysses:?}, {compute}");
    // All-to-alls of 50.3 MB per block, of which 7/8 are received; the guide has 52.5 MB including video-to-audio
    // attention. On a ring of eight, an all-to-all uses half the link bandwidth of an all-gather.
    let trades = 48.0 * 50.33e6 * 7.0 / 8.0 / 100e9 * 1e3;
    assert!((ulysses.links / trades - 1.0).abs() < 0.02, "{ulysses:?}, {trades}");
    // Keys and values of two batch rows.
    let sequence = published.bound("sequence", &[("context", 8)], "v5p");
    let gathers = 48.0 * 201.3e6 * 7.0 / 8.0 / 200e9 * 1e3;
    assert!((sequence.links / gathers - 1.0).abs() < 0.02, "{sequence:?}, {gathers}");
    // Each weight once, seven eighths of them received.
    let stored = published.bound("fsdp-ulysses", &[("context", 8)], "v6e");
    let weights = 48.0 * 688e6 * 7.0 / 8.0 / 200e9 * 1e3;
    assert!(((stored.links - ulysses.links) / weights - 1.0).abs() < 0.1, "{stored:?}, {weights}");
    // Weights sharded over the token axis are transferred too.
    let before = published.bound("before-385", &[("context", 8)], "v5p");
    assert!(before.links > 2.0 * sequence.links, "{before:?}");
    // Three of the four all-reduces of a block, each with two batch rows of video tokens.
    let tensor = published.bound("tensor", &[("tensor", 8)], "v5p");
    let sums = 48.0 * 3.0 * 100.66e6 * 2.0 * 7.0 / 8.0 / 200e9 * 1e3;
    assert!((tensor.links / sums - 1.0).abs() < 0.02, "{tensor:?}, {sums}");
    // Half of the devices repeat the work of the other half.
    let idle = published.bound("fsdp-ulysses", &[("fsdp", 2), ("context", 4)], "v5p");
    assert!((1.9..=2.0).contains(&(idle.compute / ulysses.compute)), "{idle:?}");
    // Heads and widths that are not divisible by the mesh leave each device all of the work.
    let repeated = published.bound("tensor", &[("tensor", 3)], "v5p");
    assert!((repeated.compute / (8.0 * compute) - 0.98).abs() < 1e-3 && repeated.links == 0.0, "{repeated:?}");
}
