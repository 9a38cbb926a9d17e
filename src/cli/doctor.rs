//! `ltx2 doctor`: what works on this machine, what is missing, and the command that gets it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::{print, tell};
use crate::pjrt::discover::{self, Kind, Platform, PluginFile};
use crate::pjrt::{Client, Device, Error, Plugin, Value};
use crate::runtime::platform::{self, Choice};
use crate::runtime::trial;

/// Arguments of `ltx2 doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Prints JSON instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Variable that has a child process of `ltx2 doctor` report one platform.
const PROBE: &str = "LTX2_DOCTOR_PLATFORM";

/// Platforms, plugins and tools of this machine.
#[derive(Debug, Serialize)]
struct DoctorReport {
    version: &'static str,
    platforms: Vec<PlatformReport>,
    ffmpeg: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
struct PlatformReport {
    platform: String,
    works: bool,
    hardware: Option<String>,
    plugin: Option<PluginReport>,
    platform_name: Option<String>,
    platform_version: Option<String>,
    devices: Vec<String>,
    /// Problems, each with its remedy.
    missing: Vec<String>,
}

#[derive(Debug, Deserialize, Serialize)]
struct PluginReport {
    path: PathBuf,
    origin: String,
    /// The plugin's PJRT version; `None`: it was not loaded.
    api_version: Option<String>,
    stablehlo_version: Option<String>,
}

impl From<&PluginFile> for PluginReport {
    fn from(file: &PluginFile) -> Self {
        let (path, origin) = (file.path.clone(), file.origin.clone());
        PluginReport { path, origin, api_version: None, stablehlo_version: None }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    const PLATFORMS: [Platform; 3] = [Platform::Cpu, Platform::Cuda, Platform::Tpu];
    if let Ok(name) = std::env::var(PROBE) {
        let kind = PLATFORMS.into_iter().find(|kind| kind.name() == name).context("no such platform")?;
        return print(&serde_json::to_string(&examine(kind))?);
    }
    let supported = PLATFORMS.into_iter().map(probe);
    let platforms =
        supported.chain(discover::find_unsupported().iter().map(|(name, file)| unsupported(name, file))).collect();
    let report = DoctorReport { version: env!("CARGO_PKG_VERSION"), platforms, ffmpeg: in_path("ffmpeg") };
    match args.json {
        true => print(&format!("{}\n", serde_json::to_string_pretty(&report)?))?,
        false => print(&text(&report))?,
    }
    if !report.platforms.iter().any(|platform| platform.works) {
        bail!("no platform works, as listed; `ltx2 plugin install cpu` fetches a plugin that runs everywhere");
    }
    Ok(())
}

/// Examines a platform in a child process, which a plugin may end.
fn probe(kind: Platform) -> PlatformReport {
    let ran = std::env::current_exe().and_then(|program| {
        let mut child = Command::new(program);
        child.arg("doctor").env(PROBE, kind.name()).stdin(Stdio::null()).output()
    });
    let output = match ran {
        Ok(output) => output,
        Err(error) => return failed(kind, format!("cannot start a process to examine it: {error}")),
    };
    let printed = String::from_utf8_lossy(&output.stderr);
    match serde_json::from_slice(&output.stdout) {
        Ok(report) if output.status.success() => {
            printed.lines().for_each(tell);
            report
        }
        _ => {
            let last = printed.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it printed nothing");
            failed(kind, format!("the process that examined it ended with {}: {}", output.status, last.trim()))
        }
    }
}

/// The report of a platform whose child process has none.
fn failed(kind: Platform, why: String) -> PlatformReport {
    let plugin = discover::find(kind, None).found.first().map(PluginReport::from);
    PlatformReport { platform: kind.name().into(), plugin, missing: vec![why], ..PlatformReport::default() }
}

/// The report of a plugin for hardware that this program does not support.
fn unsupported(name: &str, file: &PluginFile) -> PlatformReport {
    let why = format!("{name} is not supported: use cpu, cuda or tpu");
    let plugin = Some(file.into());
    PlatformReport { platform: name.into(), plugin, missing: vec![why], ..PlatformReport::default() }
}

fn examine(kind: Platform) -> PlatformReport {
    let name = kind.name();
    let mut report = PlatformReport { platform: name.into(), ..PlatformReport::default() };
    let hardware = platform::hardware(kind);
    match &hardware {
        Ok(text) if kind != Platform::Cpu => report.hardware = Some(text.clone()),
        Ok(_) => {}
        Err(reason) => report.missing.push(reason.clone()),
    }
    let search = discover::find(kind, None);
    let Some(found) = search.found.first() else {
        report.missing.push(format!("no plugin: `ltx2 plugin install {name}` fetches it"));
        return report;
    };
    let mut plugin_report = PluginReport::from(found);
    // Reading half a gigabyte of libtpu is of no use without chips.
    let load = Platform::of_file(&found.path) != Some(Platform::Tpu) || hardware.is_ok();
    if load {
        match trial::load(&found.path, None) {
            Ok(plugin) if own_kind(&plugin) != Kind::Supported(kind) => {
                let own = own_kind(&plugin).name();
                report.missing.push(format!("{} is a plugin of {own}", found.path.display()));
                return report;
            }
            Ok(plugin) => {
                plugin_report.api_version = Some(format!("{}.{}", plugin.version().0, plugin.version().1));
                plugin_report.stablehlo_version = stablehlo_version(&plugin);
            }
            // A plugin of a neutral name that turns out to be libtpu's is not this platform's.
            Err(Error::NoHardware { platform, .. }) if platform != name => {
                report.missing.push(format!("{} is a plugin of {platform}", found.path.display()));
                return report;
            }
            Err(Error::NoHardware { .. }) if hardware.is_err() => {}
            Err(error) => report.missing.push(error.to_string()),
        }
    }
    if kind == Platform::Cuda {
        report.missing.extend(platform::missing_for_cuda(&found.path));
    }
    let loaded = plugin_report.api_version.is_some();
    report.plugin = Some(plugin_report);
    if loaded && hardware.is_ok() {
        let choice = Choice::File(found.path.clone());
        let described = platform::open(&choice, None).map_err(|e| e.to_string());
        match described.and_then(|(_, client)| describe(&mut report, &client).map_err(|e| e.to_string())) {
            Ok(()) => report.works = true,
            Err(error) => report.missing.push(error),
        }
    }
    report
}

/// What a plugin drives; one without a TPU's or a GPU's extensions drives the CPU.
fn own_kind(plugin: &Plugin) -> Kind {
    plugin.kind().unwrap_or(Kind::Supported(Platform::Cpu))
}

fn describe(report: &mut PlatformReport, client: &Client) -> crate::pjrt::Result<()> {
    report.platform_name = Some(client.platform_name().into());
    report.platform_version = Some(client.platform_version().into());
    let line = |device: &Device| match (device.kind(), &device.description().debug) {
        (kind, debug) if debug.contains(kind) => debug.clone(),
        (kind, debug) => format!("{debug} {kind}"),
    };
    report.devices = client.devices().iter().map(line).collect();
    Ok(())
}

/// `1.20.0` from the plugin's list of numbers.
fn stablehlo_version(plugin: &Plugin) -> Option<String> {
    match plugin.attributes().ok()?.remove("stablehlo_current_version")? {
        Value::Ints(parts) => Some(parts.iter().map(i64::to_string).collect::<Vec<_>>().join(".")),
        other => Some(other.to_string()),
    }
}

fn text(report: &DoctorReport) -> String {
    let mut lines = vec![format!("ltx2 {}", report.version)];
    for platform in &report.platforms {
        lines.push(format!("\n{}: {}", platform.platform, if platform.works { "works" } else { "not available" }));
        if let Some(plugin) = &platform.plugin {
            lines.push(format!("  plugin    {} ({})", plugin.path.display(), plugin.origin));
            if let Some(api) = &plugin.api_version {
                let stablehlo = plugin.stablehlo_version.as_deref().unwrap_or("unknown");
                lines.push(format!("  interface PJRT {api}, StableHLO {stablehlo}"));
            }
        }
        if let Some(hardware) = &platform.hardware {
            lines.push(format!("  hardware  {hardware}"));
        }
        if let (Some(name), Some(version)) = (&platform.platform_name, &platform.platform_version) {
            lines.push(format!("  platform  {name}: {}", version.lines().next().unwrap_or_default()));
        }
        lines.extend(platform.devices.iter().map(|device| format!("  device    {device}")));
        lines.extend(platform.missing.iter().map(|missing| format!("  missing   {missing}")));
    }
    match &report.ffmpeg {
        Some(path) => lines.push(format!("\nffmpeg: {}", path.display())),
        None => lines.push("\nffmpeg: not on PATH; MP4 files are written by the built-in encoder".into()),
    }
    lines.join("\n") + "\n"
}

/// The first executable of that name on PATH.
fn in_path(name: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let executable = |path: &Path| path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| executable(path))
}
