//! `layout: auto`, and the messages of `generate` and `check` about faster layouts.

use std::path::Path;
use std::process::Output;

use crate::support::{self, QUICK, needs};
use serde_json::Value;

/// Runs the smallest model on four virtual devices.
fn generate(out: &Path, more: &[&str]) -> Output {
    let mut command = support::ltx2();
    command.args(["generate", "-c", support::tiny(), "--set", QUICK, "--steps", "1", "-o"]).arg(out).args(more);
    let done = command.output().expect("the binary runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    done
}

/// Returns the stderr lines about layouts, without log level and module.
fn lines(out: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&out.stderr);
    let said = text.lines().filter(|line| line.contains(" MB received a step"));
    said.filter_map(|line| Some(line[line.find("layout ")?..].to_string())).collect()
}

/// Parses an estimate such as `cfg (cfg=2), 310.5 ms a step` into layout, mesh and figure.
fn estimate(said: &str) -> (&str, &str, f64) {
    let (layout, rest) = said.split_once(" (").expect("a layout");
    let (mesh, rest) = rest.split_once("), ").expect("a mesh");
    (layout, mesh, rest.split(' ').next().and_then(|n| n.parse().ok()).expect("a figure"))
}

#[needs(cpu, full)]
fn generate_reports_auto_choice_and_faster_layout() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("auto.mp4");
    let said = lines(&generate(&out, &["--layout", "auto", "--mesh", "cfg=2,context=2"]));
    let [line] = &said[..] else { panic!("one line: {said:?}") };
    let line = line.strip_prefix("layout auto: for 4 x cpu: ").unwrap_or_else(|| panic!("{line}"));
    let (first, next) = line.split_once(" MB received a step (predicted); next: ").expect("the runner-up");
    let ((layout, mesh, cost), (other, its_mesh, more)) = (estimate(first), estimate(next));
    assert!(layout != other && mesh == "cfg=2,context=2" && its_mesh == mesh, "{line}");
    // Among layouts within 1 % of the best, the simplest is chosen.
    assert!(cost > 0.0 && cost <= 1.01 * more, "{line}");
    let sidecar: Value =
        serde_json::from_str(&std::fs::read_to_string(out.with_extension("json")).expect("a sidecar")).expect("JSON");
    assert_eq!(sidecar["config"]["layout"], layout, "the printed layout is the one that ran");

    let slow = ["--layout", "tensor", "--mesh", "tensor=4"];
    let said = lines(&generate(&dir.path().join("slow.mp4"), &[&slow[..], &["-v"]].concat()));
    let [line] = &said[..] else { panic!("one line: {said:?}") };
    let both = line.strip_prefix("layout ").and_then(|l| l.split_once(" (predicted); the shipped layout "));
    let (own, best) = both.expect("two estimates");
    let ((layout, mesh, cost), (_, _, less)) = (estimate(own), estimate(best));
    assert_eq!((layout, mesh), ("tensor", "tensor=4"));
    let saved = 100.0 * (1.0 - less / cost);
    let named = best.split_once(" would save ").and_then(|(_, s)| s.trim_end_matches(" %").parse::<f64>().ok());
    assert!(saved > 5.0 && named.is_some_and(|named| (named - saved).abs() < 1.0), "{line}");
    // Logged only with -v, because it is advice.
    assert!(lines(&generate(&dir.path().join("quiet.mp4"), &slow)).is_empty());
}

