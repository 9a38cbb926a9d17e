//! Optimized HLO modules: decoding, access to instructions, and loops.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use prost::Message;

use super::proto::{ComputationProto, InstructionProto, ModuleProto, ModuleWithConfig, ShapeProto};
use super::shape::{dtype_name, elements, is_in_host};

/// Error of decoding an optimized program.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// The bytes are not a valid protobuf.
    #[error(transparent)]
    Bytes(#[from] prost::DecodeError),
    /// An operand does not precede its user, calls are recursive or too deeply nested, or they expand to too many
    /// instructions.
    #[error("{0}")]
    Order(String),
}

/// Maximum depth of nested calls. Compilers nest about ten deep.
const NESTED: usize = 64;

/// Maximum number of instructions after all calls are expanded. Programs of the published models have less than a
/// million.
const MET: u64 = 1 << 24;

/// An optimized HLO module, as returned by a plugin.
pub struct Module {
    name: String,
    entry: i64,
    computations: BTreeMap<i64, ComputationProto>,
    /// For each instruction id: the id of its computation, and its index in the computation.
    places: HashMap<i64, (i64, usize)>,
    /// For each computation id: the ids of its instructions in execution order.
    schedule: HashMap<i64, Vec<i64>>,
}

/// A `while` loop of the optimized program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Name of the `while` instruction.
    pub name: String,
    /// Name scope as the compiler recorded it (`op_name`).
    pub scope: String,
    /// Loops nested in this loop.
    pub inner: Vec<Loop>,
}

/// An array that the program writes to device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredArray {
    /// Element type, such as `bf16`.
    pub dtype: &'static str,
    /// Dimensions of the array.
    pub dims: Vec<i64>,
    /// HLO opcode of the instruction that writes the array.
    pub opcode: String,
    /// Name scope of the instruction, as the compiler recorded it (`op_name`).
    pub scope: String,
}

/// An instruction of the optimized program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Name, which is unique in the module.
    pub name: String,
    /// HLO opcode: `all-gather`, `dot`, `while` …
    pub opcode: String,
    /// Dimensions of the result; empty if the result is a tuple.
    pub dims: Vec<i64>,
    /// Number of elements of the result; for a tuple, the sum over its arrays.
    pub elements: i64,
    /// Name scope as the compiler recorded it (`op_name`).
    pub scope: String,
    /// Target of a custom call; empty for other opcodes.
    pub target: String,
    /// Backend config as text, usually JSON; empty if the instruction has no backend config.
    pub config: String,
}

impl Module {
    /// Returns whether the program calls cuDNN kernels. These are selected and built on the device, so an ahead-of-time
    /// compiled program does not contain them.
    pub fn is_bound_to_device(&self) -> bool {
        self.instructions().any(|i| i.target.starts_with("__cudnn$"))
    }

    /// Decodes a module. `format` is `hlo_with_config` or `hlo` (a module without a configuration).
    ///
    /// # Errors
    /// Returns an error if the bytes are not a valid protobuf, if an operand does not precede its user, if calls are
    /// recursive or too deeply nested, or if they expand to too many instructions.
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

    /// Checks that operands precede their users in the same computation, so that walks along operands terminate.
    fn check_operands(&self) -> Result<(), ModuleError> {
        for c in self.computations.values() {
            for (at, i) in c.instructions.iter().enumerate() {
                let before = |id: &&i64| self.places.get(*id).is_none_or(|(of, n)| *of == c.id && *n < at);
                if let Some(operand) = i.operand_ids.iter().find(|id| !before(id)) {
                    return Err(ModuleError::Order(format!(
                        "operand {operand} does not precede its user '{}'",
                        i.name
                    )));
                }
            }
        }
        Ok(())
    }

    /// Checks that calls are not recursive, are not nested too deeply, and do not expand to too many instructions.
    fn check_calls(&self) -> Result<(), ModuleError> {
        let mut met: HashMap<i64, u64> = HashMap::new();
        for _ in 0..NESTED {
            let open = self.computations.values().filter(|c| !met.contains_key(&c.id));
            let known: Vec<(i64, u64)> = open.filter_map(|c| Some((c.id, self.met_in(c, &met)?))).collect();
            match known.iter().find(|(_, count)| *count > MET) {
                Some((id, _)) => {
                    return Err(ModuleError::Order(format!(
                        "the calls of computation {id} expand to more than {MET} instructions"
                    )));
                }
                None if known.is_empty() => break,
                None => met.extend(known),
            }
        }
        match self.computations.values().find(|c| !met.contains_key(&c.id)) {
            Some(c) => Err(ModuleError::Order(format!(
                "computation {} calls itself, or its calls are nested more than {NESTED} deep",
                c.id
            ))),
            None => Ok(()),
        }
    }

    /// Returns the number of instructions of a computation, including those of the computations that it calls. `met`
    /// has the numbers that are known so far; `None`: it lacks the number of a called computation.
    fn met_in(&self, c: &ComputationProto, met: &HashMap<i64, u64>) -> Option<u64> {
        c.instructions.iter().try_fold(0u64, |sum, i| {
            let called = i.called_computation_ids.iter().filter(|id| self.computations.contains_key(id));
            called.map(|id| met.get(id).copied()).try_fold(sum + 1, |sum, n| Some(sum.saturating_add(n?)))
        })
    }

