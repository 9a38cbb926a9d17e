//! The CPU of the host, as virtual devices.

use prost::Message as _;

use super::{PlatformSpec, Wheel, wheel};
use ltx2_nn::Lowering;
use ltx2_pjrt::{CpuOptions, OptionValue};

const WHEELS: &[Wheel] = &[wheel(
    "lammps-jax-pjrt-cpu",
    "0.11.2",
    "manylinux_2_27_x86_64",
    "1319390d948b39f69f7dade496b7c385149d9ca6097a6b62114da113216d9ad1",
)];

pub(super) fn spec() -> PlatformSpec {
    PlatformSpec {
        description: "CPU of the host (63 MB, 202 MB unpacked)",
        wheels: WHEELS,
        hardware: || Ok("always available".into()),
        is_host: true,
        has_one_process: true,
        client_options: |options| {
            let devices = Some(options.cpu_devices.unwrap_or(1));
            CpuOptions { devices, asynchronous: None }.to_attributes()
        },
        target_syntax: || "cpu:DEVICES".into(),
        target_example: "cpu:8",
        target_dimensions: &[1],
        // The CPU runtime does not support bf16 dots with f32 results above a certain size.
        lowering: |_| Lowering { mixed_precision_dot: false, batch_invariant: true, ..Lowering::default() },
        result_flags: || {
            // Limit the YNN library to individual matmuls, because its fusions change results: sums depend on the
            // number of rows, a GELU fused into a matmul uses a different polynomial from XLA's, and which operations
            // are fused depends on whether the samples' matmuls are adjacent in the program.
            let products = OptionValue::Text("LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT".into());
            vec![("xla_cpu_experimental_ynn_fusion_type", products)]
        },
        machine: Some(machine),
        writes_cache_in_background: false,
        warm_up_runs: 1,
        assumed_flops: 1e9,
        ..PlatformSpec::default()
    }
}

/// Returns the part of a serialized CPU topology that compiled code depends on: target triple, processor and features,
/// but not the number of virtual devices. Returns the complete topology if that part is not found.
fn machine(topology: &[u8]) -> Vec<u8> {
    let machine = TopologyProto::decode(topology).ok().and_then(|t| CpuTopologyProto::decode(&*t.specific?.value).ok());
    machine.and_then(|t| t.machine).unwrap_or_else(|| topology.to_vec())
}

/// `xla.PjRtTopologyDescriptionProto`, only the fields that are used.
#[derive(prost::Message)]
struct TopologyProto {
    #[prost(message, optional, tag = "9")]
    specific: Option<AnyProto>,
}

/// `google.protobuf.Any`.
#[derive(prost::Message)]
struct AnyProto {
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `xla.CpuTopologyProto`, only the fields that are used.
#[derive(prost::Message)]
struct CpuTopologyProto {
    #[prost(bytes = "vec", optional, tag = "5")]
    machine: Option<Vec<u8>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_kind_ignores_the_number_of_devices() {
        let topology = |devices: &[u8], code: &[u8]| {
            // Field 1 is the device list.
            let devices = devices.iter().flat_map(|id| [0x0a, 2, 0x18, *id]);
            let value = devices.chain(CpuTopologyProto { machine: Some(code.to_vec()) }.encode_to_vec()).collect();
            TopologyProto { specific: Some(AnyProto { value }) }.encode_to_vec()
        };
        let one = machine(&topology(&[0], b"znver4"));
        assert_eq!(one, b"znver4");
        assert_eq!(machine(&topology(&[0, 1], b"znver4")), one);
        assert_ne!(machine(&topology(&[0], b"skylake")), one);
        for other in [TopologyProto { specific: None }.encode_to_vec(), b"what is this".to_vec()] {
            assert_eq!(machine(&other), other);
        }
    }
}