#[needs(cpu)]
fn check_reports_faster_layout() {
    let check = |layout: &str, mesh: &str| {
        let mut command = support::ltx2();
        command.args(["check", "assets/nano", "-c", "nano_2_0", "--target", "cpu:4", "--json"]);
        let out = command.args(["--layout", layout, "--mesh", mesh]).output().expect("the binary runs");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice::<Value>(&out.stdout).expect("JSON")["layouts"].clone()
    };
    let slow = check("tensor", "tensor=4");
    let auto = slow["auto"].as_str().and_then(|line| line.strip_prefix("layout auto: for 4 x cpu: ")).expect("a line");
    let (first, next) = auto.split_once(" MB received a step (predicted); next: ").expect("the runner-up");
    let ((layout, mesh, cost), (other, its_mesh, more)) = (estimate(first), estimate(next));
    let line = slow["faster"].as_str().expect("a faster layout");
    let both = line.strip_prefix("layout ").and_then(|l| l.split_once(" (predicted); the shipped layout "));
    let (own, best) = both.expect("two estimates");
    assert!(estimate(own).2 > cost / 0.95 && estimate(best) == (layout, mesh, cost), "{line}");
    // Replicated work does not show in received bytes, so the work is compared.
    let repeating = check("sequence", "context=4")["faster"].to_string();
    assert!(repeating.ends_with(" % of the work\""), "{repeating}");
    // No layout is faster than the fastest, and the runner-up is another layout.
    assert_eq!(check(layout, mesh)["faster"], Value::Null);
    assert!((layout, mesh) != (other, its_mesh) && more >= cost, "{auto}");
    // With a given mesh, as for a run.
    let auto = check("auto", "tensor=4")["auto"].clone();
    assert!(
        auto.as_str().is_some_and(|line| line.starts_with("layout auto: for 4 x cpu: tensor (tensor=4), ")),
        "{auto}"
    );
}

/// Chip files suffice to rank layouts for absent devices, so no plugin is loaded.
#[needs(nothing)]
fn check_ranks_layouts_without_target_plugin() {
    for (target, plugin, devices) in [
        ("tpu:v6e:2x4", "/nowhere/libtpu.so", "8 x TPU v6 lite"),
        ("tpu:tpu7x:2x2x1", "/nowhere/libtpu.so", "8 x TPU7x"),
        ("cuda:h200:1x1x4", "/nowhere/xla_cuda_plugin.so", "4 x NVIDIA H200"),
    ] {
        let mut command = support::ltx2();
        command.args(["check", "assets/nano", "-c", "nano", "--target", target]).env("LTX2_PJRT_PLUGIN", plugin);
        let out = command.output().expect("the binary runs");
        let (said, printed) = (String::from_utf8_lossy(&out.stderr), String::from_utf8_lossy(&out.stdout));
        assert!(out.status.success(), "{said}");
        let line =
            printed.lines().find(|line| line.starts_with("layout auto: ")).unwrap_or_else(|| panic!("{printed}"));
        assert!(line.starts_with(&format!("layout auto: for {devices}: ")) && line.contains(" ms a step"), "{line}");
        // Only CUDA has a choice.
        let layers = printed.lines().find(|line| line.starts_with("runtime.layers: auto: "));
        assert_eq!(layers.is_some(), target.starts_with("cuda"), "{printed}");
    }
}

/// The layout is a shipped one without the rule for video tokens.
#[needs(nothing)]
fn check_names_the_rule_that_a_layout_lacks() {
    let shipped = std::fs::read_to_string("shardings/ulysses.yml").expect("a layout");
    let rule = "  video_sequence: [context]\n";
    assert!(shipped.contains(rule));
    let file = tempfile::NamedTempFile::with_suffix(".yml").expect("a file");
    std::fs::write(file.path(), shipped.replace(rule, "")).expect("written");
    for target in ["cuda:h100:1x1x4", "tpu:v5p:2x2x1"] {
        let mut command = support::ltx2();
        command.args(["check", "assets/nano", "-c", "nano", "--target", target, "--json", "--mesh", "context=4"]);
        let out = command.arg("--layout").arg(file.path()).env("LTX2_PJRT_PLUGIN", "/nowhere/plugin.so").output();
        let printed = out.expect("the binary runs").stdout;
        let lacking = serde_json::from_slice::<Value>(&printed).expect("JSON")["layouts"]["lacking"].to_string();
        assert!(lacking.contains("`rules: video_sequence: [context]`"), "{target}: {lacking}");
    }
}
