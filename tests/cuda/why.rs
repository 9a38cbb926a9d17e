//! `ltx2 why` on the published model and layouts that are kept for their waste, for two H200s that are not here.

use std::time::{Duration, Instant};

use crate::support::{ltx2, needs};
use serde_json::Value;

/// Longest that one diagnosis may take on two cores.
const LONGEST: Duration = Duration::from_secs(300);

/// Diagnoses layouts, each on its mesh, and compares the first suggestion with the change that undoes what was planted; the
/// longest that one took.
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

/// Up to seven programs of the published size are compiled for each, which takes minutes.
#[needs(cuda)]
fn the_first_suggestion_names_what_was_planted() {
    let sharded = ("before-385", "context=2", "rules: without embed");
    let rotated = ("rope-gathered", "context=2", "tensors: without \"*.attn1.keys\"");
    let longest = first_suggestions("ltx2", &[sharded, GATHERED, rotated]);
    assert!(longest < LONGEST, "{:.0} s", longest.as_secs_f64());
}

/// A shipped layout without the rule of its tokens.
#[needs(cuda, full)]
fn the_first_suggestion_is_the_rule_that_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = std::fs::read_to_string("shardings/ulysses.yml").expect("a layout");
    let kept: Vec<&str> = text.lines().filter(|line| !line.starts_with("  video_sequence:")).collect();
    let path = folder.path().join("layout.yml");
    std::fs::write(&path, kept.join("\n") + "\n").expect("writes");
    first_suggestions("ltx2", &[(path.to_str().expect("UTF-8"), "context=2", "rules: video_sequence: [context]")]);
}

/// Of its layouts that are kept for their waste this one's is not hidden behind four branches' matmuls.
#[needs(cuda, full)]
fn of_ltx2_5_too() {
    first_suggestions("ltx2_5", &[GATHERED]);
}
