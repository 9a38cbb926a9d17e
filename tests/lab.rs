//! `ltx2 experiment` and `ltx2 why` on the CPU plugin with virtual devices.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::cpu;
use ltx2::lab::Record;

/// Small enough that a case is seconds.
const SMALL: &str =
    "config: nano\nset: [model.path=nano, request.width=64, request.height=96, request.num_frames=9]\nlayers: 1\n";

fn records(folder: &Path) -> Vec<Record> {
    let text = std::fs::read_to_string(folder.join("results.jsonl")).unwrap_or_default();
    text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

fn stderr(out: &std::process::Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn an_experiment_is_killed_and_goes_on() {
    if cpu(1).is_none() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let (yaml, out) = (dir.path().join("x.yml"), dir.path().join("out"));
    let cases = "layouts: [sequence, ulysses, ring, tensor]\ntargets: ['cpu:2']\n\
                 include: [{layout: cfg, mesh: cfg=16}, {layout: cfg, mesh: cfg=2}]\n";
    std::fs::write(&yaml, format!("{SMALL}{cases}")).expect("writes");
    let command = || {
        let mut c = common::ltx2();
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
    assert!(before.len() < 6, "it was killed before its end");

    let done = command().output().expect("runs");
    assert!(done.status.success(), "{}", stderr(&done));
    let all = records(&out);
    assert_eq!(all.len(), 6);
    assert_eq!(all[..before.len()], before[..], "what was done is kept");
    let mut keys: Vec<&str> = all.iter().map(|r| r.key.as_str()).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 6, "no case was run twice");
    let failed: Vec<&Record> = all.iter().filter(|r| r.error.is_some()).collect();
    assert_eq!(failed.len(), 1);
    assert!(failed[0].error.as_deref().is_some_and(|e| e.contains("needs 16 devices")), "{:?}", failed[0].error);
    let table = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(table.starts_with("cpu:2\n") && table.contains("ulysses") && table.contains("needs 16 devices"), "{table}");

    // Everything is known: nothing is done.
    let again = command().output().expect("runs");
    assert!(again.status.success() && stderr(&again).contains("6 of 6 are known"), "{}", stderr(&again));
    assert_eq!(records(&out), all);
    assert_eq!(String::from_utf8_lossy(&again.stdout), table);
}

#[test]
fn a_wrong_file_is_one_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let yaml = dir.path().join("x.yml");
    let fail = |text: &str| {
        std::fs::write(&yaml, text).expect("writes");
        let out = common::ltx2().arg("experiment").arg(&yaml).arg("-o").arg(dir.path()).output().expect("runs");
        assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
        stderr(&out)
    };
    assert!(fail("layouts: [ulysses]\ntarget: ['cpu:2']\n").contains("x.yml:2: unknown key 'target'; did you mean"));
    assert!(fail("layouts: [ulysses]\ntargets: [cpu]\n").contains("target 'cpu'"));
    assert!(fail("layouts: [nowhere]\ntargets: ['cpu:2']\nconfig: nano\n").contains("cannot read nowhere"));
}
