//! `ltx2 quality` on a tiny model.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{self, needs};

/// Steps that may be skipped.
const WINDOW: [&str; 6] = [
    "--set",
    "sampler.cache.warmup_steps=2",
    "--set",
    "sampler.cache.last_steps=0",
    "--set",
    "sampler.cache.max_skips=1",
];

/// Runs `quality` with the configuration of `resume::resumed_run_skips_the_same_steps`. Returns the JSON report, or
/// stderr if the command fails.
fn quality(more: &[&str]) -> Result<Value, String> {
    let made = command("-", more).output().expect("the binary runs");
    match made.status.success() {
        true => Ok(serde_json::from_slice(&made.stdout).expect("JSON")),
        false => Err(String::from_utf8_lossy(&made.stderr).into_owned()),
    }
}

/// Returns a command that measures four steps and writes its results to `json`.
fn command(json: &str, more: &[&str]) -> Command {
    let cache = format!("runtime.compile_cache={}", support::programs().display());
    let mut command = support::ltx2();
    command.args(["quality", "-c", support::tiny(), "--json", json, "--steps", "4", "--height", "96"]);
    command.args(["--set", &cache, "--set", "pipeline=text_to_video"]).args(more);
    command
}

/// With threshold 0, the result is that of the run without a cache; with a large threshold, it differs and steps are
/// skipped.
#[needs(cpu)]
fn quality_reports_distances_and_skipped_steps() {
    let report = quality(&[&WINDOW[..], &["--cache", "0,9"]].concat()).unwrap_or_else(|why| panic!("{why}"));
    assert_eq!((&report["prompts"], &report["steps"]), (&1.into(), &4.into()));
    let run = |at: usize| report["caches"][at]["runs"][0].clone();
    let [exact, skipping] = [run(0), run(1)];
    assert_eq!((&exact["skipped"], &exact["psnr"], &exact["ssim"]), (&0.into(), &Value::Null, &1.0.into()));
    assert_eq!((exact["video_latents"].as_f64(), exact["audio_latents"].as_f64()), (Some(0.0), Some(0.0)));
    assert_eq!(skipping["skipped"], 1);
    for distance in ["video_latents", "audio_latents", "psnr", "time_ratio"] {
        assert!(skipping[distance].as_f64().is_some_and(|value| value > 0.0), "{distance}: {skipping}");
    }
    assert!(skipping["ssim"].as_f64().is_some_and(|ssim| ssim < 1.0), "{skipping}");
}

/// A measurement that is killed after its first prompt has the results of this prompt, and a resumed one keeps them. The
/// programs are those of the test above.
#[needs(cpu)]
fn interrupted_measurement_is_resumed() {
    let folder = tempfile::tempdir().expect("a folder");
    let prompts = folder.path().join("prompts.txt");
    std::fs::write(&prompts, "a red disc\na blue square\n").expect("written");
    let (prompts, file) = (prompts.to_str().expect("UTF-8"), folder.path().join("quality.json"));
    let run = |more: &[&str]| {
        let own = [&WINDOW[..], &["--prompts", prompts, "--cache", "0,9"], more].concat();
        command(file.to_str().expect("UTF-8"), &own)
    };
    let results = |file: &Path| -> Value {
        serde_json::from_slice(&std::fs::read(file).expect("results")).expect("complete JSON")
    };
    let mut killed = run(&[]).env("LTX2_FAILPOINT", "prompt 1").stderr(Stdio::piped()).spawn().expect("starts");
    let lines = BufReader::new(killed.stderr.take().expect("a pipe")).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "at prompt 1"), "the first prompt is measured");
    killed.kill().and_then(|()| killed.wait()).expect("killed");
    let first = results(&file);
    assert_eq!((&first["prompts"], &first["of_prompts"]), (&1.into(), &2.into()));

    let refused = |more: &[&str]| {
        let made = run(more).output().expect("the binary runs");
        assert!(!made.status.success());
        String::from_utf8_lossy(&made.stderr).into_owned()
    };
    let why = refused(&[]);
    assert!(why.contains("quality.json exists; overwrite it with --force"), "{why}");
    let why = refused(&["--resume", "--seed", "7"]);
    assert!(why.contains("--resume: the file of --json has results of another measurement: "), "{why}");
    assert!(why.contains("seed was "), "{why}");

    let made = run(&["--resume"]).output().expect("the binary runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let all = results(&file);
    assert_eq!((&all["prompts"], &all["identity"]), (&2.into(), &first["identity"]));
    for at in 0..2 {
        let [before, after] = [&first, &all].map(|all| all["caches"][at]["runs"].as_array().expect("runs"));
        assert_eq!((before.len(), after.len(), &before[0]), (1, 2, &after[0]));
    }
}

#[needs(nothing)]
fn quality_rejects_unsupported_runs() {
    for (args, want) in [
        (&["--cache", "fast"][..], "--cache fast: 'fast' is not a number"),
        (&["--cache", "0.1"], "with 4 steps, no step is left to skip"),
        (
            &["--cache", "0.1", "--set", "sampler.kind=res_2s"],
            "a sampler with two evaluations per step cannot skip steps",
        ),
        (&[&WINDOW[..], &["--cache", "0.1", "--resume"]].concat(), "--resume: needs a file; pass --json FILE"),
        (
            &[
                "--cache",
                "ratio=0.5",
                "--set",
                "sampler.cache.last_steps=0",
                "--set",
                "sampler.cache.warmup_steps=1",
                "--toy-prompts",
                "none.json",
            ],
            "--toy-prompts none.json: ",
        ),
    ] {
        let why = quality(args).expect_err("refused");
        assert!(why.contains(want), "{args:?}: {why}");
    }
    let mut two_stages = support::ltx2();
    two_stages.args(["quality", "-c", "nano_two_stage", "--cache", "ratio=0.5", "--set"]);
    let made = two_stages.arg("two_stage.cache={kind: fixed, steps: [1]}").output().expect("the binary runs");
    let why = String::from_utf8_lossy(&made.stderr);
    let want = "quality measures only the step cache of the first pass: set two_stage.cache.kind to off";
    assert!(made.status.code() == Some(2) && why.contains(want), "{why}");
}
