//! `ltx2 bench --micro`: microbenchmarks of devices, and calibration constants fitted to them.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::generate::prepare_libtpu;
use super::{UsageError, deliver, print};
use crate::analysis::{AlphaBeta, Calibration, Chip, Measurements, Microbenchmark, fit};
use crate::config::Config;
use crate::perf::micro::measure;

/// Flags of microbenchmarks.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Microbenchmarks")]
pub(crate) struct MicroArgs {
    /// Benchmarks matmuls, memory, kernel launches and collectives, without a model
    #[arg(long, conflicts_with_all = ["baseline", "programs"])]
    pub(crate) micro: bool,
    /// Earlier --json in place of measuring; repeatable, for several hosts
    #[arg(long, value_name = "FILE", requires = "micro")]
    pub(crate) from: Vec<PathBuf>,
    /// Calibration file to write, in the form of those in crates/xla-analysis/src/chips
    #[arg(long, value_name = "FILE", requires = "micro")]
    pub(crate) fit: Option<PathBuf>,
}

pub(crate) fn run(config: &Config, args: &MicroArgs, runs: usize, json: Option<&Path>) -> anyhow::Result<()> {
    let all = match args.from.as_slice() {
        [] => {
            prepare_libtpu(config);
            vec![measure(config, runs, &typed())?]
        }
        files => files.iter().map(|f| read(f)).collect::<anyhow::Result<_>>()?,
    };
    let tables: String = all.iter().map(table).collect();
    match (json, all.as_slice()) {
        (Some(_), [_, _, ..]) => return Err(UsageError("--json takes the measurements of one --from".into()).into()),
        (Some(_), [one]) => deliver(json, &format!("{}\n", serde_json::to_string_pretty(one)?), &tables)?,
        _ => print(&tables)?,
    }
    let chip = chip(all.first().map_or("", |m| &m.source.device));
    let fitted = fit(&all, &chip, &typed());
    let Some(path) = &args.fit else {
        if let (Ok(constants), None) = (&fitted, json.filter(|path| path.as_os_str() == "-")) {
            print(&constants_text(constants))?;
        }
        return Ok(());
    };
    let constants = fitted.map_err(|e| anyhow::anyhow!("--fit {}: {e}", path.display()))?;
    let text = format!("{}\n", serde_json::to_string_pretty(&constants)?);
    crate::media::write_atomically(path, text.as_bytes())?;
    print(&constants_text(&constants))?;
    tracing::info!("{} written", path.display());
    Ok(())
}

/// Command line as typed, absolute paths shortened to file names.
fn typed() -> String {
    let short = |word: String| {
        let path = Path::new(&word);
        let name = path.file_name().filter(|_| path.is_absolute()).map(|name| name.to_string_lossy().into_owned());
        name.unwrap_or(word)
    };
    std::iter::once("ltx2".to_string()).chain(std::env::args().skip(1).map(short)).collect::<Vec<_>>().join(" ")
}

/// Chip name, by the plugin's name of the device; else that name in kebab case.
fn chip(device: &str) -> String {
    let device = device.to_lowercase();
    let known = Chip::all().iter().find(|c| device.split_whitespace().any(|word| word == c.name));
    known.map_or_else(|| device.replace(' ', "-"), |c| c.name.clone())
}

fn read(path: &Path) -> anyhow::Result<Measurements> {
    let fail = |e: String| UsageError(format!("--from {}: {e}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
    let parsed = serde_json::from_str(&text);
    Ok(parsed.map_err(|e| fail(format!("{e}; give what `ltx2 bench --micro --json FILE` wrote")))?)
}

fn table(m: &Measurements) -> String {
    let s = &m.source;
    let mut out = format!("{} x {} ({}), {}\n", s.devices, s.device, m.platform, s.date);
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{:<44}{:>12}{:>12}{:>12}{:>15}", "", "us", "TFLOP/s", "GB/s", "received GB/s");
    for s in &m.samples {
        let what = match (s.benchmark, s.collective) {
            (Microbenchmark::Collective, Some(kind)) => {
                format!("{} over {} devices, {}", kind.name(), s.devices, s.name)
            }
            (what, _) => format!("{}, {}", format!("{what:?}").to_lowercase(), s.name),
        };
        let rate = |amount: f64, unit: f64| match amount > 0.0 {
            true => format!("{:.1}", amount / s.seconds / unit),
            false => String::new(),
        };
        let memory = if s.benchmark == Microbenchmark::Collective { 0.0 } else { s.bytes };
        let _ = writeln!(
            out,
            "{what:<44}{:>12.2}{:>12}{:>12}{:>15}",
            s.seconds * 1e6,
            rate(s.flops, 1e12),
            rate(memory, 1e9),
            rate(s.wire_bytes, 1e9)
        );
    }
    out
}

fn constants_text(c: &Calibration) -> String {
    let mut out =
        format!("\n{}: kernel launch {:.2} us, memory {:.0} GB/s\n", c.chip, c.kernel_seconds * 1e6, c.bandwidth / 1e9);
    let mut line = |name: &str, l: &AlphaBeta, unit: &str, scale: f64| {
        let _ = writeln!(out, "{name:<28}{:>8.2} us and {:.1} {unit}", l.latency * 1e6, l.rate / scale);
    };
    line("matmul", &c.matmul, "TFLOP/s", 1e12);
    c.attention.iter().for_each(|l| line("attention", l, "TFLOP/s", 1e12));
    for e in &c.collectives {
        line(&format!("{} over {} devices", e.kind.name(), e.devices), &e.cost, "GB/s", 1e9);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_known_by_their_chip() {
        assert_eq!(chip("NVIDIA H200"), "h200");
        assert_eq!(chip("NVIDIA H200 NVL"), "h200");
        assert_eq!(chip("TPU v5p"), "v5p");
        assert_eq!(chip("NVIDIA RTX 6000"), "nvidia-rtx-6000");
    }
}
