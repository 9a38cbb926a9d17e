//! `ltx2 experiment` and `ltx2 why` on the CPU plugin with virtual devices.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::module_store::{copy_modules, modules};
use crate::support::{self, needs};
use ltx2::tune::{DiagnosisReport, LogRecord};
use serde_json::Value;

/// Settings small enough that a case takes seconds.
const SMALL: &str = "config: nano_2_0\nset: [model.path=nano, request.width=64, request.height=96, request.num_frames=9, \
    runtime.xla_flags.xla_backend_optimization_level=0]\nlayers: 1\n";

fn records(folder: &Path) -> Vec<LogRecord> {
    let text = std::fs::read_to_string(folder.join("results.jsonl")).unwrap_or_default();
    text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

fn stderr(out: &std::process::Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[needs(cpu)]
fn killed_experiment_resumes_at_the_next_run() {
    let dir = tempfile::tempdir().expect("a folder");
    let (yaml, out) = (dir.path().join("x.yml"), dir.path().join("out"));
    let cases = "layouts: [sequence, ulysses, tensor]\ntargets: ['cpu:2']\ninclude: [{layout: cfg, mesh: cfg=16}]\n";
    std::fs::write(&yaml, format!("{SMALL}{cases}")).expect("writes");
    copy_modules(&out);
    let command = || {
        let mut c = support::ltx2();
        c.arg("experiment").arg(&yaml).arg("-o").arg(&out).args(["--jobs", "2"]);
        c
    };
    let mut first = command().stderr(std::process::Stdio::null()).spawn().expect("starts");
    let started = Instant::now();
    while records(&out).len() < 2 {
        assert!(started.elapsed() < Duration::from_secs(300), "two cases are done");
        std::thread::sleep(Duration::from_millis(20));
    }
    first.kill().expect("is killed");
    first.wait().expect("is gone");
    let before = records(&out);
    assert!(before.len() < 4, "the experiment ended before the kill");

    let done = command().output().expect("runs");
    assert!(done.status.success(), "{}", stderr(&done));
    let all = records(&out);
    assert_eq!(all.len(), 4);
    assert_eq!(all[..before.len()], before[..], "results of the killed run are kept");
    let mut keys: Vec<&str> = all.iter().map(|r| r.key.as_str()).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 4, "no case was run twice");
    let failed: Vec<&LogRecord> = all.iter().filter(|r| r.error.is_some()).collect();
    assert_eq!(failed.len(), 1);
    assert!(failed[0].error.as_deref().is_some_and(|e| e.contains("needs 16 devices")), "{:?}", failed[0].error);
    let table = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(table.starts_with("cpu:2\n") && table.contains("ulysses") && table.contains("needs 16 devices"), "{table}");

    // All results are stored, so nothing is compiled.
    let again = command().output().expect("runs");
    assert!(
        again.status.success() && stderr(&again).contains("4 of 4 results are already stored"),
        "{}",
        stderr(&again)
    );
    assert_eq!(records(&out), all);
    assert_eq!(String::from_utf8_lossy(&again.stdout), table);
}

/// Experiments with several slices and configurations: each group is ranked separately, and equal programs are compiled
/// once.
#[needs(cpu, full)]
fn slices_and_configurations_are_ranked_separately() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("out");
    let cases = "title: Slices\nconfigs: [two.yml, three.yml, five.yml]\nlayers: 1\nslices: {pair.yml: 'cpu:2', four.yml: 'cpu:4'}\n\
        set: [request.width=64, request.height=96, request.num_frames=9, \
        runtime.xla_flags.xla_backend_optimization_level=0]\n\
        exclude: [{config: [three.yml, five.yml], slice: [four.yml]}]\n\
        include: [{config: [two.yml, three.yml], layout: tensor}, {layout: sequence}, {layout: ring, mesh: context=16}]\n";
    for (name, text) in [
        ("x.yml", cases),
        ("two.yml", "extends: nano_2_0\nmodel: {path: nano}\n"),
        ("three.yml", "extends: nano_2_3\nmodel: {path: nano_2_3}\n"),
        ("five.yml", "extends: nano_2_5\nmodel: {path: nano_2_5}\n"),
        ("pair.yml", "layout: sequence\nmesh: {context: 2}\n"),
        ("four.yml", "layout: ulysses\nmesh: {context: 4}\n"),
    ] {
        std::fs::write(dir.path().join(name), text).expect("writes");
    }
    let run = || {
        let mut command = support::ltx2();
        command.current_dir(dir.path()).args(["experiment", "x.yml", "-o", "out"]).output().expect("runs")
    };
    let done = run();
    assert!(done.status.success(), "{}", stderr(&done));
    // `sequence` on the slice's mesh equals the slice's own layout, so it is compiled once.
    let first = stderr(&done).lines().next().map(str::to_string);
    let counted = first
        .as_deref()
        .is_some_and(|line| line.ends_with("cases: 8, programs to compile: 6, cases whose program cannot be built: 1"));
    assert!(counted, "{}", stderr(&done));
    let table = String::from_utf8_lossy(&done.stdout).into_owned();
    let groups: Vec<&str> = table.lines().filter(|line| line.starts_with("cpu:")).collect();
    assert_eq!(groups, ["cpu:2, two", "cpu:2, three", "cpu:2, five", "cpu:4, two"], "{table}");
    assert!(table.contains("tensor context=2 ") && table.contains("ulysses context=4 (four)"), "{table}");

    let text = std::fs::read_to_string(out.join("results.jsonl")).expect("a log");
    let log: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let given = |record: &Value, word: &str| record["command"].as_array().is_some_and(|c| c.contains(&word.into()));
    assert!(log.iter().all(|record| given(record, "pair.yml") || given(record, "four.yml")));
    assert_eq!(log.iter().filter(|record| given(record, "three.yml")).count(), 2);
    // A case with another layout keeps the slice's mesh.
    let tensor = log.iter().find(|record| given(record, "tensor")).expect("a case of it");
    assert_eq!(tensor["result"]["mesh"], serde_json::json!({"context": 2}));

    let page = std::fs::read_to_string(out.join("report.md")).expect("a page");
    assert!(page.starts_with("# Slices\n\nGenerated by `ltx2 experiment x.yml -o out` with cpu "), "{page}");
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|l| l.starts_with("| "))
        .map(|l| l.trim_matches(['|', ' ']).split(" | ").collect())
        .collect();
    let named = |row: &Vec<&str>| row[..3].join(", ");
    assert_eq!(rows.len(), 2 + 8, "a head, a rule and the cases: {page}");
    assert_eq!(named(&rows[0]), "devices, configuration, case", "no column is empty: {page}");
    for own in ["cpu:2, two, **sequence context=2 (pair)**", "cpu:4, two, **ulysses context=4 (four)**"] {
        assert!(rows.iter().any(|row| named(row) == own), "{own}: {page}");
    }
    assert!(page.contains("\n- cpu:2, two: ring context=16: ") && page.contains(" | 0.0 % | "), "{page}");
    assert!(std::fs::read_to_string(out.join("report.html")).expect("a report").contains("<h2>cpu:2, three</h2>"));

    let again = run();
    assert!(stderr(&again).contains("cases: 8, programs to compile: 0"), "{}", stderr(&again));
    assert_eq!(String::from_utf8_lossy(&again.stdout), table);
}

