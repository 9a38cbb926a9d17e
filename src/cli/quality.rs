//! `ltx2 quality`: distances of runs with a step cache to runs without one.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::args::RunArgs;
use super::generate::prepare_run;
use super::{UsageError, check_json, json_file, print_and_write_json, tell};
use crate::atomic_file::write_file;
use crate::config::{CliOverrides, LoadedConfig, load};
use crate::destination::Destination;
use crate::perf::cache_quality::{CacheQuality, CacheVariant, Measurement, VariantQuality};
use crate::pipeline::plan::videos::Job;
use crate::quality::toy::{PromptScores, ToyPrompt};
use crate::text_file;

/// Measures what a step cache changes: generates each prompt without and with each step cache, and prints the distances
/// between both, the skipped steps and the time of the first pass.
#[derive(clap::Args, Clone, Debug)]
#[command(
    after_help = "PSNR is the median and the minimum over the prompts, the other distances are means. Time is the median time of the
first pass relative to the run without a step cache. Only the step cache of the first pass is measured: two_stage.cache must
be off.

Examples:
  ltx2 quality -c ltx2 --prompts prompts.txt --cache 0.02,0.05,0.1 --json quality.json
  ltx2 quality -c nano --toy-prompts tests/fixtures/nano/prompts.json --seed 100 --cache 0.05,0.1,ratio=0.5"
)]
pub(crate) struct QualityArgs {
    /// Step caches to measure: thresholds of `adaptive`, or `ratio=R` for `fixed`; the other keys of sampler.cache apply
    /// to all of them
    #[arg(long, value_name = "THRESHOLD,…", value_delimiter = ',', required = true)]
    cache: Vec<String>,
    /// JSON list of prompts of the toy model with their colour, motion and pitch, instead of --prompts; also prints how
    /// many clips follow their prompt. The seed increases by 1 with each prompt
    #[arg(long, value_name = "FILE")]
    toy_prompts: Option<PathBuf>,
    /// File to write the results of every prompt to, as JSON; `-` writes it to stdout instead of the table. A file is
    /// replaced after each prompt
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Overwrites the file of --json
    #[arg(long)]
    force: bool,
    /// Resumes an interrupted measurement: skips the prompts whose results the file of --json has. If there is no file,
    /// starts at the first prompt
    #[arg(long, requires = "json", conflicts_with = "force")]
    resume: bool,
    #[command(flatten)]
    run: RunArgs,
}

pub(crate) fn run(args: &QualityArgs) -> anyhow::Result<()> {
    let given = args.run.overrides()?;
    let (mut variants, mut base) = (Vec::new(), None);
    for name in &args.cache {
        let loaded = with_cache(&given, name)?;
        let cache = loaded.config.sampler.cache.step_cache();
        let cache = cache.ok_or_else(|| UsageError(format!("--cache {name}: selects no step cache")))?;
        variants.push(CacheVariant { name: name.clone(), cache });
        base = base.or(Some(loaded));
    }
    let loaded = base.ok_or_else(|| UsageError("--cache: needs at least one value".into()))?;
    let is_of_files = |path: &str| path.starts_with("output.") || path == "sampler.progress_every";
    loaded.check_read("this command writes no video and shows no progress", |path| !is_of_files(path))?;
    loaded.check_read("this command does not enhance prompts", |path| !path.starts_with("enhance."))?;
    let earlier = args.earlier()?;
    check_json(args.json.as_deref(), args.force || earlier.is_some())?;
    let config = &loaded.config;
    if config.runtime.distributed.num_processes.is_some_and(|processes| processes > 1) {
        return Err(UsageError("quality runs in one process; remove --num-processes".into()).into());
    }
    let toys = args.toy_prompts.as_deref().map(read_toys).transpose()?;
    let jobs = match &toys {
        Some(toys) => toys
            .iter()
            .enumerate()
            .map(|(index, toy)| Job {
                index,
                prompt: toy.prompt.clone(),
                seed: config.request.seed.wrapping_add(index as u64),
            })
            .collect(),
        None => config.jobs()?,
    };
    prepare_run(config);
    // A pipe or a device receives only the final results.
    let file = json_file(args.json.as_deref()).filter(|path| !Destination::is_stream(path));
    let mut replaces = args.force || earlier.is_some();
    let measurement = Measurement { config, jobs: &jobs, toys: toys.as_deref(), caches: &variants };
    let quality = measurement.run(earlier, |quality| {
        tracing::info!("{} of {} prompts", quality.prompts, quality.of_prompts);
        let Some(file) = file else { return };
        match write_file(file, json(quality).as_bytes(), replaces) {
            Ok(()) => replaces = true,
            // The results are written again after the next prompt, and printed if the last attempt fails.
            Err(error) => tracing::warn!("--json: cannot save the results: {error}"),
        }
    })?;
    print_and_write_json(args.json.as_deref(), replaces, &json(&quality), &table(&quality))?;
    if toys.is_none() && quality.prompts < 2 {
        tell("one prompt says little about others; pass --prompts FILE");
    }
    Ok(())
}

fn json(quality: &CacheQuality) -> String {
    format!("{}\n", serde_json::to_string_pretty(quality).expect("structs of strings and numbers serialize to JSON"))
}

