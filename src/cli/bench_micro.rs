//! `ltx2 bench --micro`: measures devices with microbenchmarks and fits calibration constants to the results.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::generate::prepare_run;
use super::{UsageError, check_output_file, print, print_and_write_json};
use crate::analysis::{AlphaBeta, Calibration, Chip, ChipError, CollectiveKind, Measurements, Microbenchmark, fit};
use crate::config::{Config, ConfigError, LoadedConfig};
use crate::perf::micro::measure;
use crate::runtime::micro;
use crate::text_file;

/// Options of microbenchmarks.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Microbenchmarks")]
pub(crate) struct MicroArgs {
    /// Benchmarks matmuls, memory, kernel launches, copies from host memory and collectives, without a model
    #[arg(long, conflicts_with_all = ["baseline", "programs", "layers", "warmup", "allow_changed_inputs"])]
    pub(crate) micro: bool,
    /// Reads an earlier --json file instead of measuring; repeatable, to combine several hosts
    #[arg(long, value_name = "FILE", requires = "micro", conflicts_with = "runs")]
    pub(crate) from: Vec<PathBuf>,
    /// Measures only these collectives, to update part of an earlier measurement
    #[arg(long, value_name = "KIND,…", requires = "micro", conflicts_with_all = ["from", "fit"], value_delimiter = ',',
        value_parser = collective)]
    pub(crate) collectives: Vec<CollectiveKind>,
    /// Chip file to write the calibration into; a new file also gets the data-sheet values of --chip or of the device
    #[arg(long, value_name = "FILE.toml", requires = "micro")]
    pub(crate) fit: Option<PathBuf>,
}

impl MicroArgs {
    /// Rejects flags and `--set` pairs that do not affect the measurement.
    pub(crate) fn check_read(&self, loaded: &LoadedConfig) -> Result<(), ConfigError> {
        let places = ["runtime.", "mesh.", "layout"];
        let (why, is_read): (_, &dyn Fn(&str) -> bool) = match (self.from.is_empty(), &self.fit) {
            (true, _) => ("--micro runs no model", &|path| places.iter().any(|place| path.starts_with(place))),
            (false, Some(_)) => ("--from uses existing measurements", &|path| path == "runtime.chip_file"),
            (false, None) => ("--from uses existing measurements", &|_| false),
        };
        loaded.check_read(why, is_read)
    }
}

pub(crate) fn run(
    config: &Config,
    args: &MicroArgs,
    runs: usize,
    json: Option<&Path>,
    force: bool,
) -> anyhow::Result<()> {
    check_output_file("--fit", args.fit.as_deref(), &["toml"], force)?;
    let chip = config.runtime.chip_file.as_deref();
    let chip_file = args.fit.as_deref().map(|path| chip_file_to_extend(path, chip)).transpose()?.flatten();
    let all = match args.from.as_slice() {
        [] => {
            prepare_run(config);
            vec![measure(config, runs, &args.collectives, &typed())?]
        }
        files => files.iter().map(|f| read(f)).collect::<anyhow::Result<_>>()?,
    };
    let tables: String = all.iter().map(table).collect();
    match (json, all.as_slice()) {
        (Some(_), [_, _, ..]) => {
            return Err(
                UsageError("--json requires a single --from: it writes the measurements of one file".into()).into()
            );
        }
        (Some(_), [one]) => {
            print_and_write_json(json, force, &format!("{}\n", serde_json::to_string_pretty(one)?), &tables)?
        }
        _ => print(&tables)?,
    }
    let fitted = fit(&all, &typed());
    let Some(path) = &args.fit else {
        if let (Ok(constants), None) = (&fitted, json.filter(|path| path.as_os_str() == "-")) {
            print(&constants_text(constants))?;
        }
        return Ok(());
    };
    let constants = fitted.map_err(|e| anyhow::anyhow!("--fit {}: {e}", path.display()))?;
    let device = all.first().map_or("", |m| &m.source.device);
    let text = Chip::text_with(&calibration_text(path, chip_file, device)?, &constants);
    let text = text.map_err(|e| anyhow::anyhow!("--fit {}: {e}", path.display()))?;
    print(&constants_text(&constants))?;
    crate::atomic_file::write_file(path, text.as_bytes(), force)?;
    tracing::info!("{} written", path.display());
    Ok(())
}

/// Parses the name of a collective that can be measured.
fn collective(name: &str) -> Result<CollectiveKind, String> {
    let found = micro::KINDS.into_iter().find(|kind| kind.name() == name);
    found.ok_or_else(|| format!("expected one of {}", micro::KINDS.map(CollectiveKind::name).join(", ")))
}

/// Returns the command line, with absolute paths reduced to file names.
fn typed() -> String {
    let short = |word: String| {
        let path = Path::new(&word);
        let name = path.file_name().filter(|_| path.is_absolute()).map(|name| name.to_string_lossy().into_owned());
        name.unwrap_or(word)
    };
    std::iter::once("ltx2".to_string()).chain(std::env::args().skip(1).map(short)).collect::<Vec<_>>().join(" ")
}