/// The predictions of an experiment use a chip file that is not built in, also in child processes.
#[needs(cpu)]
fn experiment_predicts_with_chip_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let (yaml, out) = (dir.path().join("x.yml"), dir.path().join("out"));
    std::fs::write(&yaml, format!("{SMALL}layouts: [sequence]\ntargets: ['cpu:2']\n")).expect("writes");
    let run = |more: &[&str]| {
        let mut command = support::ltx2();
        command.arg("experiment").arg(&yaml).arg("--modules").arg(modules()).arg("-o").arg(&out);
        command.args(more).output().expect("runs")
    };
    let done = run(&["--chip", "examples/chips/a100.toml"]);
    assert!(done.status.success(), "{}", stderr(&done));
    let figures = records(&out)[0].result.clone().expect("figures");
    assert_eq!(figures["chip"]["name"], "a100");
    assert!(figures["predicted_ms"]["step"].as_f64() > Some(0.0), "{figures}");
    // Without the chip file, a CPU has no prediction.
    assert!(run(&[]).status.success());
    assert!(records(&out).last().and_then(|r| r.result.as_ref()?.get("chip")?.as_null()).is_some());
    let unknown = run(&["--chip", "v9"]);
    assert_eq!(unknown.status.code(), Some(2), "{}", stderr(&unknown));
}

