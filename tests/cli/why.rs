//! `ltx2 why` on layouts that are wrong on purpose: the first suggestion undoes what was planted.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::{self, needs};
use serde_json::Value;

/// Longest that one diagnosis may take on two cores.
const LONGEST: Duration = Duration::from_secs(300);

/// Rules of tokens over `context`, before what is planted.
const TOKENS: &str = "mesh: {context: -1}\nrules:\n  video_sequence: [context]\n  height: [context]\n";

/// A layout that is wrong on purpose, and the beginning of the change that undoes it.
struct Planted {
    name: &'static str,
    /// A shipped layout's name, or a layout file's text.
    layout: String,
    undone: &'static str,
}

/// `rope-gathered` is not among them: gathered keys cost the CPU's program nothing. It is among those of `cuda why`.
fn all() -> Vec<Planted> {
    let of = |name, layout: &str, undone| Planted { name, layout: layout.into(), undone };
    vec![
        of("before-385", "before-385", "rules: without embed"),
        of("tensor-gathered-ffn", "tensor-gathered-ffn", "tensors: without \"*ff.hidden\""),
        // Weights sharded as for storage, by a rule of compute: the rule stands under the wrong key.
        of(
            "embed of storage moved to the rules",
            &format!("{TOKENS}  embed: [context]\ncontext_parallel: {{kind: ulysses}}\n"),
            "rules: without embed",
        ),
        // Storage over an axis of its own, but as a rule of compute: every matmul sums over it.
        of(
            "embed over fsdp in the rules",
            "mesh: {fsdp: 2, context: 2}\nrules:\n  video_sequence: [context]\n  height: [context]\n  embed: [fsdp]\n\
             context_parallel: {kind: ulysses}\n",
            "rules: without embed",
        ),
        // Attention's weights alone, by a pattern that was meant for storage.
        of(
            "an override that shards attention's weights",
            &format!("{TOKENS}tensors:\n  \"*attn*\": {{embed: [context]}}\ncontext_parallel: {{kind: ulysses}}\n"),
            "tensors: without \"*attn*\"",
        ),
        // Axes swapped: weights of attention sharded along their inputs, in place of their heads.
        of(
            "attention's inputs sharded in place of its heads",
            "mesh: {tensor: -1}\nrules:\n  heads: [tensor]\n  kv_heads: [tensor]\n  mlp: [tensor]\n  vocab: [tensor]\n\
             tensors:\n  \"*attn1*\": {heads: [], embed: [tensor]}\n",
            "tensors: without \"*attn1*\"",
        ),
        // Nothing shards the tokens: every device computes all of them.
        of(
            "tokens left out",
            "mesh: {context: -1}\nrules:\n  height: [context]\ncontext_parallel: {kind: ulysses}\n",
            "rules: video_sequence: [context]",
        ),
        // And each head split, in place of heads over devices.
        of(
            "a head's width sharded in place of heads",
            "mesh: {tensor: -1}\nrules:\n  head_dim: [tensor]\n  mlp: [tensor]\n  vocab: [tensor]\n",
            "tensors: \"transformer.*attn*\": {head_dim: []}",
        ),
        // The inner activation is gathered, as in `tensor-gathered-ffn`, in one of two streams.
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
    // Times, not bytes: what repeats work on every device is no gain.
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

/// The first suggestion, where it is another.
fn check(planted: &Planted) -> Option<String> {
    let folder = tempfile::tempdir().expect("a folder");
    let change = first(planted, folder.path());
    (!change.starts_with(planted.undone)).then(|| format!("{}: the first suggestion is {change}", planted.name))
}

#[needs(cpu)]
fn the_first_suggestion_names_a_rule_that_was_moved() {
    assert_eq!(check(&all()[2]), None);
}

#[needs(cpu)]
fn the_first_suggestion_names_a_rule_that_is_missing() {
    let planted = all().into_iter().find(|planted| planted.name == "tokens left out").expect("planted");
    assert_eq!(check(&planted), None);
}

/// `layout: auto`, the default, is what it takes for the target's devices.
#[needs(cpu)]
fn what_auto_takes_is_diagnosed() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = support::ltx2();
    command.args(["why", "--target", "cpu:2", "-c", "nano_2_0", "--model", "nano", "--layers", "1", "--chip", "h200"]);
    command.args(["--set", "request.width=64", "--set", "request.height=96", "--set", "request.num_frames=9"]);
    command.args(["--set", support::QUICK, "--json", "-", "--budget", "1", "-o"]).arg(folder.path());
    let out = command.arg("--modules").arg(support::modules()).output().expect("runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let answer: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert!(answer["layout"].as_str().is_some_and(|layout| layout != "auto"), "{}", answer["layout"]);
    assert!(answer["predicted_ms"]["step"].as_f64() > Some(0.0), "{}", answer["predicted_ms"]);
}

#[needs(cpu, full)]
fn the_first_suggestion_names_what_was_planted() {
    assert_eq!(all().iter().filter_map(check).collect::<Vec<_>>(), Vec::<String>::new());
}
