//! Default XLA options of every compile. The user's flags override them.

use super::platforms::{Flags, NO_HLO_SHARDING_V3, PlatformSpec, spec, spec_by_name};
use ltx2_pjrt::discover::Platform;
use ltx2_pjrt::{Client, OptionValue};
use ltx2_stablehlo::Program;

/// The properties of a compiler that the default options depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Toolchain {
    /// `cpu`, `cuda`, `tpu` …
    pub platform: String,
    /// Device kind as reported by the plugin: `TPU v6 lite` …
    pub kind: String,
    /// Platform version as reported by the plugin.
    pub version: String,
}

impl Toolchain {
    /// Returns the compiler of a client's plugin, for its devices.
    pub fn of(client: &Client) -> Self {
        Toolchain {
            platform: client.platform_name().to_lowercase(),
            kind: client.devices().first().map(|d| d.kind().to_owned()).unwrap_or_default(),
            version: client.platform_version().into(),
        }
    }

    /// Returns the properties of the platform.
    pub fn spec(&self) -> PlatformSpec {
        spec_by_name(&self.platform)
    }

    /// Returns the plugin's release if it is one that this project's programs were tested with.
    pub fn tested_release(&self) -> Option<&'static str> {
        (self.spec().tested_release?)(&self.version)
    }

    /// Whether the platform's plugins are tested by release, and this one is not a tested release.
    pub fn is_untested(&self) -> bool {
        self.spec().tested_release.is_some() && self.tested_release().is_none()
    }
}

impl std::fmt::Display for Toolchain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.spec().version_text)(&self.version) {
            Some(text) => f.write_str(&text),
            None => write!(f, "{} {}", self.platform, self.version.lines().next().unwrap_or_default()),
        }
    }
}

/// Default options that only affect speed, compile messages or tracing. If a plugin rejects one of them, the program is
/// compiled without it. This can change results only as much as another plugin version can: the compiler may select
/// kernels that add in a different order.
fn speed_only() -> impl Iterator<Item = &'static str> {
    let platforms = Platform::ALL.into_iter().flat_map(|platform| spec(platform).speed_flags).copied();
    // Only suppresses a warning.
    platforms.chain([NO_HLO_SHARDING_V3.0])
}

/// Whether a default option only affects speed, compile messages or tracing.
pub(super) fn is_speed_only(option: &str) -> bool {
    speed_only().any(|name| name == option)
}

/// Returns the default options for compiling a program.
pub fn defaults(toolchain: &Toolchain, program: &Program) -> Flags {
    // Keeps the roundings that the program specifies: CUDA otherwise deletes f32 -> bf16 -> f32 pairs.
    let mut flags = vec![("xla_allow_excess_precision", OptionValue::Bool(false))];
    flags.extend((toolchain.spec().flags)(&toolchain.kind, &toolchain.version, program));
    flags
}

/// Returns the options that are added to [`defaults`] for programs that are traced.
pub fn trace_options(platform: &str) -> Flags {
    (spec_by_name(platform).trace_flags)()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ltx2_stablehlo::{Builder, DType, Mesh, Sharding, Type};

    /// Builds a program in which two devices exchange `rows` rows of 4 KiB.
    fn passes(rows: usize) -> Program {
        let b = Builder::new("f").with_mesh(Mesh::new(&[("context", 2)]));
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
        assert!(speed_only().all(|name| all.contains(name)), "every listed option is a default");
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
