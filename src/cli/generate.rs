//! `ltx2 generate`: videos with sound from prompts.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::args::{OutputArgs, RerunArgs, RunArgs, load_run};
use super::plan::Plan;
use super::progress::Progress;
use super::{UsageError, log, print, signals, tell};
use crate::config::{Config, Loaded, ProgressEvery, WeightSource, output_paths};
use crate::pipeline::PipelineError;
use crate::pipeline::generate::generate;
use crate::pipeline::options::GenerateOptions;
use crate::pipeline::origin::Origin;
use crate::pipeline::outputs::{check_taken, unfinished};
use crate::pipeline::preflight::preflight;
use crate::pipeline::processes::together;
use crate::pipeline::programs::Programs;
use crate::pjrt::give_libtpu_arguments;
use crate::runtime::processes::Group;

/// Makes videos with sound from prompts.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(after_help = "Examples:
  ltx2 generate -c nano -p \"a red circle bounces on blue, low beeps\"
  ltx2 generate -c configs/ltx2.yml -p \"a cat plays the piano\" --seconds 5 --seed 1 -o cat.mp4
  ltx2 generate -c my.yml --set guidance.video.cfg=3 --print-config
  ltx2 generate -c out/ltx2_10.json -o again.mp4          repeats an earlier run
  ltx2 generate -c ltx2 --prompts prompts.txt --num-videos 2 -o clips")]
pub(crate) struct Args {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    rerun: RerunArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Args {
    /// The configuration that files and flags make together.
    pub(crate) fn load(&self) -> anyhow::Result<Loaded> {
        let mut given = self.run.given()?;
        self.rerun.add(&mut given);
        self.output.add(&mut given);
        Ok(load_run(&given)?)
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let loaded = args.load()?;
    let config = &loaded.config;
    if args.output.print_config {
        return print(&loaded.to_yaml());
    }
    if args.output.dry_run {
        let options = options(&loaded, &args.output, None)?;
        let verified = verify(config, &options);
        let plan = Plan::new(&loaded, &options, &verified);
        match args.output.json {
            true => print(&format!("{}\n", serde_json::to_string_pretty(&plan)?))?,
            false => tell(plan.to_string().trim_end()),
        }
        return verified;
    }
    prepare_run(config);
    together(config, |group| make(args, &loaded, group))
}

/// Verifies a run for its plan. A published model may be on another machine than the plan: then the request is verified by
/// the configuration that this program carries of it.
///
/// # Errors
/// The error that the run would end with before it compiles a program.
fn verify(config: &Config, options: &GenerateOptions) -> anyhow::Result<()> {
    let is_elsewhere =
        config.model.weights == WeightSource::File && matches!(Origin::of(config), Ok(Origin::Preset(_)));
    if !is_elsewhere {
        return Ok(preflight(config, options).map(drop)?);
    }
    if config.request.num_frames.count().is_none() {
        return Ok(());
    }
    match Programs::of(config, None) {
        // Which upsampler the other machine has is not known.
        Ok(_) | Err(PipelineError::Input(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn make(args: &Args, loaded: &Loaded, group: Option<&Arc<Group>>) -> anyhow::Result<()> {
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
    let mut progress = Progress::new(options.jobs.len(), later || !tracing::enabled!(tracing::Level::INFO));
    let finished = generate(config, &options, group, &mut progress)?;
    if finished.is_empty() {
        return Ok(());
    }
    match options.json {
        true => print(&format!("{}\n", serde_json::to_string_pretty(&finished)?)),
        false => print(&finished.iter().map(|f| format!("{}\n", f.path.display())).collect::<String>()),
    }
}

/// Hands the configuration's arguments to libtpu; then SIGINT and SIGTERM are heard in every phase.
pub(super) fn prepare_run(config: &Config) {
    prepare_libtpu(config);
    signals::end_command();
}

/// Hands the configuration's arguments to libtpu, before anything has started a thread.
pub(super) fn prepare_libtpu(config: &Config) {
    let arguments = config.runtime.libtpu_init_args.trim();
    if !arguments.is_empty() && !give_libtpu_arguments(arguments) {
        tracing::warn!("runtime.libtpu_init_args comes too late; set LIBTPU_INIT_ARGS instead");
    }
}

fn options(loaded: &Loaded, output: &OutputArgs, group: Option<&Arc<Group>>) -> anyhow::Result<GenerateOptions> {
    let config = &loaded.config;
    let mut jobs = config.jobs()?;
    if output.checkpoint_every.is_some() || output.resume {
        if group.is_some() {
            return Err(UsageError("--checkpoint-every and --resume are for runs of one process".into()).into());
        }
        if config.output.path.is_none() {
            let why = "--checkpoint-every and --resume need a name that stays: give -o or output.path";
            return Err(UsageError(why.into()).into());
        }
    }
    let mut outputs = match group {
        // Only the first process writes, and only it looks at what is there.
        Some(group) if group.id() > 0 => jobs.iter().map(|_| PathBuf::new()).collect(),
        _ => output_paths(config.output.path.as_deref().map(Path::new), &jobs, config.pipeline.extension())?,
    };
    let several = jobs.len() > 1;
    if output.resume {
        (jobs, outputs) = unfinished(config, jobs, outputs, output.force)?;
    }
    let progress_every = match config.sampler.progress_every {
        ProgressEvery::Steps(steps) => Some(steps),
        // A bar moves with every step; without one, the loop runs at once. Several processes run the same calls, whether
        // they have a terminal or not.
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
    check_taken(config, &options)?;
    Ok(options)
}
