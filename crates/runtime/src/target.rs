//! Compile targets, whose devices need not be present: `tpu:v6e:2x4`, `cuda:h200:1x1x4`, `cpu:8`.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::cache::{Cache, CacheError, device_kind};
use super::checksummed_file::sha256;
use super::compile::{EngineOptions, RejectedOptions, compile_options};
use super::error::RuntimeError;
use super::flags::{Toolchain, compute_capability};
use super::platforms::{PlatformOptions, TargetDevices, alternatives, spec};
use super::trial::{self, LoadPurpose};
use ltx2_base::failpoint;
use ltx2_pjrt::discover::{self, Platform};
use ltx2_pjrt::{
    AttributeValue, Client, CompileOptions, Executable, GpuOptions, LoadedExecutable, PjrtError, Plugin, Topology,
};
use ltx2_stablehlo::Program;
use ltx2_xla_analysis::{Chip, Links};

/// Devices to compile for.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    platform: Platform,
    /// Data of the chip, for predicting times.
    chip: Option<Chip>,
    devices: TargetDevices,
}

/// The target text is invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid target '{target}': {why}; use {}, e.g. {}",
    Target::syntax(),
    Platform::ALL.map(|platform| spec(platform).target_example).join(", "))]
pub struct UnknownTarget {
    target: String,
    why: String,
}

impl FromStr for Target {
    type Err = UnknownTarget;

    fn from_str(text: &str) -> Result<Self, UnknownTarget> {
        Target::parse(text, None)
    }
}

impl Target {
    /// Returns the syntax of the targets of all platforms.
    pub fn syntax() -> String {
        alternatives(Platform::ALL.map(|platform| (spec(platform).target_syntax)()))
    }

    /// Returns the names of the platforms whose targets have a chip.
    pub fn platforms_with_chips() -> String {
        let with_chips = Platform::ALL.into_iter().rev().filter(|platform| spec(*platform).target_chip.is_some());
        alternatives(with_chips.map(Platform::name))
    }

    /// Parses a target. If `chip` is set, times are predicted for `chip` instead of the target's own chip. If `chip`
    /// also has the name of the target's GPU, its `target_config` is used to compile.
    ///
    /// # Errors
    /// Returns an error for an unknown platform, chip or shape, or for a GPU whose chip file has no description for
    /// XLA.
    pub fn parse(text: &str, chip: Option<&Chip>) -> Result<Self, UnknownTarget> {
        let fail = |why: String| Err(UnknownTarget { target: text.into(), why });
        let mut parts: Vec<&str> = text.split(':').collect();
        let Some(platform) = Platform::named(parts[0]) else {
            return fail(format!("unknown platform '{}'", parts[0]));
        };
        let spec = spec(platform);
        let mut slices = 1;
        if let Some(count) = parts.get(3).filter(|_| spec.has_slices && parts.len() == 4) {
            slices = match count.parse().ok().filter(|n| (1..=256).contains(n)) {
                Some(n) => n,
                None => return fail(format!("'{count}' is not a valid number of slices")),
            };
            parts.pop();
        }
        let (name, shape) = match (parts.as_slice(), spec.target_chip) {
            ([_, shape], None) => (None, *shape),
            ([_, name, shape], Some(_)) => (Some(*name), *shape),
            _ => return fail("unrecognized form".into()),
        };
        let own = chip.filter(|c| name == Some(c.name.as_str()));
        let named = own.or_else(|| Chip::named(name?).ok());
        let named = named.filter(|c| spec.target_chip.is_some_and(|is_own| is_own(c)));
        if let (Some(name), None) = (name, named) {
            return fail(format!("unknown chip '{name}'"));
        }
        let sizes = shape.split('x').map(|n| n.parse().ok().filter(|n| (1..=4096).contains(n)));
        let sizes: Option<Vec<usize>> = sizes.collect();
        let Some(shape) = sizes.filter(|sizes| spec.target_dimensions.contains(&sizes.len())) else {
            return fail(format!("'{shape}' is not a valid shape"));
        };
        let target_config = named.and_then(|c| c.target_config.clone()).filter(|_| spec.targets_gpus);
        if spec.targets_gpus && target_config.is_none() {
            return fail(format!(
                "the chip file of '{}' has no target_config, which XLA needs for compiling",
                parts[1]
            ));
        }
        let vm_bounds = name.and_then(|name| vm_bounds(name, &shape));
        let devices = TargetDevices { name: name.map(String::from), target_config, shape, slices, vm_bounds };
        Ok(Target { platform, chip: chip.or(named).cloned(), devices })
    }
}

