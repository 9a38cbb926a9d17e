//! The subcommands, one file each.

use std::fmt::Display;
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use clap::{Parser, Subcommand};

use crate::config::ConfigError;
use crate::destination::{Destination, check_ending};
use crate::pipeline::PipelineError;
use crate::pjrt;
use crate::runtime::platform::PlatformError;
use crate::runtime::{RuntimeError, timeline, trial};
use crate::sampling::SamplingError;

mod args;
mod bench;
mod bench_micro;
mod check;
mod compare;
mod compare_report;
mod comparison;
mod compile;
mod compile_table;
mod completions;
mod doctor;
mod experiment;
mod generate;
mod init;
pub mod log;
mod model_args;
mod numbers;
mod plan;
mod plugin;
mod profile;
mod progress;
mod run;
mod schema;
mod serve;
mod signals;
mod warm;
mod why;

/// LTX-2 audio-video generation on XLA: CPU, NVIDIA GPUs and Cloud TPUs.
#[derive(Parser, Debug)]
#[command(name = "ltx2", version, max_term_width = 110, subcommand_required = true, arg_required_else_help = true)]
#[command(after_help = "Examples:
  ltx2 plugin install cpu
  ltx2 generate -c nano -p \"a red circle bounces on blue, low beeps\"
  ltx2 generate -c ltx2_3 -m LTX-2.3 -p \"a lighthouse over a quiet sea at dawn\"

stdout carries results only; LTX2_LOG (e.g. debug, ltx2::runtime=trace) overrides -v and -q.")]
pub struct Cli {
    /// Prints more; twice for everything
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Prints warnings and errors only; twice for errors only
    #[arg(short, long, global = true, action = clap::ArgAction::Count, conflicts_with = "verbose")]
    pub quiet: u8,
    /// Subcommand to run.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Subcommands of `ltx2`.
#[derive(Subcommand, Debug)]
#[allow(clippy::large_enum_variant)] // One value in a process.
pub(crate) enum Command {
    /// Make videos with sound from prompts
    Generate(generate::Args),
    /// Serve videos over HTTP, as OpenAI's /v1/videos, with a page
    Serve(serve::Args),
    /// Run one component on tensors of a file
    Run(run::Args),
    /// Compile a program ahead of time and report memory, FLOPs, collectives and predicted time
    Compile(compile::Args),
    /// Fill the compile cache on the devices of a run, so that the run compiles nothing
    Warm(warm::Args),
    /// Compile, measure and rank layouts, or search for the fastest
    Experiment(experiment::Args),
    /// Explain every collective and suggest layout changes that remove it
    Why(why::Args),
    /// Trace denoising steps and break down their time
    Profile(profile::Args),
    /// Benchmark the programs of a run, and a whole request
    Bench(bench::Args),
    /// Compare two results by PSNR, SSIM and audio distances
    Compare(compare::Args),
    /// Write a random model in the diffusers layout
    Init(init::Args),
    /// List what a model contains and lacks, from headers alone
    Check(check::Args),
    /// Show plugins, versions and devices, and what is missing
    Doctor(doctor::Args),
    /// Install PJRT plugins
    Plugin(plugin::Args),
    /// Print the JSON Schema of the YAML
    Schema(schema::Args),
    /// Print completions for a shell
    Completions(completions::Args),
}

/// Begins the trials of new plugin files: a process that was started to try one does that and ends.
pub fn try_plugins() {
    trial::begin();
}

/// Runs a subcommand.
pub fn run(cli: &Cli) -> anyhow::Result<()> {
    timeline::begin();
    // The others prepare libtpu first, which comes before any thread.
    if matches!(
        cli.command,
        Command::Run(_)
            | Command::Compare(_)
            | Command::Init(_)
            | Command::Check(_)
            | Command::Doctor(_)
            | Command::Plugin(_)
    ) {
        signals::end_command();
    }
    match &cli.command {
        Command::Generate(args) => generate::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Run(args) => run::run(args),
        Command::Compile(args) => compile::run(args),
        Command::Warm(args) => warm::run(args),
        Command::Experiment(args) => experiment::run(args),
        Command::Why(args) => why::run(args),
        Command::Profile(args) => profile::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Init(args) => init::run(args),
        Command::Check(args) => check::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Plugin(args) => plugin::run(args),
        Command::Schema(args) => schema::run(args),
        Command::Completions(args) => completions::run(args),
    }
}

/// Does not return where a signal ends the process at this moment, with a message of its own.
pub fn stay_if_interrupted() {
    crate::interrupts::stay_if_ending();
}

/// Invalid flags, YAML or sizes: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct UsageError(pub(crate) String);

/// A server that ended before its work was done.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub(crate) struct Ended {
    pub(crate) code: u8,
    pub(crate) why: String,
}

