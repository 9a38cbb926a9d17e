//! The XLA options of every compile, by platform, each with its reason. A configuration's own flags come on top.

use crate::pjrt::OptionValue;

/// The options a platform's programs are compiled with.
pub fn defaults(platform: &str) -> Vec<(&'static str, OptionValue)> {
    let on = OptionValue::Bool(true);
    // Roundings that the program writes must stay: CUDA otherwise deletes f32 -> bf16 -> f32 pairs.
    let mut flags = vec![("xla_allow_excess_precision", OptionValue::Bool(false))];
    if platform != "tpu" {
        // Programs written in Shardy's text are not of the newer form; said here, or each compile warns.
        flags.push(("xla_enable_hlo_sharding_v3", OptionValue::Bool(false)));
    }
    match platform {
        "cpu" => {
            // Sums in the YNN library depend on how many rows there are; its products do not.
            let products = OptionValue::Text("LIBRARY_FUSION_TYPE_DOT".into());
            flags.push(("xla_cpu_experimental_ynn_fusion_type", products));
        }
        "tpu" => {
            // Fusing one product into another crashes libtpu 0.0.42 on v6e where heads are split eightfold.
            flags.push(("xla_tpu_dot_dot_fusion", OptionValue::Bool(false)));
            // Gathers of split weights run behind the computation; all of these are off by default.
            flags.extend([
                ("xla_enable_async_all_gather", on.clone()),
                ("xla_tpu_enable_async_collective_fusion", on.clone()),
                ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", on.clone()),
                ("xla_tpu_enable_async_collective_fusion_multiple_steps", on.clone()),
                // Without it only products hide a gather: a fifth of the bytes of `fsdp-ulysses` would be waited for.
                ("xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions", on.clone()),
                ("xla_tpu_overlap_compute_collective_tc", on),
            ]);
        }
        _ => {}
    }
    flags
}
