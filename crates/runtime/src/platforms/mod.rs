//! Properties of the supported platforms; each platform has a file. Callers read a property instead of comparing
//! platform names.

mod cpu;
mod cuda;
mod tpu;

use std::path::Path;
use std::time::Duration;

use super::flags::Toolchain;
pub use cuda::cuda_devices;
use ltx2_base::with_defaults;
use ltx2_nn::Lowering;
use ltx2_pjrt::discover::Platform;
use ltx2_pjrt::{Attributes, GpuOptions, OptionValue, ProcessNode};
use ltx2_stablehlo::Program;
use ltx2_xla_analysis::Chip;

/// Returns the properties of a platform.
pub fn spec(platform: Platform) -> PlatformSpec {
    match platform {
        Platform::Cpu => cpu::spec(),
        Platform::Cuda => cuda::spec(),
        Platform::Tpu => tpu::spec(),
    }
}

/// Returns the properties of the platform that a plugin names. For an unsupported platform, returns the defaults.
pub fn spec_by_name(name: &str) -> PlatformSpec {
    Platform::named(name).map(spec).unwrap_or_default()
}

/// Compile options of XLA, by name.
pub type CompileFlags = Vec<(&'static str, OptionValue)>;

/// Option that disables HLO sharding v3, which Shardy programs in text form do not use. Without the option, each
/// compile prints a warning.
const NO_HLO_SHARDING_V3: (&str, OptionValue) = ("xla_enable_hlo_sharding_v3", OptionValue::Bool(false));

with_defaults! {
    /// Properties of a platform. The defaults apply to plugins of unsupported platforms.
    #[derive(Clone, Copy)]
    pub struct PlatformSpec {
        /// Description in the help of `ltx2 plugin install`.
        pub description: &'static str = "",
        /// Wheels that make up the plugin (Linux, x86-64).
        pub wheels: &'static [Wheel] = &[],
        /// Returns a description of this machine's hardware, without loading a plugin. The error message contains the
        /// reason why the hardware was not found.
        pub hardware: fn() -> Result<String, String> = || Ok(String::new()),
        /// Returns the device kinds of this machine's devices. `None`: known only to the plugin.
        pub device_kinds: Option<fn() -> Result<Vec<String>, String>> = None,
        /// Returns a warning for each library or program that a plugin file needs but that is not installed.
        pub missing_libraries: fn(&Path) -> Vec<String> = |_| Vec::new(),
        /// Whether `ltx2 doctor` loads the plugin on a machine without the hardware.
        pub loads_without_hardware: bool = true,
        /// Whether the devices are virtual devices of the host's processor. Such devices are always present in the
        /// configured number, are slow, and have no chip file (data about a chip for predicting times).
        pub is_host: bool = false,
        /// Whether the plugin cannot communicate between processes.
        pub has_one_process: bool = false,
        /// Whether the devices form slices. If so, a target may end with the number of slices, and the mesh axis
        /// `dcn.data` must have this size.
        pub has_slices: bool = false,
        /// Options of a client.
        pub(crate) client_options: fn(&PlatformOptions) -> Attributes = |_| Attributes::new(),
        /// Configuration keys that this platform reads and not every platform reads.
        pub own_keys: &'static [&'static str] = &[],
        /// Whether programs may run while another thread uploads parameters.
        pub runs_during_transfers: bool = true,

        /// Syntax of compile targets, for error messages.
        pub(crate) target_syntax: fn() -> String = String::new,
        /// Example of a compile target, for error messages.
        pub(crate) target_example: &'static str = "",
        /// Numbers of dimensions that the shape of a target may have.
        pub(crate) target_dimensions: &'static [usize] = &[],
        /// Returns whether a chip belongs to this platform. `None`: targets have no chip.
        pub(crate) target_chip: Option<fn(&Chip) -> bool> = None,
        /// Whether targets are GPUs: the compiler needs the chip's `target_config`, the last dimension of the shape
        /// counts the devices per host, and kernels are selected at compile time if the devices are present.
        pub targets_gpus: bool = false,
        /// Returns the name and options with which the plugin creates a target's topology. `None`: programs are
        /// compiled by a client, for its own devices.
        pub(crate) topology: Option<fn(&TargetDevices) -> (String, Attributes)> = None,
        /// Returns a topology to compile for, without devices, to make the plugin parse its flags. `None`: the flags are
        /// not checked before the plugin starts.
        pub(crate) probe_topology: Option<fn() -> (String, Attributes)> = None,

        /// Whether programs copy weights from host memory while they compute.
        pub streams_weights: bool = false,
        /// Whether buffers in pinned host memory can be backed by memory that this process allocates and maps. Plugins
        /// allocate pinned memory slowly, in pools of up to twice the size needed.
        pub(crate) views_mapped_memory: bool = false,
        /// Returns the lowering for the devices of a compiler.
        pub lowering: fn(&Toolchain) -> Lowering = |_| Lowering::default(),
        /// Returns the part of the pinned plugin's platform version on which compiling depends.
        pub(crate) pinned_version: fn() -> String = String::new,
        /// Returns the plugin release with a given platform version, or an error that describes the release if this
        /// project's programs were not tested with it. `None`: compiling does not depend on the release.
        pub(crate) release: Option<fn(&str) -> Result<&'static str, String>> = None,
        /// Returns the default compile options that results depend on.
        pub(crate) result_flags: fn() -> CompileFlags = Vec::new,
        /// Returns the other default compile options for a device kind, a platform version and a program. They only
        /// affect speed and messages.
        pub(crate) speed_flags: fn(&str, &str, &Program) -> CompileFlags = |_, _, _| vec![NO_HLO_SHARDING_V3],
        /// Returns the options that are added for programs that are traced.
        pub(crate) trace_flags: fn() -> CompileFlags = Vec::new,
        /// Environment variable from which the plugin reads flags, in addition to `XLA_FLAGS`.
        pub(crate) flags_variable: Option<&'static str> = None,

        /// Returns the part of a serialized topology on which compiled code depends, in addition to the device kind.
        /// `None`: compiled code depends only on the device kind.
        pub(crate) machine: Option<fn(&[u8]) -> Vec<u8>> = None,
        /// Whether compiled code depends on the coordinates of the devices, because they determine how it routes data.
        pub(crate) routes_by_coordinates: bool = false,
        /// Whether arrays are stored in tiles along their last dimensions, so that a piece of an array is not
        /// contiguous in memory.
        pub(crate) tiles_memory: bool = false,
        /// Whether executables take long to serialize, so that by default they are written after the first run.
        pub(crate) writes_cache_in_background: bool = true,
        /// Number of runs until a program has its final speed. XLA records a GPU's command buffers in the second run.
        pub warm_up_runs: usize = 2,
        /// Matmul FLOP/s that a device is assumed to reach if its chip is unknown.
        pub(crate) assumed_flops: f64 = 1e12,
    }
}

