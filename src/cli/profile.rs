//! `ltx2 profile`: time breakdown of denoising steps.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::args::{RunArgs, timed_job};
use super::generate::prepare_libtpu;
use super::{UsageError, deliver, log};
use crate::analysis::{Trace, XSpace};
use crate::config::load;
use crate::media::{check_writable, write_atomically};
use crate::perf::profile::{Profile, profile};
use crate::pipeline::processes::together;

const STEPS: u64 = 2;

const SUMMARY: &str = "summary.json";

/// Traces --steps denoising steps (2) with the plugin's profiler, after a warm-up, and summarizes them.
///
/// Open the trace, DIR/plugins/profile/RUN/HOST.xplane.pb, with `tensorboard --logdir DIR` or `xprof DIR`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 profile -c ltx2 --weights random --platform cuda -o out/profile
  ltx2 profile -c ltx2 --layout sequence --mesh context=2 --steps 4 -o out/profile
  ltx2 profile --read out/profile/plugins/profile/2026_01_31_12_00_00/host.xplane.pb")]
pub(crate) struct Args {
    /// Folder for the trace and summary.json
    #[arg(short, long, value_name = "DIR", required_unless_present = "read")]
    output: Option<PathBuf>,
    /// Existing trace of any program, to summarize
    #[arg(long, value_name = "FILE.xplane.pb", conflicts_with = "output")]
    read: Option<PathBuf>,
    /// Second file for the summary; `-` for stdout, in place of the tables
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    run: RunArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(path) = &args.read {
        return read(args, path);
    }
    let folder = args.output.as_deref().ok_or_else(|| UsageError("no --output DIR".into()))?;
    // --steps is the number of traced steps; the configuration has the number of all.
    let mut given = args.run.clone();
    let steps = given.request.steps.take().unwrap_or(STEPS) as usize;
    let loaded = load(&given.given()?)?;
    let config = &loaded.config;
    let job = timed_job(config)?;
    let summary = folder.join(SUMMARY);
    prepare_libtpu(config);
    together(config, |group| {
        let first = group.is_none_or(|group| group.id() == 0);
        if first {
            check_writable(&summary)?;
        } else {
            log::only_warnings();
        }
        let profile = profile(config, &job, steps, folder, group)?;
        if !first {
            return Ok(());
        }
        let figures = serde_json::to_string_pretty(&profile)? + "\n";
        write_atomically(&summary, figures.as_bytes())?;
        deliver(args.json.as_deref(), &figures, &text(&profile, &summary))
    })
}

fn read(args: &Args, path: &Path) -> anyhow::Result<()> {
    let wrong = |reason: String| anyhow::anyhow!("{}: {reason}", path.display());
    let bytes = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;
    let space = XSpace::read(&bytes).map_err(|e| wrong(format!("not an xplane.pb: {e}")))?;
    let steps = args.run.request.steps.map(|steps| steps as usize);
    let trace = Trace::of(&space, steps).map_err(wrong)?;
    let figures = serde_json::to_string_pretty(&json!({"xplane": path, "trace": trace}))? + "\n";
    deliver(args.json.as_deref(), &figures, &trace.to_string())
}

fn text(profile: &Profile, summary: &Path) -> String {
    let mut out = format!("device      {} x {} ({})\n", profile.devices, profile.device, profile.platform);
    if !profile.flags.is_empty() {
        let flags = profile.flags.join(", ");
        out += &format!("options     {flags}: without CUDA graphs, so that kernels name their operations\n");
    }
    out += &format!("trace       {}\nsummary     {}\n\n{}", profile.xplane.display(), summary.display(), profile.trace);
    out
}
