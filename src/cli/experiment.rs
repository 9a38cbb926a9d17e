//! `ltx2 experiment`: compiles, measures and ranks cases, or searches all layouts.

use std::path::{Path, PathBuf};

use super::args::{ConfigArgs, JobArgs, LAYERS};
use super::compile::{chip_of, prepare_tpus, target};
use super::{UsageError, print};
use crate::analysis::Chip;
use crate::config::{AUTO, Case, Config, Experiment, load, read_experiment, read_layout_source};
use crate::pipeline::programs::build::{ProgramKind, Programs};
use crate::tune::search::{SearchRequest, best_layout, search, summary};
use crate::tune::{
    CaseGroup, LOG, TuneOptions, case_overrides, diagnose_groups, experiment, group_diagnosis_text, markdown, page,
    ranked, suggestions_markdown, table,
};

/// Compiles the cases of a YAML file and ranks them; with --search, finds the fastest layout and mesh.
///
/// Run the command again to resume: only missing cases are compiled and measured. Stored modules are analyzed again
/// with the current cost model; a stored measurement is reused only for the same program.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 experiment experiments/ablation.yml -o out/ablation
  ltx2 experiment experiments/tpu.yml -o out/tpu
  ltx2 experiment mine.yml -o out/mine --measure --jobs 4
  ltx2 experiment mine.yml -o out/mine --why
  ltx2 experiment --search --target tpu:v6e:2x4 --shape 1280x768x121 --memory-fit -c ltx2 -o out/search
  ltx2 experiment --search --target cuda:h200:1x1x4 -c ltx2_3_two_stage --videos 1,2,4 --layout mine.yml -o out/search

To compile for TPUs, set TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1. `ltx2 schema --of experiment` lists the keys.
A search writes DIR/best.yml, a layout file whose comments list the layouts it was compared with.")]
pub(crate) struct ExperimentArgs {
    /// Experiment file
    #[arg(value_name = "FILE.yml", required_unless_present = "search", conflicts_with = "search")]
    file: Option<PathBuf>,
    /// Folder for results.jsonl, report.md, report.html, best.yml and optimized modules; a later run replaces the
    /// reports. Use one folder per experiment
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Also measures each case whose devices are present, with random weights
    #[arg(long, conflicts_with = "search")]
    measure: bool,
    /// Also diagnoses the fastest layout of each group and adds the suggestions to the report
    #[arg(long, conflicts_with = "search")]
    why: bool,
    /// Chip used to predict times: a name or a TOML file [default: that of the target]
    #[arg(long, value_name = "NAME|FILE")]
    chip: Option<String>,
    #[command(flatten)]
    jobs: JobArgs,
    #[command(flatten)]
    search: SearchArgs,
    #[command(flatten)]
    config: ConfigArgs,
}

/// Options of a search.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Search")]
struct SearchArgs {
    /// Searches for the fastest layout and mesh
    #[arg(long, requires = "target")]
    search: bool,
    /// Target devices, as in `compile`
    #[arg(long, value_name = "TARGET", requires = "search")]
    target: Option<String>,
    /// Video size; repeat it to find one layout for several sizes [default: the configured size]
    #[arg(long, value_name = "WIDTHxHEIGHTxFRAMES", requires = "search")]
    shape: Vec<String>,
    /// Batch sizes (numbers of videos) to try; the search selects the one with the lowest time per video [default: the
    /// configured batch size]
    #[arg(long, value_name = "N,…", value_delimiter = ',', requires = "search", value_parser = clap::value_parser!(u16).range(1..))]
    videos: Vec<u16>,
    /// Program to optimize [default: all denoising programs of a request, weighted by their steps]
    #[arg(long, value_name = "PROGRAM", value_parser = ["denoise", "refine"], requires = "search")]
    program: Option<String>,
    /// Layout file to try in addition to the shipped layouts, on every mesh of the axes that it uses; repeatable
    #[arg(long, value_name = "FILE", requires = "search")]
    layout: Vec<String>,
    /// Considers only layouts that fit into device memory together with a run's other components
    #[arg(long, requires = "search")]
    memory_fit: bool,
    /// Considers only layouts with which a run needs at most this much memory per device
    #[arg(long, value_name = "GIB", requires = "search", value_parser = gib)]
    memory: Option<f64>,
    /// Maximum number of programs to compile, including those stored by earlier runs
    #[arg(long, value_name = "N", default_value_t = 48, requires = "search", value_parser = clap::value_parser!(u16).range(1..))]
    budget: u16,
    /// Starts no new compilation after this many seconds
    #[arg(long, value_name = "S", default_value_t = 7200, requires = "search")]
    seconds: u64,
    /// Random seed for the order of equally promising layouts
    #[arg(long, value_name = "N", default_value_t = 0, requires = "search")]
    seed: u64,
    /// Number of transformer blocks to compile [default: 3, or all of a smaller model]
    #[arg(long, value_name = "N", requires = "search", value_parser = clap::value_parser!(u16).range(1..))]
    layers: Option<u16>,
}

