//! `ltx2 why`: explains each collective and suggests layout changes that remove it.

use std::path::PathBuf;

use clap::ValueEnum;

use super::args::{ConfigArgs, JobArgs, LAYERS, ModelArgs, PlacementArgs};
use super::compile::{chip_of, prepare_tpus};
use super::experiment::usage;
use super::{check_json, check_output_file, print_and_write_json};
use crate::config::load;
use crate::pipeline::programs::build::ProgramKind;
use crate::tune::{BUDGET, DiagnoseRequest, DiagnosisReport, diagnose, diagnosis_text};

/// Lists the tensor, sharding rule and reason of each collective, then compiles candidate layout changes and ranks them
/// by predicted time.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 why -c ltx2 --layout before-385 --target tpu:v5p:2x2x2
  ltx2 why -c ltx2 --layout before-385 --target tpu:v5p:2x2x2 --write better.yml && \\
  ltx2 why -c ltx2 --layout better.yml --target tpu:v5p:2x2x2
  ltx2 why -c nano_2_0 --model nano --layout tensor --target cpu:4 --collective 1

The largest gain comes first. A change is marked free if it needs no additional memory or collectives.")]
pub(crate) struct WhyArgs {
    /// Target devices, as in `compile`
    #[arg(long, value_name = "TARGET")]
    target: String,
    /// Program to diagnose
    #[arg(long, value_name = "NAME", default_value = "denoise")]
    program: ProgramKind,
    /// Considers only changes that could remove this collective (its number in the table)
    #[arg(long, value_name = "N")]
    collective: Option<usize>,
    /// Number of transformer blocks to compile [default: 3, or all of a smaller model]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Maximum number of changes to compile, the most promising first
    #[arg(long, value_name = "N", default_value_t = BUDGET)]
    budget: usize,
    /// Timeout of each compilation in seconds
    #[arg(long, value_name = "S", default_value_t = 1800)]
    timeout: u64,
    /// File to write the table and suggestions to, as JSON; `-` writes them to stdout instead of the text
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Writes the layout with the best change to this file
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Overwrites the files of --json and --write
    #[arg(long)]
    force: bool,
    /// Folder for results and modules [default: why, in the compile cache]
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    #[command(flatten)]
    jobs: JobArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(crate) fn run(args: &WhyArgs) -> anyhow::Result<()> {
    let mut given = args.config.overrides();
    args.model.add(&mut given);
    args.placement.add(&mut given);
    let loaded = load(&given)?;
    loaded.check_effect()?;
    let config = loaded.config;
    check_json(args.json.as_deref(), args.force)?;
    check_output_file("--write", args.write.as_deref(), &["yml", "yaml"], args.force)?;
    let scratch;
    let folder = match (&args.output, config.compile_cache()) {
        (Some(folder), _) => folder.clone(),
        (None, Some(cache)) => cache.join("why"),
        (None, None) => {
            scratch = tempfile::tempdir()?;
            crate::temporaries::note(scratch.path());
            scratch.path().to_path_buf()
        }
    };
    prepare_tpus(&config, std::slice::from_ref(&args.target))?;
    let blocks = crate::pipeline::programs::build::Programs::from_config(&config, None)?.layers();
    let request = DiagnoseRequest {
        settings: settings(args),
        given,
        target: args.target.clone(),
        chip: chip_of(&config)?,
        program: args.program,
        layers: args.layers.unwrap_or(LAYERS.min(blocks)),
        collective: args.collective,
        budget: args.budget,
        timeout: args.timeout,
    };
    let diagnosis = diagnose(&request, &args.jobs.options(folder, false)?).map_err(usage)?;
    let report = DiagnosisReport::from(diagnosis.clone());
    let figures = format!("{}\n", serde_json::to_string_pretty(&report)?);
    print_and_write_json(args.json.as_deref(), args.force, &figures, &diagnosis_text(&diagnosis, args.collective))?;
    match (&args.write, diagnosis.suggestions.first()) {
        (Some(path), Some(best)) => {
            let comments = [
                format!("Based on {}, with {}", diagnosis.base.layout, best.change),
                format!("for {}: {:.1} % less time per step.", args.target, best.gain() * 100.0),
            ];
            let text = comments.map(|c| format!("# {c}\n")).concat() + &best.layout;
            crate::atomic_file::write_file(path, text.as_bytes(), args.force)?;
            tracing::info!("{} written", path.display());
        }
        (Some(_), None) => tracing::info!("--write: nothing written, because no change is faster"),
        (None, _) => {}
    }
    Ok(())
}

/// Returns the command-line name of an enum value.
fn word(choice: impl ValueEnum) -> Option<String> {
    choice.to_possible_value().map(|v| v.get_name().to_string())
}

/// Returns the arguments that give a child process the same configuration, except for the layout.
fn settings(args: &WhyArgs) -> Vec<String> {
    let mut out = Vec::new();
    let mut add = |flag: &str, value: Option<String>| out.extend(value.into_iter().flat_map(|v| [flag.into(), v]));
    args.config.config.iter().for_each(|c| add("-c", Some(c.clone())));
    args.config.set.iter().for_each(|s| add("--set", Some(s.clone())));
    let m = &args.model;
    add("--model", m.model.clone());
    m.components.arguments().for_each(|[flag, value]| add(&flag, Some(value)));
    m.lora.iter().for_each(|l| add("--lora", Some(l.clone())));
    add("--weights", m.weights.and_then(word));
    add("--pipeline", m.pipeline.and_then(word));
    let p = &args.placement;
    add("--dtype", p.dtype.and_then(word));
    add("--mesh", p.mesh.clone());
    add("--chip", p.chip.clone());
    out
}
