//! Table of supported plugins: packages, versions and checksums.

use ltx2_pjrt::discover::Platform;

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

/// Returns the wheels that make up a platform's plugin (Linux, x86-64).
pub const fn wheels(platform: Platform) -> &'static [Wheel] {
    match platform {
        Platform::Cpu => CPU,
        Platform::Tpu => TPU,
        Platform::Cuda => CUDA,
    }
}

const CPU: &[Wheel] = &[wheel(
    "lammps-jax-pjrt-cpu",
    "0.11.2",
    "manylinux_2_27_x86_64",
    "1319390d948b39f69f7dade496b7c385149d9ca6097a6b62114da113216d9ad1",
)];

/// libtpu has one wheel per Python version. The library inside does not depend on Python, so any wheel works.
const TPU: &[Wheel] = &[Wheel {
    python: Some("3.11"),
    ..wheel(
        "libtpu",
        Libtpu::TESTED[0].0,
        "manylinux_2_31_x86_64",
        "f5e2e596eaea9357fbb5a6755a7a9007c6ab75bfde4a55191b03eff402971140",
    )
}];

/// A libtpu build, identified by its changelist number; later builds have larger numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Libtpu(u64);

impl Libtpu {
    /// Releases that this project's programs were compiled with, newest first; the first is the pinned one. 0.0.42.1
    /// was tested only with an earlier version of the programs.
    const TESTED: [(&'static str, Libtpu); 4] = [
        ("0.0.52", Libtpu(1_014_260_217)),
        ("0.0.51", Libtpu(1_003_875_606)),
        ("0.0.46", Libtpu(963_683_785)),
        ("0.0.42.1", Libtpu(933_746_096)),
    ];

    /// A library that does not report its build; treated as the newest.
    const UNKNOWN: Libtpu = Libtpu(u64::MAX);

    /// Returns the pinned release's platform version, reduced to the part that [`Libtpu::of`] reads.
    pub(crate) fn pinned_version() -> String {
        format!("cl/{}", Self::TESTED[0].1.0)
    }

    /// Parses the platform version of a TPU client or topology.
    pub(crate) fn of(platform_version: &str) -> Self {
        let label = platform_version.split_whitespace().find_map(|word| word.strip_prefix("cl/")?.parse().ok());
        label.map_or(Libtpu::UNKNOWN, Libtpu)
    }

    /// Returns the release name of a tested build; `None` for other builds.
    pub(crate) fn release(self) -> Option<&'static str> {
        Self::TESTED.into_iter().find_map(|(release, build)| (build == self).then_some(release))
    }

    /// Whether all-gathers can be fused into other operations on this device kind. Builds after June 2026 reject this
    /// except on v5e.
    pub(crate) fn fuses_gathers(self, kind: &str) -> bool {
        const LAST_ON_ALL: Libtpu = Libtpu::TESTED[3].1;
        self <= LAST_ON_ALL || matches!(kind, "TPU v5 lite" | "TPU v5e")
    }
}

impl std::fmt::Display for Libtpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.release() {
            Some(release) => f.write_str(release),
            None if *self == Libtpu::UNKNOWN => f.write_str("(unknown build)"),
            None => write!(f, "build cl/{}", self.0),
        }
    }
}

/// CUDA 13.0, which needs a driver of the 580 series or newer. The compiler packages (nvcc, nvvm, crt) are needed to
/// compile ahead of time, also without a device.
const CUDA: &[Wheel] = &[
    wheel(
        "jax-cuda13-pjrt",
        "0.11.2",
        "manylinux_2_27_x86_64",
        "e5ff589d43064913bb74027682d89639c7ea48f9f81c2bae6fc75117e913f93e",
    ),
    wheel(
        "nvidia-cublas",
        "13.1.0.3",
        "manylinux_2_27_x86_64",
        "ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171",
    ),
    wheel(
        "nvidia-cuda-cupti",
        "13.0.85",
        "manylinux_2_25_x86_64",
        "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
    ),
    wheel(
        "nvidia-cuda-nvrtc",
        "13.0.88",
        "manylinux2010_x86_64",
        "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
    ),
    wheel(
        "nvidia-cuda-runtime",
        "13.0.96",
        "manylinux2014_x86_64",
        "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    ),
    wheel(
        "nvidia-cudnn-cu13",
        "9.19.0.56",
        "manylinux_2_27_x86_64",
        "d20e1734305e9d68889a96e3f35094d733ff1f83932ebe462753973e53a572bf",
    ),
    wheel(
        "nvidia-cufft",
        "12.0.0.61",
        "manylinux2014_x86_64",
        "6c44f692dce8fd5ffd3e3df134b6cdb9c2f72d99cf40b62c32dde45eea9ddad3",
    ),
    wheel(
        "nvidia-cusolver",
        "12.0.4.66",
        "manylinux_2_27_x86_64",
        "0a759da5dea5c0ea10fd307de75cdeb59e7ea4fcb8add0924859b944babf1112",
    ),
    wheel(
        "nvidia-cusparse",
        "12.6.3.3",
        "manylinux2014_x86_64",
        "2b3c89c88d01ee0e477cb7f82ef60a11a4bcd57b6b87c33f789350b59759360b",
    ),
    wheel(
        "nvidia-nccl-cu13",
        "2.28.9",
        "manylinux_2_18_x86_64",
        "e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42",
    ),
    wheel(
        "nvidia-nvjitlink",
        "13.0.88",
        "manylinux2010_x86_64",
        "13a74f429e23b921c1109976abefacc69835f2f433ebd323d3946e11d804e47b",
    ),
    wheel(
        "nvidia-nvshmem-cu13",
        "3.4.5",
        "manylinux2014_x86_64",
        "290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80",
    ),
    wheel(
        "nvidia-cuda-nvcc",
        "13.0.88",
        "manylinux2014_x86_64",
        "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
    ),
    wheel(
        "nvidia-nvvm",
        "13.0.88",
        "manylinux2010_x86_64",
        "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
    ),
    wheel(
        "nvidia-cuda-crt",
        "13.0.88",
        "manylinux2014_x86_64",
        "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtpu_release_is_identified_by_its_build() {
        let says = |build: &str| {
            Libtpu::of(&format!("megascale+TFRT TPU v5 lite\nBuilt on Jun 17 2026 11:08:48 (1781719728) {build}"))
        };
        assert_eq!(says("cl/933746096").release(), Some("0.0.42.1"));
        assert_eq!(says("cl/1014260217").to_string(), TPU[0].version);
        assert_eq!((says("cl/9337460961").release(), Libtpu::of("").release()), (None, None));
        assert_eq!(says("cl/970057490").to_string(), "build cl/970057490");
        assert_eq!(says("").to_string(), "(unknown build)");
    }

    #[test]
    fn newer_builds_fuse_gathers_only_on_v5e() {
        let [new, _, after, old] = Libtpu::TESTED.map(|(_, build)| build);
        let fuses =
            |build: Libtpu| ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"].map(|kind| build.fuses_gathers(kind));
        assert_eq!(fuses(old), [true; 4]);
        assert_eq!([fuses(new), fuses(after)], [[true, false, false, false]; 2]);
        assert_eq!(fuses(Libtpu(970_057_490)), fuses(new));
        assert_eq!(fuses(Libtpu::of("a version without a build")), fuses(new));
    }

    #[test]
    fn checksums_are_64_hex_digits() {
        for wheel in Platform::ALL.into_iter().flat_map(wheels) {
            assert!(wheel.sha256.len() == 64 && wheel.sha256.bytes().all(|b| b.is_ascii_hexdigit()), "{wheel:?}");
        }
    }
}
