//! `ltx2 quality` on a tiny model.

use serde_json::Value;

use crate::support::{self, needs};

/// Runs `quality` with the configuration of `resume::resumed_run_skips_the_same_steps`. Returns the JSON report, or
/// stderr if the command fails.
fn quality(more: &[&str]) -> Result<Value, String> {
    let cache = format!("runtime.compile_cache={}", support::programs().display());
    let mut command = support::ltx2();
    command.args(["quality", "-c", support::tiny(), "--json", "-", "--steps", "4", "--height", "96"]);
    command.args(["--set", &cache, "--set", "pipeline=text_to_video"]).args(more);
    let made = command.output().expect("the binary runs");
    match made.status.success() {
        true => Ok(serde_json::from_slice(&made.stdout).expect("JSON")),
        false => Err(String::from_utf8_lossy(&made.stderr).into_owned()),
    }
}

/// With threshold 0, the result is that of the run without a cache; with a large threshold, it differs and steps are
/// skipped.
#[needs(cpu)]
fn quality_reports_distances_and_skipped_steps() {
    let window = ["warmup_steps=2", "last_steps=0", "max_skips=1"].map(|pair| format!("sampler.cache.{pair}"));
    let window: Vec<&str> = window.iter().flat_map(|pair| ["--set", pair.as_str()]).collect();
    let report = quality(&[&window[..], &["--cache", "0,9"]].concat()).unwrap_or_else(|why| panic!("{why}"));
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

#[needs(nothing)]
fn quality_rejects_unsupported_runs() {
    for (args, want) in [
        (&["--cache", "fast"][..], "--cache fast: 'fast' is not a number"),
        (&["--cache", "0.1"], "with 4 steps, no step is left to skip"),
        (
            &["--cache", "0.1", "--set", "sampler.kind=res_2s"],
            "a sampler with two evaluations per step cannot skip steps",
        ),
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
}
