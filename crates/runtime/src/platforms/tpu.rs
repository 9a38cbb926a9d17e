//! Cloud TPUs.

use std::fs;
use std::path::Path;

use super::{CompileFlags, PlatformSpec, TargetDevices, Wheel, wheel};
use ltx2_nn::kernels::{Kernel, Tpu};
use ltx2_nn::{Conv3dLowering, Lowering, RopeForm, StackOrder, WindowForm};
use ltx2_pjrt::{AttributeValue, Attributes, OptionValue};
use ltx2_stablehlo::Program;
use ltx2_xla_analysis::{Chip, Links};

pub(super) fn spec() -> PlatformSpec {
    PlatformSpec {
        description: "Cloud TPU",
        wheels: WHEELS,
        hardware: || match tpu_chips(Path::new("/")) {
            0 => Err("no TPU chip (no /dev/accel0, no Google PCI device under /dev/vfio)".into()),
            count => Ok(format!("{count} TPU chip(s)")),
        },
        loads_without_hardware: false,
        has_slices: true,
        own_keys: &["runtime.libtpu_init_args"],
        target_syntax: || {
            let chips: Vec<&str> = Chip::all().iter().filter(|chip| is_tpu(chip)).map(|chip| &*chip.name).collect();
            let chips = chips.join(", ");
            format!("tpu:CHIP:AxB or tpu:CHIP:AxBxC (append :N for N slices; CHIP is one of {chips})")
        },
        target_example: "tpu:v6e:2x4",
        target_dimensions: &[2, 3],
        target_chip: Some(is_tpu),
        topology: Some(topology),
        probe_topology: Some(|| ("v5e:2x2".into(), Attributes::new())),
        lowering: |toolchain| lowering(&toolchain.kind),
        pinned_version: Libtpu::pinned_version,
        release: Some(|version| Libtpu::parse(version).release().ok_or_else(|| Libtpu::parse(version).to_string())),
        speed_flags,
        flags_variable: Some("LIBTPU_INIT_ARGS"),
        routes_by_coordinates: true,
        tiles_memory: true,
        streams_weights: true,
        ..PlatformSpec::default()
    }
}

/// Returns the lowering for a device kind (`TPU v6 lite` …).
fn lowering(kind: &str) -> Lowering {
    Lowering {
        // The TPU compiler takes minutes for each conv3d.
        conv3d: Conv3dLowering::Taps,
        attention: Kernel::Mosaic(Tpu::from_kind(kind)),
        min_integer_rows: 1024,
        rope: RopeForm::Product,
        windows: WindowForm::Features,
        text_stacks: StackOrder::NarrowTokensLast,
        // With the default tiles of 8 rows, XLA would copy the stacked weights before every execution.
        stack_tiles: (kind == "TPU7x").then_some("T(16,128)(2,1)"),
        ..Lowering::default()
    }
}

fn is_tpu(chip: &Chip) -> bool {
    matches!(chip.links, Links::Torus { .. })
}

fn topology(devices: &TargetDevices) -> (String, Attributes) {
    let slices = (devices.slices > 1).then(|| ("num_slices".into(), AttributeValue::Int(devices.slices as i64)));
    let bounds = devices.vm_bounds.clone().map(|own| ("chips_per_host_bounds".into(), AttributeValue::Ints(own)));
    let name = devices.name.as_deref().unwrap_or_default();
    (format!("{name}:{}", devices.shape_text()), slices.into_iter().chain(bounds).collect())
}

fn speed_flags(kind: &str, version: &str, _: &Program) -> CompileFlags {
    let libtpu = Libtpu::parse(version);
    let (on, fused) = (OptionValue::Bool(true), OptionValue::Bool(libtpu.fuses_gathers(kind)));
    // Fusing one matmul into another crashes libtpu 0.0.42 on v6e if heads are sharded 8 ways.
    let mut flags = vec![("xla_tpu_dot_dot_fusion", OptionValue::Bool(false))];
    // Overlap all-gathers of sharded weights with computation. All of these are off by default.
    flags.extend([
        ("xla_enable_async_all_gather", on.clone()),
        ("xla_tpu_enable_async_collective_fusion", on.clone()),
        ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", fused),
        ("xla_tpu_enable_async_collective_fusion_multiple_steps", on.clone()),
        // Without this option, gathers overlap only with matmuls: a fifth of the bytes that the layout `fsdp-ulysses`
        // gathers then do not overlap with computation.
        ("xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions", on.clone()),
        // Lets the attention kernel overlap with gathers, as matmuls do.
        ("xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call", on.clone()),
        ("xla_tpu_overlap_compute_collective_tc", on.clone()),
    ]);
    if !libtpu.fuses_gathers(kind) && kind.starts_with("TPU v6") {
        // On v6e, the SparseCores run the gathers concurrently with the computation; on TPU7x they do so by default.
        flags.push(("xla_tpu_enable_sparse_core_collective_offload_all_gather", on));
    }
    flags
}

