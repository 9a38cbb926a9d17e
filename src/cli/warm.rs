//! `ltx2 warm`: fills the compile cache on the devices of a run.

use std::fmt::Write;

use super::args::RunArgs;
use super::generate::prepare_run;
use super::{log, print};
use crate::config::load;
use crate::pipeline::processes::together;
use crate::pipeline::programs::warm::{WarmedProgram, warm};

/// Compiles all programs of a configuration into the compile cache, on the devices that run them; needs no weights.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 warm -c ltx2 --platform cuda                        `ltx2 generate` with the same flags then compiles nothing
  ltx2 warm -c ltx2_3 --layout ulysses --width 1024 --height 576 --num-frames 65
  ltx2 warm -c ltx2 --set runtime.compile_cache=/shared/programs --json

Programs depend on sizes, pipeline, guidance, layout and compiler options, but not on prompts, seeds and steps. On CUDA, a short
`ltx2 generate` loops over layers and then compiles its own programs; for `warm`, set runtime.layers to loop, too.")]
pub(crate) struct WarmArgs {
    /// Prints JSON instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunArgs,
}

pub(crate) fn run(args: &WarmArgs) -> anyhow::Result<()> {
    let loaded = load(&args.run.overrides()?)?;
    loaded.check_effect()?;
    let config = &loaded.config;
    prepare_run(config);
    together(&config.runtime.distributed, |group| {
        let first = group.is_none_or(|group| group.id() == 0);
        if !first {
            log::only_warnings();
        }
        let programs = warm(config, group)?;
        match (first, args.json) {
            (false, _) => Ok(()),
            (true, true) => print(&format!("{}\n", serde_json::to_string_pretty(&programs)?)),
            (true, false) => print(&table(&programs)),
        }
    })
}

fn table(programs: &[WarmedProgram]) -> String {
    let mut text = String::new();
    for p in programs {
        let state = if p.compiled { "compiled" } else { "already cached" };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{:<16}{:>9.3} s  {state}", p.program.replace('_', " "), p.seconds);
    }
    let compiled = programs.iter().filter(|p| p.compiled).count();
    let folder = programs.iter().find_map(|p| p.path.parent()).map(|folder| format!(" in {}", folder.display()));
    let there = programs.len() - compiled;
    let _ = writeln!(text, "{compiled} compiled, {there} already cached{}", folder.unwrap_or_default());
    text
}
