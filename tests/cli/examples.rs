//! The examples do what their first lines promise, and print what they claim.

use std::path::Path;
use std::process::Command;

use crate::support::needs;

/// What an example prints, on the CPU plugin where it needs one.
fn printed(example: &str, arguments: &[String]) -> String {
    let done = Command::new(env!("CARGO"))
        .args(["run", "--locked", "--quiet", "--example", example, "--"])
        .args(arguments)
        .env_remove("TPU_SKIP_MDS_QUERY")
        .output()
        .expect("cargo runs");
    assert!(done.status.success(), "{example}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).expect("text")
}

/// Bytes the CPU compiler moves of a tensor of bf16, which it widens to f32 first.
fn megabytes(elements: usize) -> String {
    format!("{:.1} MB of f32 over context", elements as f64 * 4.0 / 1e6)
}

#[needs(cpu)]
fn one_rule_makes_the_gather_of_the_weights_go() {
    let printed = printed("sharded_ffn", &[]);
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
    assert_eq!(printed.lines().collect::<Vec<_>>(), want);
}

/// The README's picture is what its figures draw.
#[needs(cpu)]
fn the_picture_of_the_layouts_is_drawn_from_its_figures() {
    let folder = Path::new("docs/images/layouts");
    let entries = std::fs::read_dir(folder).expect("figures").map(|e| e.expect("an entry").path());
    let mut figures: Vec<String> = entries.map(|p| p.to_str().expect("a name").to_string()).collect();
    figures.sort();
    assert!(figures.len() >= 5, "{figures:?}");
    let drawn = printed("layouts_figure", &figures);
    let kept = std::fs::read_to_string(folder.with_extension("svg")).expect("the picture");
    assert_eq!(drawn, kept, "run `make layouts-figure`");
}
