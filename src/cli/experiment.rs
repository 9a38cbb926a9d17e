//! `ltx2 experiment`: cases compiled, measured and ranked; or a search among all layouts.

use std::path::{Path, PathBuf};

use super::args::{ConfigArgs, JobArgs, LAYERS};
use super::compile::{prepare_tpus, read_chip};
use super::{UsageError, print};
use crate::config::{Case, Experiment, load, read_experiment};
use crate::pipeline::programs::{ProgramKind, Programs};
use crate::runtime::Target;
use crate::tune::search::{SearchRequest, best_layout, search, summary};
use crate::tune::{CaseResult, Options, experiment, given, markdown, page, ranked, table};

/// Compiles the cases of a YAML file and ranks them; with --search, finds the fastest layout and mesh itself.
///
/// Run it again to resume: only missing cases are compiled and measured. Stored modules are analysed anew; measurements are
/// kept by the program that ran.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 experiment experiments/ablation.yml -o out/ablation
  ltx2 experiment experiments/tpu.yml -o out/tpu
  ltx2 experiment mine.yml -o out/mine --measure --jobs 4
  ltx2 experiment --search --target tpu:v6e:2x4 --shape 1280x768x121 --memory-fit -c ltx2 -o out/search

To compile for TPUs, set TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1. `ltx2 schema --of experiment` lists the keys.
A search writes DIR/best.yml, a layout file whose comments list what it was compared with.")]
pub(crate) struct Args {
    /// Experiment file
    #[arg(value_name = "FILE.yml", required_unless_present = "search", conflicts_with = "search")]
    file: Option<PathBuf>,
    /// Folder for results.jsonl, report.md, report.html and optimized modules
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Also measures each case whose devices are present, with random weights
    #[arg(long, conflicts_with = "search")]
    measure: bool,
    /// Chip to predict times with: a name or a TOML file [default: the target's]
    #[arg(long, value_name = "NAME|FILE")]
    chip: Option<String>,
    #[command(flatten)]
    jobs: JobArgs,
    #[command(flatten)]
    search: SearchArgs,
    #[command(flatten)]
    config: ConfigArgs,
}

/// Flags of a search.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Search")]
struct SearchArgs {
    /// Searches for the fastest layout and mesh
    #[arg(long, requires = "target")]
    search: bool,
    /// Target devices, as in `compile`
    #[arg(long, value_name = "TARGET", requires = "search")]
    target: Option<String>,
    /// Video size [default: the configuration's]
    #[arg(long, value_name = "WIDTHxHEIGHTxFRAMES", requires = "search")]
    shape: Option<String>,
    /// Loop to search for
    #[arg(long, value_name = "PROGRAM", default_value = "denoise", value_parser = ["denoise", "refine"], requires = "search")]
    program: String,
    /// Only layouts that fit into device memory beside a run's other components
    #[arg(long, requires = "search")]
    memory_fit: bool,
    /// Maximum number of programs, stored ones included
    #[arg(long, value_name = "N", default_value_t = 48, requires = "search", value_parser = clap::value_parser!(u16).range(1..))]
    budget: u16,
    /// Seconds after which no compilation is begun
    #[arg(long, value_name = "S", default_value_t = 7200, requires = "search")]
    seconds: u64,
    /// Seed of the order among equally promising layouts
    #[arg(long, value_name = "N", default_value_t = 0, requires = "search")]
    seed: u64,
    /// Transformer blocks to compile [default: 3, or all of a smaller model]
    #[arg(long, value_name = "N", requires = "search", value_parser = clap::value_parser!(u16).range(1..))]
    layers: Option<u16>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let chip = args.chip.clone().zip(read_chip(args.chip.as_deref())?);
    let options = Options { chip, ..args.jobs.options(args.output.clone(), args.measure)? };
    let Some(file) = &args.file else { return run_search(args, &options) };
    if !args.config.config.is_empty() || !args.config.set.is_empty() {
        return Err(
            UsageError("-c and --set belong to --search; an experiment's file has 'config' and 'set'".into()).into()
        );
    }
    let file = read_experiment(file)?;
    prepare(&file)?;
    let rows = experiment(&file, &options).map_err(usage)?;
    report(&file.title, rows, &args.output)
}

