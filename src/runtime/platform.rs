//! Which hardware a run uses: `--platform auto | cpu | cuda | tpu | PATH.so`.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

pub(crate) use super::hardware::{cuda_devices, hardware};
use super::trial::{self, Purpose};
use crate::pjrt::discover::{self, PLUGIN_VARIABLE, Platform, Search};
use crate::pjrt::{Attributes, Client, ClientOptions, CpuOptions, CudaOptions, Error, Node, Plugin};

/// Set to 1, lets several processes run on the CPU, whose plugin has no way from one to another: a rehearsal.
const REHEARSAL: &str = "LTX2_REHEARSE_PROCESSES";

/// The platform asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The best that answers: TPU, then CUDA, then CPU.
    #[default]
    Auto,
    /// This one or an error.
    Named(Platform),
    /// This plugin file or an error.
    File(PathBuf),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Choice::Auto),
            "cpu" => Ok(Choice::Named(Platform::Cpu)),
            "cuda" => Ok(Choice::Named(Platform::Cuda)),
            "tpu" => Ok(Choice::Named(Platform::Tpu)),
            file if file.contains('/') || file.ends_with(".so") => Ok(Choice::File(file.into())),
            other => Err(format!("platform '{other}' is none of auto, cpu, cuda, tpu or a plugin file PATH.so")),
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

/// Errors of opening a platform.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// The plugin was not found, could not be loaded or did not start.
    #[error(transparent)]
    Pjrt(#[from] Error),
    #[error("platform {platform}: {reason}; `--platform auto` uses what is there, `ltx2 doctor` shows it")]
    NoHardware { platform: &'static str, reason: String },
    /// Several processes of a platform that knows one.
    #[error("platform cpu runs in one process: its plugin has no way to others; use cuda or tpu, or --num-processes 1")]
    OneProcess,
    #[error("no platform works: {0}; `ltx2 plugin install cpu` fetches a plugin that runs everywhere")]
    None(String),
}

/// Options of the platforms; each is used by its platform alone.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Options {
    /// Virtual CPU devices; None for one.
    pub(crate) cpu_devices: Option<usize>,
    pub(crate) cuda: CudaOptions,
    /// This process among several.
    pub(crate) node: Option<Node>,
    /// Time for the trial of a new plugin file; none for the default.
    pub(crate) trial: Option<Duration>,
}

/// Opens a platform with `cpu_devices` virtual devices if it is the CPU (None: one).
pub(crate) fn open(choice: &Choice, cpu_devices: Option<usize>) -> Result<(Plugin, Client), PlatformError> {
    open_with(choice, &Options { cpu_devices, ..Options::default() })
}

/// Opens a platform. `auto` logs in one line what it took and why it passed over the others; a named platform never
/// falls back.
pub(crate) fn open_with(choice: &Choice, options: &Options) -> Result<(Plugin, Client), PlatformError> {
    let known = match choice {
        Choice::File(path) => Platform::of_file(path),
        Choice::Named(platform) => Some(*platform),
        Choice::Auto => None,
    };
    let mut options = options.clone();
    if known == Some(Platform::Cpu) && options.node.is_some() {
        if !rehearses("cpu") {
            return Err(PlatformError::OneProcess);
        }
        tracing::warn!("{REHEARSAL}: a rehearsal, in which each process computes all of the work on virtual devices");
        options.node = None;
    }
    let options = &options;
    if let Some(platform) = known {
        // A file that is named like a plugin of a platform needs the platform's hardware as the platform does.
        hardware(platform).map_err(|reason| PlatformError::NoHardware { platform: platform.name(), reason })?;
    }
    match choice {
        Choice::File(path) => Ok(start_file(path, known, options)?),
        Choice::Named(platform) => Ok(start(*platform, &discover::find(*platform, None), options)?),
        Choice::Auto => auto(options),
    }
}

