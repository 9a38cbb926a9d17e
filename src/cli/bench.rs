//! `ltx2 bench`: benchmarks of programs and of a complete request.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde_json::Value;

use super::args::{RerunArgs, RunArgs, timed_job};
use super::bench_micro::{self, MicroArgs};
use super::generate::prepare_run;
use super::{UsageError, check_json, log, print_and_write_json, tell};
use crate::config::load;
use crate::perf::BenchReport;
use crate::perf::bench::{BenchOptions, BenchResults, BenchTarget, bench};
use crate::pipeline::one_line;
use crate::pipeline::processes::together;
use crate::text_file;

/// Benchmarks each program of `generate` separately, and a complete request.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 bench -c ltx2 --weights random --json now.json             full size, no model files
  ltx2 bench -c ltx2 --weights random --programs denoise --steps 4 --runs 5
  ltx2 bench -c nano_2_0 --model nano --weights random --baseline before.json --tolerance 0.05
  ltx2 bench --micro --platform cuda --json h200x2.json            microbenchmarks, no model
  ltx2 bench --micro --from h200x2.json --from h200x4.json --fit h200.toml")]
pub(crate) struct BenchArgs {
    /// File to write the report to, as JSON; `-` writes it to stdout instead of the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Overwrites the files of --json and --fit
    #[arg(long)]
    force: bool,
    /// Earlier --json file to compare with; exits with 1 if a program is slower by more than --tolerance
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Allowed increase of a median relative to --baseline, as a fraction
    #[arg(long, value_name = "FRACTION", default_value_t = 0.1, requires = "baseline")]
    tolerance: f64,
    /// Number of timed runs per program
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    runs: u16,
    /// Number of warm-up runs per program
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    warmup: u16,
    /// Number of transformer blocks, with random weights [default: all]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Programs to benchmark [default: all]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    programs: Vec<BenchTarget>,
    #[command(flatten)]
    micro: MicroArgs,
    #[command(flatten)]
    rerun: RerunArgs,
    #[command(flatten)]
    run: RunArgs,
}

pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let mut given = args.run.overrides()?;
    given.allow_changed_inputs = args.rerun.allow_changed_inputs;
    given.flag("layers", "model.blocks", args.layers);
    let loaded = load(&given)?;
    loaded.check_effect()?;
    let config = &loaded.config;
    if args.micro.micro {
        args.micro.check_read(&loaded)?;
        check_json(args.json.as_deref(), args.force)?;
        return bench_micro::run(config, &args.micro, args.runs.into(), args.json.as_deref(), args.force);
    }
    if !(args.tolerance.is_finite() && args.tolerance >= 0.0) {
        return Err(UsageError(format!("--tolerance {}: must be 0 or more, e.g. 0.1", args.tolerance)).into());
    }
    // Read the baseline first, so that a wrong path fails early.
    let baseline = args.baseline.as_deref().map(read).transpose()?;
    let job = timed_job(&loaded)?;
    let targets = if args.programs.is_empty() { BenchTarget::value_variants().to_vec() } else { args.programs.clone() };
    let options = BenchOptions { targets, runs: args.runs.into(), warmup: args.warmup.into() };
    prepare_run(config);
    together(&config.runtime.distributed, |group| {
        let first = group.is_none_or(|group| group.id() == 0);
        if first {
            check_json(args.json.as_deref(), args.force)?;
        } else {
            log::only_warnings();
        }
        let BenchResults { report, failed } = bench(config, &job, loaded.sidecar(), &options, group)?;
        let delivered = if first { finish(args, &report, baseline.as_ref()) } else { Ok(()) };
        match failed {
            // Convert the cause to text, so that the exit code is 1 whatever the cause, because the report was already
            // written.
            Some((target, error)) => {
                delivered.unwrap_or_else(|error| tracing::error!("{}", super::one_line(&error)));
                anyhow::bail!(
                    "{target}: {}; the report contains the programs that were measured before this error",
                    one_line(&error)
                )
            }
            None => delivered,
        }
    })
}