/// Returns the number of chips along each dimension if the slice is a single VM with more chips than libtpu's default
/// of 2x2x1; otherwise `None`.
fn vm_bounds(chip: &str, shape: &[usize]) -> Option<Vec<i64>> {
    let largest = Chip::named(chip).ok()?.single_vm_chips?;
    let chips: usize = shape.iter().product();
    let bounds = || shape.iter().map(|n| *n as i64).chain(std::iter::repeat(1)).take(3).collect();
    (chips > 4 && chips <= largest).then(bounds)
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.platform.name())?;
        self.devices.name.iter().try_for_each(|name| write!(f, "{name}:"))?;
        f.write_str(&self.devices.shape_text())?;
        if self.slices() > 1 { write!(f, ":{}", self.slices()) } else { Ok(()) }
    }
}

/// A target with a loaded plugin that compiles for it.
pub struct OpenTarget {
    /// The target that was opened.
    pub target: Target,
    /// Number of hosts.
    hosts: usize,
    /// Device ids in mesh order.
    pub devices: Vec<i32>,
    /// Kind of the devices as reported by the plugin, for example `TPU v6 lite`.
    pub device_kind: String,
    /// Compute capability of the GPUs; `None`: not GPUs, or not reported.
    compute_capability: Option<String>,
    /// Number of bytes that a program may use on each device. `None`: unknown.
    pub capacity: Option<i64>,
    /// Memory of a device in bytes, as reported by the plugin; the chip file may lower `capacity` below it. `None`: not
    /// reported.
    pub stated_capacity: Option<i64>,
    compiler: Compiler,
    refused: RejectedOptions,
}

enum Compiler {
    Topology(Topology),
    /// A client: for CPU, because its plugin compiles only for its own virtual devices, and for GPUs that are present,
    /// so that the compiler can select kernels.
    Client(Client),
}

/// A program compiled for a target.
pub enum Compiled {
    /// Compiled for absent devices: can be analyzed and serialized, but not run.
    AheadOfTime(Executable),
    /// Compiled for present or virtual devices.
    Loaded(LoadedExecutable),
}

impl std::ops::Deref for Compiled {
    type Target = Executable;

    fn deref(&self) -> &Executable {
        match self {
            Compiled::AheadOfTime(e) => e,
            Compiled::Loaded(e) => e,
        }
    }
}

impl OpenTarget {
    /// Returns the plugin's compiler for these devices.
    pub fn toolchain(&self) -> Toolchain {
        let version = match &self.compiler {
            // A plugin that reports no version is treated as an unknown build.
            Compiler::Topology(topology) => topology.platform_version().unwrap_or_else(|_| String::new()),
            Compiler::Client(client) => client.platform_version().into(),
        };
        let (platform, kind) = (self.target.platform.name().into(), self.device_kind.clone());
        Toolchain { platform, kind, version, compute_capability: self.compute_capability.clone() }
    }

    /// Returns the number of hosts that the devices belong to.
    pub fn hosts(&self) -> usize {
        self.hosts
    }

    /// Returns whether the devices are present. If so, kernels are selected when a program is compiled, otherwise when
    /// it first runs.
    pub fn is_present(&self) -> bool {
        matches!(self.compiler, Compiler::Client(_))
    }
}

