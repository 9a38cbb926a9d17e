//! An optimized module as a tree of loops and a list of instructions.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;

use super::proto::{ComputationProto, ModuleProto, ModuleWithConfig};

/// An optimized program, as a plugin returns it.
pub struct Module {
    entry: i64,
    computations: BTreeMap<i64, ComputationProto>,
}

/// A `while` of the optimized program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Instruction name.
    pub name: String,
    /// The name scope it was built under.
    pub scope: String,
    /// Loops inside its body.
    pub inner: Vec<Loop>,
}

/// An instruction of the optimized program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Instruction name.
    pub name: String,
    /// HLO opcode: `all-gather`, `dot`, `while` …
    pub opcode: String,
    /// Dimensions of the result; empty for a tuple.
    pub dims: Vec<i64>,
    /// Elements of the result (of a tuple: the sum).
    pub elements: i64,
    /// The name scope it was built under.
    pub scope: String,
}

impl Module {
    /// Reads the bytes of `hlo_with_config` (or of a bare module, `hlo`).
    ///
    /// # Errors
    /// The protobuf decoder's message.
    pub fn decode(format: &str, bytes: &[u8]) -> Result<Self, prost::DecodeError> {
        let module = match format {
            "hlo_with_config" => ModuleWithConfig::decode(bytes)?.module.unwrap_or_default(),
            _ => ModuleProto::decode(bytes)?,
        };
        let entry = module.entry_computation_id;
        Ok(Module { entry, computations: module.computations.into_iter().map(|c| (c.id, c)).collect() })
    }

    /// The loops, outermost first.
    pub fn loops(&self) -> Vec<Loop> {
        self.loops_in(self.entry, &mut BTreeSet::new())
    }

    fn loops_in(&self, id: i64, path: &mut BTreeSet<i64>) -> Vec<Loop> {
        let Some(computation) = self.computations.get(&id) else { return Vec::new() };
        if !path.insert(id) {
            return Vec::new();
        }
        let mut found = Vec::new();
        for i in &computation.instructions {
            let inner: Vec<Loop> = i.called_computation_ids.iter().flat_map(|&c| self.loops_in(c, path)).collect();
            if i.opcode == "while" {
                let scope = i.metadata.as_ref().map(|m| m.op_name.clone()).unwrap_or_default();
                found.push(Loop { name: i.name.clone(), scope, inner });
            } else {
                found.extend(inner);
            }
        }
        path.remove(&id);
        found
    }

    /// Every instruction of every computation.
    pub fn instructions(&self) -> impl Iterator<Item = Instruction> + '_ {
        self.computations.values().flat_map(|c| &c.instructions).map(|i| Instruction {
            name: i.name.clone(),
            opcode: i.opcode.clone(),
            dims: i.shape.as_ref().map(|s| s.dimensions.clone()).unwrap_or_default(),
            elements: i.shape.as_ref().map_or(0, elements),
            scope: i.metadata.as_ref().map(|m| m.op_name.clone()).unwrap_or_default(),
        })
    }
}

fn elements(shape: &super::proto::ShapeProto) -> i64 {
    if shape.tuple_shapes.is_empty() {
        shape.dimensions.iter().product()
    } else {
        shape.tuple_shapes.iter().map(elements).sum()
    }
}
