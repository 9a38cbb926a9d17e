//! The XLA options of every compile, by platform, each with its reason. A configuration's own flags come on top.

use super::plugins::Libtpu;
use crate::hlo::Program;
use crate::pjrt::{Client, OptionValue};

/// The compiler of a platform, as far as options differ by it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Toolchain {
    /// `cpu`, `cuda`, `tpu` …
    pub(crate) platform: String,
    /// Kind of the devices, as the plugin says it: `TPU v6 lite` …
    pub(crate) kind: String,
    /// Version, as the plugin says it.
    pub(crate) version: String,
}

impl Toolchain {
    /// The one of a client's plugin, for its devices.
    pub fn of(client: &Client) -> Self {
        Toolchain {
            platform: client.platform_name().to_lowercase(),
            kind: client.devices().first().map(|d| d.kind().to_owned()).unwrap_or_default(),
            version: client.platform_version().into(),
        }
    }

    /// The release of libtpu, where it is one that the shipped slices' loops were compiled with.
    pub(crate) fn tested_libtpu(&self) -> Option<&'static str> {
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

/// Options of ours that change how fast a program is, how its compile is told of or traced, and not what it computes: a plugin that
/// does not know one compiles without it. Kernels that it then chooses may sum in another order, as those of another plugin do.
const FOR_SPEED: [&str; 16] = [
    // What it replaces is a warning.
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

/// Whether a program without an option computes what it does with it.
pub(super) fn is_for_speed(option: &str) -> bool {
    FOR_SPEED.contains(&option)
}

/// Bytes of a permute from which on a copy engine is taken for faster than NCCL's kernel: of 4 MiB it takes 37 us and NCCL 31, of 16 MiB
/// 58 and 83 (`ltx2 bench --micro`, H100s).
const COPIED: usize = 8 << 20;

/// The options a toolchain's program is compiled with.
pub(crate) fn defaults(toolchain: &Toolchain, program: &Program) -> Vec<(&'static str, OptionValue)> {
    let platform = toolchain.platform.as_str();
    let on = OptionValue::Bool(true);
    // Roundings that the program writes must stay: CUDA otherwise deletes f32 -> bf16 -> f32 pairs.
    let mut flags = vec![("xla_allow_excess_precision", OptionValue::Bool(false))];
    if platform != "tpu" {
        // Programs written in Shardy's text are not of the newer form; said here, or each compile warns.
        flags.push(("xla_enable_hlo_sharding_v3", OptionValue::Bool(false)));
    }
    match platform {
        "cpu" => {
            // Of the YNN library the matmuls alone, one at a time: its sums depend on how many rows there are, and a GELU
            // that it takes into a matmul is another polynomial than XLA's. What it would take depends on whether the
            // samples' matmuls stand side by side.
            let products = OptionValue::Text("LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT".into());
            flags.push(("xla_cpu_experimental_ynn_fusion_type", products));
        }
        "tpu" => flags.extend(of_tpu(Libtpu::of(&toolchain.version), &toolchain.kind)),
        "cuda" => {
            flags.extend([
                // Convolutions over three dimensions are else compiled channels first, and cuDNN turns every tensor twice.
                ("xla_gpu_force_conv_nhwc", on.clone()),
                // cuBLAS applies biases and GELU to its sums; Triton's matmuls leave them to passes of their own.
                ("xla_gpu_enable_triton_gemm", OptionValue::Bool(false)),
                // The compiler takes the first of the kernels that could be, not the fastest of a measurement: a program that was
                // compiled anew gives the bits of the last.
                ("xla_gpu_deterministic_ops", on.clone()),
            ]);
            if program.devices() > 1 {
                // Keys and values travel while the queries are made, both at once.
                flags.extend([
                    ("xla_gpu_enable_latency_hiding_scheduler", on),
                    ("xla_gpu_experimental_parallel_collective_overlap_limit", OptionValue::Int(2)),
                ]);
            }
            if program.smallest_permute.is_some_and(|bytes| bytes >= COPIED) {
                // The option is of all its permutes: a ring's are large, a decoder's halos are not. Nor do copy engines take
                // processors from the work beside them, as NCCL's kernel does.
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
    // Fusing one product into another crashes libtpu 0.0.42 on v6e where heads are split eightfold.
    let mut flags = vec![("xla_tpu_dot_dot_fusion", OptionValue::Bool(false))];
    // Gathers of split weights run behind the computation; all of these are off by default.
    flags.extend([
        ("xla_enable_async_all_gather", on.clone()),
        ("xla_tpu_enable_async_collective_fusion", on.clone()),
        ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", fused),
        ("xla_tpu_enable_async_collective_fusion_multiple_steps", on.clone()),
        // Without it only matmuls hide a gather: a fifth of the bytes of `fsdp-ulysses` would be waited for.
        ("xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions", on.clone()),
        // Attention's kernel hides gathers as matmuls do.
        ("xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call", on.clone()),
        ("xla_tpu_overlap_compute_collective_tc", on.clone()),
    ]);
    if !libtpu.fuses_gathers(kind) && kind.starts_with("TPU v6") {
        // There, and on TPU7x unasked, SparseCores gather beside the computation.
        flags.push(("xla_tpu_enable_sparse_core_collective_offload_all_gather", on));
    }
    flags
}

/// The options on top of [`defaults`] of programs whose trace is taken.
pub(crate) fn for_traces(platform: &str) -> Vec<(&'static str, OptionValue)> {
    match platform {
        // A kernel that a CUDA graph launches does not say which operation it is of: no graph is long enough. (The list of
        // what graphs may hold cannot be emptied by a compile's options.)
        "cuda" => vec![("xla_gpu_graph_min_graph_size", OptionValue::Int(i64::from(i32::MAX)))],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlo::{Builder, DType, Mesh, Sharding, Type};

    /// A program that passes `rows` of 4 KiB to the other of two devices.
    fn passes(rows: usize) -> Program {
        let b = Builder::new("f").with_mesh(Mesh::new(&[("context", 2)]));
        let x = b.argument("x", Type::new(DType::F32, [2 * rows, 1024]));
        let split = Sharding::new(&[&["context"], &[]]);
        let y = b.manual(&[(&x, split.clone())], &[split], |v| vec![v[0].collective_permute(&[(0, 1), (1, 0)])]);
        b.finish(&[("y", &y[0])]).expect("builds")
    }

    #[test]
    fn copy_engines_pass_what_is_large() {
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
    fn what_numbers_rest_on_is_never_left_out() {
        let toolchain = |platform: &str, kind: &str| Toolchain {
            platform: platform.into(),
            kind: kind.into(),
            version: "cl/1014260217".into(),
        };
        let each = [("cpu", "cpu"), ("cuda", "NVIDIA H200"), ("tpu", "TPU v5"), ("tpu", "TPU v6 lite")];
        let all = each.into_iter().flat_map(|(platform, kind)| {
            let own = defaults(&toolchain(platform, kind), &passes(2048)).into_iter().chain(for_traces(platform));
            own.map(|(name, _)| name)
        });
        let all: std::collections::BTreeSet<&str> = all.collect();
        let needed: Vec<&&str> = all.iter().filter(|name| !is_for_speed(name)).collect();
        let numbers =
            ["xla_allow_excess_precision", "xla_cpu_experimental_ynn_fusion_type", "xla_gpu_deterministic_ops"];
        assert_eq!(needed, numbers.each_ref());
        assert!(FOR_SPEED.iter().all(|name| all.contains(name)), "no option is listed that is not given");
    }

    /// On the CPU no compiler that we know would take one away; CUDA's does.
    #[test]
    fn no_platform_takes_a_written_rounding_away() {
        for platform in ["cpu", "cuda", "tpu"] {
            let toolchain = Toolchain { platform: platform.into(), ..Toolchain::default() };
            let flag =
                defaults(&toolchain, &passes(1)).into_iter().find(|(name, _)| *name == "xla_allow_excess_precision");
            assert_eq!(flag.map(|(_, value)| value), Some(OptionValue::Bool(false)), "{platform}");
        }
    }
}
