//! The examples do what their first lines promise, and print what they claim.

mod common;

use std::process::Command;

/// Lines an example prints on the CPU plugin.
fn lines(example: &str) -> Vec<String> {
    let done = Command::new(env!("CARGO"))
        .args(["run", "--locked", "--quiet", "--example", example])
        .env_remove("TPU_SKIP_MDS_QUERY")
        .output()
        .expect("cargo runs");
    assert!(done.status.success(), "{example}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).expect("text").lines().map(str::to_string).collect()
}

/// Bytes the CPU compiler moves of a tensor of bf16, which it widens to f32 first.
fn megabytes(elements: usize) -> String {
    format!("{:.1} MB of f32 over context", elements as f64 * 4.0 / 1e6)
}

#[test]
fn one_rule_makes_the_gather_of_the_weights_go() {
    if common::cpu(1).is_none() {
        return;
    }
    let printed = lines("sharded_ffn");
    let (weight, activations) = (megabytes(16384 * 4096), megabytes(6144 * 4096));
    let gather = format!("  all-gather {weight}");
    let want = [
        "embed split, on eight virtual CPU devices: 536.9 MB".to_string(),
        gather.clone(),
        gather,
        "embed whole, on eight virtual CPU devices: 0.0 MB".to_string(),
        "mlp split, on eight virtual CPU devices: 100.7 MB".to_string(),
        format!("  all-reduce {activations}"),
    ];
    assert_eq!(printed, want);
}
