//! Recognizes collectives in all forms that compilers produce.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::level::LoopLevel;
use super::module::Module;
use super::proto::{ComputationProto, InstructionProto, ShapeProto};
use super::shape::{bytes, dtype_name};

/// Kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CollectiveKind {
    /// Every device receives the shards of all devices.
    AllGather,
    /// Every device receives the sum of all values.
    AllReduce,
    /// Every device receives one shard of the sum of all values.
    ReduceScatter,
    /// Every device receives one shard of the value of each device.
    AllToAll,
    /// Each device sends its value to at most one other device.
    CollectivePermute,
    /// Every device receives the value of one source device.
    CollectiveBroadcast,
}

impl CollectiveKind {
    /// All kinds with XLA's opcodes. `reduce-scatter` precedes `all-reduce`, so that a search for an opcode that the
    /// name `all-reduce-scatter` contains finds `reduce-scatter`.
    pub(super) const NAMES: [(CollectiveKind, &str); 6] = [
        (CollectiveKind::AllGather, "all-gather"),
        (CollectiveKind::ReduceScatter, "reduce-scatter"),
        (CollectiveKind::AllReduce, "all-reduce"),
        (CollectiveKind::AllToAll, "all-to-all"),
        (CollectiveKind::CollectivePermute, "collective-permute"),
        (CollectiveKind::CollectiveBroadcast, "collective-broadcast"),
    ];

    /// Returns XLA's opcode.
    pub fn name(self) -> &'static str {
        let found = Self::NAMES.iter().find(|(kind, _)| *kind == self);
        found.expect("every kind is listed").1
    }

    /// Returns the kind of a collective with this opcode, which may be synchronous or a `-start`.
    pub(super) fn from_opcode(opcode: &str) -> Option<CollectiveKind> {
        let opcode = opcode.strip_suffix("-start").unwrap_or(opcode);
        let name = if opcode == "ragged-all-to-all" { "all-to-all" } else { opcode };
        Self::NAMES.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind)
    }

    /// Returns the kind of a collective with this opcode, which may be synchronous, a `-start` or a `-done`.
    pub(super) fn of_any(opcode: &str) -> Option<CollectiveKind> {
        Self::from_opcode(opcode.strip_suffix("-done").unwrap_or(opcode))
    }

    /// Returns the bytes that each of `n` devices receives with a ring algorithm if the result has `bytes` bytes. An
    /// all-reduce transfers everything twice; in an all-gather or all-to-all, a device does not receive its own shard.
    pub fn wire_bytes(self, bytes: f64, n: usize) -> f64 {
        let n = n.max(1) as f64;
        match self {
            CollectiveKind::AllGather | CollectiveKind::AllToAll => bytes * (n - 1.0) / n,
            CollectiveKind::AllReduce => 2.0 * bytes * (n - 1.0) / n,
            CollectiveKind::ReduceScatter => bytes * (n - 1.0),
            CollectiveKind::CollectivePermute | CollectiveKind::CollectiveBroadcast => bytes,
        }
    }
}

/// A collective of the program. It counts once even if the compiler split it into several instructions or cloned it.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    /// Kind of the collective.
    pub kind: CollectiveKind,
    /// Name scope (XLA's `op_name` without compiler wrappers and the operation's name); empty if unknown.
    pub scope: String,
    /// Element types, joined by `+`.
    pub dtype: String,
    /// Size in bytes of the result on one device; for an all-reduce, that of the operand, which is equal.
    pub bytes: f64,
    /// Bytes that one device receives.
    pub wire_bytes: f64,
    /// Mesh axes along which the devices of a group differ, outermost first.
    pub axes: Vec<String>,
    /// Loop that contains the collective.
    pub level: LoopLevel,
    /// Number of runs of the collective per call, step or block, depending on `level`.
    pub times: f64,
    /// Whether the collective is a pair of a start and a done instruction.
    pub asynchronous: bool,
    /// Whether matmuls or other work run between the start and the end.
    pub overlapped: bool,
    /// Predicted seconds of the transfer; 0 if the chip is unknown.
    pub seconds: f64,
}

const ASYNC_START: &str = "AsyncCollectiveStart";
const ASYNC_DONE: &str = "AsyncCollectiveDone";

/// Returns whether an instruction marks the start or the end of a collective that the TPU compiler distributes over
/// several fusions.
pub(super) fn is_async_marker(i: &InstructionProto) -> bool {
    i.custom_call_target == ASYNC_START || i.custom_call_target == ASYNC_DONE
}

/// Part of an asynchronous collective that a fusion contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AsyncPart {
    Start,
    /// A clone of the collective that overlaps with other work. If the program has no start instruction for the
    /// collective, this is the complete collective.
    Middle,
    Done,
}

