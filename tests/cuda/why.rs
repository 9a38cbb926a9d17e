//! `ltx2 why` with the published model and wasteful example layouts, for two H200s without the hardware.

use std::time::{Duration, Instant};

use crate::support::{ltx2, needs};
use serde_json::Value;

/// Time limit of one diagnosis on two cores.
const LONGEST: Duration = Duration::from_secs(300);

/// Diagnoses layouts, each on its mesh, checks that the first suggestion undoes the planted waste, and returns the
/// longest time.
fn first_suggestions(config: &str, planted: &[(&str, &str, &str)]) -> Duration {
    let mut longest = Duration::ZERO;
    for (layout, mesh, undone) in planted {
        let folder = tempfile::tempdir().expect("a folder");
        let started = Instant::now();
        let mut command = ltx2();
        command.args(["why", "-c", config, "--target", "cuda:h200:1x1x2", "--layout", layout, "--mesh", mesh]);
        let out = command.args(["--json", "-", "-o"]).arg(folder.path()).output().expect("runs");
        assert!(out.status.success(), "{layout}: {}", String::from_utf8_lossy(&out.stderr));
        longest = longest.max(started.elapsed());
        let answer: Value = serde_json::from_slice(&out.stdout).expect("JSON");
        let first = answer["advice"][0]["change"].as_str().unwrap_or("nothing");
        assert!(first.starts_with(undone), "{layout}: {first}");
    }
    longest
}

const GATHERED: (&str, &str, &str) = ("tensor-gathered-ffn", "tensor=2", "tensors: without \"*ff.hidden\"");

/// Compiles up to seven programs of the published size for each layout, which takes minutes.
#[needs(cuda)]
fn first_suggestion_removes_the_planted_inefficiency() {
    let sharded = ("before-385", "context=2", "rules: without embed");
    let rotated = ("rope-gathered", "context=2", "tensors: without \"*.attn1.keys\"");
    let longest = first_suggestions("ltx2", &[sharded, GATHERED, rotated]);
    assert!(longest < LONGEST, "{:.0} s", longest.as_secs_f64());
}

/// Removes the rule that shards tokens from a shipped layout.
#[needs(cuda, full)]
fn first_suggestion_adds_the_missing_rule() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = std::fs::read_to_string("shardings/ulysses.yml").expect("a layout");
    let kept: Vec<&str> = text.lines().filter(|line| !line.starts_with("  video_sequence:")).collect();
    let path = folder.path().join("layout.yml");
    std::fs::write(&path, kept.join("\n") + "\n").expect("writes");
    first_suggestions("ltx2", &[(path.to_str().expect("UTF-8"), "context=2", "rules: video_sequence: [context]")]);
}

/// For LTX-2.5, only the waste of this layout is not hidden by the matmuls of the four guidance branches.
#[needs(cuda, full)]
fn first_suggestion_removes_the_inefficiency_for_ltx2_5() {
    first_suggestions("ltx2_5", &[GATHERED]);
}
