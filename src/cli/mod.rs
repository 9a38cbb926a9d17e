//! Command-line interface; one module per subcommand.

use std::fmt::Display;
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use clap::{Parser, Subcommand};

use self::progress::Stderr;
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
mod convert;
mod doctor;
mod encode;
mod experiment;
mod generate;
mod init;
pub mod log;
mod model_args;
mod next;
mod numbers;
mod plan;
mod plugin;
mod profile;
mod progress;
mod pull;
mod quality;
mod rounds;
mod run;
mod schema;
mod serve;
mod shipped;
mod signals;
mod warm;
mod why;

pub use completions::complete;
pub use next::first_steps;
pub use progress::close as close_progress;

/// LTX-2 audio-video generation on XLA: CPU, NVIDIA GPUs and Cloud TPUs.
#[derive(Parser, Debug)]
#[command(name = "ltx2", version, max_term_width = 110, subcommand_required = true)]
#[command(after_help = "Examples:
  ltx2 generate -c nano -p \"a red circle bounces on blue, low beeps\"
  ltx2 pull ltx2_3
  ltx2 generate -c ltx2_3 -p \"a lighthouse over a quiet sea at dawn\"
  ltx2 plugin install cuda

stdout carries results only; LTX2_LOG (e.g. debug, ltx2_runtime=trace) overrides -v and -q.")]
pub struct Cli {
    /// Increases log verbosity (debug); twice: trace
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Logs only warnings and errors; twice: only errors
    #[arg(short, long, global = true, action = clap::ArgAction::Count, conflicts_with = "verbose")]
    pub quiet: u8,
    /// Subcommand to run.
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
#[allow(clippy::large_enum_variant)] // A process has a single value.
pub(crate) enum Command {
    /// Generate videos with sound from prompts
    Generate(generate::GenerateArgs),
    /// Serve video generation over HTTP with OpenAI's /v1/videos API and a web page
    Serve(serve::ServeArgs),
    /// Run one component on tensors from a file
    Run(run::RunFileArgs),
    /// Compile a program ahead of time and report memory, FLOPs, collectives and predicted time
    Compile(compile::CompileArgs),
    /// Compile all programs of a run into the compile cache, on the run's devices
    Warm(warm::WarmArgs),
    /// Compile, measure and rank layouts, or search for the fastest one
    Experiment(experiment::ExperimentArgs),
    /// Explain every collective and suggest layout changes that remove it
    Why(why::WhyArgs),
    /// Trace denoising steps and break down their time
    Profile(profile::ProfileArgs),
    /// Benchmark the programs of a run and a complete request
    Bench(bench::BenchArgs),
    /// Measure the distance of runs with a step cache to runs without one
    Quality(quality::QualityArgs),
    /// Compare two results by PSNR, SSIM and audio distances
    Compare(compare::CompareArgs),
    /// Write a random model in the diffusers layout
    Init(init::InitArgs),
    /// Encode frames and audio that a failed run kept, or those of a dump
    Encode(encode::EncodeArgs),
    /// Convert a model file to bf16, fp8, int8 or int8-convrot
    Convert(convert::ConvertArgs),
    /// List the components of a model and what is missing; reads only file headers
    Check(check::CheckArgs),
    /// Download models from the Hugging Face hub
    Pull(pull::PullArgs),
    /// Show plugins, versions and devices, and report what is missing
    Doctor(doctor::DoctorArgs),
    /// Install PJRT plugins
    Plugin(plugin::PluginArgs),
    /// List the presets of -c, or print one
    Presets(shipped::PresetsArgs),
    /// List the shipped layouts of --layout, or print one
    Layouts(shipped::LayoutsArgs),
    /// Print the JSON Schema of the YAML files
    Schema(schema::SchemaArgs),
    /// Print shell completions
    Completions(completions::CompletionsArgs),
}

/// Enables plugin trials: new plugin files are first loaded in a child process. If this process is that child process,
/// loads the plugin and exits.
pub fn try_plugins() {
    trial::begin();
}

/// Runs the subcommand of the command line.
pub fn run(cli: &Cli) -> anyhow::Result<()> {
    timeline::begin();
    plugin::install_if_missing()?;
    signals::end_at_once();
    // The other commands install signal handlers later: they set libtpu's environment variables first, before any
    // thread starts.
    if matches!(
        cli.command,
        Command::Run(_)
            | Command::Compare(_)
            | Command::Init(_)
            | Command::Encode(_)
            | Command::Convert(_)
            | Command::Check(_)
            | Command::Doctor(_)
            | Command::Plugin(_)
            | Command::Pull(_)
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
        Command::Quality(args) => quality::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Init(args) => init::run(args),
        Command::Encode(args) => encode::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Check(args) => check::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Plugin(args) => plugin::run(args),
        Command::Pull(args) => pull::run(args),
        Command::Presets(args) => shipped::presets(args),
        Command::Layouts(args) => shipped::layouts(args),
        Command::Schema(args) => schema::run(args),
        Command::Completions(args) => completions::run(args),
    }
}

/// Blocks forever if a signal is terminating the process, because the signal thread prints the final message.
pub fn block_if_interrupted() {
    crate::interrupts::block_if_ending();
}

/// Error in flags, YAML or sizes; exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct UsageError(pub(crate) String);

/// Error of a server that stopped before it finished its work.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub(crate) struct ServerStopped {
    pub(crate) code: u8,
    pub(crate) why: String,
}

