//! Weight offloading between phases: the same video whatever stays on the devices, fewer bytes, and a clear error where a run has
//! no room.

use std::path::Path;
use std::process::Output;

use crate::support::{self, needs};
use serde_json::Value;

/// A run of a small model with settings of `runtime`, in a two-stage pipeline whose transformer loads twice.
fn generate(out: &Path, more: &[&str]) -> Output {
    let out = out.to_str().expect("UTF-8");
    let run = ["generate", "-v", "-c", support::tiny(), "-o", out, "--pipeline", "two_stage", "--steps", "1"];
    let run = [&run[..], &["--height", "64", "--num-frames", "17"]].concat();
    support::ltx2().args([&run[..], more].concat()).output().expect("the binary runs")
}

fn set(values: &[&str]) -> Vec<String> {
    values.iter().flat_map(|v| ["--set".to_string(), format!("runtime.{v}")]).collect()
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// A figure of the planned table, in GiB.
fn planned(log: &str, row: &str) -> f64 {
    let line = log.lines().find(|l| l.trim_start().starts_with(row)).unwrap_or_else(|| panic!("no '{row}' in {log}"));
    line.split_whitespace().last().and_then(|v| v.parse().ok()).expect("a figure")
}

#[needs(cpu)]
fn residency_changes_memory_and_not_the_video() {
    let dir = tempfile::tempdir().expect("a folder");
    let run = |name: &str, values: &[&str]| {
        let (out, set) = (dir.path().join(format!("{name}.mp4")), set(values));
        let ran = generate(&out, &set.iter().map(String::as_str).collect::<Vec<_>>());
        let log = stderr(&ran);
        assert!(ran.status.success(), "{values:?}: {log}");
        let sidecar = std::fs::read_to_string(out.with_extension("json")).expect("a sidecar");
        let sidecar: Value = serde_json::from_str(&sidecar).expect("JSON");
        (sidecar["sha256"].clone(), sidecar["timings"]["parameter_bytes"].as_u64().expect("a number"), log)
    };
    let (video, all, log) = run("resident", &["residency=resident"]);
    assert!(!log.contains("leaves the devices"));
    let (least, most) = (planned(&log, "one component at a time"), planned(&log, "all loaded"));
    assert!(least < most, "{log}");

    let (same, left, log) = run("in_turn", &["residency=in_turn"]);
    assert_eq!(same, video);
    assert!(left < all, "only the last stage's weights are left: {left} of {all} bytes");
    assert_eq!(log.matches("transformer leaves the devices").count(), 2, "once a stage: {log}");

    // Room for all but a little: the largest part makes room, the rest stays.
    let tight = format!("memory_limit={}", (least + most) / 2.0);
    let (same, left, log) = run("tight", &[&tight]);
    assert_eq!(same, video);
    assert!(left < all && log.contains("leaves the devices"), "{left} of {all} bytes: {log}");

    let refused = |values: &[&str]| {
        let (out, set) = (dir.path().join("no.mp4"), set(values));
        let ran = generate(&out, &set.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(ran.status.code(), Some(1), "{}", stderr(&ran));
        assert!(!out.exists());
        stderr(&ran).lines().find(|l| l.starts_with("error: ")).expect("an error").to_string()
    };
    let error = refused(&[&tight, "residency=resident"]);
    assert!(error.contains("all parts together need") && error.ends_with("set runtime.residency to auto"), "{error}");
    let error = refused(&[&format!("memory_limit={}", least * 0.9)]);
    assert!(error.contains("needs") && error.contains("--num-frames 9 would fit"), "{error}");
    let error = refused(&["memory_limit=0.001"]);
    assert!(error.ends_with("take more devices"), "{error}");
}
