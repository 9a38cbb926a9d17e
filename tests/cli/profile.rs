//! `ltx2 profile`: a trace whose sums are worked out here by hand, one of GPUs as another reader sums it up, and what
//! the command says where nothing can be recorded.

use std::path::{Path, PathBuf};

use crate::support::{self, needs};
use serde_json::Value;

/// Two devices, drawn up in scripts/tune/fixture.py.
const RECORDING: &str = "tests/fixtures/trace/two_devices.xplane.pb";

/// 0.6 ms of two H200s (`ltx2`, 384x256x25, layout `tensor`), cut out by scripts/tune/trim.py.
const H200: &str = "tests/fixtures/trace/two_h200.xplane.pb";

fn summary(recording: &str) -> Value {
    let out = support::ltx2().args(["profile", "--read", recording, "--json", "-"]).output().expect("runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice::<Value>(&out.stdout).expect("JSON")["trace"].clone()
}

fn near(got: &Value, want: f64) {
    let got = got.as_f64().unwrap_or(f64::NAN);
    assert!((got - want).abs() < 1e-9, "{got}, not {want}");
}

#[needs(nothing)]
fn kinds_of_work_and_what_they_cover() {
    let trace = summary(RECORDING);
    // The first device has 140 us with a gap of 5, the second 100 us without one: means of the two.
    near(&trace["window_ms"], 0.12);
    near(&trace["idle_ms"], 0.0025);
    near(&trace["idle_share"], 2.5 / 120.0);
    let names: Vec<&str> =
        trace["activities"].as_array().expect("a list").iter().filter_map(|a| a["activity"].as_str()).collect();
    assert_eq!(names, ["matmul", "attention", "elementwise", "copy", "all-gather", "all-reduce"]);
    let of = |name: &str| {
        let at = names.iter().position(|n| *n == name).expect("a kind");
        trace["activities"][at].clone()
    };
    let ms = [("matmul", 65.0), ("attention", 30.0), ("elementwise", 5.0), ("copy", 2.5), ("all-reduce", 5.0)];
    for (name, us) in ms {
        near(&of(name)["ms"], us / 1e3);
        near(&of(name)["share"], us / 120.0);
    }
    // 60 to 95 beside work until 85, and 90 to 100 beside none.
    near(&of("all-gather")["ms"], 0.0225);
    near(&of("all-gather")["overlapped_ms"], 0.0125);
    near(&of("all-gather")["exposed_ms"], 0.01);
    near(&of("all-gather")["share"], 10.0 / 120.0);
    near(&of("all-reduce")["overlapped_ms"], 0.0);
    assert!(of("matmul")["exposed_ms"].is_null(), "only collectives can be exposed");
    let shares: f64 = names.iter().filter_map(|n| of(n)["share"].as_f64()).sum();
    near(&Value::from(shares + trace["idle_share"].as_f64().expect("a number")), 1.0);
}

#[needs(nothing)]
fn name_scopes_and_devices() {
    let trace = summary(RECORDING);
    let scopes: Vec<(&str, f64)> = trace["scopes"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|s| (s["scope"].as_str().expect("text"), (s["ms"].as_f64().expect("a number") * 1e4).round() / 10.0))
        .collect();
    let want = [
        ("blocks/attn1/sdpa", 52.5),
        ("blocks/attn1/to_q", 50.0),
        ("blocks/ff/proj", 20.0),
        ("blocks/norm1", 5.0),
        ("blocks/attn1", 2.5),
    ];
    assert_eq!(scopes, want);
    near(&trace["scopes"][0]["activities"]["all-gather"], 0.0225);
    near(&trace["without_scope"], 0.0);
    near(&trace["devices"][0]["window_ms"], 0.14);
    near(&trace["devices"][1]["idle_ms"], 0.0);
    assert_eq!(trace["devices"][1]["device"], "/device:GPU:1");
    assert_eq!(trace["operations"][0]["name"], "custom-call.1");
    assert_eq!(trace["operations"][0]["count"], 2);
}

#[needs(nothing)]
fn two_h200s_as_xprof_sums_them_up() {
    let trace = summary(H200);
    let window = trace["window_ms"].as_f64().expect("a number");
    let share = |names: &[&str]| -> f64 {
        let all = trace["activities"].as_array().expect("a list").iter();
        let named = all.filter(|a| names.contains(&a["activity"].as_str().expect("a name")));
        100.0 * named.filter_map(|a| a["ms"].as_f64()).sum::<f64>() / window
    };
    // By xprof 2.24.2, of the same 0.6 ms with the whole program, as scripts/tune/agree.py reads its tables.
    let xprof = [
        (&["matmul"][..], 41.07),
        (&["all-reduce"], 21.71),
        (&["attention"], 5.39),
        (&["elementwise", "copy", "other"], 17.91),
    ];
    for (names, want) in xprof {
        assert!((share(names) - want).abs() < 0.5, "{names:?}: {:.2}, by xprof {want}", share(names));
    }
    // Sums of two matmuls that the compiler made one, and sums that XLA's own kernels form beside NCCL's.
    let scopes: Vec<&str> =
        trace["scopes"].as_array().expect("a list").iter().filter_map(|s| s["scope"].as_str()).collect();
    assert!(scopes.contains(&"blocks/{audio_to_video_attn/norm_k, video_to_audio_attn/norm_q}"), "{scopes:?}");
    let operations = trace["operations"].as_array().expect("a list");
    let sums: Vec<&str> =
        operations.iter().filter(|o| o["activity"] == "all-reduce").filter_map(|o| o["name"].as_str()).collect();
    assert!(sums.iter().any(|name| name.ends_with("-fusion.1")) && sums.iter().any(|name| !name.contains("fusion")));
}

#[needs(nothing)]
fn the_table_counts_by_steps() {
    let out = support::ltx2().args(["profile", "--read", RECORDING, "--steps", "2"]).output().expect("runs");
    let text = String::from_utf8(out.stdout).expect("UTF-8");
    insta::assert_snapshot!(text);
}

/// Copies of the A100's file with a bandwidth that makes a microsecond of 500,000 bf16 elements.
fn round_chip(dir: &Path) -> PathBuf {
    let chip = std::fs::read_to_string("examples/chips/a100.toml").expect("readable");
    assert!(chip.contains("\nbandwidth = 2039e9 "), "the line that is replaced");
    let path = dir.join("round.toml");
    std::fs::write(&path, chip.replace("\nbandwidth = 2039e9 ", "\nbandwidth = 1e12 ")).expect("written");
    path
}

#[needs(nothing)]
fn predictions_beside_a_trace_the_worst_first() {
    let dir = tempfile::tempdir().expect("a folder");
    let chip = round_chip(dir.path());
    let read = |more: &[&str]| {
        let args = ["profile", "--read", RECORDING, "--chip"];
        support::ltx2().args(args).arg(&chip).args(more).output().expect("runs")
    };
    let out = read(&["--steps", "2", "--json", "-"]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let comparison = serde_json::from_slice::<Value>(&out.stdout).expect("JSON")["comparison"].clone();
    // 76 us of what scripts/tune/fixture.py gives a shape; the mean window of 120 us holds two steps.
    near(&comparison["step"]["predicted_ms"], 0.076);
    near(&comparison["step"]["measured_ms"], 0.06);
    let rows = [
        ("blocks/attn1/to_q", "matmul", 50.0, 25.0),
        ("blocks/attn1/sdpa", "attention", 0.0, 15.0),
        ("blocks/attn1/sdpa", "all-gather", 0.0, 11.25),
        ("blocks/norm1", "elementwise", 12.0, 2.5),
        ("blocks/ff/proj", "matmul", 12.0, 7.5),
        ("blocks/ff/proj", "all-reduce", 0.0, 2.5),
        ("blocks/attn1", "copy", 2.0, 1.25),
    ];
    let scopes = comparison["scopes"].as_array().expect("a list");
    assert_eq!(scopes.len(), rows.len());
    for (got, (scope, category, predicted, measured)) in scopes.iter().zip(rows) {
        assert_eq!((&got["scope"], &got["category"]), (&Value::from(scope), &Value::from(category)));
        near(&got["predicted_ms"], predicted / 1e3);
        near(&got["measured_ms"], measured / 1e3);
    }
    let text = String::from_utf8(read(&["--steps", "2"]).stdout).expect("UTF-8");
    let table = text.find("   predicted").map(|at| &text[at..]).expect("a table");
    insta::assert_snapshot!(table);
    // Without --steps its ratios would be those of a trace of one.
    let out = read(&[]);
    let line = "error: --read with --chip: give --steps, the number of denoising steps in the trace\n";
    assert_eq!((out.status.code(), String::from_utf8_lossy(&out.stderr).as_ref()), (Some(2), line));
}

#[needs(cpu)]
fn a_plugin_without_a_profiler_is_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let model = ["-c", "nano_2_0", "--model", "nano", "--weights", "random", "--platform", "cpu"];
    let out = support::ltx2().arg("profile").args(model).arg("-o").arg(dir.path()).output().expect("runs");
    let errors = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{errors}");
    let line = errors.lines().last().expect("a line");
    assert!(line.starts_with("error: ") && line.contains("cpu_plugin.so: this plugin has no profiler"), "{line}");
    assert!(line.ends_with("the CUDA and TPU plugins have one: --platform cuda | tpu"), "{line}");
    assert!(!errors.contains("compil"), "said before anything is compiled: {errors}");
    assert_eq!(std::fs::read_dir(dir.path()).expect("readable").count(), 0, "nothing is written");
}

#[needs(nothing)]
fn what_is_no_recording_is_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("cut.xplane.pb");
    let whole = std::fs::read(RECORDING).expect("readable");
    let error = |bytes: &[u8], code: i32| {
        std::fs::write(&path, bytes).expect("written");
        let out = support::ltx2().args(["profile", "--read"]).arg(&path).output().expect("runs");
        assert_eq!(out.status.code(), Some(code));
        String::from_utf8_lossy(&out.stderr).trim_end().to_string()
    };
    let cut = error(&whole[..whole.len() / 2], 1);
    assert!(cut.starts_with(&format!("error: {}: not an xplane.pb:", path.display())), "{cut}");
    let empty = error(&[], 1);
    assert!(empty.ends_with("cut.xplane.pb: the trace holds no operation of a device"), "{empty}");
    let out = support::ltx2().args(["profile", "-c", "nano"]).output().expect("runs");
    assert_eq!(out.status.code(), Some(2), "a folder has to be named");
    assert!([RECORDING, H200].iter().all(|path| Path::new(path).metadata().expect("there").len() < 100_000));
}
