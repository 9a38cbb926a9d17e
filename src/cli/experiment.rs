//! `ltx2 experiment`: many cases, compiled, measured and ranked.

use std::path::PathBuf;

use super::{UsageError, print};
use crate::config::read_experiment;
use crate::lab::{Options, default_jobs, experiment, page, ranked, table};

/// Compiles the cases of a YAML file, ranks them, and keeps every result: run it again and only what is missing is done.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 experiment experiments/ablation.yml -o out/ablation
  ltx2 experiment mine.yml -o out/mine --measure --jobs 4

Compiling for TPUs wants TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1. `ltx2 schema --of experiment` has the keys.")]
pub struct Args {
    /// The experiment
    #[arg(value_name = "FILE.yml")]
    file: PathBuf,
    /// Folder for results.jsonl and report.html
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Also runs each case whose devices are present, with random weights
    #[arg(long)]
    measure: bool,
    /// Cases that compile at a time [default: as many as cores and memory allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// Also repeats what failed before
    #[arg(long)]
    retry: bool,
}

/// Runs the command.
///
/// # Errors
/// What is wrong with the file; a folder that cannot be written; no case that came to figures.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let file = read_experiment(&args.file)?;
    let options = Options {
        binary: std::env::current_exe()?,
        folder: args.output.clone(),
        jobs: args.jobs.map_or_else(default_jobs, usize::from),
        measure: args.measure,
        retry: args.retry,
    };
    let groups = ranked(experiment(&file, &options).map_err(usage)?);
    let report = args.output.join("report.html");
    crate::media::write_atomically(&report, page(&file.title, &groups).as_bytes())?;
    print(&table(&groups))?;
    tracing::info!("{} written", report.display());
    let failed = groups.iter().flat_map(|(_, rows)| rows).filter(|r| r.figures.is_none()).count();
    let all: usize = groups.iter().map(|(_, rows)| rows.len()).sum();
    anyhow::ensure!(failed < all, "none of {all} cases came to figures");
    Ok(())
}

/// Mistakes in the file end as the configuration's do.
pub(super) fn usage(error: crate::lab::LabError) -> anyhow::Error {
    match error {
        crate::lab::LabError::Config(e) => e.into(),
        crate::lab::LabError::Target(e) => UsageError(e.to_string()).into(),
        other => other.into(),
    }
}
