//! `ltx2 experiment --search`: what it looks at, what it leaves out, and that it says the same again.

use std::path::Path;
use std::process::Output;

use crate::module_store::tamper;
use crate::support::{self, needs};
use ltx2::analysis::Chip;
use ltx2::config::{CliOverrides, load, read_layout_source};
use ltx2::hlo::Mesh;
use ltx2::nn::{Build, Lowering};
use ltx2::pipeline::programs::{ProgramKind, Programs};
use ltx2::tune::Record;
use ltx2::tune::search::{Bound, bound, parts, placed};

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

fn records(folder: &Path) -> Vec<Record> {
    let text = std::fs::read_to_string(folder.join("results.jsonl")).unwrap_or_default();
    text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

/// A search on small sizes.
fn search(folder: &Path, more: &[&str]) -> Output {
    let mut command = support::ltx2();
    command.args(["experiment", "--search", "--shape", "64x96x9", "-c", "nano_2_0", "--set", "model.path=nano"]);
    command.arg("--modules").arg(support::modules()).args(["--set", support::QUICK, "--layers", "1"]);
    command.arg("-o").arg(folder).args(more).output().expect("runs")
}

#[needs(cpu)]
fn a_search_ends_is_repeated_and_goes_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let question = ["--target", "cpu:2", "--budget", "3", "--seed", "3"];
    let first = search(&one, &question);
    assert!(first.status.success(), "{}", stderr(&first));
    let done = records(&one);
    assert!((2..=3).contains(&done.len()), "{}", stderr(&first));
    let best = std::fs::read_to_string(one.join("best.yml")).expect("a layout");
    assert!(best.contains("the fastest predicted of") && best.contains("Compiled and slower"), "{best}");
    assert!(std::fs::read_to_string(one.join("report.html")).expect("a report").contains("What changed between"));

    // Everything is known: the same answer, nothing compiled.
    let again = search(&one, &question);
    assert_eq!(again.stdout, first.stdout, "{}", stderr(&again));
    assert_eq!(records(&one), done);
    assert_eq!(std::fs::read_to_string(one.join("best.yml")).expect("a layout"), best);
    // Elsewhere too, whatever reads modules at a time.
    let elsewhere = search(&two, &[&question[..], &["--jobs", "1"]].concat());
    assert_eq!(String::from_utf8_lossy(&elsewhere.stdout), String::from_utf8_lossy(&first.stdout));
    // Figures that are written down are not believed: they are read from the modules anew.
    tamper(&two);
    let read = search(&two, &question);
    assert_eq!(String::from_utf8_lossy(&read.stdout), String::from_utf8_lossy(&first.stdout), "{}", stderr(&read));

    // The winner compiles as it was compared: its cost is the least of the table.
    let costs = |r: &Record| r.result.as_ref().and_then(|r| r["collectives"]["per_step_wire_bytes"].as_f64());
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

#[needs(cpu)]
fn mistakes_are_one_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let fail = |arguments: &[&str]| {
        let out = support::ltx2().arg("experiment").args(arguments).arg("-o").arg(dir.path()).output().expect("runs");
        assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
        stderr(&out)
    };
    let message = fail(&["--search", "--target", "tpu:v9:2x2", "-c", "ltx2"]);
    assert!(message.starts_with("error: --target: target 'tpu:v9:2x2': unknown chip 'v9'"), "{message}");
    assert_eq!(message.trim().lines().count(), 1, "{message}");
    let message = fail(&["--search", "--target", "cpu:2", "--shape", "768x512", "-c", "nano_2_0"]);
    assert!(message.contains("shape '768x512' is not WIDTHxHEIGHTxFRAMES"), "{message}");
    let message = fail(&["--search", "--target", "cpu:2", "--memory-fit", "-c", "nano_2_0"]);
    assert!(message.contains("--memory-fit: the device memory of 'cpu:2' is unknown"), "{message}");
    assert!(fail(&["x.yml", "--search", "--target", "cpu:2"]).contains("cannot be used with"), "a file and --search");
    assert!(fail(&["--search", "-c", "ltx2"]).contains("--target"), "no target");
    assert!(fail(&["x.yml", "--budget", "3"]).contains("--search"), "a budget without --search");
    assert!(fail(&["x.yml", "--set", "sampler.steps=3"]).contains("belong to --search"));
}