/// Text of a chip file and the parsed chip.
type ChipFile = (String, Chip);

/// Returns the chip file that the calibration extends: the file at `path` if it exists, otherwise that of `chip`.
/// `None` if there is neither: the calibration then extends the file of the measured device, which is only known after
/// measuring.
fn chip_file_to_extend(path: &Path, chip: Option<&str>) -> anyhow::Result<Option<ChipFile>> {
    let wrong = |e: ChipError| UsageError(format!("--fit {}: {e}", path.display()));
    Ok(Some(match (path.exists(), chip) {
        (true, Some(chip)) => {
            let why =
                format!("--chip {chip}: {} exists and keeps its data-sheet values; remove --chip", path.display());
            return Err(UsageError(why).into());
        }
        (true, None) => (text_file::read(path)?, Chip::read(path).map_err(wrong)?),
        (false, Some(name)) => {
            let chip = Chip::find(name).map_err(|e| UsageError(format!("--chip: {e}")))?;
            let text = match Chip::is_file(name) {
                true => text_file::read(Path::new(name))?,
                false => chip.file_text().unwrap_or_default().to_string(),
            };
            (text, chip)
        }
        (false, None) => return Ok(None),
    }))
}

/// Returns the text of the chip file to write the calibration into, and checks that it describes the measured device.
fn calibration_text(path: &Path, chip_file: Option<ChipFile>, device: &str) -> anyhow::Result<String> {
    let (text, named) = match chip_file {
        Some(chip_file) => chip_file,
        None => {
            let chip = Chip::of_device(device).map_err(|e| UsageError(format!("--fit {}: {e}", path.display())))?;
            (chip.file_text().unwrap_or_default().to_string(), chip.clone())
        }
    };
    if named.device_kinds.iter().any(|kind| kind == device) {
        return Ok(text);
    }
    let kinds = named.device_kinds.join("', '");
    Err(UsageError(format!(
        "--fit {}: the measurements were made on '{device}', but the chip '{}' has device_kinds ['{kinds}']; use the chip file of that device",
        path.display(),
        named.name
    ))
    .into())
}

fn read(path: &Path) -> anyhow::Result<Measurements> {
    let fail = |e: String| UsageError(format!("--from {}: {e}", path.display()));
    let text = text_file::read(path).map_err(|e| fail(e.to_string()))?;
    let parsed = serde_json::from_str(&text);
    Ok(parsed.map_err(|e| fail(format!("{e}; expected a file written by `ltx2 bench --micro --json FILE`")))?)
}

fn table(m: &Measurements) -> String {
    let s = &m.source;
    let mut out = format!("{} x {} ({}), {}\n", s.devices, s.device, m.platform, s.date);
    // Writing to a String cannot fail.
    let head = ["us", "TFLOP/s", "GB/s", "received GB/s", "host GB/s"];
    let _ = writeln!(out, "{:<44}{:>12}{:>12}{:>12}{:>15}{:>12}", "", head[0], head[1], head[2], head[3], head[4]);
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
        let is_transfer = matches!(s.benchmark, Microbenchmark::Collective | Microbenchmark::HostCopy);
        let memory = if is_transfer { 0.0 } else { s.bytes };
        let _ = writeln!(
            out,
            "{what:<44}{:>12.2}{:>12}{:>12}{:>15}{:>12}",
            s.seconds * 1e6,
            rate(s.flops, 1e12),
            rate(memory, 1e9),
            rate(s.wire_bytes, 1e9),
            rate(s.host_bytes, 1e9)
        );
    }
    out
}

fn constants_text(c: &Calibration) -> String {
    let mut out = format!("\nkernel launch {:.2} us, memory {:.0} GB/s\n", c.kernel_seconds * 1e6, c.bandwidth / 1e9);
    let mut line = |name: &str, l: &AlphaBeta, unit: &str, scale: f64| {
        let _ = writeln!(out, "{name:<28}{:>8.2} us and {:.1} {unit}", l.latency * 1e6, l.rate / scale);
    };
    line("matmul", &c.matmul, "TFLOP/s", 1e12);
    c.attention.iter().for_each(|l| line("attention", l, "TFLOP/s", 1e12));
    c.host.iter().for_each(|l| line("copy from host memory", l, "GB/s", 1e9));
    for e in &c.collectives {
        line(&format!("{} over {} devices", e.kind.name(), e.devices), &e.cost, "GB/s", 1e9);
    }
    for (what, lost) in c.contention.iter().flat_map(|c| [("matmuls", c.compute), ("memory", c.memory)]) {
        let (work, collective) = (lost.work * 100.0, lost.collective * 100.0);
        let _ = writeln!(
            out,
            "overlap of collectives and {what}: {what} lose {work:.0} % of their rate, collectives {collective:.0} %"
        );
    }
    out
}
