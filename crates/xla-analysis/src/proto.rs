//! The messages of XLA's `hlo.proto` and `xla_data.proto` that the analysis reads, declared by hand: field numbers are
//! the published ones, fields that nothing here reads are left out.

use std::collections::HashMap;

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub(super) struct ModuleWithConfig {
    #[prost(message, optional, tag = "1")]
    pub module: Option<ModuleProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ModuleProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "3")]
    pub computations: Vec<ComputationProto>,
    #[prost(int64, tag = "6")]
    pub entry_computation_id: i64,
    #[prost(message, optional, tag = "7")]
    pub schedule: Option<ScheduleProto>,
}

/// The order in which each computation's instructions start, by computation id.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ScheduleProto {
    #[prost(map = "int64, message", tag = "1")]
    pub sequences: HashMap<i64, SequenceProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SequenceProto {
    #[prost(int64, repeated, tag = "1")]
    pub instruction_ids: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ComputationProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "2")]
    pub instructions: Vec<InstructionProto>,
    #[prost(int64, tag = "5")]
    pub id: i64,
    #[prost(int64, tag = "6")]
    pub root_id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct InstructionProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub opcode: String,
    #[prost(message, optional, tag = "3")]
    pub shape: Option<ShapeProto>,
    #[prost(message, optional, tag = "7")]
    pub metadata: Option<MetadataProto>,
    #[prost(message, optional, tag = "8")]
    pub literal: Option<LiteralProto>,
    #[prost(int64, tag = "9")]
    pub parameter_number: i64,
    #[prost(int64, tag = "13")]
    pub tuple_index: i64,
    #[prost(int64, repeated, tag = "14")]
    pub dimensions: Vec<i64>,
    #[prost(message, optional, tag = "15")]
    pub window: Option<WindowProto>,
    #[prost(message, optional, tag = "16")]
    pub convolution: Option<ConvolutionProto>,
    #[prost(int64, tag = "26")]
    pub channel_id: i64,
    #[prost(string, tag = "28")]
    pub custom_call_target: String,
    #[prost(message, optional, tag = "30")]
    pub dot: Option<DotProto>,
    #[prost(int64, tag = "35")]
    pub id: i64,
    #[prost(int64, repeated, tag = "36")]
    pub operand_ids: Vec<i64>,
    #[prost(int64, repeated, tag = "38")]
    pub called_computation_ids: Vec<i64>,
    #[prost(bytes = "vec", tag = "43")]
    pub backend_config: Vec<u8>,
    #[prost(message, repeated, tag = "49")]
    pub replica_groups: Vec<ReplicaGroupProto>,
    #[prost(int64, tag = "50")]
    pub feature_group_count: i64,
    #[prost(message, repeated, tag = "52")]
    pub source_target_pairs: Vec<PairProto>,
    #[prost(int64, tag = "58")]
    pub batch_group_count: i64,
    #[prost(string, tag = "63")]
    pub comparison_direction: String,
    #[prost(message, optional, tag = "87")]
    pub device_list: Option<DeviceListProto>,
    #[prost(message, optional, tag = "92")]
    pub iota_groups: Option<IotaGroupsProto>,
    #[prost(message, optional, tag = "93")]
    pub mesh_axes_groups: Option<MeshAxesGroupsProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MetadataProto {
    #[prost(string, tag = "2")]
    pub op_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ShapeProto {
    #[prost(int32, tag = "2")]
    pub element_type: i32,
    #[prost(int64, repeated, tag = "3")]
    pub dimensions: Vec<i64>,
    #[prost(message, repeated, tag = "4")]
    pub tuple_shapes: Vec<ShapeProto>,
    #[prost(message, optional, tag = "5")]
    pub layout: Option<LayoutProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LayoutProto {
    #[prost(int64, repeated, tag = "1")]
    pub minor_to_major: Vec<i64>,
    #[prost(int64, tag = "8")]
    pub memory_space: i64,
}

/// The element types that loop counters have.
#[derive(Clone, PartialEq, Message)]
pub(super) struct LiteralProto {
    #[prost(int32, repeated, tag = "4")]
    pub s32s: Vec<i32>,
    #[prost(int64, repeated, tag = "5")]
    pub s64s: Vec<i64>,
    #[prost(uint32, repeated, tag = "6")]
    pub u32s: Vec<u32>,
    #[prost(uint64, repeated, tag = "7")]
    pub u64s: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WindowProto {
    #[prost(message, repeated, tag = "1")]
    pub dimensions: Vec<WindowDimensionProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WindowDimensionProto {
    #[prost(int64, tag = "1")]
    pub size: i64,
    #[prost(int64, tag = "2")]
    pub stride: i64,
    #[prost(int64, tag = "3")]
    pub padding_low: i64,
    #[prost(int64, tag = "4")]
    pub padding_high: i64,
    #[prost(int64, tag = "5")]
    pub window_dilation: i64,
    #[prost(int64, tag = "6")]
    pub base_dilation: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ConvolutionProto {
    #[prost(int64, tag = "3")]
    pub kernel_input_feature: i64,
    #[prost(int64, tag = "8")]
    pub input_feature: i64,
    #[prost(int64, repeated, tag = "11")]
    pub input_spatial: Vec<i64>,
    #[prost(int64, repeated, tag = "12")]
    pub output_spatial: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DotProto {
    #[prost(int64, repeated, tag = "1")]
    pub lhs_contracting: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ReplicaGroupProto {
    #[prost(int64, repeated, tag = "1")]
    pub ids: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PairProto {
    #[prost(int64, tag = "1")]
    pub source: i64,
    #[prost(int64, tag = "2")]
    pub target: i64,
}

/// The groups of a collective, listed; older plugins put the second form here too.
#[derive(Clone, PartialEq, Message)]
pub(super) struct DeviceListProto {
    #[prost(message, repeated, tag = "1")]
    pub groups: Vec<ReplicaGroupProto>,
    #[prost(message, optional, tag = "2")]
    pub iota: Option<IotaGroupsProto>,
}

/// The numbers from 0, reshaped, transposed and cut into groups.
#[derive(Clone, PartialEq, Message)]
pub(super) struct IotaGroupsProto {
    #[prost(int64, tag = "1")]
    pub groups: i64,
    #[prost(int64, tag = "2")]
    pub per_group: i64,
    #[prost(int64, repeated, tag = "3")]
    pub reshape: Vec<i64>,
    #[prost(int32, repeated, tag = "4")]
    pub transpose: Vec<i32>,
}

/// Axes of a mesh, whose names are the partitioner's own.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MeshAxesGroupsProto {
    #[prost(message, optional, tag = "1")]
    pub mesh: Option<MeshProto>,
    #[prost(message, repeated, tag = "2")]
    pub axes: Vec<AxisRefProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MeshProto {
    #[prost(message, repeated, tag = "1")]
    pub axes: Vec<MeshAxisProto>,
    #[prost(int64, repeated, tag = "2")]
    pub device_ids: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MeshAxisProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(int64, tag = "2")]
    pub size: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct AxisRefProto {
    #[prost(int64, tag = "1")]
    pub index: i64,
    #[prost(message, optional, tag = "2")]
    pub part: Option<SubAxisProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SubAxisProto {
    #[prost(int64, tag = "1")]
    pub pre_size: i64,
    #[prost(int64, tag = "2")]
    pub size: i64,
}
