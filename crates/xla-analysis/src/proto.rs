//! The messages of XLA's `hlo.proto` and `xla_data.proto` that the analysis reads. They are declared by hand with the
//! published field numbers; fields that are not used are omitted.

use std::collections::HashMap;

/// Declares protobuf messages. Each field has the form `name: Type = number [prost attributes of the wire type]`.
macro_rules! messages {
    ($(
        $(#[$about:meta])*
        $vis:vis struct $name:ident {
            $($(#[$about_field:meta])* $field:ident: $type:ty = $number:tt [$($wire:tt)+],)*
        }
    )*) => {
        $(
            $(#[$about])*
            #[derive(Clone, PartialEq, ::prost::Message)]
            $vis struct $name {
                $($(#[$about_field])* #[prost($($wire)+, tag = $number)] pub $field: $type,)*
            }
        )*
    };
}

pub(super) use messages;

messages! {
    pub(super) struct ModuleWithConfig {
        module: Option<ModuleProto> = 1 [message, optional],
    }

    pub(super) struct ModuleProto {
        name: String = 1 [string],
        computations: Vec<ComputationProto> = 3 [message, repeated],
        entry_computation_id: i64 = 6 [int64],
        schedule: Option<ScheduleProto> = 7 [message, optional],
    }

    /// For each computation (by id), the order in which its instructions start.
    pub(super) struct ScheduleProto {
        sequences: HashMap<i64, SequenceProto> = 1 [map = "int64, message"],
    }

    pub(super) struct SequenceProto {
        instruction_ids: Vec<i64> = 1 [int64, repeated],
    }

    pub(super) struct ComputationProto {
        name: String = 1 [string],
        instructions: Vec<InstructionProto> = 2 [message, repeated],
        id: i64 = 5 [int64],
        root_id: i64 = 6 [int64],
    }

    pub(super) struct InstructionProto {
        name: String = 1 [string],
        opcode: String = 2 [string],
        shape: Option<ShapeProto> = 3 [message, optional],
        metadata: Option<MetadataProto> = 7 [message, optional],
        literal: Option<LiteralProto> = 8 [message, optional],
        parameter_number: i64 = 9 [int64],
        tuple_index: i64 = 13 [int64],
        dimensions: Vec<i64> = 14 [int64, repeated],
        window: Option<WindowProto> = 15 [message, optional],
        convolution: Option<ConvolutionProto> = 16 [message, optional],
        channel_id: i64 = 26 [int64],
        custom_call_target: String = 28 [string],
        dot: Option<DotProto> = 30 [message, optional],
        id: i64 = 35 [int64],
        operand_ids: Vec<i64> = 36 [int64, repeated],
        called_computation_ids: Vec<i64> = 38 [int64, repeated],
        backend_config: Vec<u8> = 43 [bytes = "vec"],
        replica_groups: Vec<ReplicaGroupProto> = 49 [message, repeated],
        feature_group_count: i64 = 50 [int64],
        source_target_pairs: Vec<PairProto> = 52 [message, repeated],
        batch_group_count: i64 = 58 [int64],
        comparison_direction: String = 63 [string],
        device_list: Option<DeviceListProto> = 87 [message, optional],
        iota_groups: Option<IotaGroupsProto> = 92 [message, optional],
        mesh_axes_groups: Option<MeshAxesGroupsProto> = 93 [message, optional],
    }

    pub(super) struct MetadataProto {
        op_name: String = 2 [string],
    }

    pub(super) struct ShapeProto {
        element_type: i32 = 2 [int32],
        dimensions: Vec<i64> = 3 [int64, repeated],
        tuple_shapes: Vec<ShapeProto> = 4 [message, repeated],
        layout: Option<LayoutProto> = 5 [message, optional],
    }

    pub(super) struct LayoutProto {
        minor_to_major: Vec<i64> = 1 [int64, repeated],
        memory_space: i64 = 8 [int64],
    }

    /// A constant, with only the element types that loop counters have.
    pub(super) struct LiteralProto {
        s32s: Vec<i32> = 4 [int32, repeated],
        s64s: Vec<i64> = 5 [int64, repeated],
        u32s: Vec<u32> = 6 [uint32, repeated],
        u64s: Vec<u64> = 7 [uint64, repeated],
    }

    pub(super) struct WindowProto {
        dimensions: Vec<WindowDimensionProto> = 1 [message, repeated],
    }

    pub(super) struct WindowDimensionProto {
        size: i64 = 1 [int64],
        stride: i64 = 2 [int64],
        padding_low: i64 = 3 [int64],
        padding_high: i64 = 4 [int64],
        window_dilation: i64 = 5 [int64],
        base_dilation: i64 = 6 [int64],
    }

    pub(super) struct ConvolutionProto {
        kernel_input_feature: i64 = 3 [int64],
        input_feature: i64 = 8 [int64],
        input_spatial: Vec<i64> = 11 [int64, repeated],
        output_spatial: Vec<i64> = 12 [int64, repeated],
    }

    pub(super) struct DotProto {
        lhs_contracting: Vec<i64> = 1 [int64, repeated],
    }

    pub(super) struct ReplicaGroupProto {
        ids: Vec<i64> = 1 [int64, repeated],
    }

    pub(super) struct PairProto {
        source: i64 = 1 [int64],
        target: i64 = 2 [int64],
    }

    /// Device groups of a collective as lists. Older plugins also store the iota form in this message.
    pub(super) struct DeviceListProto {
        groups: Vec<ReplicaGroupProto> = 1 [message, repeated],
        iota: Option<IotaGroupsProto> = 2 [message, optional],
    }

    /// Device groups in the iota form: device numbers from 0 are reshaped, transposed and split into groups.
    pub(super) struct IotaGroupsProto {
        groups: i64 = 1 [int64],
        per_group: i64 = 2 [int64],
        reshape: Vec<i64> = 3 [int64, repeated],
        transpose: Vec<i32> = 4 [int32, repeated],
    }

    /// Device groups as axes of a mesh. The partitioner chose the names of the axes.
    pub(super) struct MeshAxesGroupsProto {
        mesh: Option<MeshProto> = 1 [message, optional],
        axes: Vec<AxisRefProto> = 2 [message, repeated],
    }

    pub(super) struct MeshProto {
        axes: Vec<MeshAxisProto> = 1 [message, repeated],
        device_ids: Vec<i64> = 2 [int64, repeated],
    }

    pub(super) struct MeshAxisProto {
        name: String = 1 [string],
        size: i64 = 2 [int64],
    }

    pub(super) struct AxisRefProto {
        index: i64 = 1 [int64],
        part: Option<SubAxisProto> = 2 [message, optional],
    }

    pub(super) struct SubAxisProto {
        pre_size: i64 = 1 [int64],
        size: i64 = 2 [int64],
    }
}
