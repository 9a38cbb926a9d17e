//! `ltx2 profile`: traces denoising steps and breaks down their time.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::args::{RerunArgs, RunArgs, timed_job};
use super::compile::chip_of;
use super::generate::prepare_run;
use super::{UsageError, check_json, check_output_file, log, print_and_write_json};
use crate::analysis::{Chip, Trace, TraceComparison, XSpace};
use crate::atomic_file::write_file;
use crate::config::load;
use crate::perf::profile::{Profile, profile};
use crate::pipeline::processes::together;
use crate::pipeline::programs::build::ProgramKind;

const STEPS: u64 = 2;

const SUMMARY: &str = "summary.json";

/// Traces denoising steps (--steps, 2 by default) with the plugin's profiler, after a warm-up, and compares them with
/// the prediction.
///
/// Open the trace, DIR/plugins/profile/RUN/HOST.xplane.pb, with `tensorboard --logdir DIR` or `xprof DIR`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 profile -c ltx2 --weights random --platform cuda -o out/profile
  ltx2 profile -c ltx2 --layout sequence --mesh context=2 --steps 4 -o out/profile
  ltx2 profile --read out/profile/plugins/profile/2026_01_31_12_00_00/host.xplane.pb")]
pub(crate) struct ProfileArgs {
    /// Folder for the trace and summary.json
    #[arg(short, long, value_name = "DIR", required_unless_present = "read")]
    output: Option<PathBuf>,
    /// Summarizes an existing trace, of any program, instead of running
    #[arg(long, value_name = "FILE.xplane.pb", conflicts_with_all = ["output", "allow_changed_inputs"])]
    read: Option<PathBuf>,
    /// Denoising loop to trace: denoise, refine (second pass) or round (largest tile of a temporal round)
    #[arg(long, value_enum, value_name = "NAME", default_value = "denoise", conflicts_with = "read")]
    program: ProgramKind,
    /// Additional file to write the summary to, as JSON; `-` writes it to stdout instead of the tables
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Overwrites summary.json and the file of --json
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    rerun: RerunArgs,
    #[command(flatten)]
    run: RunArgs,
}

pub(crate) fn run(args: &ProfileArgs) -> anyhow::Result<()> {
    if let Some(path) = &args.read {
        check_json(args.json.as_deref(), args.force)?;
        let mut given = args.run.clone();
        // Here --steps is the number of traced steps, not a request setting.
        given.request.steps = None;
        let mut given = given.overrides()?;
        given.allow_changed_inputs = args.rerun.allow_changed_inputs;
        let loaded = load(&given)?;
        loaded.check_read("--read does not run the model", |path| path == "runtime.chip_file")?;
        let chip = chip_of(&loaded.config)?;
        return read(args, path, chip.as_ref());
    }
    let folder = args.output.as_deref().ok_or_else(|| UsageError("--output DIR is required".into()))?;
    // --steps is the number of traced steps; the configuration keeps the total.
    let mut given = args.run.clone();
    let steps = given.request.steps.take().unwrap_or(STEPS) as usize;
    let mut given = given.overrides()?;
    given.allow_changed_inputs = args.rerun.allow_changed_inputs;
    let loaded = load(&given)?;
    loaded.check_effect()?;
    let config = &loaded.config;
    let job = timed_job(&loaded)?;
    let summary = folder.join(SUMMARY);
    prepare_run(config);
    together(&config.runtime.distributed, |group| {
        let first = group.is_none_or(|group| group.id() == 0);
        if first {
            check_output_file("--output", Some(&summary), &[], args.force)?;
            check_json(args.json.as_deref(), args.force)?;
        } else {
            log::only_warnings();
        }
        let profile = profile(config, &job, loaded.sidecar(), args.program, steps, folder, group)?;
        if !first {
            return Ok(());
        }
        let figures = serde_json::to_string_pretty(&profile)? + "\n";
        let written = write_file(&summary, figures.as_bytes(), args.force);
        print_and_write_json(args.json.as_deref(), args.force, &figures, &text(&profile, &summary))?;
        Ok(written?)
    })
}

fn read(args: &ProfileArgs, path: &Path, chip: Option<&Chip>) -> anyhow::Result<()> {
    let wrong = |reason: String| anyhow::anyhow!("{}: {reason}", path.display());
    let bytes = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;
    let space = XSpace::read(&bytes).map_err(|e| wrong(format!("not an xplane.pb: {e}")))?;
    let steps = args.run.request.steps.map(|steps| steps as usize);
    if chip.is_some() && steps.is_none() {
        // The prediction is per step, and a trace does not contain the number of steps.
        return Err(UsageError(
            "--read with --chip requires --steps, the number of denoising steps in the trace".into(),
        )
        .into());
    }
    let trace = Trace::from_space(&space, steps).map_err(wrong)?;
    let devices = [("devices".to_string(), trace.devices.len())];
    let comparison = chip.and_then(|chip| TraceComparison::of_space(&space, &trace, &devices, chip));
    if let (Some(chip), None) = (chip, &comparison) {
        return Err(wrong(format!("the trace contains no program whose time can be predicted for {}", chip.name)));
    }
    let figures = json!({"xplane": path, "trace": trace, "comparison": comparison});
    let text = tables(&trace, comparison.as_ref());
    print_and_write_json(args.json.as_deref(), args.force, &(serde_json::to_string_pretty(&figures)? + "\n"), &text)
}

fn text(profile: &Profile, summary: &Path) -> String {
    let mut out = format!("device      {} x {} ({})\n", profile.devices, profile.device, profile.platform);
    if !profile.flags.is_empty() {
        let flags = profile.flags.join(", ");
        out += &format!("options     {flags} (CUDA graphs are disabled so that kernels map to operations)\n");
    }
    out += &format!("trace       {}\nsummary     {}\n\n", profile.xplane.display(), summary.display());
    out + &tables(&profile.trace, profile.comparison.as_ref())
}

fn tables(trace: &Trace, comparison: Option<&TraceComparison>) -> String {
    let comparison = comparison.map_or(String::new(), |comparison| format!("\n{comparison}"));
    format!("{trace}{comparison}")
}
