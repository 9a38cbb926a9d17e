//! Requests that `ltx2 bench` rejects before it measures, and its report if a request fails.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::support::{self, needs};

const VIDEO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny_video.yml");

fn bench(folder: &Path, arguments: &[&str]) -> Command {
    let mut bench = support::ltx2();
    bench.current_dir(folder).arg("bench").args(arguments);
    bench
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

fn report(folder: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join(name)).expect("a report")).expect("JSON")
}

fn measured(report: &Value) -> Vec<&str> {
    report["programs"].as_object().expect("programs").keys().map(String::as_str).collect()
}

#[needs(cpu)]
fn chained_request_is_rejected_before_compiling() {
    let folder = tempfile::tempdir().expect("a folder");
    let clips = ["--set", "request.chain={clip: 17, overlap: 9}", "--num-frames", "33"];
    let size = ["-c", VIDEO, "--width", "96", "--height", "64", "--json", "a.json"];
    let mut run = bench(folder.path(), &[&size[..], &clips].concat());
    let out = run.env("LTX2_LOG", "info,ltx2_runtime::engine=debug").output().expect("runs");
    let said = stderr(&out);
    assert_eq!(out.status.code(), Some(2), "{said}");
    let line = "error: bench: request.chain: chained clips cannot be benchmarked; remove --chain";
    assert!(said.lines().any(|l| l.starts_with(line)), "{said}");
    assert!(!said.contains("hash=") && !folder.path().join("a.json").exists(), "{said}");
}

#[needs(cpu)]
fn audio_only_benchmark_writes_wav() {
    let folder = tempfile::tempdir().expect("a folder");
    let request = ["-c", VIDEO, "--pipeline", "text_to_audio", "--num-frames", "9", "--json", "a.json"];
    let runs = ["--programs", "vocoder,end-to-end", "--runs", "1"];
    let out = bench(folder.path(), &[&request[..], &runs].concat()).output().expect("runs");
    assert!(out.status.success(), "{}", stderr(&out));
    let table = String::from_utf8_lossy(&out.stdout);
    assert!(table.lines().any(|line| line.starts_with("WAV ")) && !table.contains("MP4"), "{table}");
    let report = report(folder.path(), "a.json");
    assert_eq!(measured(&report), ["end_to_end", "vocoder"]);
    let outputs = report["programs"]["end_to_end"]["outputs"].as_object().expect("outputs");
    assert_eq!(outputs.keys().collect::<Vec<_>>(), ["audio"]);
    assert!(report["mp4_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{report}");
}

#[needs(cpu)]
fn failed_request_still_reports_measured_programs() {
    let folder = tempfile::tempdir().expect("a folder");
    for (n, (moment, programs)) in
        [("decode audio", &["vocoder"][..]), ("rename bench.mp4", &["end_to_end", "vocoder"])].into_iter().enumerate()
    {
        let name = format!("{n}.json");
        let own = ["-c", support::tiny(), "--programs", "vocoder,end-to-end", "--runs", "1", "--json", &name];
        let mut run = bench(folder.path(), &own);
        let out = run.env("LTX2_FAILPOINT", format!("fail {moment}")).output().expect("runs");
        let said = stderr(&out);
        assert_eq!(out.status.code(), Some(1), "{said}");
        let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "{said}");
        assert!(
            errors[0].starts_with("error: end-to-end: ") && errors[0].contains("failure injected by LTX2_FAILPOINT"),
            "{said}"
        );
        assert!(
            errors[0].ends_with("; the report contains the programs that were measured before this error"),
            "{said}"
        );
        let report = report(folder.path(), &name);
        assert_eq!(measured(&report), programs, "{moment}");
        assert!(report["mp4_seconds"].is_null(), "{moment}");
        let table = String::from_utf8_lossy(&out.stdout);
        assert!(programs.iter().all(|program| table.contains(program)), "{table}");
    }
    // Nothing was measured, so no report is written.
    let own = ["-c", support::tiny(), "--programs", "end-to-end", "--runs", "1", "--json", "none.json"];
    let mut run = bench(folder.path(), &own);
    let out = run.env("LTX2_FAILPOINT", "fail decode audio").output().expect("runs");
    assert!(!out.status.success() && !folder.path().join("none.json").exists(), "{}", stderr(&out));
}

#[needs(cpu)]
fn report_is_printed_if_its_file_is_unwritable() {
    let folder = tempfile::tempdir().expect("a folder");
    let own = ["-c", support::tiny(), "--programs", "vocoder", "--runs", "1", "--json", "a.json"];
    let out = bench(folder.path(), &own).env("LTX2_FAILPOINT", "fail rename a.json").output().expect("runs");
    assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
    assert!(
        stderr(&out).contains("error: --json: cannot write the file; the JSON was printed to stdout instead: "),
        "{}",
        stderr(&out)
    );
    let printed = String::from_utf8_lossy(&out.stdout);
    let figures = printed.find("\n{").map(|at| &printed[at..]).expect("figures");
    assert_eq!(measured(&serde_json::from_str(figures).expect("JSON")), ["vocoder"]);
}