/// Whether an error is one of a flag that a plugin does not know: of the environment, or of `runtime.xla_flags`.
fn is_of_flags(cause: &(dyn std::error::Error + 'static)) -> bool {
    let plugin = |error: &pjrt::Error| matches!(error, pjrt::Error::Flags { .. });
    let platform = |error: &PlatformError| matches!(error, PlatformError::Pjrt(error) if plugin(error));
    let runtime = |error: &RuntimeError| match error {
        RuntimeError::Plugin(error) => plugin(error),
        other => matches!(other, RuntimeError::Flag { .. }),
    };
    let pipeline = |error: &PipelineError| match error {
        PipelineError::Platform(error) => platform(error),
        PipelineError::Runtime(error) => runtime(error),
        _ => false,
    };
    cause.downcast_ref().is_some_and(plugin)
        || cause.downcast_ref().is_some_and(platform)
        || cause.downcast_ref().is_some_and(runtime)
        || cause.downcast_ref().is_some_and(pipeline)
}

/// 2 for flags, YAML and sizes, 130 for an interruption, 1 for the rest.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    let sampling = |e: &SamplingError| !matches!(e, SamplingError::Read { .. } | SamplingError::Scheduler { .. });
    for cause in error.chain() {
        if cause.is::<UsageError>() || cause.is::<ConfigError>() || is_of_flags(cause) {
            return 2;
        }
        if let Some(ended) = cause.downcast_ref::<Ended>() {
            return ended.code;
        }
        let error = cause.downcast_ref::<PipelineError>();
        let cause = error.map(PipelineError::cause);
        // What fails behind the last step is no fault of the request, whatever its error is.
        if matches!(error, Some(PipelineError::Kept { .. })) && !matches!(cause, Some(PipelineError::Interrupted(..))) {
            return 1;
        }
        match cause {
            Some(PipelineError::Interrupted(..)) => return 130,
            Some(PipelineError::Sampling(e)) if sampling(e) => return 2,
            // Rules that contradict each other are found where a tensor is placed.
            Some(PipelineError::Program(e)) if e.op == "layout" => return 2,
            Some(
                PipelineError::Usage(_)
                | PipelineError::Given { .. }
                | PipelineError::Input(_)
                | PipelineError::Request(_)
                | PipelineError::Launch(_),
            ) => {
                return 2;
            }
            _ => {}
        }
    }
    1
}

/// An error and its causes on one line.
pub fn one_line(error: &anyhow::Error) -> String {
    crate::pipeline::one_line(error.as_ref())
}

/// Refuses to overwrite the file that `flag` names, and a name with another ending than `endings`, if there are any; tries its
/// place, before the work.
pub(crate) fn check_new(flag: &str, path: Option<&Path>, endings: &[&str], force: bool) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    if Destination::is_taken(path) && !force {
        let why = format!("{flag}: {} exists; overwrite it with --force, or name another file", path.display());
        return Err(UsageError(why).into());
    }
    if let ([first, ..], Some(_)) = (endings, path.extension()) {
        let written = format!("{} is written here", first.to_uppercase());
        check_ending(path, &written, endings).map_err(|why| UsageError(format!("{flag}: {why}")))?;
    }
    Ok(crate::media::check_writable(path)?)
}

/// Writes results to stdout. A reader that has seen enough is no error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to stdout"),
    }
}

/// The file of `--json`; `-` is stdout.
fn json_file(json: Option<&Path>) -> Option<&Path> {
    json.filter(|path| path.as_os_str() != "-")
}

/// [`check_new`] of the place that [`deliver`] will write to.
pub(crate) fn check_json(json: Option<&Path>, force: bool) -> anyhow::Result<()> {
    check_new("--json", json_file(json), &["json"], force)
}

/// Prints `text`, and writes `figures` to the file of `--json`; `-` is stdout, in place of the text. Figures that cannot be written
/// are printed.
pub(crate) fn deliver(json: Option<&Path>, force: bool, figures: &str, text: &str) -> anyhow::Result<()> {
    let Some(path) = json_file(json) else {
        return print(if json.is_some() { figures } else { text });
    };
    let written = crate::media::write_file(path, figures.as_bytes(), force);
    print(text)?;
    if written.is_err() {
        print(figures)?;
    }
    written.context("--json: its figures are printed instead")
}

/// Writes a line to stderr. A full disk there does not end the run.
pub fn tell(line: impl Display) {
    // There is nowhere left to report it.
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn errors_are_one_line_and_have_their_code() {
        let io = std::io::Error::other("disk\n  full");
        let read = ConfigError::Read { path: "x.yml".into(), source: io };
        let error = Err::<(), _>(read).context("loading").unwrap_err();
        assert_eq!(one_line(&error), "loading: cannot read x.yml: disk full");
        assert_eq!(exit_code(&error), 2);
        assert_eq!(exit_code(&PipelineError::Interrupted(3, 8).into()), 130);
        let kept = |error| PipelineError::Kept { source: Box::new(error), what: "x".into(), kept: "y".into() };
        assert_eq!(exit_code(&kept(kept(PipelineError::Interrupted(8, 8))).into()), 130);
        assert_eq!(exit_code(&PipelineError::from(SamplingError::Steps(300)).into()), 2);
        assert_eq!(exit_code(&anyhow::anyhow!("device")), 1);
        let flags = || pjrt::Error::Flags { plugin: "p.so".into(), reason: "Unknown flag in XLA_FLAGS: --a".into() };
        let line = "Unknown flag in XLA_FLAGS: --a (plugin p.so); correct or remove it";
        assert_eq!(flags().to_string(), line);
        let error = PipelineError::from(PlatformError::from(flags()));
        assert_eq!((exit_code(&error.into()), exit_code(&RuntimeError::from(flags()).into())), (2, 2));
        let option = RuntimeError::Flag { option: "xla_a".into(), source: flags() };
        assert_eq!(exit_code(&PipelineError::from(option).into()), 2);
        let program = |op| crate::hlo::Error { op, scope: "a".into(), program: "b".into(), message: "c".into() };
        assert_eq!(exit_code(&PipelineError::from(program("layout")).into()), 2);
        assert_eq!(exit_code(&PipelineError::from(program("add")).into()), 1);
    }
}