impl Target {
    /// Returns the platform whose plugin compiles for the target.
    pub fn platform(&self) -> Platform {
        self.platform
    }

    /// Returns the number of slices, which are connected by a network.
    pub fn slices(&self) -> usize {
        self.devices.slices
    }

    /// Returns the data of the chip, with the target's number of devices per host. `None`: a CPU target without a chip
    /// file.
    pub fn chip(&self) -> Option<Chip> {
        let mut chip = self.chip.clone()?;
        if let (true, Links::Switch { devices_per_host, .. }, Some(&n)) =
            (spec(self.platform).targets_gpus, &mut chip.links, self.devices.shape.last())
        {
            *devices_per_host = n;
        }
        Some(chip)
    }

    /// Returns the compiler, the number of devices, and the bytes that a program may use on each, from chip files
    /// alone; loads no plugin. The compiler is the pinned plugin release, whose platform version is known only for
    /// libtpu.
    pub fn described(&self) -> (Toolchain, usize, Option<i64>) {
        let name = self.devices.name.as_deref().unwrap_or_default();
        let own = self.chip.as_ref().filter(|chip| chip.name == name).or_else(|| Chip::named(name).ok());
        let kind =
            own.and_then(|chip| chip.device_kinds.first().cloned()).unwrap_or_else(|| self.platform.name().into());
        let version = (spec(self.platform).pinned_version)();
        let per_chip = own.and_then(|chip| chip.devices_per_chip).unwrap_or(1);
        let count = self.devices.shape.iter().product::<usize>() * self.slices() * per_chip;
        let capacity = own.into_iter().chain(&self.chip).map(|chip| chip.capacity).min();
        let compute_capability = own.and_then(Chip::compute_capability);
        (Toolchain { platform: self.platform.name().into(), kind, version, compute_capability }, count, capacity)
    }

    fn plugin(&self) -> Result<Plugin, PjrtError> {
        let search = discover::find(self.platform, None);
        trial::load(&search.found.first().ok_or_else(|| search.not_found())?.path, None, LoadPurpose::Compile)
    }

    /// Opens this host's GPUs, without preallocating memory, if they are of the target's kind and numerous enough.
    /// Kernels are then selected at compile time. Otherwise does the same as [`Target::open`].
    pub fn open_present(&self) -> Result<OpenTarget, PjrtError> {
        let absent = self.open()?;
        let spec = spec(self.platform);
        if !spec.targets_gpus || (spec.hardware)().is_err() {
            return Ok(absent);
        }
        let gpu = GpuOptions { preallocate: Some(false), ..GpuOptions::default() };
        let options = (spec.client_options)(&PlatformOptions { gpu, ..PlatformOptions::default() });
        let client = Client::new(&self.plugin()?, &options)?;
        let here = client.devices();
        if here.len() < absent.devices.len() || here.iter().any(|d| d.kind() != absent.device_kind) {
            return Ok(absent);
        }
        let devices = here.iter().take(absent.devices.len()).map(ltx2_pjrt::Device::id).collect();
        Ok(OpenTarget { devices, compiler: Compiler::Client(client), ..absent })
    }