/// The published model at 768x512x121, as the TPU's programs are written but for the kernels.
struct Published {
    programs: Programs,
    products: f64,
}

impl Published {
    fn new() -> Self {
        let given = CliOverrides { files: vec!["ltx2".into()], ..CliOverrides::default() };
        let config = load(&given).expect("a shipped configuration").config;
        let programs = Programs::of(&config, None).expect("the published model's sizes");
        let alone = programs.network(ProgramKind::Denoise, &build()).expect("builds");
        Published { programs, products: alone.program.dot_flops }
    }

    fn bound(&self, layout: &str, mesh: &[(&str, usize)], chip: &str) -> Bound {
        let source = read_layout_source(layout).expect("a layout");
        let point = placed(layout.into(), None, &source, &Mesh::new(mesh)).expect("a mesh that it uses");
        let layout = point.source.on(point.mesh.clone()).expect("rules");
        let build = Build { layout: layout.clone(), ..build() };
        let network = self.programs.network(ProgramKind::Denoise, &build).expect("builds");
        let chip = Chip::named(chip).expect("a chip");
        bound(&network, &layout, Some(chip), self.products, parts(&point), self.programs.layers())
    }
}

fn build() -> Build {
    Build { lowering: Lowering::default(), ..Build::new(ltx2::hlo::DType::BF16) }
}

/// Bounds beside figures of the guide to layouts and of the model's own arithmetic.
#[needs(cpu)]
fn bounds_are_below_what_is_known_and_near_it() {
    let published = Published::new();
    // Two rows of 6144 tokens through 48 blocks: 2 x 48 x (weights of 235 M and more a token, attention 0.62 TFLOP).
    assert!((300e12..450e12).contains(&published.products), "{:.3e}", published.products);
    let ulysses = published.bound("ulysses", &[("context", 8)], "v5p");
    let compute = published.products / 8.0 / 459e12 * 1e3;
    assert!((0.97..=1.0).contains(&(ulysses.compute / compute)), "{ulysses:?}, {compute}");
    // 50.3 MB of trades a block, of which 7/8 are received; the guide has 52.5 with video to audio.
    // A trade between eight on a ring uses half of what a gather does.
    let trades = 48.0 * 50.33e6 * 7.0 / 8.0 / 100e9 * 1e3;
    assert!((ulysses.links / trades - 1.0).abs() < 0.02, "{ulysses:?}, {trades}");
    // Keys and values, two rows each.
    let sequence = published.bound("sequence", &[("context", 8)], "v5p");
    let gathers = 48.0 * 201.3e6 * 7.0 / 8.0 / 200e9 * 1e3;
    assert!((sequence.links / gathers - 1.0).abs() < 0.02, "{sequence:?}, {gathers}");
    // Every weight once, seven eighths of them from others.
    let stored = published.bound("fsdp-ulysses", &[("context", 8)], "v6e");
    let weights = 48.0 * 688e6 * 7.0 / 8.0 / 200e9 * 1e3;
    assert!(((stored.links - ulysses.links) / weights - 1.0).abs() < 0.1, "{stored:?}, {weights}");
    // Weights split by what the tokens do not share travel too.
    let before = published.bound("before-385", &[("context", 8)], "v5p");
    assert!(before.links > 2.0 * sequence.links, "{before:?}");
    // Three of the four sums of a block, two rows of video tokens each.
    let tensor = published.bound("tensor", &[("tensor", 8)], "v5p");
    let sums = 48.0 * 3.0 * 100.66e6 * 2.0 * 7.0 / 8.0 / 200e9 * 1e3;
    assert!((tensor.links / sums - 1.0).abs() < 0.02, "{tensor:?}, {sums}");
    // Half the devices do the other half's work.
    let idle = published.bound("fsdp-ulysses", &[("fsdp", 2), ("context", 4)], "v5p");
    assert!((idle.compute / ulysses.compute - 2.0).abs() < 1e-6, "{idle:?}");
}
