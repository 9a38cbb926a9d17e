//! `ltx2 doctor`: what works on this machine, what is missing, and the command that gets it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::{print, tell};
use crate::pjrt::discover::{self, Kind, PLUGIN_VARIABLE, Platform, PluginFile};
use crate::pjrt::{Client, Device, Error, Plugin, Value};
use crate::runtime::platform::{self, Choice};
use crate::runtime::trial::{self, Purpose};

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
    /// A plugin that was found for this platform and belongs to none of this program's; listed by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    foreign: Option<Box<PlatformReport>>,
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
    let mut platforms: Vec<PlatformReport> = PLATFORMS.into_iter().map(probe).collect();
    // One file is found for every platform if its name speaks of none.
    let mut foreign: Vec<PlatformReport> =
        platforms.iter_mut().filter_map(|one| one.foreign.take()).map(|b| *b).collect();
    foreign.dedup_by(|one, other| one.path() == other.path());
    platforms.extend(foreign);
    platforms.extend(discover::find_unsupported().iter().map(|(name, file)| unsupported(name, file.into())));
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
    let search = discover::find(kind, None);
    let report = PlatformReport { platform: kind.name().into(), ..PlatformReport::default() };
    match search.found.first() {
        Some(plugin) if Kind::of_file(&plugin.path).is_none() => report.without_broken(plugin, why),
        plugin => PlatformReport { plugin: plugin.map(PluginReport::from), missing: vec![why], ..report },
    }
}

/// The report of a plugin for hardware that this program does not support.
fn unsupported(name: &str, plugin: PluginReport) -> PlatformReport {
    let why = format!("{name} is not supported: use cpu, cuda or tpu");
    PlatformReport { platform: name.into(), plugin: Some(plugin), missing: vec![why], ..PlatformReport::default() }
}

impl PlatformReport {
    /// Path of the plugin.
    fn path(&self) -> Option<&Path> {
        self.plugin.as_ref().map(|plugin| &*plugin.path)
    }

    /// The report without a plugin that turned out not to be the platform's.
    fn without(mut self, plugin: &PluginFile, what: &str, foreign: Option<PlatformReport>) -> Self {
        self.missing.push(format!("{} {what}", plugin.path.display()));
        PlatformReport {
            platform: self.platform,
            hardware: self.hardware,
            missing: self.missing,
            foreign: foreign.map(Box::new),
            ..PlatformReport::default()
        }
    }

    /// The same for a plugin whose file does not say what it is for and which does not start.
    fn without_broken(self, plugin: &PluginFile, error: String) -> Self {
        let missing = vec![error];
        let foreign = PlatformReport {
            platform: "unknown".into(),
            plugin: Some(plugin.into()),
            missing,
            ..PlatformReport::default()
        };
        let what = format!("cannot be used: name another plugin with {PLUGIN_VARIABLE}, or unset it");
        self.without(plugin, &what, Some(foreign))
    }
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
    report.plugin = Some(found.into());
    let is_neutral = Kind::of_file(&found.path).is_none();
    // Reading half a gigabyte of libtpu is of no use without chips.
    if Platform::of_file(&found.path) != Some(Platform::Tpu) || hardware.is_ok() {
        match trial::load(&found.path, None, Purpose::Run) {
            Ok(plugin) => match plugin.kind() {
                Some(Kind::Unsupported(own)) => {
                    return report.without(
                        found,
                        &format!("is a plugin of {own}"),
                        Some(unsupported(own, found.into())),
                    );
                }
                Some(own) if own != Kind::Supported(kind) => {
                    return report.without(found, &format!("is a plugin of {}", own.name()), None);
                }
                None if kind != Platform::Cpu => {
                    return report.without(found, &format!("is no plugin of {name}"), None);
                }
                _ => report.plugin = Some(loaded(found, &plugin)),
            },
            // A plugin of a neutral name that turns out to be libtpu's is not this platform's.
            Err(Error::NoHardware { platform, .. }) if platform != name => {
                return report.without(found, &format!("is a plugin of {platform}"), None);
            }
            Err(Error::NoHardware { .. }) if hardware.is_err() => {}
            Err(error) if is_neutral => return report.without_broken(found, error.to_string()),
            Err(error) => report.missing.push(error.to_string()),
        }
    }
    if kind == Platform::Cuda {
        report.missing.extend(platform::missing_for_cuda(&found.path));
    }
    match report.plugin.as_ref().is_some_and(|plugin| plugin.api_version.is_some()) && hardware.is_ok() {
        true => start(kind, report, found),
        false => report,
    }
}

/// Report of a plugin that was loaded.
fn loaded(file: &PluginFile, plugin: &Plugin) -> PluginReport {
    PluginReport {
        api_version: Some(format!("{}.{}", plugin.version().0, plugin.version().1)),
        stablehlo_version: stablehlo_version(plugin),
        ..PluginReport::from(file)
    }
}

/// Adds the devices of a plugin that was loaded. Its client may name other hardware than the platform's: a plugin without
/// a TPU's or a GPU's extensions need not be the CPU's.
fn start(kind: Platform, mut report: PlatformReport, found: &PluginFile) -> PlatformReport {
    let opened = platform::open(&Choice::File(found.path.clone()), None).map_err(|e| e.to_string());
    match opened.and_then(|(_, client)| describe(&mut report, &client).map_err(|e| e.to_string())) {
        Ok(()) => match report.platform_name.clone().filter(|own| kind == Platform::Cpu && own != kind.name()) {
            Some(own) => {
                let foreign = report.plugin.take().map(|plugin| unsupported(&own, plugin));
                return report.without(found, &format!("is a plugin of {own}"), foreign);
            }
            None => report.works = true,
        },
        Err(error) if kind == Platform::Cpu && Kind::of_file(&found.path).is_none() => {
            return report.without_broken(found, error);
        }
        Err(error) => report.missing.push(error),
    }
    report
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
