//! Default XLA options of every compile. The user's flags override them.

use super::platforms::{CompileFlags, PlatformSpec, spec, spec_by_name};
use ltx2_pjrt::discover::Platform;
use ltx2_pjrt::{Client, Device, DeviceDescription, OptionValue};
use ltx2_stablehlo::Program;

/// The properties of a compiler that the default options depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Toolchain {
    /// Platform name: `cpu`, `cuda`, `tpu` …
    pub platform: String,
    /// Device kind as reported by the plugin: `TPU v6 lite` …
    pub kind: String,
    /// Platform version as reported by the plugin.
    pub version: String,
    /// Compute capability of a GPU, such as `9.0`. `None`: not a GPU, or not reported.
    pub compute_capability: Option<String>,
}

impl Toolchain {
    /// Returns the properties of the compiler in a client's plugin, for the client's devices.
    pub fn from_client(client: &Client) -> Self {
        let device = client.devices().first().map(Device::description);
        Toolchain {
            platform: client.platform_name().to_lowercase(),
            kind: device.map(|d| d.kind.clone()).unwrap_or_default(),
            version: client.platform_version().into(),
            compute_capability: device.and_then(compute_capability),
        }
    }

    /// Returns the properties of a compiler of unknown version, for devices of which only the kind is known.
    pub fn of_kind(platform: &str, kind: &str) -> Self {
        Toolchain { platform: platform.into(), kind: kind.into(), ..Toolchain::default() }
    }

    /// Returns the properties of the platform.
    pub fn spec(&self) -> PlatformSpec {
        spec_by_name(&self.platform)
    }

    /// Returns the plugin's release if it is one that this project's programs were tested with.
    pub fn tested_release(&self) -> Option<&'static str> {
        (self.spec().release?)(&self.version).ok()
    }

    /// Returns whether compiling depends on the plugin's release, and this release is not tested.
    pub fn is_untested(&self) -> bool {
        self.spec().release.is_some_and(|release| release(&self.version).is_err())
    }
}

/// Returns the compute capability of a device; `None`: the plugin does not report it.
pub(super) fn compute_capability(device: &DeviceDescription) -> Option<String> {
    device.attributes.get("compute_capability").map(ToString::to_string)
}

impl std::fmt::Display for Toolchain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let spec = self.spec();
        match spec.release.map(|release| release(&self.version)) {
            Some(release) => write!(f, "{} {}", spec.wheels[0].package, release.map_or_else(|text| text, String::from)),
            None => write!(f, "{} {}", self.platform, self.version.lines().next().unwrap_or_default()),
        }
    }
}

/// XLA option that, if false, keeps all roundings in the program. Otherwise CUDA removes conversions from f32 to bf16
/// and back.
const EXCESS_PRECISION: &str = "xla_allow_excess_precision";

/// Returns whether a default option only affects speed, compile messages or tracing. If a plugin rejects such an
/// option, the program is compiled without it. Compiling without it can change results no more than another plugin
/// version does: the compiler may select kernels that add in a different order.
pub(super) fn is_speed_only(option: &str) -> bool {
    let mut needed = Platform::ALL.into_iter().flat_map(|platform| (spec(platform).result_flags)());
    option != EXCESS_PRECISION && needed.all(|(name, _)| name != option)
}

/// Returns the default options for compiling a program.
pub fn defaults(toolchain: &Toolchain, program: &Program) -> CompileFlags {
    let spec = toolchain.spec();
    let mut flags = vec![(EXCESS_PRECISION, OptionValue::Bool(false))];
    flags.extend((spec.result_flags)());
    flags.extend((spec.speed_flags)(&toolchain.kind, &toolchain.version, program));
    flags
}

/// Returns the options that are added to [`defaults`] for programs that are traced.
pub fn trace_options(platform: &str) -> CompileFlags {
    (spec_by_name(platform).trace_flags)()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ltx2_stablehlo::{Builder, DType, DeviceMesh, Sharding, Type};

    /// Builds a program in which two devices exchange `rows` rows of 4 KiB.
    fn passes(rows: usize) -> Program {
        let b = Builder::new("f").with_mesh(DeviceMesh::new(&[("context", 2)]));
        let x = b.argument("x", Type::new(DType::F32, [2 * rows, 1024]));
        let split = Sharding::new(&[&["context"], &[]]);
        let y = b.manual(&[(&x, split.clone())], &[split], |v| vec![v[0].collective_permute(&[(0, 1), (1, 0)])]);
        b.finish(&[("y", &y[0])]).expect("builds")
    }

    #[test]
    fn large_permutes_use_copy_engines() {
        let toolchain = Toolchain { platform: "cuda".into(), ..Toolchain::default() };
        for (mebibytes, copied) in [(7, false), (8, true)] {
            let own = defaults(&toolchain, &passes(mebibytes << 8));
            assert_eq!(
                own.iter().any(|(name, _)| *name == "xla_gpu_collective_permute_mode"),
                copied,
                "{mebibytes} MiB"
            );
        }
    }

    #[test]
    fn options_that_results_depend_on_are_never_dropped() {
        let toolchain = |platform: &str, kind: &str| Toolchain {
            platform: platform.into(),
            kind: kind.into(),
            version: "cl/1014260217".into(),
            ..Toolchain::default()
        };
        let each = [("cpu", "cpu"), ("cuda", "NVIDIA H200"), ("tpu", "TPU v5"), ("tpu", "TPU v6 lite")];
        let all = each.into_iter().flat_map(|(platform, kind)| {
            let own = defaults(&toolchain(platform, kind), &passes(2048)).into_iter().chain(trace_options(platform));
            own.map(|(name, _)| name)
        });
        let all: std::collections::BTreeSet<&str> = all.collect();
        let needed: Vec<&&str> = all.iter().filter(|name| !is_speed_only(name)).collect();
        let numbers =
            ["xla_allow_excess_precision", "xla_cpu_experimental_ynn_fusion_type", "xla_gpu_deterministic_ops"];
        assert_eq!(needed, numbers.each_ref());
    }

    /// Checks the flag instead of a program's results, because only CUDA's compiler removes an explicit rounding (f32
    /// to bf16 to f32) without the flag.
    #[test]
    fn explicit_roundings_are_kept_on_every_platform() {
        for platform in Platform::ALL.map(Platform::name) {
            let toolchain = Toolchain { platform: platform.into(), ..Toolchain::default() };
            let flag =
                defaults(&toolchain, &passes(1)).into_iter().find(|(name, _)| *name == "xla_allow_excess_precision");
            assert_eq!(flag.map(|(_, value)| value), Some(OptionValue::Bool(false)), "{platform}");
        }
    }
}