impl Module {
    /// Returns the collectives that are fused into a computation, with the part of each that the computation contains.
    pub(super) fn fused_collectives<'a>(&'a self, c: &'a ComputationProto) -> Vec<(AsyncPart, &'a InstructionProto)> {
        let marked = |target: &str| c.instructions.iter().any(|i| i.custom_call_target == target);
        let part = match (marked(ASYNC_START), marked(ASYNC_DONE)) {
            (true, _) => AsyncPart::Start,
            (_, true) => AsyncPart::Done,
            _ => AsyncPart::Middle,
        };
        let mut found = Vec::new();
        for i in &c.instructions {
            if CollectiveKind::from_opcode(&i.opcode).is_some() {
                found.push((part, i));
            } else if i.opcode == "fusion"
                && let Some(called) = self.called(i)
            {
                found.extend(self.fused_collectives(called));
            }
        }
        found
    }

    /// Returns the collective that an asynchronous computation contains. For TPU SparseCores, it is nested in another
    /// custom call.
    pub(super) fn wrapped_collective(&self, start: &InstructionProto) -> Option<&InstructionProto> {
        self.called(start)?.instructions.iter().find_map(|i| match CollectiveKind::from_opcode(&i.opcode) {
            Some(_) => Some(i),
            None if i.opcode == "custom-call" => self.wrapped_collective(i),
            None => None,
        })
    }

    /// Returns the kind and the result shape of a collective. An all-reduce in a fusion that keeps only a slice of the
    /// result counts as a reduce-scatter.
    pub(super) fn result<'a>(
        &'a self,
        i: &'a InstructionProto,
        fused_in: Option<&'a ComputationProto>,
    ) -> Option<(CollectiveKind, &'a ShapeProto)> {
        let kind = CollectiveKind::from_opcode(&i.opcode)?;
        let shape = i.shape.as_ref()?;
        if let Some(root) = fused_in.and_then(|c| self.root(c)).filter(|r| r.opcode == "dynamic-slice")
            && kind == CollectiveKind::AllReduce
        {
            return Some((CollectiveKind::ReduceScatter, root.shape.as_ref()?));
        }
        // The tuple of a start contains operands, results and then runtime context; that of an all-reduce-start
        // contains only results.
        let both = i.opcode.ends_with("-start") && kind != CollectiveKind::AllReduce;
        let result = if both { shape.tuple_shapes.get(1).unwrap_or(shape) } else { shape };
        Some((kind, result))
    }

    /// Returns the name scope of an instruction, without the name of the operation. If the instruction has no scope,
    /// returns the scope of its first operand.
    pub(super) fn scope_of(&self, i: &InstructionProto) -> String {
        let mut at = Some(i);
        for _ in 0..8 {
            let Some(here) = at else { break };
            if !here.scope().is_empty() {
                return trim(here.scope());
            }
            at = self.operand(here, 0);
        }
        String::new()
    }

    /// Returns the name scope of the first instruction that uses a value, directly or through instructions without a
    /// scope. Compilers may drop the scope of a collective that they move, or of a weight's all-gather that they
    /// insert.
    pub(super) fn scope_of_reader(&self, i: &InstructionProto) -> String {
        let mut made_of_it = HashSet::from([i.id]);
        // In a computation, users follow their operands.
        for later in self.following(i) {
            if !later.operand_ids.iter().any(|id| made_of_it.contains(id)) {
                continue;
            }
            let scope = trim(later.scope());
            if !scope.is_empty() {
                return scope;
            }
            made_of_it.insert(later.id);
        }
        String::new()
    }
}

const MANUAL_REGION: &str = "manual_computation/";

/// Removes compiler wrappers at the start of a name scope and the operation name at its end. If the compiler merged
/// operations, as in `blocks/(attn1/to_q/dot:attn1/to_k/dot)`, returns the common prefix followed by the rest of each
/// scope: `blocks/attn1/{to_q, to_k}`.
pub(super) fn trim(scope: &str) -> String {
    let mut each = Vec::new();
    for one in alternatives(scope) {
        let one = trim_one(&one);
        if !one.is_empty() && !each.contains(&one) {
            each.push(one);
        }
    }
    let Some((first, others)) = each.split_first() else { return String::new() };
    if others.is_empty() {
        return first.clone();
    }
    let common = |other: &String| first.split('/').zip(other.split('/')).take_while(|(a, b)| a == b).count();
    let shared = others.iter().map(common).min().unwrap_or(0);
    let rest = |scope: &String| scope.split('/').skip(shared).collect::<Vec<_>>().join("/");
    let rests: Vec<String> = each.iter().map(rest).filter(|rest| !rest.is_empty()).collect();
    let prefix: String = first.split('/').take(shared).flat_map(|part| [part, "/"]).collect();
    format!("{prefix}{{{}}}", rests.join(", "))
}

fn trim_one(scope: &str) -> String {
    // The scope of an operation inside a manual region is appended to the scope of the region; keep only the inner
    // scope.
    let scope = scope.rsplit(MANUAL_REGION).find(|part| part.contains('/')).unwrap_or(scope);
    let parts: Vec<&str> = scope.split('/').filter(|p| !p.starts_with("jit(") && !p.is_empty()).collect();
    parts[..parts.len().saturating_sub(1)].join("/")
}

