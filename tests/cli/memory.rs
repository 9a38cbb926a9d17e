//! Weight offloading between phases: `runtime.residency` changes memory use but not the video, and a run that does not
//! fit fails with a clear error.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::standin::{self, Fault, RESOURCE_EXHAUSTED, Standin};
use crate::support::{self, cases, needs};
use ltx2::pipeline::output::tensors;
use serde_json::Value;

/// Two-stage pipeline, whose transformer is loaded twice.
const TWO_STAGES: [&str; 6] = ["--pipeline", "two_stage", "--steps", "1", "--height", "64"];

/// Runs a small model with settings of `runtime`.
fn generate(out: &Path, request: &[&str], values: &[&str]) -> Output {
    let set = set(values);
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    command(out, &[request, &set].concat()).output().expect("the binary runs")
}

fn command(out: &Path, more: &[&str]) -> Command {
    let mut command = support::ltx2();
    command.args(["generate", "-v", "-c", support::tiny(), "-o"]).arg(out).args(more);
    command
}

fn set(values: &[&str]) -> Vec<String> {
    values.iter().flat_map(|v| ["--set".to_string(), format!("runtime.{v}")]).collect()
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// Returns a figure of the planned memory table, in GiB.
fn planned(log: &str, row: &str) -> f64 {
    let line =
        log.lines().find_map(|l| l.trim_start().strip_prefix(row)).unwrap_or_else(|| panic!("no '{row}' in {log}"));
    line.split_whitespace().next().and_then(|v| v.parse().ok()).expect("a figure")
}

/// What cannot fit is refused before anything is compiled.
#[needs(cpu)]
fn too_large_run_is_refused_before_compilation() {
    let mut bench = support::ltx2();
    bench.args(["bench", "-c", support::tiny(), "--weights", "random", "--set", "runtime.memory_limit=0.00001"]);
    // Without programs, all would be compiled.
    let cache = tempfile::tempdir().expect("a folder");
    let ran = bench.env("LTX2_COMPILE_CACHE", cache.path()).output().expect("the binary runs");
    let said = stderr(&ran);
    assert_eq!(ran.status.code(), Some(1), "{said}");
    let error = said.lines().last().unwrap_or_default();
    assert!(error.contains(" together need at least ") && error.contains("0.00 GiB per device are usable"), "{said}");
    assert!(!said.contains("compiling "), "{said}");
}

#[needs(cpu)]
fn residency_mode_changes_memory_use_but_not_the_video() {
    let dir = tempfile::tempdir().expect("a folder");
    let run = |name: &str, request: &[&str], values: &[&str]| {
        let out = dir.path().join(format!("{name}.mp4"));
        let ran = generate(&out, request, values);
        let log = stderr(&ran);
        assert!(ran.status.success(), "{values:?}: {log}");
        let sidecar = std::fs::read_to_string(out.with_extension("json")).expect("a sidecar");
        let sidecar: Value = serde_json::from_str(&sidecar).expect("JSON");
        (sidecar["sha256"].clone(), sidecar["timings"]["parameter_bytes"].as_u64().expect("a number"), log)
    };
    let (video, all, log) = run("resident", &TWO_STAGES, &["residency=resident"]);
    assert!(!log.contains("is evicted from the devices"));
    let (least, most) = (planned(&log, "one component at a time"), planned(&log, "all loaded"));
    assert!(least < most, "{log}");
    // On a CPU, the free memory of the host is the limit.
    let host = ltx2_base::host::free_memory().expect("Linux") as f64 / f64::from(1 << 30);
    let usable = planned(&log, "usable");
    assert!(most < usable && (0.2..5.0).contains(&(usable / host)), "{usable} of {host} GiB: {log}");

    let (same, left, log) = run("in_turn", &TWO_STAGES, &["residency=in_turn"]);
    assert_eq!(same, video);
    assert!(left < all, "only the last stage's weights are left: {left} of {all} bytes");
    assert_eq!(log.matches("transformer is evicted from the devices").count(), 2, "once a stage: {log}");

    // A limit slightly below the total: only the largest component is offloaded.
    let tight = format!("memory_limit={}", (least + most) / 2.0);
    let (same, left, log) = run("tight", &TWO_STAGES, &[&tight]);
    assert_eq!(same, video);
    assert!(left < all && log.contains("is evicted from the devices"), "{left} of {all} bytes: {log}");

    let refused = |request: &[&str], values: &[&str]| {
        let out = dir.path().join("no.mp4");
        let ran = generate(&out, request, values);
        assert_eq!(ran.status.code(), Some(1), "{}", stderr(&ran));
        assert!(!out.exists());
        stderr(&ran).lines().find(|l| l.starts_with("error: ")).expect("an error").to_string()
    };
    let error = refused(&TWO_STAGES, &[&tight, "residency=resident"]);
    assert!(
        error.contains("all components together need") && error.ends_with("set runtime.residency to auto"),
        "{error}"
    );
    // A video, with the programs of `tiling`, that does not fit into the memory of a shorter one.
    let (.., log) = run("short", &["--steps", "1"], &["residency=in_turn"]);
    let limit = format!("memory_limit={}", planned(&log, "one component at a time") * 1.05);
    let error = refused(&["--steps", "1", "--num-frames", "17"], &[&limit]);
    assert!(error.contains("needs") && error.contains("--num-frames 9 would fit"), "{error}");
    let error = refused(&TWO_STAGES, &["memory_limit=0.0001"]);
    assert!(error.ends_with("use more devices"), "{error}");
}

/// The plugin runs out of memory although the plan expected enough: the error uses the plan's figures, and the proposed
/// change runs, or is valid if it has other programs.
#[needs(cpu)]
fn out_of_memory_error_uses_planned_figures() {
    let (dir, temporary) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let out = dir.path().join("out.mp4");
    let said = "out of memory while trying to allocate 1 GiB";
    let fault = Fault::Fail(RESOURCE_EXHAUSTED, said);
    let failed = |standin: &Standin, more: &[&str], cache: &Path| {
        let mut run = command(&out, more);
        standin.give(&mut run).env("LTX2_COMPILE_CACHE", cache).env("TMPDIR", temporary.path());
        let ran = run.output().expect("the binary runs");
        let log = stderr(&ran);
        assert_eq!(ran.status.code(), Some(1), "{log}");
        let errors: Vec<&str> = log.lines().filter_map(|line| line.strip_prefix("error: ")).collect();
        let [error] = errors[..] else { panic!("one line says it: {log}") };
        assert!(error.contains(": out of device memory: "), "{error}");
        let reason = format!("(RESOURCE_EXHAUSTED): {said}");
        let (_, kept) = error.split_once(&reason).unwrap_or_else(|| panic!("no '{reason}': {error}"));
        match kept.strip_prefix("; the latents are kept in ") {
            Some(path) => drop(ltx2::pipeline::output::tensors::read(Path::new(path)).expect("latents")),
            None => assert_eq!(kept, "", "{error}"),
        }
        assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 0, "nothing is left");
        // The proposed flags are between the free memory and their effect.
        let words = if error.contains(" would fit") { " would fit" } else { " needs less" };
        let change = error.split(words).next().and_then(|text| text.rsplit(": ").next());
        (error.to_string(), change.expect("a change").to_string())
    };
    let start = |(error, _): &(String, String), words: &str| assert!(error.starts_with(words), "{error}");

    let cached = standin::programs();
    // All components are loaded, so loading one at a time is proposed.
    let runs = failed(&Standin::new().execution("denoise", 1, &fault), &[], &cached);
    start(&runs, "running denoise: out of device memory: denoise needs ");
    assert!(
        runs.0.contains(" GiB together with the parameters that stay loaded; ") && runs.0.contains(" GiB are usable: "),
        "{}",
        runs.0
    );
    assert_eq!(runs.1, "--set runtime.residency=in_turn");
    let uploads = failed(&Standin::new().at("PJRT_Client_BufferFromHostBuffer", 1, &fault), &[], &cached);
    assert!(uploads.0.contains("GiB per device") && uploads.1 == runs.1, "{}", uploads.0);
    let loads = failed(&Standin::new().at("PJRT_Client_CreateBuffersForAsyncHostToDevice", 1, &fault), &[], &cached);
    start(&loads, "loading parameters of text_encoder, connectors: ");
    let compiling = tempfile::tempdir().expect("a folder");
    let without = compiling.path().join("cache");
    standin::link_programs_except("text_encoder", &cached, &without);
    // It is compiled again without loaded parameters.
    let twice = Standin::new().at("PJRT_Client_Compile", 1, &fault).at("PJRT_Client_Compile", 1, &fault);
    let compiles = failed(&twice, &[], &without);
    start(&compiles, "compiling text_encoder: out of device memory: text_encoder needs ");
    assert!(compiles.1 != runs.1, "other residency does not reduce the need of one program: {}", compiles.0);

    // Known limits are reported, and another change is proposed.
    let in_turn = ["--set", "runtime.residency=in_turn", "--set", "runtime.memory_limit=1"];
    let next = failed(&Standin::new().execution("video_decoder", 1, &fault), &in_turn, &cached);
    start(&next, "running video_decoder: out of device memory: video_decoder needs ");
    assert!(next.0.contains(" GiB per device; 1.00 GiB are usable: "), "{}", next.0);
    assert!(next.1 != runs.1, "{}", next.0);
    // The proposed smaller request is valid.
    for (flags, before) in [(runs.1, &["--force"][..]), (next.1, &[&in_turn[..], &["--force", "--dry-run"]].concat())] {
        let flags: Vec<&str> = flags.split(' ').map(|flag| flag.trim_matches('\'')).collect();
        let ran = command(&out, &[before, &flags].concat()).output().expect("the binary runs");
        assert!(ran.status.success(), "{flags:?}: {}", stderr(&ran));
    }
}

