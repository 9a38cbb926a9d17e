//! `ltx2 compile`: compiles a program ahead of time and reports its costs.

use std::path::{Path, PathBuf};

use anyhow::Context;

use super::args::{ConfigArgs, ModelArgs, PlacementArgs};
use super::compile_table::table;
use super::generate::prepare_libtpu;
use super::{UsageError, check_json, check_output_file, print, print_and_write_json, signals};
use crate::analysis::Chip;
use crate::atomic_file::check_writable;
use crate::config::{Config, load};
use crate::pipeline::PipelineError;
use crate::pipeline::programs::build::{ProgramKind, Programs};
use crate::pipeline::programs::compile::{ProgramCompileOptions, compile, dump_files};
use crate::pjrt::{TPUS_UNPREPARED, prepare_absent_tpus};
use crate::runtime::{ModuleStore, Target};
use crate::tune::CompileReport;

/// Compiles a program ahead of time, without the target devices, and reports memory, FLOPs, collectives and predicted
/// time.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 compile --target tpu:v6e:2x4 -c ltx2 --layout fsdp-ulysses
  ltx2 compile --target tpu:v5p:2x2x2 -c ltx2 --layout ulysses --layers 3 --json ulysses.json
  ltx2 compile --target cuda:h200:1x1x4 -c ltx2 --layout tensor --program text-encoder
  ltx2 compile --target cuda:h200:1x1x4 -c ltx2 --layout ulysses --save cache
  ltx2 compile --target cpu:8 -c nano_2_0 -m nano --layout sequence --dump-hlo hlo")]
pub(crate) struct CompileArgs {
    #[arg(long, value_name = "TARGET", help = format!("Target devices: {}", Target::syntax()))]
    target: String,
    /// Program to compile [default: denoise; with --save, all programs of a run]
    #[arg(long, value_name = "NAME")]
    program: Option<ProgramKind>,
    /// Number of transformer blocks to compile; figures per block do not depend on it
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// File to write the report to, as JSON; `-` writes it to stdout instead of the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Overwrites the files of --json and --dump-hlo
    #[arg(long)]
    force: bool,
    /// Folder for the StableHLO and optimized HLO of the program
    #[arg(long, value_name = "DIR")]
    dump_hlo: Option<PathBuf>,
    /// Writes the executables to a compile cache in this folder, for runs with `runtime.compile_cache: DIR`
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Folder of optimized modules; a module that it contains is analyzed without compiling
    #[arg(long, value_name = "DIR", conflicts_with = "save")]
    modules: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(crate) fn run(args: &CompileArgs) -> anyhow::Result<()> {
    let mut given = args.config.overrides();
    args.model.add(&mut given);
    args.placement.add(&mut given);
    let loaded = load(&given)?;
    loaded.check_effect()?;
    check_json(args.json.as_deref(), args.force)?;
    if let Some(folder) = &args.save {
        check_writable(&folder.join("entry")).context("--save")?;
    }
    let config = &loaded.config;
    let target = target(&args.target, chip_of(config)?.as_ref())?;
    prepare_tpus(config, std::slice::from_ref(&args.target))?;
    let kinds = match (args.program, &args.save) {
        (Some(kind), _) => vec![kind],
        (None, None) => vec![ProgramKind::default()],
        (None, Some(_)) => Programs::from_config(config, None)?.kinds().collect(),
    };
    let dumps = args.dump_hlo.iter().flat_map(|folder| kinds.iter().flat_map(move |kind| dump_files(folder, *kind)));
    dumps.into_iter().try_for_each(|file| check_output_file("--dump-hlo", Some(&file), &[], args.force))?;
    let modules = args.modules.as_deref().map(ModuleStore::new);
    let mut reports = Vec::new();
    let mut shortage = None;
    for kind in kinds {
        let (layers, dump, save) = (args.layers, args.dump_hlo.as_deref(), args.save.as_deref());
        let options =
            ProgramCompileOptions { target: target.clone(), kind, layers, dump, save, modules: modules.as_ref() };
        let done = compile(config, &options)?;
        shortage = shortage.or_else(|| done.shortage.clone());
        let report = CompileReport::from_compilation(done, &target);
        if !to_stdout(args.json.as_deref()) {
            let space = if reports.is_empty() { "" } else { "\n" };
            print(&format!("{space}{}", table(&report)))?;
        }
        reports.push(report);
    }
    let figures = match reports.as_slice() {
        [one] => serde_json::to_string_pretty(one)?,
        all => serde_json::to_string_pretty(all)?,
    };
    if args.json.is_some() {
        // The tables are already printed.
        print_and_write_json(args.json.as_deref(), args.force, &format!("{figures}\n"), "")?;
    }
    match shortage {
        None => Ok(()),
        Some(shortage) => Err(PipelineError::TooLarge(shortage.to_string()).into()),
    }
}

/// Parses the value of `--target`.
pub(super) fn target(name: &str, chip: Option<&Chip>) -> Result<Target, UsageError> {
    Target::parse(name, chip).map_err(|e| UsageError(format!("--target: {e}")))
}

/// Returns the chip of `runtime.chip_file`.
pub(super) fn chip_of(config: &Config) -> Result<Option<Chip>, UsageError> {
    config.chip().map_err(|e| UsageError(format!("runtime.chip_file: {e}")))
}

/// Prepares libtpu's environment variables if any target is a TPU; must run before any thread starts. Child processes
/// inherit the variables. Then installs the signal handlers.
pub(super) fn prepare_tpus(config: &Config, targets: &[String]) -> anyhow::Result<()> {
    if targets.iter().any(|name| name.starts_with("tpu:")) {
        prepare_libtpu(config);
        if !prepare_absent_tpus() {
            return Err(UsageError(TPUS_UNPREPARED.into()).into());
        }
    }
    signals::end_command();
    Ok(())
}

fn to_stdout(json: Option<&Path>) -> bool {
    json == Some(Path::new("-"))
}
