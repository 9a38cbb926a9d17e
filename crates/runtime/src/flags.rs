//! Default XLA options of every compile, by platform, each with its reason. The user's flags override them.

use super::plugins::Libtpu;
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

    /// Returns the libtpu release if it is one that this project's programs were tested with.
    pub fn tested_libtpu(&self) -> Option<&'static str> {
        Some(&self.version).filter(|_| self.platform == "tpu").and_then(|version| Libtpu::of(version).release())
    }
}

impl std::fmt::Display for Toolchain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.platform.as_str() {
            "tpu" => write!(f, "libtpu {}", Libtpu::of(&self.version)),
            other => write!(f, "{other} {}", self.version.lines().next().unwrap_or_default()),
        }
    }
}

/// Default options that affect speed, compile messages or tracing. If a plugin rejects one of them, the program is
/// compiled without it. This can change results only as much as another plugin version can: the compiler may select
/// kernels that add in a different order.
const SPEED_ONLY: [&str; 16] = [
    // Only suppresses a warning.
    "xla_enable_hlo_sharding_v3",
    "xla_gpu_force_conv_nhwc",
    "xla_gpu_enable_triton_gemm",
    "xla_gpu_enable_latency_hiding_scheduler",
    "xla_gpu_experimental_parallel_collective_overlap_limit",
    "xla_gpu_collective_permute_mode",
    "xla_gpu_graph_min_graph_size",
    "xla_tpu_dot_dot_fusion",
    "xla_enable_async_all_gather",
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions",
    "xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call",
    "xla_tpu_overlap_compute_collective_tc",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather",
];

/// Whether the option only affects speed, compile messages or tracing; see [`SPEED_ONLY`].
pub(super) fn is_speed_only(option: &str) -> bool {
    SPEED_ONLY.contains(&option)
}

/// Permute size in bytes from which a copy engine is assumed to be faster than NCCL's kernel. Measured: 37 us against
/// NCCL's 31 us at 4 MiB, 58 us against 83 us at 16 MiB (`ltx2 bench --micro`, H100s).
const COPY_ENGINE_BYTES: usize = 8 << 20;

/// Returns the default options for compiling a program.
pub fn defaults(toolchain: &Toolchain, program: &Program) -> Vec<(&'static str, OptionValue)> {
    let platform = toolchain.platform.as_str();
    let on = OptionValue::Bool(true);
    // Keeps the roundings that the program specifies: CUDA otherwise deletes f32 -> bf16 -> f32 pairs.
    let mut flags = vec![("xla_allow_excess_precision", OptionValue::Bool(false))];
    if platform != "tpu" {
        // Shardy programs in text form do not use HLO sharding v3; without this option, each compile prints a warning.
        flags.push(("xla_enable_hlo_sharding_v3", OptionValue::Bool(false)));
    }
    match platform {
        "cpu" => {
            // Limit the YNN library to individual matmuls, because its fusions change results: sums depend on the
            // number of rows, a GELU fused into a matmul uses a different polynomial from XLA's, and which operations
            // are fused depends on whether the samples' matmuls are adjacent in the program.
            let products = OptionValue::Text("LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT".into());
            flags.push(("xla_cpu_experimental_ynn_fusion_type", products));
        }
        "tpu" => flags.extend(of_tpu(Libtpu::of(&toolchain.version), &toolchain.kind)),
        "cuda" => {
            flags.extend([
                // Otherwise 3D convolutions are compiled channels-first, and cuDNN transposes every tensor twice.
                ("xla_gpu_force_conv_nhwc", on.clone()),
                // cuBLAS fuses bias and GELU into the matmul; Triton's matmuls leave them to separate kernels.
                ("xla_gpu_enable_triton_gemm", OptionValue::Bool(false)),
                // Selects the first applicable kernel instead of the fastest measured one, so that a recompiled program
                // gives bitwise identical results.
                ("xla_gpu_deterministic_ops", on.clone()),
            ]);
            if program.devices() > 1 {
                // Overlap the transfers of keys and values with the computation of the queries, and with each other.
                flags.extend([
                    ("xla_gpu_enable_latency_hiding_scheduler", on),
                    ("xla_gpu_experimental_parallel_collective_overlap_limit", OptionValue::Int(2)),
                ]);
            }
            if program.smallest_permute.is_some_and(|bytes| bytes >= COPY_ENGINE_BYTES) {
                // The option applies to all permutes of a program. Those of ring attention are large; those of a
                // decoder's halo exchange are not. Unlike NCCL's kernels, copy engines also leave the multiprocessors
                // free for concurrent work.
                let engines = OptionValue::Text("COLLECTIVES_PEER_MEMORY".into());
                flags.push(("xla_gpu_collective_permute_mode", engines));
            }
        }
        _ => {}
    }
    flags
}

fn of_tpu(libtpu: Libtpu, kind: &str) -> Vec<(&'static str, OptionValue)> {
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

/// Returns the options that are added to [`defaults`] for programs that are traced.
pub fn trace_options(platform: &str) -> Vec<(&'static str, OptionValue)> {
    match platform {
        // A kernel launched from a CUDA graph does not report its operation, so this sets a minimum graph size that no
        // graph reaches. (Compile options cannot clear the list of commands that graphs may contain.)
        "cuda" => vec![("xla_gpu_graph_min_graph_size", OptionValue::Int(i64::from(i32::MAX)))],
        _ => Vec::new(),
    }
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
        assert!(SPEED_ONLY.iter().all(|name| all.contains(name)), "every listed option is a default");
    }

    /// Checks the flag instead of a program's results, because only CUDA's compiler removes an explicit rounding (f32
    /// to bf16 to f32) without the flag.
    #[test]
    fn explicit_roundings_are_kept_on_every_platform() {
        for platform in ["cpu", "cuda", "tpu"] {
            let toolchain = Toolchain { platform: platform.into(), ..Toolchain::default() };
            let flag =
                defaults(&toolchain, &passes(1)).into_iter().find(|(name, _)| *name == "xla_allow_excess_precision");
            assert_eq!(flag.map(|(_, value)| value), Some(OptionValue::Bool(false)), "{platform}");
        }
    }
}