/// The suggestions of `--why` appear in all three outputs: text, Markdown and HTML. For a CPU target, their cost is in
/// received bytes.
#[needs(cpu, full)]
fn fastest_layout_of_each_group_is_diagnosed() {
    let dir = tempfile::tempdir().expect("a folder");
    let (yaml, out) = (dir.path().join("x.yml"), dir.path().join("out"));
    std::fs::write(&yaml, format!("{SMALL}layouts: [before-385]\ntargets: ['cpu:4']\n")).expect("writes");
    let mut command = support::ltx2();
    command.arg("experiment").arg(&yaml).arg("--modules").arg(support::modules()).arg("-o").arg(&out).arg("--why");
    let done = command.output().expect("runs");
    assert!(done.status.success(), "{}", stderr(&done));
    let text = String::from_utf8_lossy(&done.stdout);
    assert_eq!(text.matches("single-rule changes, each compiled:").count(), 1, "{text}");
    assert!(text.contains(" blocks (compiled: 1), ") && text.contains(" MB received per step of "), "{text}");
    let read = |name: &str| std::fs::read_to_string(out.join(name)).expect("a report");
    assert!(read("report.html").contains("\"unit\":\"received_bytes\",\"layers\":"));
    assert!(read("report.md").contains("\n## Suggestions: cpu:4, before-385"), "{}", read("report.md"));
    // A separate folder, because the experiment's results are locked.
    assert!(out.join("why/results.jsonl").is_file() && !out.join("why/modules").exists());
}

#[needs(cpu)]
fn experiment_case_is_measured_on_its_devices() {
    let dir = tempfile::tempdir().expect("a folder");
    let (yaml, out) = (dir.path().join("x.yml"), dir.path().join("out"));
    // All blocks, so that the measured program is the one that `bench` runs.
    let text = SMALL.replace("layers: 1\n", "layouts: [sequence]\ntargets: ['cpu:2']\n");
    std::fs::write(&yaml, &text).expect("writes");
    let run = |more: &[&str]| {
        let mut command = support::ltx2();
        command.arg("experiment").arg(&yaml).arg("--modules").arg(modules()).arg("-o").arg(&out);
        command.args(more).output().expect("runs")
    };
    let done = run(&["--measure"]);
    assert!(done.status.success(), "{}", stderr(&done));
    let [compiled, measured] = &records(&out)[..] else { panic!("compiled, then measured: {}", stderr(&done)) };
    assert_eq!((&compiled.error, &measured.error), (&None, &None));
    let result = measured.result.as_ref().expect("figures");
    assert_eq!(result["devices"], 2);
    let seconds = result["programs"]["denoise_loop"]["median"].as_f64().expect("seconds of a step");
    let page = std::fs::read_to_string(out.join("report.html")).expect("a report");
    let shown = format!("\"measured_ms\":{}", serde_json::json!(seconds * 1e3));
    assert!(page.contains(&shown), "the report has {shown}");

    // Stored measurements are shown without --measure.
    let again = run(&[]);
    assert_eq!((records(&out).len(), again.stdout == done.stdout), (2, true), "{}", stderr(&again));

    // Measurements belong to the program that ran, not to the case: a changed program has none.
    let ran = &result["programs"]["denoise_loop"]["program"]["hash"];
    assert_eq!(measured.identity.as_ref().map(|i| i.program.as_str()), ran.as_str());
    std::fs::write(&yaml, text.replace("request.width=64", "request.width=96")).expect("writes");
    let other = run(&[]);
    assert!(other.status.success(), "{}", stderr(&other));
    let page = std::fs::read_to_string(out.join("report.html")).expect("a report");
    assert!(!page.contains(&shown), "{shown} is another program's");
}