/// Expands an abbreviated path: `a/(b/c:d/e)` becomes `a/b/c` and `a/d/e`.
fn alternatives(path: &str) -> Vec<String> {
    let opens = |at: &usize| *at == 0 || path.as_bytes()[at - 1] == b'/';
    let Some(open) = path.match_indices('(').map(|(at, _)| at).find(opens) else { return vec![path.to_string()] };
    let (mut depth, mut from, mut inner) = (0, open + 1, Vec::new());
    for (at, c) in path.char_indices().skip_while(|(at, _)| *at < open) {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ':' if depth == 1 => {
                inner.push(&path[from..at]);
                from = at + 1;
            }
            _ => {}
        }
        if depth == 0 {
            inner.push(&path[from..at]);
            let (before, behind) = (&path[..open], &path[at + 1..]);
            return inner.iter().flat_map(|part| alternatives(&format!("{before}{part}{behind}"))).collect();
        }
    }
    vec![path.to_string()]
}

/// Returns the element types and the total size in bytes of a result.
pub(super) fn dtypes_and_bytes(shape: &ShapeProto) -> (String, f64) {
    fn leaves<'a>(s: &'a ShapeProto, into: &mut Vec<&'a ShapeProto>) {
        match s.tuple_shapes.is_empty() {
            true => into.push(s),
            false => s.tuple_shapes.iter().for_each(|t| leaves(t, into)),
        }
    }
    let mut all = Vec::new();
    leaves(shape, &mut all);
    let mut names: Vec<&str> = all.iter().map(|s| dtype_name(s.element_type)).collect();
    names.sort_unstable();
    names.dedup();
    (names.join("+"), bytes(shape) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sketch::{self, computation, decode};

    #[test]
    fn wire_bytes_follow_ring_algorithms() {
        assert_eq!(CollectiveKind::AllGather.wire_bytes(800.0, 8), 700.0);
        assert_eq!(CollectiveKind::AllReduce.wire_bytes(800.0, 8), 1400.0);
        assert_eq!(CollectiveKind::ReduceScatter.wire_bytes(100.0, 8), 700.0);
        assert_eq!(CollectiveKind::AllToAll.wire_bytes(800.0, 4), 600.0);
        assert_eq!(CollectiveKind::CollectivePermute.wire_bytes(800.0, 2), 800.0);
    }

    #[test]
    fn unscoped_gather_uses_scope_of_its_user() {
        let instruction = |id: i64, opcode: &str, operands: &[i64], scope: &str| InstructionProto {
            metadata: sketch::scope(scope),
            ..sketch::instruction(id, opcode, operands)
        };
        let instructions = vec![
            instruction(1, "parameter", &[], ""),
            instruction(2, "all-gather", &[1], ""),
            instruction(3, "add", &[1, 1], "blocks/attn1/add"),
            instruction(4, "bitcast", &[2], ""),
            instruction(5, "custom-call", &[3, 4], "jit(main)/blocks/ff/2/dot_general"),
        ];
        let module = decode(1, vec![computation(1, instructions)]).expect("a module");
        let gather = module.instruction(2).expect("the gather");
        assert_eq!((module.scope_of(gather).as_str(), module.scope_of_reader(gather).as_str()), ("", "blocks/ff/2"));
        assert_eq!(module.scope_of_reader(module.instruction(5).expect("the product")), "");
    }

    #[test]
    fn compiler_wrappers_are_trimmed_from_scopes() {
        assert_eq!(trim("blocks/attn1/sdpa/dot_general"), "blocks/attn1/sdpa");
        assert_eq!(trim("jit(main)/blocks/ff/reshape"), "blocks/ff");
        assert_eq!(trim("blocks/attn1/sdpa/manual_computation/blocks/attn1/sdpa/all_to_all"), "blocks/attn1/sdpa");
        assert_eq!(trim("while"), "");
        let sums = "blocks/(attn2/0/dot_general:video_to_audio_attn/0/dot_general)";
        assert_eq!(trim(sums), "blocks/{attn2/0, video_to_audio_attn/0}");
        assert_eq!(trim("blocks/attn1/(norm_k/reduce:norm_q/reduce)"), "blocks/attn1/{norm_k, norm_q}");
        assert_eq!(trim("jit(main)/blocks/(ff/(a/add:b/add):ff/a/add)"), "blocks/ff/{a, b}");
        assert_eq!(trim("blocks/(ff/add:ff/mul)"), "blocks/ff");
        assert_eq!(trim("blocks/(ff/add:ff"), "blocks/(ff", "truncated");
    }

    #[test]
    fn start_and_done_opcodes_map_to_their_kind() {
        assert_eq!(CollectiveKind::from_opcode("all-gather-start"), Some(CollectiveKind::AllGather));
        assert_eq!(CollectiveKind::from_opcode("copy-start"), None);
        assert_eq!(CollectiveKind::of_any("collective-permute-done"), Some(CollectiveKind::CollectivePermute));
        assert_eq!(CollectiveKind::of_any("async-done"), None);
    }
}
