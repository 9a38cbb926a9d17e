//! `ltx2 why`: where the exchanges of a program come from, and what would end them.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::args::{ConfigArgs, ModelArgs, PlacementArgs};
use super::compile::{prepare_tpus, read_chip};
use super::experiment::usage;
use super::print;
use crate::config::load;
use crate::lab::{Answer, Options, Question, default_jobs, why, why_text};
use crate::pipeline::programs::ProgramKind;

/// Names for every exchange the tensor, the rule and the reason; then compiles changes of one rule and ranks them.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 why -c ltx2 --layout before-385 --target tpu:v5p:2x2x2
  ltx2 why -c ltx2 --layout before-385 --target tpu:v5p:2x2x2 --write better.yml && \\
  ltx2 why -c ltx2 --layout better.yml --target tpu:v5p:2x2x2
  ltx2 why -c nano_2_0 --model nano --layout tensor --target cpu:4 --collective 1

Changes without a price come first, then those that cost memory, then those that put other exchanges in place; among
equals the gain counts for each family of tensors that a change reaches.")]
pub struct Args {
    /// Devices, as `compile` takes them
    #[arg(long, value_name = "TARGET")]
    target: String,
    /// Chip that times are predicted with: a name or a TOML file [default: the target's]
    #[arg(long, value_name = "NAME|FILE")]
    chip: Option<String>,
    /// What is compiled
    #[arg(long, value_name = "NAME", default_value = "denoise")]
    program: ProgramKind,
    /// Only changes that could end this exchange of the table
    #[arg(long, value_name = "N")]
    collective: Option<usize>,
    /// Blocks that are compiled [default: 3, or all of a smaller model]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Changes that are compiled at most, the most promising first
    #[arg(long, value_name = "N", default_value_t = 6)]
    budget: usize,
    /// Programs that compile at a time [default: as many as cores and memory allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// Seconds for one of them
    #[arg(long, value_name = "S", default_value_t = 1800)]
    timeout: u64,
    /// Writes table and advice; `-` for stdout, in place of the text
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Writes the layout with the best change
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Folder of what was compiled [default: lab, in the compile cache]
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Folder of optimized modules [default: modules, in that of what was compiled]
    #[arg(long, value_name = "DIR")]
    modules: Option<PathBuf>,
    /// Also repeats what the compiler failed on before
    #[arg(long)]
    retry: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    config: ConfigArgs,
}

/// Blocks that stand for all.
const LAYERS: usize = 3;

/// Runs the command.
///
/// # Errors
/// What is wrong with configuration, layout or target; a program that does not compile as it is.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut given = args.config.given();
    args.model.add(&mut given);
    args.placement.add(&mut given);
    let config = load(&given)?.config;
    let scratch;
    let folder = match (&args.output, config.compile_cache()) {
        (Some(folder), _) => folder.clone(),
        (None, Some(cache)) => cache.join("lab"),
        (None, None) => {
            scratch = tempfile::tempdir()?;
            scratch.path().to_path_buf()
        }
    };
    prepare_tpus(&config, std::slice::from_ref(&args.target))?;
    let blocks = crate::pipeline::programs::Programs::of(&config, None)?.layers();
    let question = Question {
        settings: settings(args),
        given,
        target: args.target.clone(),
        chip: read_chip(args.chip.as_deref())?,
        program: args.program,
        layers: args.layers.unwrap_or(LAYERS.min(blocks)),
        collective: args.collective,
        budget: args.budget,
        timeout: args.timeout,
    };
    let options = Options {
        binary: std::env::current_exe()?,
        folder,
        modules: args.modules.clone(),
        jobs: args.jobs.map_or_else(default_jobs, usize::from),
        measure: false,
        retry: args.retry,
    };
    let answer = why(&question, &options).map_err(usage)?;
    let figures = format!("{}\n", serde_json::to_string_pretty(&json_of(&answer, &config.layout))?);
    match args.json.as_deref() {
        Some(path) if path.as_os_str() == "-" => print(&figures)?,
        Some(path) => {
            crate::media::write_atomically(path, figures.as_bytes())?;
            print(&why_text(&answer, args.collective))?;
        }
        None => print(&why_text(&answer, args.collective))?,
    }
    match (&args.write, answer.advice.first()) {
        (Some(path), Some(best)) => {
            let comments = [
                format!("As {}, with {}", config.layout, best.change),
                format!("for {}: {:.1} % of a step less.", args.target, best.gain() * 100.0),
            ];
            let text = comments.map(|c| format!("# {c}\n")).concat() + &best.layout;
            crate::media::write_atomically(path, text.as_bytes())?;
            tracing::info!("{} written", path.display());
            Ok(())
        }
        (Some(_), None) => {
            tracing::info!("nothing is written: no change gains");
            Ok(())
        }
        (None, _) => Ok(()),
    }
}

/// What a child is given of the same, without layout.
fn settings(args: &Args) -> Vec<String> {
    let mut out = Vec::new();
    let mut add = |flag: &str, value: Option<String>| out.extend(value.into_iter().flat_map(|v| [flag.into(), v]));
    add("-c", args.config.config.clone());
    add("--chip", args.chip.clone());
    args.config.set.iter().for_each(|s| add("--set", Some(s.clone())));
    let m = &args.model;
    let word = |v: Option<clap::builder::PossibleValue>| v.map(|v| v.get_name().to_string());
    add("--model", m.model.clone());
    add("--text-encoder", m.text_encoder.clone());
    add("--upsampler", m.upsampler.clone());
    m.lora.iter().for_each(|l| add("--lora", Some(l.clone())));
    add("--weights", word(m.weights.and_then(|w| clap::ValueEnum::to_possible_value(&w))));
    add("--pipeline", word(m.pipeline.and_then(|p| clap::ValueEnum::to_possible_value(&p))));
    let p = &args.placement;
    add("--dtype", word(p.dtype.and_then(|d| clap::ValueEnum::to_possible_value(&d))));
    add("--mesh", p.mesh.clone());
    out
}

fn json_of(answer: &Answer, layout: &str) -> Value {
    let b = &answer.base;
    let list: Vec<Value> = b
        .collectives
        .list
        .iter()
        .enumerate()
        .map(|(n, e)| {
            json!({
                "number": n + 1, "kind": e.kind, "scope": e.scope, "tensor": e.tensor, "role": e.role,
                "rule": e.rule, "reason": e.reason, "count": e.count, "trip_count": e.trip_count,
                "bytes": e.bytes, "wire_bytes": e.wire_bytes, "axes": e.axes, "ms": e.ms,
            })
        })
        .collect();
    json!({
        "target": b.target,
        "layout": layout,
        "layers": b.layers,
        "per_layer_bytes": b.collectives.per_layer_bytes,
        "predicted_ms": b.predicted_ms,
        "collectives": list,
        "advice": answer.advice,
        "no_gain": answer.useless,
        "refused": answer.refused,
        "not_compiled": answer.left,
    })
}
