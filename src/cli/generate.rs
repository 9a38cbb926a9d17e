//! `ltx2 generate`: from a prompt to an MP4 with sound.

use std::io::IsTerminal;
use std::path::Path;

use super::args::{ConfigArgs, ModelArgs, OutputArgs, PlacementArgs, RequestArgs};
use super::plan::Plan;
use super::progress::Progress;
use super::{UsageError, print};
use crate::config::{Config, Loaded, ProgressEvery, load, output_paths};
use crate::pipeline::generate::generate;
use crate::pipeline::options::GenerateOptions;

/// Makes videos with sound from prompts.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(after_help = "Examples:
  ltx2 generate -c nano -p \"a lighthouse over a quiet sea at dawn\"
  ltx2 generate -c configs/ltx2.yml -p \"a cat plays the piano\" --seconds 5 --seed 1 -o cat.mp4
  ltx2 generate -c my.yml --set guidance.video.cfg=3 --print-config
  ltx2 generate -c out/ltx2_10.json -o again.mp4          repeats an earlier run
  ltx2 generate -c ltx2 --prompts prompts.txt --num-videos 2 -o clips")]
pub struct Args {
    #[command(flatten)]
    request: RequestArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    config: ConfigArgs,
}

impl Args {
    /// The configuration that files and flags make together.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn load(&self) -> anyhow::Result<Loaded> {
        let mut given = self.config.given();
        self.request.add(&mut given)?;
        self.model.add(&mut given);
        self.placement.add(&mut given);
        self.output.add(&mut given);
        Ok(load(&given)?)
    }
}

/// Runs the command.
///
/// # Errors
/// What is wrong with request, model or device.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let loaded = args.load()?;
    let config = &loaded.config;
    if args.output.print_config {
        return print(&loaded.to_yaml());
    }
    let options = options(config, &args.output)?;
    if args.output.dry_run {
        let plan = Plan::new(&loaded, &options);
        return match args.output.json {
            true => print(&format!("{}\n", serde_json::to_string_pretty(&plan)?)),
            false => {
                eprint!("{plan}");
                Ok(())
            }
        };
    }
    if let Some(job) = options.jobs.iter().find(|j| j.prompt.trim().is_empty()) {
        let what =
            if options.jobs.len() > 1 { format!("video {} has no prompt", job.index) } else { "no prompt".into() };
        return Err(UsageError(format!("{what}: give --prompt, --prompts or request.prompt in the YAML")).into());
    }
    let missing = config.not_built();
    if !missing.is_empty() {
        return Err(UsageError(format!("not built yet: {}", missing.join(", "))).into());
    }
    let mut progress = Progress::new(options.jobs.len(), !tracing::enabled!(tracing::Level::INFO));
    let finished = generate(config, &options, &mut progress)?;
    match options.json {
        true => print(&format!("{}\n", serde_json::to_string_pretty(&finished)?)),
        false => print(&finished.iter().map(|f| format!("{}\n", f.path.display())).collect::<String>()),
    }
}

fn options(config: &Config, output: &OutputArgs) -> anyhow::Result<GenerateOptions> {
    let jobs = config.jobs()?;
    let outputs = output_paths(config.output.path.as_deref().map(Path::new), &jobs, output.force)?;
    let progress_every = match config.sampler.progress_every {
        ProgressEvery::Steps(steps) => Some(steps),
        // A bar moves with every step; without one, the loop runs at once.
        ProgressEvery::Auto(_) => std::io::stderr().is_terminal().then_some(1),
    };
    Ok(GenerateOptions {
        jobs,
        outputs,
        force: output.force,
        dump: output.dump.clone(),
        perf_json: output.perf_json.clone(),
        progress_every,
        json: output.json,
    })
}