    /// Loads the plugin that compiles for this target and opens its topology.
    ///
    /// # Errors
    /// Returns an error if there is no plugin or it does not support the topology.
    pub fn open(&self) -> Result<OpenTarget, PjrtError> {
        let plugin = self.plugin()?;
        let spec = spec(self.platform);
        let Some(topology) = spec.topology else {
            let options =
                PlatformOptions { cpu_devices: self.devices.shape.first().copied(), ..PlatformOptions::default() };
            let client = Client::new(&plugin, &(spec.client_options)(&options))?;
            return Ok(OpenTarget {
                target: self.clone(),
                hosts: 1,
                devices: client.devices().iter().map(ltx2_pjrt::Device::id).collect(),
                device_kind: client.devices().first().map(|d| d.kind().to_owned()).unwrap_or_default(),
                compute_capability: None,
                capacity: self.chip.as_ref().map(|c| c.capacity),
                stated_capacity: None,
                compiler: Compiler::Client(client),
                refused: RejectedOptions::default(),
            });
        };
        let (name, options) = topology(&self.devices);
        let topology = Topology::new(&plugin, &name, &options)?;
        let described = topology.devices()?;
        let stated = described.first().and_then(|d| match d.attributes.get("device_memory_bytes_limit") {
            Some(AttributeValue::Int(bytes)) => Some(*bytes),
            _ => None,
        });
        Ok(OpenTarget {
            target: self.clone(),
            hosts: described.iter().map(|d| d.process_index).collect::<BTreeSet<_>>().len(),
            device_kind: described.first().map(|d| d.kind.clone()).unwrap_or_default(),
            compute_capability: described.first().and_then(compute_capability),
            devices: described.iter().map(|d| d.id).collect(),
            // For a GPU this is the card's total memory, part of which the driver reserves.
            stated_capacity: stated,
            capacity: [stated, self.chip.as_ref().map(|c| c.capacity)].into_iter().flatten().min(),
            compiler: Compiler::Topology(topology),
            refused: RejectedOptions::default(),
        })
    }
}

impl OpenTarget {
    /// Returns the compile options for these devices, without those that the plugin has rejected so far.
    pub fn known_options(&self, program: &Program, options: &EngineOptions) -> CompileOptions {
        self.refused.without(self.compile_options(program, options))
    }

    /// Returns the compile options for these devices, including options that the plugin may reject.
    pub(super) fn compile_options(&self, program: &Program, options: &EngineOptions) -> CompileOptions {
        compile_options(&self.toolchain(), program, &self.devices, options)
    }

    /// Opens the compile cache in a directory, with the entry names that a run on these devices uses.
    pub fn cache(&self, folder: &Path) -> Result<Cache, CacheError> {
        Cache::new(folder, self.target.platform.name(), &self.topology()?)
    }

    fn topology(&self) -> Result<Topology, PjrtError> {
        match &self.compiler {
            Compiler::Topology(topology) => Ok(topology.clone()),
            Compiler::Client(client) => client.topology(),
        }
    }

    pub(super) fn plugin_path(&self) -> Result<PathBuf, PjrtError> {
        Ok(self.topology()?.plugin().path().to_path_buf())
    }

    /// Returns the properties of the devices on which an optimized module depends, as text: the device kind; for a GPU,
    /// a hash of its `target_config`; for a TPU, the chips per VM if they are not libtpu's default.
    pub(super) fn device_identity(&self) -> Result<String, CacheError> {
        let topology = self.topology()?;
        let kind = device_kind(self.target.platform.name(), &topology, &topology.devices()?)?;
        Ok(match (&self.target.devices.target_config, &self.target.devices.vm_bounds) {
            (Some(config), _) => format!("{kind} {}", &sha256(config.as_bytes())[..16]),
            (_, Some(bounds)) => format!("{kind} {bounds:?}"),
            _ => kind,
        })
    }

