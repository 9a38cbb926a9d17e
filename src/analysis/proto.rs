//! The messages of XLA's `hlo.proto` and `xla_data.proto` that the analysis reads, declared by hand: field numbers are
//! the published ones, fields that nothing here reads are left out.

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
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ComputationProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "2")]
    pub instructions: Vec<InstructionProto>,
    #[prost(int64, tag = "5")]
    pub id: i64,
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
    #[prost(int64, repeated, tag = "38")]
    pub called_computation_ids: Vec<i64>,
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
}