/// The plugin file that `LTX2_PJRT_PLUGIN` names.
fn named_plugin() -> Option<PathBuf> {
    std::env::var_os(PLUGIN_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The first plugin of a platform whose hardware is in this machine.
fn first_plugin(platform: Platform) -> Option<PathBuf> {
    hardware(platform).ok()?;
    discover::find(platform, None).found.into_iter().next().map(|plugin| plugin.path)
}

/// The platform that a choice opens, by this machine's hardware and the names of plugin files; no plugin is loaded. `auto` is the
/// CPU where nothing else can be opened. `None`: the name of the plugin file tells no platform.
pub(crate) fn expected(choice: &Choice) -> Option<Platform> {
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

/// Tries the plugin that a choice starts first with the flags of the environment, without starting it.
///
/// # Errors
/// A flag that the plugin does not know. Other faults are left to [`open_with`].
pub(crate) fn check_flags(choice: &Choice, options: &Options) -> Result<(), PlatformError> {
    let path = match choice {
        Choice::File(path) => Some(path.clone()),
        Choice::Named(platform) => first_plugin(*platform),
        Choice::Auto => named_plugin().or_else(|| Platform::ALL.into_iter().find_map(first_plugin)),
    };
    let is_here = |path: &PathBuf| Platform::of_file(path).is_none_or(|platform| hardware(platform).is_ok());
    match path.filter(is_here).map_or(Ok(()), |path| trial::check(&path, options.trial, Purpose::Run)) {
        Err(error @ Error::Flags { .. }) => Err(error.into()),
        _ => Ok(()),
    }
}

/// Whether each of several processes does all of the work on `platform`: a rehearsal, asked for by the environment. They
/// meet, compare what they run, share a compile cache and end together as on other platforms; no data goes between them.
pub(crate) fn rehearses(platform: &str) -> bool {
    platform == Platform::Cpu.name() && std::env::var(REHEARSAL).is_ok_and(|value| value == "1")
}

fn auto(options: &Options) -> Result<(Plugin, Client), PlatformError> {
    if let Some(path) = named_plugin() {
        let known = Platform::of_file(&path);
        if let Some(platform) = known {
            hardware(platform).map_err(|reason| PlatformError::NoHardware { platform: platform.name(), reason })?;
        }
        let opened = start_file(&path, known, options)?;
        tracing::info!("platform {}: {PLUGIN_VARIABLE} names it", path.display());
        return Ok(opened);
    }
    let mut passed = Vec::new();
    for platform in Platform::ALL {
        if platform == Platform::Cpu && options.node.is_some() {
            passed.push("cpu: it runs in one process, these are several".into());
            continue;
        }
        let hardware = match hardware(platform) {
            Ok(hardware) => hardware,
            Err(reason) => {
                passed.push(format!("{}: {reason}", platform.name()));
                continue;
            }
        };
        match start(platform, &discover::find(platform, None), options) {
            Ok(opened) => {
                let reasons =
                    if passed.is_empty() { String::new() } else { format!("; not {}", passed.join("; not ")) };
                tracing::info!("platform {}: {hardware}{reasons}", platform.name());
                return Ok(opened);
            }
            Err(error) => {
                // Hardware that is there but cannot be used is worth more than a line among the reasons.
                tracing::warn!("{} passed over: {hardware}, but {error}", platform.name());
                passed.push(format!("{}: {error}", platform.name()));
            }
        }
    }
    Err(PlatformError::None(passed.join("; ")))
}

/// Starts a plugin file, with the options of a platform where that is known.
fn start_file(path: &Path, platform: Option<Platform>, options: &Options) -> Result<(Plugin, Client), Error> {
    let plugin = trial::load(path, options.trial, Purpose::Run)?;
    let client = Client::among(&plugin, &client_options(platform, options), options.node.as_ref())?;
    Ok((plugin, client))
}

/// Starts the first plugin of a search that works; otherwise the first's error.
fn start(platform: Platform, search: &Search, options: &Options) -> Result<(Plugin, Client), Error> {
    let mut passed = Vec::new();
    for found in &search.found {
        if platform == Platform::Cuda {
            missing_for_cuda(&found.path).iter().for_each(|line| tracing::warn!("{line}"));
        }
        match start_file(&found.path, Some(platform), options) {
            Ok(opened) => {
                passed.iter().for_each(|error| tracing::warn!("a plugin is passed over: {error}"));
                return Ok(opened);
            }
            Err(error) => passed.push(error),
        }
    }
    Err(passed.into_iter().next().unwrap_or_else(|| search.not_found()))
}

fn client_options(platform: Option<Platform>, options: &Options) -> ClientOptions {
    match platform {
        Some(Platform::Cpu) => {
            ClientOptions::Cpu(CpuOptions { devices: Some(options.cpu_devices.unwrap_or(1)), asynchronous: None })
        }
        Some(Platform::Cuda) => ClientOptions::Cuda(options.cuda.clone()),
        Some(Platform::Tpu) | None => ClientOptions::Named(Attributes::new()),
    }
}

/// Libraries that the CUDA plugin will not find, each with a remedy: neither beside it, where wheels leave it, nor
/// where the system's loader looks.
pub(crate) fn missing_for_cuda(plugin: &Path) -> Vec<String> {
    // site-packages/jax_plugins/xla_cuda13/xla_cuda_plugin.so
    let site = plugin.ancestors().nth(3).map(|site| site.join("nvidia")).unwrap_or_default();
    let beside = |file: &str, folder: &str| {
        let packages = fs::read_dir(&site).into_iter().flatten().flatten();
        packages.map(|package| package.path().join(folder).join(file)).any(|path| path.exists())
    };
    // SAFETY: NVIDIA's libraries; loading one runs its initialisers only, and the plugin loads it right after.
    let loads = |file: &str| unsafe { libloading::Library::new(file) }.map(std::mem::forget).is_ok();
    let programs = || std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect::<Vec<_>>();
    let runs = |file: &str| {
        programs().iter().chain([&PathBuf::from("/usr/local/cuda/bin")]).any(|folder| folder.join(file).exists())
    };
    let pieces = [
        (
            "cuDNN",
            "libcudnn.so.9",
            "attention and convolutions need it",
            beside("libcudnn.so.9", "lib") || loads("libcudnn.so.9"),
        ),
        ("NCCL", "libnccl.so.2", "several devices need it", beside("libnccl.so.2", "lib") || loads("libnccl.so.2")),
        ("ptxas", "ptxas", "compiling needs it", beside("ptxas", "bin") || runs("ptxas")),
    ];
    let missing = pieces.into_iter().filter(|(.., found)| !found);
    missing
        .map(|(name, file, why, _)| {
            format!(
                "{name} ({file}) is neither beside {} nor in the system: {why}; `ltx2 plugin install cuda` fetches it",
                plugin.display()
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices() {
        assert_eq!("auto".parse(), Ok(Choice::Auto));
        assert_eq!("tpu".parse(), Ok(Choice::Named(Platform::Tpu)));
        assert_eq!("./my.so".parse(), Ok(Choice::File("./my.so".into())));
        assert!("gpu".parse::<Choice>().unwrap_err().contains("auto, cpu, cuda, tpu"));
    }

    #[test]
    fn expected_platform_follows_names_and_hardware() {
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
    fn what_the_cuda_plugin_needs_is_looked_for_beside_it() {
        let site = tempfile::tempdir().unwrap();
        let plugin = site.path().join("jax_plugins/xla_cuda13/xla_cuda_plugin.so");
        let give = |path: &str| {
            let path = site.path().join("nvidia").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        give("nccl/lib/libnccl.so.2");
        give("cu13/bin/ptxas");
        // A machine may have cuDNN of its own.
        for line in missing_for_cuda(&plugin) {
            assert!(line.starts_with("cuDNN (libcudnn.so.9) is neither beside"), "{line}");
            assert!(line.ends_with("`ltx2 plugin install cuda` fetches it"), "{line}");
        }
        give("cudnn/lib/libcudnn.so.9");
        assert_eq!(missing_for_cuda(&plugin), Vec::<String>::new());
    }

    #[test]
    fn a_named_platform_without_hardware_is_an_error() {
        // A machine has chips of one maker.
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
