//! Selects the hardware of a run (`--platform`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

pub use super::platforms::{PlatformOptions, cuda_devices};
use super::platforms::{alternatives, spec, spec_by_name};
use super::trial::{self, LoadPurpose};
use ltx2_pjrt::discover::{self, PLUGIN_VARIABLE, Platform, PluginSearch};
use ltx2_pjrt::{Client, PjrtError, Plugin};

/// Environment variable that, if 1, allows a multi-process run on CPU as a rehearsal; the CPU plugin cannot communicate
/// between processes.
const REHEARSAL: &str = "LTX2_REHEARSE_PROCESSES";

/// The requested platform.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The first of [`Platform::ALL`] that works.
    #[default]
    Auto,
    /// The given platform, without fallback.
    Named(Platform),
    /// The given plugin file, without fallback.
    File(PathBuf),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Choice::Auto),
            file if file.contains('/') || file.ends_with(".so") => Ok(Choice::File(file.into())),
            name => Platform::named(name).map(Choice::Named).ok_or_else(|| {
                let names = Platform::ALL.into_iter().rev().map(Platform::name);
                let known = ["auto"].into_iter().chain(names).chain(["a plugin file PATH.so"]);
                format!("unknown platform '{name}'; use {}", alternatives(known))
            }),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Auto => f.write_str("auto"),
            Choice::Named(platform) => f.write_str(platform.name()),
            Choice::File(path) => path.display().fmt(f),
        }
    }
}

/// An error from opening a platform.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// The plugin was not found, could not be loaded, or failed to start.
    #[error(transparent)]
    Pjrt(#[from] PjrtError),
    /// The machine does not have the requested platform's hardware.
    #[error("platform {platform}: {reason}; use `--platform auto`, or see `ltx2 doctor` for the available platforms")]
    NoHardware {
        /// Name of the platform, for example `cuda`.
        platform: &'static str,
        /// Description of the hardware that was not found.
        reason: String,
    },
    /// Several processes were requested on a platform that supports only one.
    #[error(
        "platform {} runs in one process only; use {} for several processes, or pass --num-processes 1",
        .0.name(),
        alternatives(Platform::ALL.into_iter().rev().filter(|each| !spec(*each).has_one_process).map(Platform::name))
    )]
    OneProcess(Platform),
    /// A plugin was not found, and installing it failed.
    #[error("no {} plugin found, and installing it failed: {reason}", platform.name())]
    Install {
        /// Platform of the plugin.
        platform: Platform,
        /// What failed and what to do.
        reason: String,
    },
    /// `auto` found no platform that works.
    #[error("no usable platform; run `ltx2 plugin install {}`: {reasons}", install.name())]
    None {
        /// Platform whose plugin is missing, although the machine has its hardware; otherwise the CPU.
        install: Platform,
        /// The reason for each platform.
        reasons: String,
    },
}

/// Installs the plugin of a platform where [`discover::find`] finds it, or returns what failed and what to do.
pub type Installer = fn(Platform) -> Result<(), String>;

static INSTALLER: OnceLock<Installer> = OnceLock::new();

/// Makes [`open_with`] install a missing CPU plugin. Without a call, a missing plugin is an error. Calls after the first
/// one have no effect.
pub fn install_missing_with(installer: Installer) {
    // An error means that the program already set an installer.
    let _ = INSTALLER.set(installer);
}

/// Finds plugins of a platform. If the CPU has none and `LTX2_PJRT_PLUGIN` is not set, installs one with the program's
/// [`Installer`].
fn find_or_install(platform: Platform) -> Result<PluginSearch, PlatformError> {
    let search = discover::find(platform, None);
    if !search.found.is_empty() || !spec(platform).is_host || named_plugin().is_some() {
        return Ok(search);
    }
    let Some(install) = INSTALLER.get() else { return Ok(search) };
    install(platform).map_err(|reason| PlatformError::Install { platform, reason })?;
    Ok(discover::find(platform, None))
}

/// Returns a description of a platform's hardware on this machine, without loading a plugin. The error message contains
/// the reason why the hardware was not found.
pub fn hardware(platform: Platform) -> Result<String, String> {
    (spec(platform).hardware)()
}

/// Opens a platform. `cpu_devices` is the number of virtual devices on CPU (`None`: 1).
pub fn open(choice: &Choice, cpu_devices: Option<usize>) -> Result<(Plugin, Client), PlatformError> {
    open_with(choice, &PlatformOptions { cpu_devices, ..PlatformOptions::default() })
}