pub(crate) fn run(args: &ExperimentArgs) -> anyhow::Result<()> {
    let chip = args.chip.as_deref().map(Chip::find).transpose().map_err(|e| UsageError(format!("--chip: {e}")))?;
    let chip = args.chip.clone().zip(chip);
    check_own(&args.output)?;
    let mut options = TuneOptions { chip, ..args.jobs.options(args.output.clone(), args.measure)? };
    let Some(file) = &args.file else { return run_search(args, options) };
    if !args.config.config.is_empty() || !args.config.set.is_empty() {
        return Err(UsageError(
            "-c and --set require --search; in an experiment file, use the keys 'config' and 'set'".into(),
        )
        .into());
    }
    let file = read_experiment(file)?;
    prepare(&file, &mut options)?;
    let rows = experiment(&file, &options).map_err(usage)?;
    let mut groups = ranked(rows);
    if args.why {
        diagnose_groups(&mut groups, &file, &options).map_err(usage)?;
    }
    report(&file.title, &groups, &args.output)
}

/// Returns an error if `folder` contains a report but no results.jsonl, so that files that no experiment wrote are not
/// overwritten.
fn check_own(folder: &Path) -> Result<(), UsageError> {
    let is_foreign = |name: &&str| folder.join(name).exists() && !folder.join(LOG).exists();
    match REPORTS.into_iter().find(is_foreign) {
        Some(name) => Err(UsageError(format!(
            "--output: {} exists, but its folder has no {LOG}, so no experiment wrote the file; choose another folder",
            folder.join(name).display()
        ))),
        None => Ok(()),
    }
}

/// Prepares this process for the targets of the file: sets libtpu's arguments, which all cases must share, and uses the
/// chip of the cases unless `--chip` is set.
fn prepare(file: &Experiment, options: &mut TuneOptions) -> anyhow::Result<()> {
    let cases = file.cases();
    let load_case = |case: &Case| {
        let loaded = load(&case_overrides(case, file).map_err(usage)?)?;
        loaded.check_effect()?;
        Ok(loaded.config)
    };
    let configs = cases.iter().map(load_case).collect::<anyhow::Result<Vec<_>>>()?;
    let targets: Vec<String> = cases.into_iter().filter_map(|case| case.target).collect();
    let Some(first) = configs.first() else { return Ok(()) };
    // libtpu reads its arguments once, from the environment, which child processes inherit.
    if configs.iter().any(|config| config.runtime.libtpu_init_args != first.runtime.libtpu_init_args) {
        let why = "runtime.libtpu_init_args differs between the cases; use a separate experiment for each value";
        return Err(UsageError(why.into()).into());
    }
    if options.chip.is_none() && configs.iter().any(|config| config.runtime.chip_file != first.runtime.chip_file) {
        return Err(UsageError(
            "runtime.chip_file differs between the cases; use a separate experiment for each value".into(),
        )
        .into());
    }
    use_configured_chip(first, options)?;
    prepare_tpus(first, &targets)
}

/// Uses the chip of the configuration unless `--chip` is set.
fn use_configured_chip(config: &Config, options: &mut TuneOptions) -> Result<(), UsageError> {
    if options.chip.is_none() {
        options.chip = config.runtime.chip_file.clone().zip(chip_of(config)?);
    }
    Ok(())
}

fn report(title: &str, groups: &[CaseGroup], folder: &Path) -> anyhow::Result<()> {
    let title = if title.is_empty() { "Experiment" } else { title };
    let write = |name: &str, text: String| {
        let path = folder.join(name);
        crate::atomic_file::write_atomically(&path, text.as_bytes()).map(|()| path.display().to_string())
    };
    let [short, long, _] = REPORTS;
    let short = write(short, markdown(title, &command_line(), groups) + &suggestions_markdown(groups))?;
    let long = write(long, page(title, groups))?;
    print(&(table(groups) + &group_diagnosis_text(groups)))?;
    tracing::info!("{short} and {long} written");
    let rows = || groups.iter().flat_map(|group| &group.rows);
    let (failed, all) = (rows().filter(|r| r.report.is_none()).count(), rows().count());
    anyhow::ensure!(failed < all, "all {all} cases failed to compile");
    Ok(())
}

