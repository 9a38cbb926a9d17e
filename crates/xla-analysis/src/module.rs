//! An optimized module as a tree of loops and a list of instructions.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use prost::Message;

use super::proto::{ComputationProto, InstructionProto, ModuleProto, ModuleWithConfig, ShapeProto};
use super::shape::{dtype_name, elements};

/// Errors of decoding an optimized program.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// Not such a protobuf.
    #[error(transparent)]
    Bytes(#[from] prost::DecodeError),
    /// An operand that the compiler would have written before, or calls that go round.
    #[error("{0}")]
    Order(String),
}

/// Calls in calls that are read. Compilers nest ten.
const NESTED: usize = 64;

/// Instructions that a reader who follows every call meets at most. The published models' programs have less than a
/// million.
const MET: u64 = 1 << 24;

/// An optimized HLO module, as a plugin returns it.
pub struct Module {
    name: String,
    entry: i64,
    computations: BTreeMap<i64, ComputationProto>,
    /// Computation of each instruction, and its index there.
    places: HashMap<i64, (i64, usize)>,
    schedule: HashMap<i64, Vec<i64>>,
}

/// A `while` of the optimized program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    pub name: String,
    pub scope: String,
    pub inner: Vec<Loop>,
}

/// An array that an instruction writes to device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub dtype: &'static str,
    pub dims: Vec<i64>,
    pub opcode: String,
    pub scope: String,
}

/// An instruction of the optimized program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub name: String,
    /// HLO opcode: `all-gather`, `dot`, `while` …
    pub opcode: String,
    /// Dimensions of the result; empty for a tuple.
    pub dims: Vec<i64>,
    /// Elements of the result (of a tuple: the sum).
    pub elements: i64,
    pub scope: String,
    pub target: String,
    pub config: String,
}

impl Module {
    /// Whether it calls cuDNN kernels that are chosen and built on the device itself: compiled ahead of time, it lacks
    /// them.
    pub fn is_bound_to_device(&self) -> bool {
        self.instructions().any(|i| i.target.starts_with("__cudnn$"))
    }

    /// Decodes the bytes of `hlo_with_config` (or of a bare module, `hlo`).
    ///
    /// # Errors
    /// The protobuf decoder's message; operands or calls without an order.
    pub fn decode(format: &str, bytes: &[u8]) -> Result<Self, ModuleError> {
        let module = match format {
            "hlo_with_config" => ModuleWithConfig::decode(bytes)?.module.unwrap_or_default(),
            _ => ModuleProto::decode(bytes)?,
        };
        let entry = module.entry_computation_id;
        let mut places = HashMap::new();
        for c in &module.computations {
            places.extend(c.instructions.iter().enumerate().map(|(at, i)| (i.id, (c.id, at))));
        }
        let sequences = module.schedule.unwrap_or_default().sequences;
        let schedule = sequences.into_iter().map(|(id, s)| (id, s.instruction_ids)).collect();
        let computations = module.computations.into_iter().map(|c| (c.id, c)).collect();
        let module = Module { name: module.name, entry, computations, places, schedule };
        module.check_operands()?;
        module.check_calls()?;
        Ok(module)
    }

    /// Operands stand before their users, in the same computation: whoever follows them comes to an end.
    fn check_operands(&self) -> Result<(), ModuleError> {
        for c in self.computations.values() {
            for (at, i) in c.instructions.iter().enumerate() {
                let before = |id: &&i64| self.places.get(*id).is_none_or(|(of, n)| *of == c.id && *n < at);
                if let Some(operand) = i.operand_ids.iter().find(|id| !before(id)) {
                    return Err(ModuleError::Order(format!(
                        "operand {operand} of '{}' does not stand before it",
                        i.name
                    )));
                }
            }
        }
        Ok(())
    }

    /// Calls do not go round, are not too deep, and come to so many instructions that they can all be followed.
    fn check_calls(&self) -> Result<(), ModuleError> {
        let mut met: HashMap<i64, u64> = HashMap::new();
        for _ in 0..NESTED {
            let open = self.computations.values().filter(|c| !met.contains_key(&c.id));
            let known: Vec<(i64, u64)> = open.filter_map(|c| Some((c.id, self.met_in(c, &met)?))).collect();
            match known.iter().find(|(_, count)| *count > MET) {
                Some((id, _)) => return Err(ModuleError::Order(format!("computation {id} calls too much to follow"))),
                None if known.is_empty() => break,
                None => met.extend(known),
            }
        }
        match self.computations.values().find(|c| !met.contains_key(&c.id)) {
            Some(c) => {
                Err(ModuleError::Order(format!("computation {} calls itself, or {NESTED} others in turn", c.id)))
            }
            None => Ok(()),
        }
    }

    /// Instructions of a computation and of all that it calls, where that is known of what it calls.
    fn met_in(&self, c: &ComputationProto, met: &HashMap<i64, u64>) -> Option<u64> {
        c.instructions.iter().try_fold(0u64, |sum, i| {
            let called = i.called_computation_ids.iter().filter(|id| self.computations.contains_key(id));
            called.map(|id| met.get(id).copied()).try_fold(sum + 1, |sum, n| Some(sum.saturating_add(n?)))
        })
    }

