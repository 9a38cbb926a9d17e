//! NVIDIA GPUs.

#![allow(unsafe_code)] // Calls the CUDA driver.

use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};

use super::{CompileFlags, NO_HLO_SHARDING_V3, PlatformSpec, TargetDevices, Wheel, wheel};
use crate::flags::Toolchain;
use ltx2_nn::kernels::Kernel;
use ltx2_nn::{Lowering, RopeForm, RowProductForm, StackOrder};
use ltx2_pjrt::{AttributeValue, Attributes, OptionValue, with_sources};
use ltx2_stablehlo::{MemorySpace, Program};
use ltx2_xla_analysis::{Chip, Links};

pub(super) fn spec() -> PlatformSpec {
    PlatformSpec {
        description: "NVIDIA GPUs (CUDA 13, driver 580 or newer; about 3 GB unpacked)",
        wheels: WHEELS,
        hardware: || cuda_devices().map(|names| format!("{} NVIDIA device(s)", names.len())),
        device_kinds: Some(cuda_devices),
        missing_libraries,
        client_options: |options| options.gpu.to_attributes(options.node.as_ref()),
        own_keys: &["runtime.memory_fraction", "runtime.visible_devices", "runtime.distributed.devices_per_process"],
        // On the first run of a program from the compile cache, cuDNN restores its kernels by capturing a stream, and
        // concurrent transfers then cause errors, hangs or crashes (seen with jax-cuda13-pjrt 0.11.2 on an H200).
        runs_during_transfers: false,
        target_syntax: || "cuda:h200:PARTITIONSxHOSTSxDEVICES".into(),
        target_example: "cuda:h200:1x1x4",
        target_dimensions: &[3],
        target_chip: Some(|chip| !matches!(chip.links, Links::Torus { .. })),
        targets_gpus: true,
        topology: Some(topology),
        probe_topology: Some(|| {
            let target_config = Chip::all().iter().find_map(|chip| chip.target_config.clone());
            let (name, shape) = (Some("gpu".into()), vec![1; 3]);
            topology(&TargetDevices { name, target_config, shape, slices: 1, vm_bounds: None })
        }),
        streams_weights: true,
        views_mapped_memory: true,
        lowering,
        // Selects the first applicable kernel instead of measuring which one is fastest, so that a recompiled program
        // gives bitwise identical results.
        result_flags: || vec![("xla_gpu_deterministic_ops", OptionValue::Bool(true))],
        speed_flags,
        // A kernel launched from a CUDA graph does not report its operation, so this sets a minimum graph size that no
        // graph reaches. (Compile options cannot clear the list of commands that graphs may contain.)
        trace_flags: || vec![("xla_gpu_graph_min_graph_size", OptionValue::Int(i64::from(i32::MAX)))],
        ..PlatformSpec::default()
    }
}

fn topology(devices: &TargetDevices) -> (String, Attributes) {
    let options =
        [("target_config", devices.target_config.clone().unwrap_or_default()), ("topology", devices.shape_text())];
    let options = options.map(|(name, value)| (name.to_string(), AttributeValue::Text(value)));
    (devices.name.clone().unwrap_or_default(), options.into())
}

/// Major compute capability from which cuDNN's fused attention and XLA's Triton compiler support a GPU (Ampere).
const FUSED_KERNELS: u32 = 8;

/// Returns the lowering for the GPUs of a compiler. Older GPUs, of which CUDA 13 supports Turing (7.5), use XLA
/// operations instead of fused kernels. An unknown compute capability counts as new enough: the plugin reports the
/// compute capability of every device, so it is unknown only before the plugin is opened. A kernel that a GPU does not
/// support is an error of the compiler, never a wrong result.
fn lowering(toolchain: &Toolchain) -> Lowering {
    let newest = Lowering {
        attention: Kernel::Cudnn { required: false },
        sequence_unit: 8,
        text_stacks: StackOrder::TokensHeads,
        fuse_epilogues: true,
        integer_sums: true,
        rotates_by_kernel: true,
        rope: RopeForm::Reversal,
        pads_by_index: true,
        unroll_layers: true,
        row_products: RowProductForm::Kernel,
        ..Lowering::default()
    };
    let major = toolchain.compute_capability.as_ref().and_then(|text| text.split('.').next()?.parse::<u32>().ok());
    match major.is_some_and(|major| major < FUSED_KERNELS) {
        true => {
            Lowering { attention: Kernel::Plain, rotates_by_kernel: false, row_products: RowProductForm::Sum, ..newest }
        }
        false => newest,
    }
}

