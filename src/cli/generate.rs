//! `ltx2 generate`: generates videos with sound from prompts.

use super::args::{OutputArgs, RerunArgs, RunArgs};
use super::plan::PlanSummary;
use super::progress::ProgressDisplay;
use super::{log, print, signals, tell};
use crate::config::{Config, LoadedConfig, WeightSource, load};
use crate::pipeline::PipelineError;
use crate::pipeline::generate::generate;
use crate::pipeline::plan::options::GenerateOptions;
use crate::pipeline::plan::origin::Origin;
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::videos::RunVideos;
use crate::pipeline::processes::together;
use crate::pipeline::stages::enhance::enhance_prompts;
use crate::pjrt::prepend_libtpu_flags;

/// Generates videos with sound from prompts.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(after_help = "Examples:
  ltx2 generate -c nano -p \"a red circle bounces on blue, low beeps\"
  ltx2 generate -c configs/ltx2.yml -p \"a cat plays the piano\" --seconds 5 --seed 1 -o cat.mp4
  ltx2 generate -c my.yml --set guidance.video.cfg=3 --print-config
  ltx2 generate -c out/ltx2_10.json -o again.mp4          generates an earlier video again
  ltx2 generate -c ltx2 -p \"a cat\" --enhance-prompt --dry-run      prints the detailed prompt
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
    given.allow_changed_inputs = args.rerun.allow_changed_inputs;
    args.output.add(&mut given);
    let loaded = load(&given)?;
    loaded.check_effect()?;
    let config = &loaded.config;
    if args.output.print_config {
        return print(&loaded.to_yaml());
    }
    let options = GenerateOptions {
        force: args.output.force,
        sidecar: loaded.sidecar().cloned(),
        dump: args.output.dump.clone(),
        dump_steps: args.output.dump_steps,
        perf_json: args.output.perf_json.clone(),
        checkpoint_every: args.output.checkpoint_every.map(|n| n as usize),
        resume: args.output.resume,
    };
    if args.output.dry_run {
        return dry_run(&loaded, options, args.output.json);
    }
    prepare_run(config);
    let finished = together(&config.runtime.distributed, |group| {
        let later = group.is_some_and(|group| group.id() > 0);
        if later {
            log::only_warnings();
        }
        let mut progress = ProgressDisplay::new(later || !tracing::enabled!(tracing::Level::INFO));
        generate(config, options, group, &mut progress)
    })?;
    if finished.is_empty() {
        return Ok(());
    }
    match args.output.json {
        true => print(&format!("{}\n", serde_json::to_string_pretty(&finished)?)),
        false => print(&finished.iter().map(|f| format!("{}\n", f.path.display())).collect::<String>()),
    }
}

/// Prints the plan of a run. If the run enhances prompts, also enhances and prints them.
///
/// # Errors
/// Returns the error that the run would fail with before it compiles a program, or the error of the enhancement.
fn dry_run(loaded: &LoadedConfig, options: GenerateOptions, as_json: bool) -> anyhow::Result<()> {
    let config = &loaded.config;
    let videos = RunVideos::new(config, options, None)?;
    let mut verified = verify(config, &videos);
    let mut prompts = Vec::new();
    if verified.is_ok() && config.request.enhance_prompt {
        prepare_run(config);
        match enhance_prompts(config, &videos) {
            Ok(enhanced) => prompts = enhanced,
            Err(error) => verified = Err(error.into()),
        }
    }
    let mut plan = PlanSummary::new(loaded, &videos, &verified);
    plan.prompts = prompts;
    if as_json {
        print(&format!("{}\n", serde_json::to_string_pretty(&plan)?))?;
        return verified;
    }
    tell(plan.to_string().trim_end());
    let lines = plan.prompts.iter().map(|prompt| format!("{}\n", prompt.enhanced));
    print(&lines.collect::<String>())?;
    verified
}

/// Validates a run for its plan. If the model is a published one that is not on this machine, validates the request
/// against the built-in configuration of that model.
///
/// # Errors
/// Returns the error that the run would fail with before it compiles a program.
fn verify(config: &Config, videos: &RunVideos) -> anyhow::Result<()> {
    let is_elsewhere =
        config.model.weights == WeightSource::File && matches!(Origin::find(config), Ok(Origin::Preset(_)));
    if !is_elsewhere {
        return Ok(RunPlan::new(config, videos).map(drop)?);
    }
    if config.request.num_frames.count().is_none() {
        return Ok(());
    }
    match RunPlan::of_programs(config, None) {
        // Accept an input error: it may be caused by an upsampler, and the machine that will run the plan may have
        // another one.
        Ok(plan) => {
            plan.warn_of_missing_lora();
            Ok(())
        }
        Err(PipelineError::Input(_)) => Ok(()),
        Err(error) => Err(error.into()),
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
