//! `ltx2 experiment --search` with the TPU compiler.

use std::path::Path;

use crate::support::{self, needs};

/// With the sizes of a small model, the best layout found is no slower than the shipped layouts (`make test-full`).
#[needs(tpu, full)]
fn search_winner_is_no_slower_than_shipped_layouts() {
    // Results are cached between runs, keyed by everything they depend on.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("search");
    let mut command = support::ltx2();
    command.args(["experiment", "--search", "--target", "tpu:v6e:2x2", "--shape", "256x192x25", "-c", "nano_2_0"]);
    command.args(["--set", "model.path=nano", "--memory-fit", "--layers", "2", "--budget", "40", "-o"]).arg(&folder);
    let out = command.output().expect("runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let words = String::from_utf8_lossy(&out.stdout).into_owned();
    eprintln!("{words}");
    assert!(!words.contains("increase --budget"), "{words}");
    let best = std::fs::read_to_string(folder.join("best.yml")).expect("a layout");
    let step = |layout: &str, mesh: Option<&str>| {
        let mut command = support::ltx2();
        command.args([
            "compile",
            "--target",
            "tpu:v6e:2x2",
            "-c",
            "nano_2_0",
            "--set",
            "model.path=nano",
            "--layers",
            "2",
        ]);
        command.args(["--set", "request.width=256", "--set", "request.height=192", "--set", "request.num_frames=25"]);
        command.args(["--json", "-", "--layout", layout]).args(mesh.iter().flat_map(|m| ["--mesh", m]));
        let out = command.output().expect("runs");
        assert!(out.status.success(), "{layout}: {}", String::from_utf8_lossy(&out.stderr));
        let figures: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
        figures["predicted_all_ms"]["step"].as_f64().expect("milliseconds")
    };
    let winner = step(folder.join("best.yml").to_str().expect("UTF-8"), None);
    for (layout, mesh) in [("cfg-ulysses", "cfg=2,context=2"), ("sequence", "context=4"), ("tensor", "tensor=4")] {
        let shipped = step(layout, Some(mesh));
        eprintln!("{layout} {mesh}: {shipped:.4} ms, the winner {winner:.4} ms");
        assert!(winner <= shipped * 1.0001, "{layout} {mesh}: {shipped}, the winner {winner}\n{best}");
    }
}
