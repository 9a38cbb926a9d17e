//! `ltx2 doctor`: reports which platforms work on this machine, what is missing, and the command that installs it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::{next, print, tell};
use crate::pjrt::discover::{self, Kind, PLUGIN_VARIABLE, Platform, PluginFile};
use crate::pjrt::{AttributeValue, Client, Device, PjrtError, Plugin};
use crate::runtime::platform::{self, Choice};
use crate::runtime::platforms;
use crate::runtime::trial::{self, LoadPurpose};

/// Arguments of `ltx2 doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Prints JSON instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Environment variable that makes a child process of `ltx2 doctor` examine a single platform.
const PROBE: &str = "LTX2_DOCTOR_PLATFORM";

/// Platforms, plugins and tools of this machine.
#[derive(Debug, Serialize)]
struct DoctorReport {
    version: &'static str,
    platforms: Vec<PlatformReport>,
    ffmpeg: Option<PathBuf>,
    /// Command to run next.
    next: String,
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
    /// Problems, each with its fix.
    missing: Vec<String>,
    /// Report of a plugin that was found for this platform but belongs to an unsupported one. The output lists it as a
    /// separate platform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    foreign: Option<Box<PlatformReport>>,
}

#[derive(Debug, Deserialize, Serialize)]
struct PluginReport {
    path: PathBuf,
    origin: String,
    /// The plugin's PJRT version; `None`: the plugin was not loaded.
    api_version: Option<String>,
    stablehlo_version: Option<String>,
}

impl From<&PluginFile> for PluginReport {
    fn from(file: &PluginFile) -> Self {
        let (path, origin) = (file.path.clone(), file.origin.clone());
        PluginReport { path, origin, api_version: None, stablehlo_version: None }
    }
}

pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    if let Ok(name) = std::env::var(PROBE) {
        let kind = Platform::named(&name).with_context(|| format!("{PROBE}: unknown platform '{name}'"))?;
        return print(&serde_json::to_string(&examine(kind))?);
    }
    let mut platforms: Vec<PlatformReport> = Platform::ALL.into_iter().rev().map(probe).collect();
    // A plugin whose file name does not identify a platform is found for every platform.
    let mut foreign: Vec<PlatformReport> =
        platforms.iter_mut().filter_map(|one| one.foreign.take()).map(|b| *b).collect();
    foreign.dedup_by(|one, other| one.path() == other.path());
    platforms.extend(foreign);
    platforms.extend(discover::find_unsupported().iter().map(|(name, file)| unsupported(name, file.into())));
    let works = platforms.iter().any(|platform| platform.works);
    let report = DoctorReport {
        version: env!("CARGO_PKG_VERSION"),
        platforms,
        ffmpeg: in_path("ffmpeg"),
        next: next::first(works),
    };
    match args.json {
        true => print(&format!("{}\n", serde_json::to_string_pretty(&report)?))?,
        false => print(&text(&report))?,
    }
    if !works {
        bail!("no platform works (see the list above)");
    }
    Ok(())
}

/// Examines a platform in a child process, because a plugin may abort its process.
fn probe(kind: Platform) -> PlatformReport {
    let ran = std::env::current_exe().and_then(|program| {
        let mut child = Command::new(program);
        child.arg("doctor").env(PROBE, kind.name()).stdin(Stdio::null()).output()
    });
    let output = match ran {
        Ok(output) => output,
        Err(error) => return failed(kind, format!("cannot start a process that examines the platform: {error}")),
    };
    let printed = String::from_utf8_lossy(&output.stderr);
    match serde_json::from_slice(&output.stdout) {
        Ok(report) if output.status.success() => {
            printed.lines().for_each(tell);
            report
        }
        _ => {
            let last = printed.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no output");
            failed(kind, format!("examining the platform failed ({}): {}", output.status, last.trim()))
        }
    }
}

/// Returns the report of a platform whose child process failed.
fn failed(kind: Platform, why: String) -> PlatformReport {
    let search = discover::find(kind, None);
    let report = PlatformReport { platform: kind.name().into(), ..PlatformReport::default() };
    match search.found.first() {
        Some(plugin) if Kind::of_file(&plugin.path).is_none() => report.without_broken(plugin, why),
        plugin => PlatformReport { plugin: plugin.map(PluginReport::from), missing: vec![why], ..report },
    }
}

/// Returns the report of a plugin for unsupported hardware.
fn unsupported(name: &str, plugin: PluginReport) -> PlatformReport {
    let names = Platform::ALL.into_iter().rev().map(Platform::name);
    let why = format!("{name} is not supported: use {}", platforms::alternatives(names));
    PlatformReport { platform: name.into(), plugin: Some(plugin), missing: vec![why], ..PlatformReport::default() }
}

impl PlatformReport {
    fn path(&self) -> Option<&Path> {
        self.plugin.as_ref().map(|plugin| &*plugin.path)
    }