/// Opens a platform. `auto` logs one line with its choice and why it skipped the others; any other choice never falls
/// back.
pub fn open_with(choice: &Choice, options: &PlatformOptions) -> Result<(Plugin, Client), PlatformError> {
    let known = match choice {
        Choice::File(path) => Platform::of_file(path),
        Choice::Named(platform) => Some(*platform),
        Choice::Auto => None,
    };
    let mut options = options.clone();
    if let Some(platform) = known.filter(|platform| spec(*platform).has_one_process && options.node.is_some()) {
        if !is_rehearsal(platform.name()) {
            return Err(PlatformError::OneProcess(platform));
        }
        tracing::warn!("{REHEARSAL} is set: each process computes all of the work on its own virtual devices");
        options.node = None;
    }
    let options = &options;
    if let Some(platform) = known {
        // A file whose name indicates a platform also needs the hardware of that platform.
        hardware(platform).map_err(|reason| PlatformError::NoHardware { platform: platform.name(), reason })?;
    }
    match choice {
        Choice::File(path) => Ok(start_file(path, known, options)?),
        Choice::Named(platform) => Ok(start(*platform, &find_or_install(*platform)?, options)?),
        Choice::Auto => auto(options),
    }
}

/// Returns the plugin file set by `LTX2_PJRT_PLUGIN`.
fn named_plugin() -> Option<PathBuf> {
    std::env::var_os(PLUGIN_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Returns the first plugin found for a platform; `None` if this machine lacks its hardware.
fn first_plugin(platform: Platform) -> Option<PathBuf> {
    hardware(platform).ok()?;
    discover::find(platform, None).found.into_iter().next().map(|plugin| plugin.path)
}

/// Predicts the platform that a choice opens, from this machine's hardware and the names of plugin files, without
/// loading a plugin. For `auto` the prediction is CPU if no other platform has both hardware and a plugin. `None`: the
/// plugin's file name does not reveal the platform.
pub fn expected(choice: &Choice) -> Option<Platform> {
    match choice {
        Choice::Named(platform) => Some(*platform),
        Choice::File(path) => Platform::of_file(path),
        Choice::Auto => match named_plugin() {
            Some(path) => Platform::of_file(&path),
            None => {
                let first = Platform::ALL.into_iter().find(|platform| first_plugin(*platform).is_some());
                Some(first.unwrap_or(Platform::Cpu))
            }
        },
    }
}

/// Starts a trial process to check that a plugin accepts the flags in the environment. The plugin is the one that
/// [`open_with`] would start first for this choice of platform. Ignores other problems, which [`open_with`] reports.
pub fn check_flags(choice: &Choice, options: &PlatformOptions) -> Result<(), PlatformError> {
    let path = match choice {
        Choice::File(path) => Some(path.clone()),
        Choice::Named(platform) => first_plugin(*platform),
        Choice::Auto => named_plugin().or_else(|| Platform::ALL.into_iter().find_map(first_plugin)),
    };
    let is_here = |path: &PathBuf| Platform::of_file(path).is_none_or(|platform| hardware(platform).is_ok());
    match path.filter(is_here).map_or(Ok(()), |path| trial::check(&path, options.trial, LoadPurpose::Run)) {
        Err(error @ PjrtError::Flags { .. }) => Err(error.into()),
        _ => Ok(()),
    }
}

/// Returns whether this run is a rehearsal: a multi-process run on a `platform` that supports only one process, enabled
/// by the environment. Each process does all of the work. The processes register, compare their programs, share a
/// compile cache and exit together as on other platforms, but exchange no tensors.
pub fn is_rehearsal(platform: &str) -> bool {
    spec_by_name(platform).has_one_process && std::env::var(REHEARSAL).is_ok_and(|value| value == "1")
}

fn auto(options: &PlatformOptions) -> Result<(Plugin, Client), PlatformError> {
    if let Some(path) = named_plugin() {
        let known = Platform::of_file(&path);
        if let Some(platform) = known {
            hardware(platform).map_err(|reason| PlatformError::NoHardware { platform: platform.name(), reason })?;
        }
        let opened = start_file(&path, known, options)?;
        tracing::info!("platform {}: selected by {PLUGIN_VARIABLE}", path.display());
        return Ok(opened);
    }
    let (mut passed, mut unusable) = (Vec::new(), Vec::new());
    // Platforms with hardware whose plugin is missing, and whether a plugin that was found failed.
    let (mut missing, mut failed) = (Vec::new(), false);
    for platform in Platform::ALL {
        if spec(platform).has_one_process && options.node.is_some() {
            passed.push(format!("{}: the platform supports only one process", platform.name()));
            continue;
        }
        let hardware = match hardware(platform) {
            Ok(hardware) => hardware,
            Err(reason) => {
                passed.push(format!("{}: {reason}", platform.name()));
                continue;
            }
        };
        // If an accelerator's plugin failed, a missing CPU plugin is not installed, so that the accelerator's error is
        // not followed by a slow run.
        let search = match failed {
            true => discover::find(platform, None),
            false => find_or_install(platform)?,
        };
        match search.found.is_empty() {
            true => missing.push(platform),
            false => failed = true,
        }
        match start(platform, &search, options) {
            Ok(opened) => {
                // Warn separately, because the hardware is present but unusable.
                unusable.iter().for_each(|line| tracing::warn!("skipping platform {line}"));
                let reasons =
                    if passed.is_empty() { String::new() } else { format!("; skipped {}", passed.join("; skipped ")) };
                tracing::info!("platform {}: {hardware}{reasons}", platform.name());
                return Ok(opened);
            }
            Err(error) => {
                unusable.push(format!("{}: {hardware}, but {error}", platform.name()));
                passed.push(format!("{}: {error}", platform.name()));
            }
        }
    }
    let install = missing.first().copied().or_else(|| Platform::ALL.last().copied()).expect("there are platforms");
    Err(PlatformError::None { install, reasons: passed.join("; ") })
}

/// Starts a plugin file, with the options of its platform if the platform is known.
fn start_file(
    path: &Path,
    platform: Option<Platform>,
    options: &PlatformOptions,
) -> Result<(Plugin, Client), PjrtError> {
    let plugin = trial::load(path, options.trial, LoadPurpose::Run)?;
    let spec = platform.map(spec).unwrap_or_default();
    let client = Client::among(&plugin, &(spec.client_options)(options), options.node.as_ref())?;
    Ok((plugin, client))
}

/// Starts the first working plugin of a search; if none works, returns the error of the first plugin.
fn start(platform: Platform, search: &PluginSearch, options: &PlatformOptions) -> Result<(Plugin, Client), PjrtError> {
    let mut passed = Vec::new();
    for found in &search.found {
        (spec(platform).missing_libraries)(&found.path).iter().for_each(|line| tracing::warn!("{line}"));
        match start_file(&found.path, Some(platform), options) {
            Ok(opened) => {
                passed.iter().for_each(|error| tracing::warn!("skipped a plugin: {error}"));
                return Ok(opened);
            }
            Err(error) => passed.push(error),
        }
    }
    Err(passed.into_iter().next().unwrap_or_else(|| search.not_found()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn platform_choices_parse() {
        assert_eq!("auto".parse(), Ok(Choice::Auto));
        assert_eq!("tpu".parse(), Ok(Choice::Named(Platform::Tpu)));
        assert_eq!("./my.so".parse(), Ok(Choice::File("./my.so".into())));
        assert!("gpu".parse::<Choice>().unwrap_err().contains("auto, cpu, cuda, tpu"));
    }

    #[test]
    fn expected_platform_follows_file_names_and_hardware() {
        let of = |text: &str| expected(&text.parse().expect("a choice"));
        assert_eq!(of("cuda"), Some(Platform::Cuda));
        assert_eq!(of("/a/pjrt_c_api_cpu_plugin.so"), Some(Platform::Cpu));
        assert_eq!(of("/a/libtpu.so"), Some(Platform::Tpu));
        assert_eq!(of("/a/plugin.so"), None);
        let lacks_accelerators = [Platform::Tpu, Platform::Cuda].iter().all(|platform| hardware(*platform).is_err());
        if lacks_accelerators && named_plugin().is_none() {
            assert_eq!(of("auto"), Some(Platform::Cpu));
        }
    }

    #[test]
    fn named_platform_without_hardware_is_an_error() {
        // No machine has both TPUs and NVIDIA GPUs.
        let lacking = [Platform::Tpu, Platform::Cuda]
            .into_iter()
            .find_map(|platform| Some((platform, hardware(platform).err()?)));
        let (platform, why) = lacking.expect("no machine has both");
        let error = open(&Choice::Named(platform), None).unwrap_err().to_string();
        assert!(error.starts_with(&format!("platform {}: {why}", platform.name())), "{error}");
        let error = open(&Choice::File("/no/such.so".into()), None).unwrap_err().to_string();
        assert!(error.starts_with("/no/such.so: cannot load the plugin"), "{error}");
    }
}
