//! `ltx2 why` on layouts with a deliberate error: the first suggestion undoes it.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::module_store::modules;
use crate::support::{self, needs};
use serde_json::Value;

/// Maximum time of one diagnosis on two cores.
const LONGEST: Duration = Duration::from_secs(300);

/// Rules that shard tokens over `context`, to which an error is added.
const TOKENS: &str = "mesh: {context: -1}\nrules:\n  video_sequence: [context]\n  height: [context]\n";

/// Layout with a deliberate error, and the start of the change that undoes it.
struct Planted {
    name: &'static str,
    /// Name of a shipped layout, or the text of a layout file.
    layout: String,
    undone: &'static str,
}

/// Returns all layouts with errors, except `rope-gathered`: gathered keys cost nothing in the CPU program. `cuda why`
/// tests it.
fn all() -> Vec<Planted> {
    let of = |name, layout: &str, undone| Planted { name, layout: layout.into(), undone };
    vec![
        of("before-385", "before-385", "rules: without embed"),
        of("tensor-gathered-ffn", "tensor-gathered-ffn", "tensors: without \"*ff.hidden\""),
        // The storage rule for weights is listed under `rules`, which apply to compute.
        of(
            "embed of storage moved to the rules",
            &format!("{TOKENS}  embed: [context]\ncontext_parallel: {{kind: ulysses}}\n"),
            "rules: without embed",
        ),
        // Storage sharding over a separate axis, but as a compute rule: every matmul needs an all-reduce over it.
        of(
            "embed over fsdp in the rules",
            "mesh: {fsdp: 2, context: 2}\nrules:\n  video_sequence: [context]\n  height: [context]\n  embed: [fsdp]\n\
             context_parallel: {kind: ulysses}\n",
            "rules: without embed",
        ),
        // A pattern meant for storage that shards only the attention weights.
        of(
            "an override that shards attention's weights",
            &format!("{TOKENS}tensors:\n  \"*attn*\": {{embed: [context]}}\ncontext_parallel: {{kind: ulysses}}\n"),
            "tensors: without \"*attn*\"",
        ),
        // Swapped axes: attention weights are sharded along their inputs instead of their heads.
        of(
            "attention's inputs sharded in place of its heads",
            "mesh: {tensor: -1}\nrules:\n  heads: [tensor]\n  kv_heads: [tensor]\n  mlp: [tensor]\n  vocab: [tensor]\n\
             tensors:\n  \"*attn1*\": {heads: [], embed: [tensor]}\n",
            "tensors: without \"*attn1*\"",
        ),
        // No rule shards the tokens, so every device computes all of them.
        of(
            "tokens left out",
            "mesh: {context: -1}\nrules:\n  height: [context]\ncontext_parallel: {kind: ulysses}\n",
            "rules: video_sequence: [context]",
        ),
        // Each head is sharded, instead of distributing heads over devices.
        of(
            "a head's width sharded in place of heads",
            "mesh: {tensor: -1}\nrules:\n  head_dim: [tensor]\n  mlp: [tensor]\n  vocab: [tensor]\n",
            "tensors: \"transformer.*attn*\": {head_dim: []}",
        ),
        // The inner activation is gathered in one of two streams, as in `tensor-gathered-ffn`.
        of(
            "the inner activation of one stream gathered",
            "mesh: {tensor: -1}\nrules:\n  heads: [tensor]\n  kv_heads: [tensor]\n  mlp: [tensor]\n  vocab: [tensor]\n\
             tensors:\n  \"*ff.hidden\": {mlp: []}\n",
            "tensors: without \"*ff.hidden\"",
        ),
    ]
}

fn first(planted: &Planted, folder: &Path) -> String {
    let path = folder.join("planted.yml");
    let layout = match planted.layout.contains('\n') {
        true => {
            std::fs::write(&path, &planted.layout).expect("writes");
            path.to_str().expect("UTF-8").to_string()
        }
        false => planted.layout.clone(),
    };
    let mut command = support::ltx2();
    command.args(["why", "--target", "cpu:4", "-c", "nano_2_0", "--model", "nano", "--layers", "1"]);
    // Compare times rather than bytes: replicating work on every device is not a gain.
    command.args(["--chip", "v5p"]);
    command.args(["--set", "request.width=256", "--set", "request.height=256", "--set", "request.num_frames=33"]);
    command.args(["--set", support::QUICK, "--json", "-", "--layout", &layout, "-o"]).arg(folder.join("lab"));
    command.arg("--modules").arg(support::modules());
    let started = Instant::now();
    let out = command.output().expect("runs");
    assert!(out.status.success(), "{}: {}", planted.name, String::from_utf8_lossy(&out.stderr));
    assert!(started.elapsed() < LONGEST, "{}: {:.0} s", planted.name, started.elapsed().as_secs_f64());
    let answer: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let advice = answer["advice"].as_array().expect("a list");
    let gains: Vec<f64> = advice
        .iter()
        .map(|a| 1.0 - a["cost"][1].as_f64().expect("a cost") / a["cost"][0].as_f64().expect("a cost"))
        .collect();
    assert!(
        gains.windows(2).all(|pair| pair[0] >= pair[1]),
        "{}: the largest gain comes first: {gains:?}",
        planted.name
    );
    let shipped = &answer["shipped"];
    let [own, fastest] = [&shipped["estimate"], &shipped["fastest"]["estimate"]].map(|ms| ms.as_f64().expect("a cost"));
    assert!(fastest < own && !shipped["lines"].as_array().expect("lines").is_empty(), "{}: {shipped}", planted.name);
    advice.first().map_or_else(|| format!("nothing: {answer}"), |a| a["change"].as_str().expect("a change").into())
}

/// Returns an error if the first suggestion is not the expected one.
fn check(planted: &Planted) -> Option<String> {
    let folder = tempfile::tempdir().expect("a folder");
    let change = first(planted, folder.path());
    (!change.starts_with(planted.undone)).then(|| format!("{}: the first suggestion is {change}", planted.name))
}

#[needs(cpu, full)]
fn first_suggestion_removes_misplaced_rule() {
    assert_eq!(check(&all()[2]), None);
}

#[needs(cpu)]
fn first_suggestion_adds_missing_rule() {
    let planted = all().into_iter().find(|planted| planted.name == "tokens left out").expect("planted");
    assert_eq!(check(&planted), None);
}

/// `layout: auto`, the default, is resolved to the layout that it selects for the target.
#[needs(cpu)]
fn layout_chosen_by_auto_is_diagnosed() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = support::ltx2();
    command.args(["why", "--target", "cpu:2", "-c", "nano_2_0", "--model", "nano", "--layers", "1", "--chip", "h200"]);
    command.args(["--set", "request.width=64", "--set", "request.height=96", "--set", "request.num_frames=9"]);
    command.args(["--set", support::QUICK, "--json", "-", "--budget", "1", "-o"]).arg(folder.path());
    let out = command.arg("--modules").arg(modules()).output().expect("runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let answer: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert!(answer["layout"].as_str().is_some_and(|layout| layout != "auto"), "{}", answer["layout"]);
    assert!(answer["predicted_ms"]["step"].as_f64() > Some(0.0), "{}", answer["predicted_ms"]);
}

#[needs(cpu, full)]
fn first_suggestion_undoes_each_planted_layout_error() {
    assert_eq!(all().iter().filter_map(check).collect::<Vec<_>>(), Vec::<String>::new());
}