    /// Returns the module name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn entry(&self) -> i64 {
        self.entry
    }

    pub(super) fn computation(&self, id: i64) -> Option<&ComputationProto> {
        self.computations.get(&id)
    }

    pub(super) fn computations(&self) -> impl Iterator<Item = &ComputationProto> {
        self.computations.values()
    }

    /// Returns the instruction with this id, which is unique in the module.
    pub(super) fn instruction(&self, id: i64) -> Option<&InstructionProto> {
        let (computation, at) = self.places.get(&id)?;
        self.computations.get(computation)?.instructions.get(*at)
    }

    /// Returns the instructions that follow `i` in its computation.
    pub(super) fn following(&self, i: &InstructionProto) -> &[InstructionProto] {
        let place = self.places.get(&i.id).and_then(|(c, at)| self.computation(*c)?.instructions.get(at + 1..));
        place.unwrap_or_default()
    }

    pub(super) fn operand(&self, i: &InstructionProto, n: usize) -> Option<&InstructionProto> {
        self.instruction(*i.operand_ids.get(n)?)
    }

    /// Returns the shape of the array that an instruction copies, or starts to copy, between host memory and the
    /// device. `None`: the instruction does neither.
    pub(super) fn host_copy<'a>(&'a self, i: &'a InstructionProto) -> Option<&'a ShapeProto> {
        let crosses = |from: &ShapeProto, to: &ShapeProto| is_in_host(from) != is_in_host(to);
        let of_operand = |n| self.operand(i, n)?.shape.as_ref();
        match i.opcode.as_str() {
            // The shape contains the destination and the source.
            "copy-start" => match i.shape.as_ref()?.tuple_shapes.as_slice() {
                [to, from, ..] => crosses(from, to).then_some(to),
                _ => None,
            },
            "copy" | "slice" | "dynamic-slice" => {
                i.shape.as_ref().filter(|to| of_operand(0).is_some_and(|from| crosses(from, to)))
            }
            "dynamic-update-slice" => of_operand(1).filter(|part| i.shape.as_ref().is_some_and(|to| crosses(part, to))),
            "async-start" => self.host_copy(self.root(self.called(i)?)?),
            _ => None,
        }
    }

    /// Returns the first computation that an instruction calls.
    pub(super) fn called(&self, i: &InstructionProto) -> Option<&ComputationProto> {
        self.computation(*i.called_computation_ids.first()?)
    }

    /// Returns the instructions of a computation in schedule order. Without a schedule, returns them in stored order,
    /// in which operands precede users.
    pub(super) fn scheduled<'a>(&'a self, c: &'a ComputationProto) -> Vec<&'a InstructionProto> {
        match self.schedule.get(&c.id) {
            Some(order) => order.iter().filter_map(|&id| self.instruction(id)).collect(),
            None => c.instructions.iter().collect(),
        }
    }

    pub(super) fn root<'a>(&'a self, c: &'a ComputationProto) -> Option<&'a InstructionProto> {
        self.instruction(c.root_id)
    }

    /// Returns the outermost loops, each with its nested loops.
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

    /// Returns every array that is written to device memory. Values inside fusions and aliases are not included.
    pub fn stored_arrays(&self) -> Vec<StoredArray> {
        const NAMES: [&str; 5] = ["parameter", "tuple", "get-tuple-element", "bitcast", "while"];
        let of_fusions = self.computations.values().flat_map(|c| &c.instructions).filter(|i| i.opcode == "fusion");
        let fused: BTreeSet<i64> = of_fusions.flat_map(|i| i.called_computation_ids.iter().copied()).collect();
        let own = self.computations.values().filter(|c| !fused.contains(&c.id)).flat_map(|c| &c.instructions);
        let mut found = Vec::new();
        // `ConcatBitcast` joins slices that were prefetched one by one to faster memory; it writes nothing.
        let is_name =
            |i: &InstructionProto| NAMES.contains(&i.opcode.as_str()) || i.custom_call_target == "ConcatBitcast";
        for i in own.filter(|i| !is_name(i)) {
            for array in i.shape.iter().flat_map(leaves) {
                let (dtype, dims) = (dtype_name(array.element_type), array.dimensions.clone());
                found.push(StoredArray { dtype, dims, opcode: i.opcode.clone(), scope: i.scope().to_string() });
            }
        }
        found
    }

    /// Returns the instructions of all computations.
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

/// Returns the arrays of which a shape consists.
fn leaves(shape: &ShapeProto) -> Vec<&ShapeProto> {
    match shape.tuple_shapes.is_empty() {
        true => vec![shape],
        false => shape.tuple_shapes.iter().flat_map(leaves).collect(),
    }
}

impl InstructionProto {
    /// Returns the name scope as the compiler recorded it.
    pub(super) fn scope(&self) -> &str {
        self.metadata.as_ref().map_or("", |m| m.op_name.as_str())
    }
}
