//! The examples do and print what their first lines state.

use std::path::Path;
use std::process::Command;

use crate::support::{self, QUICK, needs};

/// Returns the stdout of an example, which runs on the CPU plugin if it needs one.
fn printed(example: &str, arguments: &[String]) -> String {
    let done = Command::new(env!("CARGO"))
        .args(["run", "--locked", "--quiet", "--example", example, "--"])
        .args(arguments)
        .env_remove("TPU_SKIP_MDS_QUERY")
        .env("LTX2_COMPILE_CACHE", support::programs())
        .output()
        .expect("cargo runs");
    assert!(done.status.success(), "{example}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).expect("text")
}

/// Formats the bytes that a collective transfers for a bf16 tensor, which the CPU compiler widens to f32.
fn megabytes(elements: usize) -> String {
    format!("{:.1} MB of f32 over context", elements as f64 * 4.0 / 1e6)
}

#[needs(cpu, full)]
fn one_sharding_rule_removes_weight_gathers() {
    let printed = printed("sharded_ffn", &[]);
    let (weight, activations) = (megabytes(16384 * 4096), megabytes(6144 * 4096));
    let gather = format!("  all-gather {weight}");
    let want = [
        "embed split, on eight virtual CPU devices: 536.9 MB".to_string(),
        gather.clone(),
        gather,
        "embed replicated, on eight virtual CPU devices: 0.0 MB".to_string(),
        "mlp split, on eight virtual CPU devices: 100.7 MB".to_string(),
        format!("  all-reduce {activations}"),
    ];
    assert_eq!(printed.lines().collect::<Vec<_>>(), want);
}

/// The README's figure is up to date with its data.
#[needs(cpu, full)]
fn readme_layouts_figure_is_up_to_date() {
    let folder = Path::new("benchmarks/layouts");
    let entries = std::fs::read_dir(folder).expect("figures").map(|e| e.expect("an entry").path());
    let mut figures: Vec<String> = entries.map(|p| p.to_str().expect("a name").to_string()).collect();
    figures.sort();
    assert!(figures.len() >= 5, "{figures:?}");
    let drawn = printed("layouts_figure", &figures);
    let kept = std::fs::read_to_string(folder.with_extension("svg")).expect("the figure");
    assert_eq!(drawn, kept, "run `make layouts-figure`");
}

/// Runs one example of each library crate.
#[needs(cpu, full)]
fn library_crate_examples_build_run_and_analyze_programs() {
    let written = printed("attention", &[]);
    assert!(written.contains("sdy.mesh @mesh") && written.contains("stablehlo.dot_general"), "{written}");
    let ran = printed("hello", &[]);
    let tanh = [0.1f32, 0.2, 0.3].map(f32::tanh);
    let result: Vec<f32> = serde_json::from_str(ran.lines().last().unwrap_or_default()).expect("numbers");
    assert!(result.len() == 3 && result.iter().zip(tanh).all(|(x, y)| (x - y).abs() < 1e-6), "{ran}");
    // The first byte of a fuzz seed selects the format of the rest.
    let module = tempfile::NamedTempFile::new().expect("a file");
    let seed = std::fs::read("fuzz/seeds/module/tpu_v6e_gathers.pb").expect("a seed");
    std::fs::write(module.path(), &seed[1..]).expect("written");
    let read = printed("report", &[module.path().display().to_string(), "context=8".into(), "v6e".into()]);
    assert!(read.contains("AllGather over [\"context\"]") && read.contains("predicted: "), "{read}");
}

/// Settings of the toy model at the smallest useful size.
const SMALL: [&str; 4] = ["request.max_sequence_length=64", "sampler.steps=16", "runtime.platform=cpu", QUICK];

#[needs(cpu, full)]
fn library_example_generates_a_video() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out.mp4").display().to_string();
    let own = ["nano", "assets/nano", "a red circle bounces on blue, low beeps", "64x64x9", &out];
    let printed = printed("generate", &own.into_iter().chain(SMALL).map(String::from).collect::<Vec<_>>());
    assert_eq!(printed.trim().len(), 64, "{printed}");
    assert_eq!(&std::fs::read(&out).expect("a video")[4..8], b"ftyp");
}

/// A second-order sampler is closer to a fine solution than a first-order one with as many evaluations.
#[needs(cpu, full)]
fn custom_second_order_sampler_beats_euler() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out.mp4").display().to_string();
    let size = ["request.width=64", "request.height=64", "request.num_frames=9"];
    let own = ["nano", "assets/nano", &out].into_iter().chain(size).chain(SMALL);
    let printed = printed("sampler", &own.map(String::from).collect::<Vec<_>>());
    let rows: Vec<(&str, f64)> = printed
        .lines()
        .map(|line| line.split_once(": ").expect("a row"))
        .map(|(name, distance)| (name, distance.parse().expect("a number")))
        .collect();
    let [("Euler", euler), ("AdamsBashforth", own)] = rows[..] else { panic!("{printed}") };
    assert!(0.0 < own && own < euler * 0.7, "{printed}");
    assert_eq!(&std::fs::read(&out).expect("a video")[4..8], b"ftyp");
}