    /// Removes a plugin that turned out to be for another platform, and adds a message with the path and `what`.
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

    /// Like [`Self::without`], for a plugin of unknown platform that fails to start.
    fn without_broken(self, plugin: &PluginFile, error: String) -> Self {
        let missing = vec![error];
        let foreign = PlatformReport {
            platform: "unknown".into(),
            plugin: Some(plugin.into()),
            missing,
            ..PlatformReport::default()
        };
        let what = format!("cannot be used: set {PLUGIN_VARIABLE} to another plugin, or unset it");
        self.without(plugin, &what, Some(foreign))
    }
}

fn examine(kind: Platform) -> PlatformReport {
    let (name, spec) = (kind.name(), platforms::spec(kind));
    let mut report = PlatformReport { platform: name.into(), ..PlatformReport::default() };
    let hardware = platform::hardware(kind);
    match &hardware {
        Ok(text) if !spec.is_host => report.hardware = Some(text.clone()),
        Ok(_) => {}
        Err(reason) => report.missing.push(reason.clone()),
    }
    let search = discover::find(kind, None);
    let Some(found) = search.found.first() else {
        report.missing.push(format!("no plugin: install it with `ltx2 plugin install {name}`"));
        return report;
    };
    report.plugin = Some(found.into());
    let is_neutral = Kind::of_file(&found.path).is_none();
    let own = Platform::of_file(&found.path);
    if own.is_none_or(|own| platforms::spec(own).loads_without_hardware) || hardware.is_ok() {
        match trial::load(&found.path, None, LoadPurpose::Run) {
            Ok(plugin) => match plugin.kind() {
                Some(Kind::Unsupported(own)) => {
                    return report.without(
                        found,
                        &format!("is a plugin for {own}"),
                        Some(unsupported(own, found.into())),
                    );
                }
                Some(own) if own != Kind::Supported(kind) => {
                    return report.without(found, &format!("is a plugin for {}", own.name()), None);
                }
                None if !spec.is_host => {
                    return report.without(found, &format!("is not a plugin for {name}"), None);
                }
                _ => report.plugin = Some(loaded(found, &plugin)),
            },
            // A plugin whose file name identifies no platform turned out to be libtpu.
            Err(PjrtError::NoHardware { platform, .. }) if platform != name => {
                return report.without(found, &format!("is a plugin for {platform}"), None);
            }
            Err(PjrtError::NoHardware { .. }) if hardware.is_err() => {}
            Err(error) if is_neutral => return report.without_broken(found, error.to_string()),
            Err(error) => report.missing.push(error.to_string()),
        }
    }
    report.missing.extend((spec.missing_libraries)(&found.path));
    match report.plugin.as_ref().is_some_and(|plugin| plugin.api_version.is_some()) && hardware.is_ok() {
        true => start(kind, report, found),
        false => report,
    }
}

/// Returns the report of a loaded plugin.
fn loaded(file: &PluginFile, plugin: &Plugin) -> PluginReport {
    PluginReport {
        api_version: Some(format!("{}.{}", plugin.version().0, plugin.version().1)),
        stablehlo_version: stablehlo_version(plugin),
        ..PluginReport::from(file)
    }
}

/// Creates a client and adds its devices to the report. The client may report a platform other than `kind`: a plugin
/// without TPU or GPU extensions is not necessarily a CPU plugin.
fn start(kind: Platform, mut report: PlatformReport, found: &PluginFile) -> PlatformReport {
    let is_host = platforms::spec(kind).is_host;
    let opened = platform::open(&Choice::File(found.path.clone()), None).map_err(|e| e.to_string());
    match opened.and_then(|(_, client)| describe(&mut report, &client).map_err(|e| e.to_string())) {
        Ok(()) => match report.platform_name.clone().filter(|own| is_host && own != kind.name()) {
            Some(own) => {
                let foreign = report.plugin.take().map(|plugin| unsupported(&own, plugin));
                return report.without(found, &format!("is a plugin for {own}"), foreign);
            }
            None => report.works = true,
        },
        Err(error) if is_host && Kind::of_file(&found.path).is_none() => {
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

/// Returns the StableHLO version, such as `1.20.0`, from the plugin's attributes.
fn stablehlo_version(plugin: &Plugin) -> Option<String> {
    match plugin.attributes().ok()?.remove("stablehlo_current_version")? {
        AttributeValue::Ints(parts) => Some(parts.iter().map(i64::to_string).collect::<Vec<_>>().join(".")),
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
        None => lines.push("\nffmpeg: not on PATH; MP4 files are written with the built-in encoder".into()),
    }
    lines.push(format!("\nnext: {}", report.next));
    lines.join("\n") + "\n"
}

/// Returns the first executable with this name on PATH.
fn in_path(name: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let executable = |path: &Path| path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| executable(path))
}