/// Size of a collective permute in bytes from which a copy engine is assumed to be faster than NCCL's kernel. `ltx2
/// bench --micro` on H100s measured 37 us (NCCL: 31 us) at 4 MiB, and 58 us (NCCL: 83 us) at 16 MiB.
const COPY_ENGINE_BYTES: usize = 8 << 20;

/// Number of copies from host memory that the scheduler may have in flight at a time. It assumes that each copy takes as
/// long as five matmuls, so with its default of two, the copies of a block appear to take longer than the block. It then
/// schedules most copies of a step before the first matmul, which waits for them.
const COPIES_IN_FLIGHT: i64 = 64;

fn speed_flags(_: &str, _: &str, program: &Program) -> CompileFlags {
    let on = OptionValue::Bool(true);
    let mut flags = vec![NO_HLO_SHARDING_V3];
    flags.extend([
        // Otherwise 3D convolutions are compiled channels-first, and cuDNN transposes every tensor twice.
        ("xla_gpu_force_conv_nhwc", on.clone()),
        // cuBLAS fuses bias and GELU into the matmul; Triton's matmuls leave them to separate kernels.
        ("xla_gpu_enable_triton_gemm", OptionValue::Bool(false)),
    ]);
    if program.devices() > 1 {
        // Overlap the transfers of keys and values with the computation of the queries, and with each other.
        flags.extend([
            ("xla_gpu_enable_latency_hiding_scheduler", on),
            ("xla_gpu_experimental_parallel_collective_overlap_limit", OptionValue::Int(2)),
        ]);
    }
    if program.arguments.iter().any(|argument| argument.memory == MemorySpace::PinnedHost) {
        flags.push(("xla_gpu_experimental_parallel_async_compute_limit", OptionValue::Int(COPIES_IN_FLIGHT)));
    }
    if program.smallest_permute.is_some_and(|bytes| bytes >= COPY_ENGINE_BYTES) {
        // The option applies to all permutes of a program. Those of ring attention are large; those of a decoder's halo
        // exchange are not. Unlike NCCL's kernels, copy engines also leave the multiprocessors free for concurrent
        // work.
        let engines = OptionValue::Text("COLLECTIVES_PEER_MEMORY".into());
        flags.push(("xla_gpu_collective_permute_mode", engines));
    }
    flags
}

/// Returns the names of the NVIDIA devices that the driver lists, which are the same as the device kinds that the CUDA
/// plugin reports.
pub fn cuda_devices() -> Result<Vec<String>, String> {
    // Without a device node, the kernel driver is missing, even if the driver library is installed. WSL has /dev/dxg
    // instead.
    if !["/dev/nvidiactl", "/dev/dxg"].iter().any(|node| Path::new(node).exists()) {
        return Err("no NVIDIA driver (no /dev/nvidiactl)".into());
    }
    // SAFETY: this is the NVIDIA driver's library; loading it runs only its initializers.
    let library = unsafe { libloading::Library::new("libcuda.so.1") };
    let library = library.map_err(|e| format!("cannot load the NVIDIA driver library: {}", with_sources(&e)))?;
    let missing = |_| "libcuda.so.1 is not a valid NVIDIA driver library (missing CUDA functions)".to_owned();
    let mut names = Vec::new();
    // SAFETY: these are the signatures of the CUDA driver API; the length passed with `name` is within its buffer.
    let status = unsafe {
        let init = library.get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit\0").map_err(missing)?;
        let devices =
            library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"cuDeviceGetCount\0").map_err(missing)?;
        let name_of = library
            .get::<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int>(b"cuDeviceGetName\0")
            .map_err(missing)?;
        let mut count: c_int = 0;
        let mut status = init(0);
        if status == 0 {
            status = devices(&mut count);
        }
        for device in 0..count {
            let mut name: [c_char; 256] = [0; 256];
            if status == 0 {
                status = name_of(name.as_mut_ptr(), 255, device);
            }
            names.push(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned());
        }
        status
    };
    // After cuInit the driver has threads and state, so it stays loaded; the plugin needs it anyway.
    std::mem::forget(library);
    match status {
        0 if !names.is_empty() => Ok(names),
        0 => Err("the NVIDIA driver found no device".into()),
        status => Err(format!("the NVIDIA driver returned CUDA error {status}")),
    }
}