#[needs(cpu)]
fn out_of_memory_of_one_component_is_reported() {
    let dir = tempfile::tempdir().expect("a folder");
    let (given, made) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let case = cases("vocoder").into_iter().next().expect("a case");
    let inputs: Vec<_> = case.inputs.iter().map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
    tensors::write(&given, &inputs).expect("written");
    let said = "out of memory while trying to allocate 1 GiB";
    let fault = || Fault::Fail(RESOURCE_EXHAUSTED, said);
    let (known, none) = (standin::programs(), dir.path().join("cache"));
    let faults = [
        ("compiling vocoder", "at least ", Standin::new().at("PJRT_Client_Compile", 1, &fault()), &none),
        (
            "loading parameters of vocoder",
            "",
            Standin::new().at("PJRT_Client_BufferFromHostBuffer", 1, &fault()),
            &known,
        ),
        ("running vocoder", "", Standin::new().execution("vocoder", 1, &fault()), &known),
    ];
    for (doing, least, standin, cache) in faults {
        let mut run = support::ltx2();
        run.args(["run", "vocoder", "--platform", "cpu", "--dtype", "f32", "--model"]).arg(&case.model);
        run.arg("--inputs").arg(&given).arg("-o").arg(&made);
        let ran = standin.give(&mut run).env("LTX2_COMPILE_CACHE", cache).output().expect("runs");
        let error =
            stderr(&ran).lines().find_map(|line| line.strip_prefix("error: ").map(str::to_string)).expect("an error");
        assert_eq!(ran.status.code(), Some(1), "{error}");
        let words = format!(
            "{doing}: out of device memory: the program needs {least}0.00 GiB per device; free memory is unknown: "
        );
        assert!(error.starts_with(&words) && error.ends_with(said) && error.contains("--mesh"), "{error}");
        assert!(!made.exists(), "nothing is written");
    }
}