/// Sets this process up for the targets of a file, by the one set of arguments that all its configurations give libtpu.
fn prepare(file: &Experiment) -> anyhow::Result<()> {
    let cases = file.cases();
    let configs = cases.iter().map(|case| Ok(load(&given(case, file).map_err(usage)?)?.config));
    let configs = configs.collect::<anyhow::Result<Vec<_>>>()?;
    let targets: Vec<String> = cases.into_iter().filter_map(|case| case.target).collect();
    let Some(first) = configs.first() else { return Ok(()) };
    // They are read once, from the environment that children share.
    if configs.iter().any(|config| config.runtime.libtpu_init_args != first.runtime.libtpu_init_args) {
        let why = "runtime.libtpu_init_args differs between the cases; make an experiment of each";
        return Err(UsageError(why.into()).into());
    }
    prepare_tpus(first, &targets)
}

fn report(title: &str, rows: Vec<CaseResult>, folder: &Path) -> anyhow::Result<()> {
    let title = if title.is_empty() { "Experiment" } else { title };
    let groups = ranked(rows);
    let write = |name: &str, text: String| {
        let path = folder.join(name);
        crate::media::write_atomically(&path, text.as_bytes()).map(|()| path.display().to_string())
    };
    let short = write("report.md", markdown(title, &command_line(), &groups))?;
    let long = write("report.html", page(title, &groups))?;
    print(&table(&groups))?;
    tracing::info!("{short} and {long} written");
    let rows = || groups.iter().flat_map(|group| &group.rows);
    let (failed, all) = (rows().filter(|r| r.report.is_none()).count(), rows().count());
    anyhow::ensure!(failed < all, "none of {all} cases compiled");
    Ok(())
}

fn run_search(args: &Args, options: &Options) -> anyhow::Result<()> {
    let s = &args.search;
    let name = s.target.clone().expect("--search requires --target");
    let target: Target = name.parse().map_err(|e| UsageError(format!("--target: {e}")))?;
    let target = target.with_chip(read_chip(args.chip.as_deref())?);
    let mut given = args.config.given();
    let shape = Case { shape: s.shape.clone(), ..Case::default() };
    given.set.extend(shape.size_settings()?);
    if s.memory_fit && target.chip().is_none() {
        return Err(usage(crate::tune::TuneError::Capacity(name)));
    }
    let config = load(&given)?.config;
    prepare_tpus(&config, std::slice::from_ref(&name))?;
    let blocks = Programs::of(&config, None)?.layers();
    let mut settings: Vec<String> = given.files.iter().flat_map(|c| ["-c".to_string(), c.clone()]).collect();
    settings.extend(given.set.iter().flat_map(|s| ["--set".to_string(), s.clone()]));
    let request = SearchRequest {
        given,
        settings,
        target: name,
        shape: s.shape.clone(),
        program: ProgramKind::named(&s.program).map_err(UsageError)?,
        fit: s.memory_fit,
        layers: s.layers.map_or(LAYERS.min(blocks), usize::from),
        budget: s.budget.into(),
        seconds: s.seconds,
        timeout: TIMEOUT,
        seed: s.seed,
    };
    let result = search(&request, options).map_err(usage)?;
    let title = format!("The fastest layout for {}", request.target);
    if let Some(text) = best_layout(&result, &request) {
        let best = args.output.join("best.yml");
        crate::media::write_atomically(&best, text.as_bytes())?;
        tracing::info!("{} written", best.display());
    }
    let words = summary(&result, &request);
    let found_one = result.winner.is_some();
    if !result.rows.is_empty() {
        report(&title, result.rows, &args.output)?;
    }
    print(&format!("\n{words}"))?;
    anyhow::ensure!(found_one, "no layout was found for {}", request.target);
    Ok(())
}

/// The command of this process, to be typed again.
fn command_line() -> String {
    let plain =
        |word: &String| !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || "-_./=:,@+%".contains(c));
    let quoted = |word: String| if plain(&word) { word } else { format!("'{}'", word.replace('\'', "'\\''")) };
    let given = std::env::args_os().skip(1).map(|word| quoted(word.to_string_lossy().into_owned()));
    ["ltx2".to_string()].into_iter().chain(given).collect::<Vec<_>>().join(" ")
}

const TIMEOUT: u64 = 1800;

pub(super) fn usage(error: crate::tune::TuneError) -> anyhow::Error {
    match error {
        crate::tune::TuneError::Config(e) => e.into(),
        crate::tune::TuneError::Target(e) => UsageError(e.to_string()).into(),
        e @ crate::tune::TuneError::Capacity(_) => UsageError(e.to_string()).into(),
        other => other.into(),
    }
}