#[needs(nothing)]
fn invalid_experiment_file_gives_one_error_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let yaml = dir.path().join("x.yml");
    let fail = |text: &str| {
        std::fs::write(&yaml, text).expect("writes");
        let out = support::ltx2().arg("experiment").arg(&yaml).arg("-o").arg(dir.path()).output().expect("runs");
        assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
        stderr(&out)
    };
    assert!(fail("layouts: [ulysses]\ntarget: ['cpu:2']\n").contains("x.yml:2: unknown key 'target'; did you mean"));
    assert!(fail("layouts: [ulysses]\ntargets: [cpu]\n").contains("target 'cpu'"));
    let slices = "slices: {tpu/v6e-8: 'tpu:v6e:2x4'}\n";
    for (text, message) in [
        (
            "slices:\n  nowhere: 'cpu:2'\n".into(),
            "x.yml:2: 'slices': 'nowhere' is neither a file nor a shipped configuration",
        ),
        (format!("{slices}targets: ['cpu:2']\n"), "x.yml:2: 'slices' and 'targets' are mutually exclusive; remove one"),
        (
            format!("{slices}include: [{{slise: a}}]\n"),
            "x.yml:2: unknown key 'include[0].slise'; did you mean 'slice'?",
        ),
    ] {
        let said = fail(&text);
        assert!(said.ends_with(&format!("{message}\n")) && said.lines().count() == 1, "{said}");
    }
    assert!(
        fail("layouts: [nowhere]\ntargets: ['cpu:2']\nconfig: nano_2_0\n").contains("nowhere: no such file or layout")
    );
}

/// Runs `why` on a small model: it lists the rules with reasons, and its first suggestion removes the known flaw of the
/// layout `before-385`.
#[needs(cpu, full)]
fn first_suggestion_is_compiled_and_reduces_cost() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_string();
    let ask = |layout: &str, more: &[&str]| {
        let mut c = support::ltx2();
        c.args(["why", "--target", "cpu:4", "-c", "nano_2_0", "--model", "nano", "--layers", "1", "--layout", layout]);
        c.args(["--set", "request.width=64", "--set", "request.height=96", "--set", "request.num_frames=9"]);
        c.args(["--set", support::QUICK, "--json", "-", "-o", &path("lab"), "--modules"]).arg(support::modules());
        let out = c.args(more).output().expect("runs");
        assert!(out.status.success(), "{layout}: {}", stderr(&out));
        serde_json::from_slice::<serde_json::Value>(&out.stdout).expect("JSON")
    };
    let answer = ask("before-385", &["--write", &path("better.yml"), "--budget", "2"]);
    let list = answer["collectives"].as_array().expect("a list");
    let of_embed = |c: &&serde_json::Value| {
        c["rule"][0]
            .as_str()
            .is_some_and(|r| r.starts_with("shardings/before-385.yml:") && r.contains("embed: [context]"))
    };
    let weights: Vec<_> = list.iter().filter(of_embed).collect();
    assert!(!weights.is_empty(), "{answer}");
    assert!(weights.iter().any(|c| c["role"] == "parameter"), "{answer}");
    let why = |c: &&serde_json::Value| c["reason"].as_str().unwrap_or_default().to_string();
    assert!(weights.iter().map(why).any(|r| r.contains("sharding mismatch") || r.contains("contracting")), "{answer}");
    serde_json::from_value::<DiagnosisReport>(answer.clone()).expect("of the declared form");
    let best = &answer["advice"][0];
    let change = best["change"].as_str().expect("a change");
    assert!(change.contains("embed"), "{answer}");
    let cost = |n: usize| best["cost"][n].as_f64().expect("a cost");
    assert!(cost(1) < 0.99 * cost(0), "{best}");

    // The written layout is the one that was compiled: diagnosing it compiles changes of it, but not the layout again.
    let text = std::fs::read_to_string(path("better.yml")).expect("a layout");
    assert!(text.contains(&format!("# Based on before-385, with {change}")), "{text}");
    let before = records(&dir.path().join("lab"));
    let next = ask(&path("better.yml"), &["--budget", "1"]);
    let after = records(&dir.path().join("lab"));
    assert!(after.len() <= before.len() + 1, "{} then {}", before.len(), after.len());
    assert_eq!(next["per_layer_bytes"], best["block_bytes"][1]);
    assert!(next["collectives"].as_array().expect("a list").iter().all(|c| {
        let places = c["rule"].as_array().into_iter().flatten().filter_map(|r| r.as_str());
        places.into_iter().all(|r| r.contains("better.yml:"))
    }));

    // With --collective, only changes that could remove this collective are compiled.
    let number = weights[0]["number"].to_string();
    let one = ask("before-385", &["--collective", &number, "--budget", "1"]);
    assert!(one["advice"].as_array().is_some_and(|a| a.len() <= 1), "{one}");
}