/// Returns a warning for each library or program that the CUDA plugin needs but that is not installed. Searches the
/// wheels next to the plugin, the system's library path and `PATH`.
fn missing_libraries(plugin: &Path) -> Vec<String> {
    // site-packages/jax_plugins/xla_cuda13/xla_cuda_plugin.so
    let site = plugin.ancestors().nth(3).map(|site| site.join("nvidia")).unwrap_or_default();
    let is_next_to = |file: &str, folder: &str| {
        let packages = fs::read_dir(&site).into_iter().flatten().flatten();
        packages.map(|package| package.path().join(folder).join(file)).any(|path| path.exists())
    };
    // SAFETY: these are NVIDIA's libraries; loading one runs only its initializers, and the plugin loads it right
    // after.
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
            is_next_to("libcudnn.so.9", "lib") || loads("libcudnn.so.9"),
        ),
        (
            "NCCL",
            "libnccl.so.2",
            "several devices need it for collectives",
            is_next_to("libnccl.so.2", "lib") || loads("libnccl.so.2"),
        ),
        ("ptxas", "ptxas", "compiling needs it", is_next_to("ptxas", "bin") || runs("ptxas")),
    ];
    let missing = pieces.into_iter().filter(|(.., found)| !found);
    missing
        .map(|(name, file, why, _)| {
            format!(
                "{name} ({file}) not found next to {} or on the system: {why}; run `ltx2 plugin install cuda`",
                plugin.display()
            )
        })
        .collect()
}

/// Wheels for CUDA 13.0, which needs a driver of the 580 series or newer. Compiling ahead of time needs the compiler
/// packages (nvcc, nvvm, crt), even without a device.
const WHEELS: &[Wheel] = &[
    wheel(
        "jax-cuda13-pjrt",
        "0.12.0.1",
        "manylinux_2_27_x86_64",
        "5899bb6177eda86ea532afb9a26794f2bdd04966f6a01f9028266b16c2b6cf90",
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
    fn fused_kernels_need_compute_capability_8() {
        let of = |capability: Option<&str>| {
            lowering(&Toolchain {
                compute_capability: capability.map(Into::into),
                ..Toolchain::of_kind("cuda", "NVIDIA T4")
            })
        };
        for capability in [Some("8.0"), Some("8.9"), Some("9.0"), Some("10.0"), Some("12.0a"), None] {
            let newer = of(capability);
            let cudnn = Kernel::Cudnn { required: false };
            assert_eq!((newer.attention, newer.rotates_by_kernel), (cudnn, true), "{capability:?}");
        }
        for capability in ["7.0", "7.5"] {
            let older = of(Some(capability));
            assert_eq!((older.attention, older.rotates_by_kernel), (Kernel::Plain, false), "{capability}");
            assert!(older.integer_sums && older.unroll_layers, "the other choices are those of CUDA");
        }
    }

    #[test]
    fn cuda_libraries_are_searched_next_to_the_plugin() {
        let site = tempfile::tempdir().unwrap();
        let plugin = site.path().join("jax_plugins/xla_cuda13/xla_cuda_plugin.so");
        let give = |path: &str| {
            let path = site.path().join("nvidia").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        give("nccl/lib/libnccl.so.2");
        give("cu13/bin/ptxas");
        // The machine may have a system-wide cuDNN.
        for line in missing_libraries(&plugin) {
            assert!(line.starts_with("cuDNN (libcudnn.so.9) not found next to"), "{line}");
            assert!(line.ends_with("; run `ltx2 plugin install cuda`"), "{line}");
        }
        give("cudnn/lib/libcudnn.so.9");
        assert_eq!(missing_libraries(&plugin), Vec::<String>::new());
    }
}