    /// Module name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Id of the entry computation.
    pub(super) fn entry(&self) -> i64 {
        self.entry
    }

    pub(super) fn computation(&self, id: i64) -> Option<&ComputationProto> {
        self.computations.get(&id)
    }

    pub(super) fn computations(&self) -> impl Iterator<Item = &ComputationProto> {
        self.computations.values()
    }

    /// An instruction by its id, which is unique in the module.
    pub(super) fn instruction(&self, id: i64) -> Option<&InstructionProto> {
        let (computation, at) = self.places.get(&id)?;
        self.computations.get(computation)?.instructions.get(*at)
    }

    /// Instructions after one in its computation.
    pub(super) fn behind(&self, i: &InstructionProto) -> &[InstructionProto] {
        let place = self.places.get(&i.id).and_then(|(c, at)| self.computation(*c)?.instructions.get(at + 1..));
        place.unwrap_or_default()
    }

    pub(super) fn operand(&self, i: &InstructionProto, n: usize) -> Option<&InstructionProto> {
        self.instruction(*i.operand_ids.get(n)?)
    }

    /// The first computation an instruction calls.
    pub(super) fn called(&self, i: &InstructionProto) -> Option<&ComputationProto> {
        self.computation(*i.called_computation_ids.first()?)
    }

    /// A computation's instructions in the order they start; without a schedule, operands before users.
    pub(super) fn scheduled<'a>(&'a self, c: &'a ComputationProto) -> Vec<&'a InstructionProto> {
        match self.schedule.get(&c.id) {
            Some(order) => order.iter().filter_map(|&id| self.instruction(id)).collect(),
            None => c.instructions.iter().collect(),
        }
    }

    /// The result of a computation.
    pub(super) fn root<'a>(&'a self, c: &'a ComputationProto) -> Option<&'a InstructionProto> {
        self.instruction(c.root_id)
    }

    /// Loops, outermost first.
    pub fn loops(&self) -> Vec<Loop> {
        self.loops_in(self.entry)
    }

    fn loops_in(&self, id: i64) -> Vec<Loop> {
        let Some(computation) = self.computations.get(&id) else { return Vec::new() };
        let mut found = Vec::new();
        for i in &computation.instructions {
            let inner: Vec<Loop> = i.called_computation_ids.iter().flat_map(|&c| self.loops_in(c)).collect();
            if i.opcode == "while" {
                found.push(Loop { name: i.name.clone(), scope: i.scope().to_string(), inner });
            } else {
                found.extend(inner);
            }
        }
        found
    }

    /// Every array that is written to device memory: not what stays inside of a fusion, nor other names of what is
    /// there.
    pub fn stored(&self) -> Vec<Stored> {
        const NAMES: [&str; 5] = ["parameter", "tuple", "get-tuple-element", "bitcast", "while"];
        let of_fusions = self.computations.values().flat_map(|c| &c.instructions).filter(|i| i.opcode == "fusion");
        let fused: BTreeSet<i64> = of_fusions.flat_map(|i| i.called_computation_ids.iter().copied()).collect();
        let own = self.computations.values().filter(|c| !fused.contains(&c.id)).flat_map(|c| &c.instructions);
        let mut found = Vec::new();
        // Slices that were brought to faster memory one by one, as one array again.
        let is_name =
            |i: &InstructionProto| NAMES.contains(&i.opcode.as_str()) || i.custom_call_target == "ConcatBitcast";
        for i in own.filter(|i| !is_name(i)) {
            for array in i.shape.iter().flat_map(leaves) {
                let (dtype, dims) = (dtype_name(array.element_type), array.dimensions.clone());
                found.push(Stored { dtype, dims, opcode: i.opcode.clone(), scope: i.scope().to_string() });
            }
        }
        found
    }

    /// Every instruction of every computation.
    pub fn instructions(&self) -> impl Iterator<Item = Instruction> + '_ {
        self.computations.values().flat_map(|c| &c.instructions).map(|i| Instruction {
            name: i.name.clone(),
            opcode: i.opcode.clone(),
            dims: i.shape.as_ref().map(|s| s.dimensions.clone()).unwrap_or_default(),
            elements: i.shape.as_ref().map_or(0, |s| elements(s) as i64),
            scope: i.scope().to_string(),
            target: i.custom_call_target.clone(),
            config: String::from_utf8_lossy(&i.backend_config).into_owned(),
        })
    }
}

/// The arrays of a shape.
fn leaves(shape: &ShapeProto) -> Vec<&ShapeProto> {
    match shape.tuple_shapes.is_empty() {
        true => vec![shape],
        false => shape.tuple_shapes.iter().flat_map(leaves).collect(),
    }
}

impl InstructionProto {
    /// Name scope, as the compiler passes it on.
    pub(super) fn scope(&self) -> &str {
        self.metadata.as_ref().map_or("", |m| m.op_name.as_str())
    }
}