impl QualityArgs {
    /// Returns the results in the file of `--json`. `None`: there is no such file, or `--resume` is not set.
    fn earlier(&self) -> anyhow::Result<Option<CacheQuality>> {
        let Some(file) = json_file(self.json.as_deref()).filter(|file| self.resume && file.exists()) else {
            return match self.resume && json_file(self.json.as_deref()).is_none() {
                true => Err(UsageError("--resume: needs a file; pass --json FILE".into()).into()),
                false => Ok(None),
            };
        };
        let fail = |why: &dyn std::fmt::Display| {
            UsageError(format!("--resume: {} has no results of quality: {why}; choose another file", file.display()))
        };
        let text = text_file::read(file).map_err(|e| fail(&e))?;
        Ok(Some(serde_json::from_str(&text).map_err(|e| fail(&e))?))
    }
}

/// Loads the configuration with the step cache that an item of --cache selects.
fn with_cache(given: &CliOverrides, item: &str) -> anyhow::Result<LoadedConfig> {
    let mut given = given.clone();
    let (kind, key, value) = match item.trim().split_once('=') {
        None => ("adaptive", "threshold", item.trim()),
        Some(("ratio", ratio)) => ("fixed", "ratio", ratio),
        Some(_) => {
            let why = format!("--cache {item}: expected a threshold such as 0.05, or ratio=R such as ratio=0.5");
            return Err(UsageError(why).into());
        }
    };
    if value.parse::<f64>().is_err() {
        let why = format!("--cache {item}: '{value}' is not a number; use a threshold such as 0.05, or ratio=0.5");
        return Err(UsageError(why).into());
    }
    given.set.push(format!("sampler.cache.kind={kind}"));
    given.set.push(format!("sampler.cache.{key}={value}"));
    let loaded = load(&given)?;
    loaded.check_effect()?;
    Ok(loaded)
}

fn read_toys(path: &Path) -> Result<Vec<ToyPrompt>, UsageError> {
    let fail = |why: &dyn std::fmt::Display| UsageError(format!("--toy-prompts {}: {why}", path.display()));
    let text = text_file::read(path).map_err(|e| fail(&e))?;
    let toys: Vec<ToyPrompt> = serde_json::from_str(&text).map_err(|e| fail(&e))?;
    if toys.is_empty() { Err(fail(&"contains no prompts")) } else { Ok(toys) }
}

fn table(quality: &CacheQuality) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let CacheQuality { platform, device, prompts, steps, seconds, .. } = quality;
    let _ =
        writeln!(out, "{prompts} prompts, {steps} steps, {device} ({platform}); {seconds:.3} s without a step cache");
    let _ = writeln!(
        out,
        "{:<12}{:>9}{:>8}{:>12}{:>12}{:>9}{:>9}{:>8}{:>10}  prompt scores",
        "cache", "skipped", "time", "video L2", "audio L2", "PSNR", "min", "SSIM", "spectral"
    );
    if let Some(scores) = &quality.scores {
        let _ = writeln!(out, "{:<12}{:>9.1}{:>8.3}{:60}  {}", "off", 0.0, 1.0, "", score_text(scores));
    }
    for own in &quality.caches {
        let _ = writeln!(out, "{}", row(own).trim_end());
    }
    out
}

fn row(own: &VariantQuality) -> String {
    format!(
        "{:<12}{:>9.1}{:>8.3}{:>12.4}{:>12.4}{:>9.1}{:>9.1}{:>8.4}{:>10.4}  {}",
        own.name,
        own.mean(|run| run.skipped as f64),
        own.median(|run| run.time_ratio),
        own.mean(|run| run.video_latents),
        own.mean(|run| run.audio_latents),
        own.median(|run| run.psnr),
        own.least(|run| run.psnr),
        own.mean(|run| run.ssim),
        own.mean(|run| run.spectral),
        own.scores.as_ref().map(score_text).unwrap_or_default()
    )
}

fn score_text(scores: &PromptScores) -> String {
    let each = scores.0.iter().map(|(property, (good, all))| format!("{property} {good}/{all}"));
    each.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_items_select_policy_and_name_errors() {
        let given = CliOverrides { set: vec!["sampler.cache.max_skips=1".into()], ..CliOverrides::default() };
        let cache = |item: &str| with_cache(&given, item).map(|loaded| loaded.config.sampler.cache.step_cache());
        let adaptive = cache("0.25").expect("valid").expect("a cache");
        assert_eq!(adaptive.limits(), Some([0.25, 1.0]));
        assert_eq!(cache("ratio=0.5").expect("valid").expect("a cache").limits(), None);
        for (item, want) in [
            ("steps=3", "--cache steps=3: expected a threshold such as 0.05, or ratio=R such as ratio=0.5"),
            ("x", "--cache x: 'x' is not a number; use a threshold such as 0.05, or ratio=0.5"),
            (
                "11",
                "--set sampler.cache.threshold=11: 'sampler.cache.threshold' must be a number from 0 to 10 or null, not 11",
            ),
        ] {
            assert_eq!(cache(item).expect_err("refused").to_string(), want);
        }
    }
}