/// Counts the TPU chips below `root` (`/` outside of tests). Chips up to v4 are nodes such as `/dev/accel0`; chips
/// since v5e are Google PCI devices bound to the `vfio-pci` driver. The directory `/dev/accel/` belongs to another
/// kernel subsystem, and Google's other PCI devices use other drivers.
fn tpu_chips(root: &Path) -> usize {
    let entries = |folder: &str| fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
    let numbered = |name: &str, prefix: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    let count = |folder: &str, prefix: &str| {
        entries(folder).filter(|entry| numbered(&entry.file_name().to_string_lossy(), prefix)).count()
    };
    let accel = count("dev", "accel");
    if accel > 0 || count("dev/vfio", "") == 0 {
        return accel;
    }
    let is_tpu = |device: &Path| {
        let google = fs::read_to_string(device.join("vendor")).is_ok_and(|vendor| vendor.trim() == "0x1ae0");
        google && fs::read_link(device.join("driver")).is_ok_and(|driver| driver.ends_with("vfio-pci"))
    };
    entries("sys/bus/pci/devices").filter(|entry| is_tpu(&entry.path())).count()
}

/// libtpu has one wheel per Python version. The library inside does not depend on Python, so any wheel works.
const WHEELS: &[Wheel] = &[Wheel {
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
struct Libtpu(u64);

impl Libtpu {
    /// Releases that this project's programs were compiled with, newest first; the first is the pinned one. 0.0.42.1
    /// was tested only with an earlier version of the programs.
    const TESTED: [(&'static str, Libtpu); 4] = [
        ("0.0.52", Libtpu(1_014_260_217)),
        ("0.0.51", Libtpu(1_003_875_606)),
        ("0.0.46", Libtpu(963_683_785)),
        ("0.0.42.1", Libtpu(933_746_096)),
    ];

    /// Build of a library that does not report its build number. It is treated as the newest build.
    const UNKNOWN: Libtpu = Libtpu(u64::MAX);

    /// Returns the pinned release's platform version, reduced to the part that [`Libtpu::parse`] reads.
    fn pinned_version() -> String {
        format!("cl/{}", Self::TESTED[0].1.0)
    }

    /// Parses the platform version of a TPU client or topology.
    fn parse(platform_version: &str) -> Self {
        let label = platform_version.split_whitespace().find_map(|word| word.strip_prefix("cl/")?.parse().ok());
        label.map_or(Libtpu::UNKNOWN, Libtpu)
    }

    /// Returns the release name of a tested build; `None` for other builds.
    fn release(self) -> Option<&'static str> {
        Self::TESTED.into_iter().find_map(|(release, build)| (build == self).then_some(release))
    }

    /// Returns whether all-gathers can be fused into other operations on this device kind. Builds after June 2026
    /// reject this except on v5e.
    fn fuses_gathers(self, kind: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tpu_chips_are_distinguished_from_other_devices() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        fs::create_dir_all(path("dev/accel")).unwrap();
        fs::create_dir_all(path("dev/vfio")).unwrap();
        fs::write(path("dev/vfio/vfio"), "").unwrap();
        assert_eq!(tpu_chips(root.path()), 0, "the accel subsystem's folder and vfio's control node are no chips");
        fs::write(path("dev/vfio/0"), "").unwrap();
        for (name, vendor, driver) in
            [("tpu", "0x1ae0\n", "vfio-pci"), ("net", "0x1ae0\n", "gvnic"), ("gpu", "0x10de\n", "vfio-pci")]
        {
            let device = path("sys/bus/pci/devices").join(name);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("vendor"), vendor).unwrap();
            std::os::unix::fs::symlink(Path::new("../../drivers").join(driver), device.join("driver")).unwrap();
        }
        assert_eq!(tpu_chips(root.path()), 1);
        fs::write(path("dev/accel0"), "").unwrap();
        fs::write(path("dev/accel1"), "").unwrap();
        assert_eq!(tpu_chips(root.path()), 2);
    }

    #[test]
    fn libtpu_release_is_identified_by_its_build() {
        let says = |build: &str| {
            Libtpu::parse(&format!("megascale+TFRT TPU v5 lite\nBuilt on Jun 17 2026 11:08:48 (1781719728) {build}"))
        };
        assert_eq!(says("cl/933746096").release(), Some("0.0.42.1"));
        assert_eq!(says("cl/1014260217").to_string(), WHEELS[0].version);
        assert_eq!((says("cl/9337460961").release(), Libtpu::parse("").release()), (None, None));
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
        assert_eq!(fuses(Libtpu::parse("a version without a build")), fuses(new));
    }
}