/// Returns whether the error is an unknown plugin option, set in the environment or in `runtime.xla_flags`.
fn is_plugin_option_error(cause: &(dyn std::error::Error + 'static)) -> bool {
    let plugin = |error: &pjrt::PjrtError| matches!(error, pjrt::PjrtError::Flags { .. });
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

/// Returns the exit code of an error: 2 for flags, YAML and sizes, 130 for an interruption, a server's own code,
/// otherwise 1.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    let sampling = |e: &SamplingError| !matches!(e, SamplingError::Read { .. } | SamplingError::Scheduler { .. });
    for cause in error.chain() {
        if cause.is::<UsageError>() || cause.is::<ConfigError>() || is_plugin_option_error(cause) {
            return 2;
        }
        if let Some(ended) = cause.downcast_ref::<ServerStopped>() {
            return ended.code;
        }
        let error = cause.downcast_ref::<PipelineError>();
        let cause = error.map(PipelineError::cause);
        // An error after the last step is not caused by the request, whatever its type.
        if matches!(error, Some(PipelineError::ResultsSaved { .. }))
            && !matches!(cause, Some(PipelineError::Interrupted(..)))
        {
            return 1;
        }
        match cause {
            Some(PipelineError::Interrupted(..)) => return 130,
            Some(PipelineError::Sampling(e)) if sampling(e) => return 2,
            // Contradicting layout rules, and layers that cannot be quantized, are only detected when a tensor is placed.
            Some(PipelineError::Program(e)) if matches!(e.op, "layout" | "runtime.weights") => return 2,
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

/// Returns the error and its causes on one line.
pub fn one_line(error: &anyhow::Error) -> String {
    crate::pipeline::one_line(error.as_ref())
}

/// Checks the output file of a flag before the work starts: it must not be `-`, must not exist without `force`, must have
/// one of the `endings` (if any are listed), and must be writable.
pub(crate) fn check_output_file(flag: &str, path: Option<&Path>, endings: &[&str], force: bool) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    if path.as_os_str() == "-" {
        return Err(UsageError(format!("{flag}: stdout is not supported; give the path of a file")).into());
    }
    if Destination::is_taken(path) && !force {
        let why = format!("{flag}: {} exists; overwrite it with --force, or choose another file", path.display());
        return Err(UsageError(why).into());
    }
    if let ([first, ..], Some(_)) = (endings, path.extension()) {
        let written = format!("the output format is {}", first.to_uppercase());
        check_ending(path, &written, endings).map_err(|why| UsageError(format!("{flag}: {why}")))?;
    }
    Ok(crate::atomic_file::check_writable(path)?)
}

/// Writes results to stdout; ignores a broken pipe.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to stdout"),
    }
}

/// Returns the file of `--json`; `None` if the flag is not set or is `-` (stdout).
fn json_file(json: Option<&Path>) -> Option<&Path> {
    json.filter(|path| path.as_os_str() != "-")
}

/// Runs [`check_output_file`] on the file that [`print_and_write_json`] will write.
pub(crate) fn check_json(json: Option<&Path>, force: bool) -> anyhow::Result<()> {
    check_output_file("--json", json_file(json), &["json"], force)
}

/// Prints `text` and writes `figures` (JSON) to the file of `--json`. With `-`, prints the JSON instead of the text. If
/// the file cannot be written, also prints the JSON.
pub(crate) fn print_and_write_json(json: Option<&Path>, force: bool, figures: &str, text: &str) -> anyhow::Result<()> {
    let Some(path) = json_file(json) else {
        return print(if json.is_some() { figures } else { text });
    };
    let written = crate::atomic_file::write_file(path, figures.as_bytes(), force);
    print(text)?;
    if written.is_err() {
        print(figures)?;
    }
    written.context("--json: cannot write the file; the JSON was printed to stdout instead")
}

/// Writes a line to stderr; write errors are ignored.
pub fn tell(line: impl Display) {
    // There is no other place to report the error.
    let _ = Stderr.write_all(format!("{line}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_definition_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn errors_have_one_line_and_the_right_exit_code() {
        let io = std::io::Error::other("disk\n  full");
        let read = ConfigError::unreadable(Path::new("x.yml"), io);
        let error = Err::<(), _>(read).context("loading").unwrap_err();
        assert_eq!(one_line(&error), "loading: cannot read x.yml: disk full");
        assert_eq!(exit_code(&error), 2);
        assert_eq!(exit_code(&PipelineError::Interrupted(3, 8).into()), 130);
        let kept = |error| PipelineError::ResultsSaved { source: Box::new(error), what: "x".into(), kept: "y".into() };
        assert_eq!(exit_code(&kept(kept(PipelineError::Interrupted(8, 8))).into()), 130);
        assert_eq!(exit_code(&PipelineError::from(SamplingError::Steps(300)).into()), 2);
        assert_eq!(exit_code(&anyhow::anyhow!("device")), 1);
        let flags =
            || pjrt::PjrtError::Flags { plugin: "p.so".into(), reason: "Unknown flag in XLA_FLAGS: --a".into() };
        let line = "Unknown flag in XLA_FLAGS: --a (plugin p.so); correct or remove the flag";
        assert_eq!(flags().to_string(), line);
        let error = PipelineError::from(PlatformError::from(flags()));
        assert_eq!((exit_code(&error.into()), exit_code(&RuntimeError::from(flags()).into())), (2, 2));
        let option = RuntimeError::Flag { option: "xla_a".into(), source: flags() };
        assert_eq!(exit_code(&PipelineError::from(option).into()), 2);
        let program = |op| crate::hlo::BuildError { op, scope: "a".into(), program: "b".into(), message: "c".into() };
        assert_eq!(exit_code(&PipelineError::from(program("layout")).into()), 2);
        assert_eq!(exit_code(&PipelineError::from(program("add")).into()), 1);
    }
}