/// Options of all platforms. Each platform reads only its own options.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlatformOptions {
    /// Number of virtual CPU devices; `None`: 1.
    pub cpu_devices: Option<usize>,
    /// Options of GPU plugins: memory, allocator and visible devices.
    pub gpu: GpuOptions,
    /// Identity of this process in a multi-process run; `None` in a single process.
    pub node: Option<ProcessNode>,
    /// Time limit for the trial load of a new plugin file; `None`: the default.
    pub trial: Option<Duration>,
}

/// Devices of a compile target.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TargetDevices {
    /// Chip name as the compiler knows it; `None` for CPU.
    pub(crate) name: Option<String>,
    /// XLA's description of a GPU; `None` for other platforms.
    pub(crate) target_config: Option<String>,
    /// TPU: chips along each dimension. GPU: partitions, hosts, devices per host. CPU: number of virtual devices.
    pub(crate) shape: Vec<usize>,
    /// Number of TPU slices, which have this shape and are connected by a network.
    pub(crate) slices: usize,
    /// Chips of a VM along each dimension, if they differ from libtpu's default of 2x2x1.
    pub(crate) vm_bounds: Option<Vec<i64>>,
}

impl TargetDevices {
    /// Returns the shape in the syntax of targets: `2x4`.
    pub(crate) fn shape_text(&self) -> String {
        self.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
    }
}

/// A wheel on the Python Package Index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wheel {
    /// Name of the package on the index, for example `libtpu`.
    pub package: &'static str,
    /// Pinned version of the package.
    pub version: &'static str,
    /// Python version to request if the package has one wheel per Python version.
    pub python: Option<&'static str>,
    /// Platform tag in the wheel's file name, for example `manylinux_2_27_x86_64`.
    pub platform: &'static str,
    /// SHA-256 of the wheel file, 64 lower-case hex digits.
    pub sha256: &'static str,
}

const fn wheel(package: &'static str, version: &'static str, platform: &'static str, sha256: &'static str) -> Wheel {
    Wheel { package, version, python: None, platform, sha256 }
}

/// Joins names into text such as `a, b or c`.
pub fn alternatives(names: impl IntoIterator<Item = impl Into<String>>) -> String {
    let names: Vec<String> = names.into_iter().map(Into::into).collect();
    match names.as_slice() {
        [names @ .., last] if !names.is_empty() => format!("{} or {last}", names.join(", ")),
        names => names.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_64_hex_digits() {
        for wheel in Platform::ALL.into_iter().flat_map(|platform| spec(platform).wheels) {
            assert!(wheel.sha256.len() == 64 && wheel.sha256.bytes().all(|b| b.is_ascii_hexdigit()), "{wheel:?}");
        }
    }
}