fn finish(args: &BenchArgs, report: &BenchReport, baseline: Option<&Value>) -> anyhow::Result<()> {
    let figures = serde_json::to_value(report)?;
    let text = format!("{}\n", serde_json::to_string_pretty(&figures)?);
    print_and_write_json(args.json.as_deref(), args.force, &text, &table(report))?;
    let wrong = report.wrong();
    if !wrong.is_empty() {
        anyhow::bail!("{}", wrong.join("; "));
    }
    match (baseline, args.baseline.as_deref()) {
        (Some(baseline), Some(path)) => compare(report, &figures, baseline, path, args.tolerance),
        _ => Ok(()),
    }
}

fn read(path: &Path) -> anyhow::Result<Value> {
    let text = text_file::read(path).map_err(|e| UsageError(format!("--baseline {}: {e}", path.display())))?;
    Ok(serde_json::from_str(&text).map_err(|e| UsageError(format!("--baseline {}: {e}", path.display())))?)
}

fn compare(report: &BenchReport, figures: &Value, baseline: &Value, path: &Path, tolerance: f64) -> anyhow::Result<()> {
    for key in [
        "/device",
        "/devices",
        "/config/request",
        "/config/sampler",
        "/config/runtime/dtype",
        "/config/runtime/weights",
    ] {
        let (was, now) = (baseline.pointer(key), figures.pointer(key));
        // Keys that an older file lacks are not compared.
        if was.is_some() && was != now {
            tracing::warn!("{} was measured with a different {}", path.display(), key[1..].replace('/', "."));
        }
    }
    let slower = report
        .slower_than(baseline, tolerance)
        .map_err(|why| UsageError(format!("--baseline {}: {why}", path.display())))?;
    for program in &slower {
        tell(program);
    }
    match slower.len() {
        0 => Ok(()),
        n => {
            anyhow::bail!(
                "{n} of {} programs are slower than in {} by more than {:.0} %",
                report.programs.len(),
                path.display(),
                tolerance * 100.0
            )
        }
    }
}

fn table(report: &BenchReport) -> String {
    const MIB: f64 = 1048576.0;
    let mut out = String::new();
    // Writing to a String cannot fail.
    let m = &report.matmul;
    let _ = writeln!(out, "device      {} x {} ({})", report.devices, report.device, report.platform);
    let _ = writeln!(
        out,
        "matmul      {}^3 {}: {:.1} TFLOP/s, 100 % in the last column",
        m.size,
        m.dtype,
        m.flops_per_second / 1e12
    );
    let _ = writeln!(
        out,
        "{:<16}{:>13}{:>13}{:>13}{:>14}{:>11}{:>11}{:>9}",
        "", "median ms", "min ms", "p90 ms", "predicted ms", "compile s", "TFLOP/s", "of peak"
    );
    for (name, p) in &report.programs {
        let predicted =
            p.program.as_ref().and_then(|c| c.predicted).map_or(String::new(), |s| format!("{:.3}", s * 1e3));
        let compile = p.program.as_ref().map_or(String::new(), |c| format!("{:.2}", c.compile_seconds));
        let rate = p.flops_per_second.map_or(String::new(), |f| format!("{:.2}", f / 1e12));
        let share = p.share_of_matmul.map_or(String::new(), |s| format!("{:.1} %", s * 100.0));
        let [median, min, p90] = [p.median, p.min, p.p90].map(|s| s * 1e3);
        let _ = writeln!(
            out,
            "{name:<16}{median:>13.3}{min:>13.3}{p90:>13.3}{predicted:>14}{compile:>11}{rate:>11}{share:>9}"
        );
        for (phase, share) in p.parts.iter().flatten() {
            let [device, host] = [share.device, share.host].map(|s| s * 1e3);
            let _ = writeln!(out, "  {:<14}{device:>13.3} on the device, {host:.3} on the host", phase.label());
        }
    }
    if let Some(seconds) = report.mp4_seconds {
        let has_frames = report.programs.get("end_to_end").is_some_and(|run| run.outputs.contains_key("video"));
        let _ = writeln!(out, "{:<16}{:>13.3}", if has_frames { "MP4" } else { "WAV" }, seconds * 1e3);
    }
    let _ = writeln!(out, "loading     {:.2} s, compiling {:.2} s", report.load_seconds, report.compile_seconds);
    let peak = report.peak_memory_bytes.map_or(String::new(), |b| format!(", peak memory {:.1} MiB", b as f64 / MIB));
    let _ = writeln!(out, "parameters  {:.1} MiB per device{peak}", report.parameter_bytes as f64 / MIB);
    out
}
