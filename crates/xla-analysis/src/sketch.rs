//! Helpers that build modules for tests.

use prost::Message;

use crate::module::{Module, ModuleError};
use crate::proto::{ComputationProto, InstructionProto, MetadataProto, ModuleProto, ShapeProto};

/// Creates a shape. `element_type` is XLA's number: 4 is s32, 11 is f32, 16 is bf16.
pub(crate) fn shape(element_type: i32, dims: &[i64]) -> ShapeProto {
    ShapeProto { element_type, dimensions: dims.into(), ..ShapeProto::default() }
}

pub(crate) fn scope(name: &str) -> Option<MetadataProto> {
    Some(MetadataProto { op_name: name.into() })
}

pub(crate) fn instruction(id: i64, opcode: &str, operands: &[i64]) -> InstructionProto {
    InstructionProto { id, opcode: opcode.into(), operand_ids: operands.into(), ..InstructionProto::default() }
}

/// Creates a computation whose root is the last instruction.
pub(crate) fn computation(id: i64, instructions: Vec<InstructionProto>) -> ComputationProto {
    let root_id = instructions.last().map_or(0, |i| i.id);
    ComputationProto { id, instructions, root_id, ..ComputationProto::default() }
}

pub(crate) fn decode(entry_computation_id: i64, computations: Vec<ComputationProto>) -> Result<Module, ModuleError> {
    let module = ModuleProto { computations, entry_computation_id, ..ModuleProto::default() };
    Module::decode("hlo", &module.encode_to_vec())
}
