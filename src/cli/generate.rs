//! `ltx2 generate`: generates videos with sound from prompts.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::args::{OutputArgs, RerunArgs, RunArgs, load_run};
use super::plan::PlanSummary;
use super::progress::ProgressDisplay;
use super::{UsageError, log, print, signals, tell};
use crate::config::{Config, LoadedConfig, ProgressEvery, WeightSource, output_paths};
use crate::pipeline::PipelineError;
use crate::pipeline::generate::generate;
use crate::pipeline::plan::options::GenerateOptions;
use crate::pipeline::plan::origin::Origin;
use crate::pipeline::plan::outputs::{check_outputs, unfinished};
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::processes::together;
use crate::pjrt::prepend_libtpu_flags;
use crate::runtime::processes::Group;

/// Generates videos with sound from prompts.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(after_help = "Examples:
  ltx2 generate -c nano -p \"a red circle bounces on blue, low beeps\"
  ltx2 generate -c configs/ltx2.yml -p \"a cat plays the piano\" --seconds 5 --seed 1 -o cat.mp4
  ltx2 generate -c my.yml --set guidance.video.cfg=3 --print-config
  ltx2 generate -c out/ltx2_10.json -o again.mp4          generates an earlier video again
  ltx2 generate -c ltx2 --prompts prompts.txt --num-videos 2 -o clips")]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    rerun: RerunArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    let mut given = args.run.overrides()?;
    args.rerun.add(&mut given);
    args.output.add(&mut given);
    let loaded = load_run(&given)?;
    let config = &loaded.config;
    if args.output.print_config {
        return print(&loaded.to_yaml());
    }
    if args.output.dry_run {
        let options = options(&loaded, &args.output, None)?;
        let verified = verify(config, &options);
        let plan = PlanSummary::new(&loaded, &options, &verified);
        match args.output.json {
            true => print(&format!("{}\n", serde_json::to_string_pretty(&plan)?))?,
            false => tell(plan.to_string().trim_end()),
        }
        return verified;
    }
    prepare_run(config);
    together(config, |group| make(args, &loaded, group))
}

/// Validates a run for its plan. If the model is a published one that is not on this machine, validates the request
/// against the built-in configuration of that model.
///
/// # Errors
/// Returns the error that the run would fail with before it compiles a program.
fn verify(config: &Config, options: &GenerateOptions) -> anyhow::Result<()> {
    let is_elsewhere =
        config.model.weights == WeightSource::File && matches!(Origin::find(config), Ok(Origin::Preset(_)));
    if !is_elsewhere {
        return Ok(RunPlan::of_videos(config, options).map(drop)?);
    }
    if config.request.num_frames.count().is_none() {
        return Ok(());
    }
    match RunPlan::of_programs(config, None) {
        // Accept an input error: it may be caused by an upsampler, and the machine that will run the plan may have
        // another one.
        Ok(_) | Err(PipelineError::Input(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn make(args: &GenerateArgs, loaded: &LoadedConfig, group: Option<&Arc<Group>>) -> anyhow::Result<()> {
    let config = &loaded.config;
    let later = group.is_some_and(|group| group.id() > 0);
    if later {
        log::only_warnings();
    }
    let options = options(loaded, &args.output, group)?;
    let has_prompt = config.request.prompt.is_some() || config.request.prompts.is_some();
    if has_prompt && options.jobs.iter().any(|job| job.prompt.trim().is_empty()) {
        tracing::info!("the prompt is empty: the video is unconditional");
    }
    if options.resume && options.jobs.is_empty() {
        return Ok(());
    }
    let mut progress = ProgressDisplay::new(options.jobs.len(), later || !tracing::enabled!(tracing::Level::INFO));
    let finished = generate(config, &options, group, &mut progress)?;
    if finished.is_empty() {
        return Ok(());
    }
    match options.json {
        true => print(&format!("{}\n", serde_json::to_string_pretty(&finished)?)),
        false => print(&finished.iter().map(|f| format!("{}\n", f.path.display())).collect::<String>()),
    }
}

/// Passes the configured arguments to libtpu, then installs the handlers of SIGINT and SIGTERM.
pub(super) fn prepare_run(config: &Config) {
    prepare_libtpu(config);
    signals::end_command();
}

/// Passes the configured arguments to libtpu; must run before any thread starts.
pub(super) fn prepare_libtpu(config: &Config) {
    let arguments = config.runtime.libtpu_init_args.trim();
    if !arguments.is_empty() && !prepend_libtpu_flags(arguments) {
        tracing::warn!(
            "runtime.libtpu_init_args has no effect: threads are already running; set LIBTPU_INIT_ARGS instead"
        );
    }
}

fn options(loaded: &LoadedConfig, output: &OutputArgs, group: Option<&Arc<Group>>) -> anyhow::Result<GenerateOptions> {
    let config = &loaded.config;
    let mut jobs = config.jobs()?;
    if output.checkpoint_every.is_some() || output.resume {
        if group.is_some() {
            return Err(
                UsageError("--checkpoint-every and --resume are not supported with several processes".into()).into()
            );
        }
        if config.output.path.is_none() {
            let why = "--checkpoint-every and --resume require a fixed output path: set -o or output.path";
            return Err(UsageError(why.into()).into());
        }
    }
    let mut outputs = match group {
        // Only the first process writes files and checks for existing ones.
        Some(group) if group.id() > 0 => jobs.iter().map(|_| PathBuf::new()).collect(),
        _ => output_paths(config.output.path.as_deref().map(Path::new), &jobs, config.pipeline.extension())?,
    };
    let several = jobs.len() > 1;
    if output.resume {
        (jobs, outputs) = unfinished(config, jobs, outputs, output.force)?;
    }
    let progress_every = match config.sampler.progress_every {
        ProgressEvery::Steps(steps) => Some(steps),
        // With a progress bar, each step is a separate device call; without one, all steps run in one call. With
        // several processes, all must make the same calls, so a terminal has no influence.
        ProgressEvery::Auto(_) => (group.is_none() && std::io::stderr().is_terminal()).then_some(1),
    };
    let options = GenerateOptions {
        jobs,
        outputs,
        several,
        force: output.force,
        sidecar: loaded.sidecar().cloned(),
        dump: output.dump.clone(),
        dump_steps: output.dump_steps,
        perf_json: output.perf_json.clone(),
        checkpoint_every: output.checkpoint_every.map(|n| n as usize),
        resume: output.resume,
        progress_every,
        json: output.json,
    };
    check_outputs(config, &options)?;
    Ok(options)
}