fn run_search(args: &ExperimentArgs, mut options: TuneOptions) -> anyhow::Result<()> {
    let s = &args.search;
    let name = s.target.clone().expect("--search requires --target");
    let given = args.config.overrides();
    let case = |shape: &String| Case { shape: Some(shape.clone()), ..Case::default() };
    s.shape.iter().try_for_each(|shape| case(shape).size_settings().map(drop))?;
    let (mut shapes, mut videos) = (s.shape.clone(), s.videos.clone());
    shapes.sort();
    shapes.dedup();
    videos.sort_unstable();
    videos.dedup();
    // `--shape` overrides the configured size, whose frame count may be `auto`.
    let mut sized = given.clone();
    sized.set.extend(shapes.first().map(|shape| case(shape).size_settings()).transpose()?.unwrap_or_default());
    let loaded = load(&sized)?;
    loaded.check_effect()?;
    let config = loaded.config;
    use_configured_chip(&config, &mut options)?;
    let options = &options;
    let target = target(&name, options.chip.as_ref().map(|(_, chip)| chip))?;
    if s.memory_fit && target.chip().is_none() {
        return Err(usage(crate::tune::TuneError::Capacity(name)));
    }
    // Checked before any device is opened.
    s.layout.iter().try_for_each(|layout| read_layout_source(layout).map(drop))?;
    if s.layout.iter().any(|layout| layout == AUTO) {
        return Err(
            UsageError("--layout auto: a search always tries the shipped layouts; pass a layout file".into()).into()
        );
    }
    prepare_tpus(&config, std::slice::from_ref(&name))?;
    let blocks = Programs::from_config(&config, None)?.layers();
    let request = SearchRequest {
        given,
        target: name,
        shapes,
        videos: videos.into_iter().map(usize::from).collect(),
        program: s.program.as_deref().map(ProgramKind::named).transpose().map_err(UsageError)?,
        layouts: s.layout.clone(),
        fit: s.memory_fit,
        memory: s.memory,
        layers: s.layers.map_or(LAYERS.min(blocks), usize::from),
        budget: s.budget.into(),
        seconds: s.seconds,
        timeout: TIMEOUT,
        seed: s.seed,
        command: command_line(),
    };
    let result = search(&request, options).map_err(usage)?;
    let title = format!("The fastest layout for {}", request.target);
    if let Some(text) = best_layout(&result, &request) {
        let [.., best] = REPORTS;
        let best = args.output.join(best);
        crate::atomic_file::write_atomically(&best, text.as_bytes())?;
        tracing::info!("{} written", best.display());
    }
    let rows = result.rows();
    if !rows.is_empty() {
        report(&title, &ranked(rows), &args.output)?;
    }
    print(&format!("\n{}", summary(&result)))?;
    anyhow::ensure!(result.found(), "found no layout for {}", request.target);
    Ok(())
}

fn gib(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(gib) if gib > 0.0 && f64::is_finite(gib) => Ok(gib),
        _ => Err("expected a number of GiB above 0".into()),
    }
}

/// Returns the command line of this process, quoted for a shell.
fn command_line() -> String {
    let plain =
        |word: &String| !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || "-_./=:,@+%".contains(c));
    let quoted = |word: String| if plain(&word) { word } else { format!("'{}'", word.replace('\'', "'\\''")) };
    let given = std::env::args_os().skip(1).map(|word| quoted(word.to_string_lossy().into_owned()));
    ["ltx2".to_string()].into_iter().chain(given).collect::<Vec<_>>().join(" ")
}

const TIMEOUT: u64 = 1800;

/// Files in an experiment's folder that a later run replaces.
const REPORTS: [&str; 3] = ["report.md", "report.html", "best.yml"];

pub(super) fn usage(error: crate::tune::TuneError) -> anyhow::Error {
    match error {
        crate::tune::TuneError::Config(e) => e.into(),
        crate::tune::TuneError::Pipeline(e) => e.into(),
        crate::tune::TuneError::Target(e) => UsageError(e.to_string()).into(),
        e @ crate::tune::TuneError::Capacity(_) => UsageError(e.to_string()).into(),
        other => other.into(),
    }
}