    /// Compiles a program with the options that a run on these devices would use. Does not read the compile cache.
    ///
    /// # Errors
    /// Returns the compiler's error, or an error if the plugin rejects an option that must not be omitted.
    pub fn compile(&self, program: &Program, options: &EngineOptions) -> Result<Compiled, RuntimeError> {
        let compile = |o: &CompileOptions| {
            Ok(match &self.compiler {
                Compiler::Topology(topology) => Compiled::AheadOfTime(topology.compile(&program.text, o)?),
                Compiler::Client(client) => Compiled::Loaded(client.compile(&program.text, o)?),
            })
        };
        let (toolchain, asked) = (self.toolchain(), self.compile_options(program, options));
        loop {
            let compiled = || self.refused.compile(&toolchain, &asked, options, compile);
            if let Some(compiled) = failpoint::within("compile", &self.target, compiled)? {
                return Ok(compiled);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_vm_slices_set_vm_bounds() {
        let bounds = |text: &str| text.parse::<Target>().expect(text).devices.vm_bounds;
        for (text, one_vm) in [("tpu:v5e:2x4", [2, 4, 1]), ("tpu:v6e:2x4", [2, 4, 1]), ("tpu:v6e:4x2:2", [4, 2, 1])] {
            assert_eq!(bounds(text), Some(one_vm.to_vec()), "{text}");
        }
        // One VM of libtpu's default size, and slices of several VMs with four chips each.
        let default = ["v5e:1x1", "v5e:2x2", "v6e:2x2", "v5e:4x4", "v6e:4x4", "v6e:8x8", "v5p:2x2x2", "tpu7x:2x2x1"];
        for text in default {
            assert_eq!(bounds(&format!("tpu:{text}")), None, "{text}");
        }
    }

    #[test]
    fn target_is_described_without_loading_a_plugin() {
        let described = |text: &str| {
            let (toolchain, count, capacity) = text.parse::<Target>().expect(text).described();
            (toolchain.platform.clone(), toolchain.kind.clone(), toolchain.tested_release(), count, capacity)
        };
        let capacity = |name: &str| Some(Chip::named(name).expect(name).capacity);
        let release = spec(Platform::Tpu).wheels.first().map(|wheel| wheel.version);
        let tpu = |kind: &str, count, chip| ("tpu".into(), kind.into(), release, count, capacity(chip));
        assert_eq!(described("tpu:v6e:2x4:2"), tpu("TPU v6 lite", 16, "v6e"));
        assert_eq!(described("tpu:tpu7x:2x2x1"), tpu("TPU7x", 8, "tpu7x"));
        let gpus = ("cuda".into(), "NVIDIA H200".into(), None, 4, capacity("h200"));
        assert_eq!(described("cuda:h200:1x1x4"), gpus);
        assert_eq!(described("cpu:8"), ("cpu".into(), "cpu".into(), None, 8, None));
        let capability = |text: &str| text.parse::<Target>().expect(text).described().0.compute_capability;
        assert_eq!((capability("cuda:h200:1x1x4").as_deref(), capability("tpu:v6e:2x4")), (Some("9.0"), None));
    }

    #[test]
    fn targets_parse_and_format() {
        for text in [
            "tpu:v6e:2x4",
            "tpu:v5p:2x2x2",
            "tpu:v5e:4x4",
            "tpu:v6e:2x4:2",
            "tpu:tpu7x:2x2x1",
            "cuda:h200:1x1x4",
            "cpu:8",
        ] {
            let target: Target = text.parse().expect(text);
            assert_eq!(target.to_string(), text);
            assert_eq!(target.chip().is_none(), text.starts_with("cpu"));
        }
        let why = |text: &str| text.parse::<Target>().expect_err(text).why;
        assert_eq!(why("gpu:h200:1x1x4"), "unknown platform 'gpu'");
        assert_eq!(why("tpu:v9:2x2"), "unknown chip 'v9'");
        assert_eq!(why("tpu:h200:2x2"), "unknown chip 'h200'");
        assert_eq!(why("cuda:h200:4"), "'4' is not a valid shape");
        assert_eq!(why("tpu:v6e:2x4:0"), "'0' is not a valid number of slices");
        assert_eq!(why("cpu:0"), "'0' is not a valid shape");
        assert_eq!(why("tpu"), "unrecognized form");
        let message = "tpu:v6e".parse::<Target>().expect_err("no shape").to_string();
        assert!(message.contains("v5e, v5p, v6e, tpu7x") && message.contains("tpu:v6e:2x4"), "{message}");
    }
}
