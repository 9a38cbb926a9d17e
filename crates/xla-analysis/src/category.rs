//! Categories of operations, determined from the optimized program if it is available, and otherwise from the kernel's
//! name.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::collective::{CollectiveKind, is_async_marker, trim};
use super::module::Module;
use super::proto::{ComputationProto, InstructionProto, ShapeProto};
use super::shape::dtype_name;

/// Kind of work that an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(with = "String"))]
pub enum OpCategory {
    /// Matmuls and convolutions, including the operations fused into them.
    Matmul,
    /// Attention scores, softmax and weighted sum, in one or several kernels.
    Attention,
    /// Elementwise arithmetic and reductions: norms, modulation, activations.
    Elementwise,
    /// Copies, transposes and slices.
    Copy,
    /// Loop overhead, and kernels of unknown purpose.
    Other,
    /// Copies between host memory and the device.
    HostCopy,
    /// Collectives of this kind.
    Collective(CollectiveKind),
}

impl OpCategory {
    /// Returns the category's name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            OpCategory::Matmul => "matmul",
            OpCategory::Attention => "attention",
            OpCategory::Elementwise => "elementwise",
            OpCategory::Copy => "copy",
            OpCategory::Other => "other",
            OpCategory::HostCopy => "host-copy",
            OpCategory::Collective(kind) => kind.name(),
        }
    }

    /// Returns whether the category is that of a collective.
    pub fn is_collective(self) -> bool {
        matches!(self, OpCategory::Collective(_))
    }

    /// Returns whether operations of the category use links, so that they overlap with work of the device: collectives
    /// and copies from host memory.
    pub fn is_transfer(self) -> bool {
        self.is_collective() || self == OpCategory::HostCopy
    }
}

impl TryFrom<String> for OpCategory {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        use OpCategory::{Attention, Collective, Copy, Elementwise, HostCopy, Matmul, Other};
        let collectives = CollectiveKind::NAMES.into_iter().map(|(kind, _)| Collective(kind));
        let mut all = [Matmul, Attention, Elementwise, Copy, Other, HostCopy].into_iter().chain(collectives);
        all.find(|category| category.name() == name).ok_or_else(|| format!("unknown category '{name}'"))
    }
}

impl From<OpCategory> for &'static str {
    fn from(category: OpCategory) -> Self {
        category.name()
    }
}

/// Category and name scope of an instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Purpose {
    /// Category of the instruction.
    pub category: OpCategory,
    /// Name scope, without the name of the operation at its end.
    pub scope: String,
}

/// Name scope of attention, whichever kernel computes it.
const ATTENTION: &str = "sdpa";

/// Opcodes of instructions that only move data.
const MOVES: [&str; 25] = [
    "parameter",
    "constant",
    "iota",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "bitcast-convert",
    "reshape",
    "transpose",
    "broadcast",
    "copy",
    "copy-start",
    "copy-done",
    "slice",
    "slice-start",
    "slice-done",
    "dynamic-slice",
    "dynamic-update-slice",
    "concatenate",
    "pad",
    "reverse",
    "gather",
    "scatter",
    "optimization-barrier",
    "after-all",
];

impl Module {
    /// Returns the category and the name scope of every instruction, by instruction name.
    pub fn purposes(&self) -> HashMap<String, Purpose> {
        let all = self.computations().flat_map(|c| &c.instructions);
        all.map(|i| (i.name.clone(), self.purpose(i))).collect()
    }

    pub(super) fn purpose(&self, i: &InstructionProto) -> Purpose {
        let (category, scope) = (self.category(i), self.scope_of(i));
        // Compilers drop the name scopes of weight all-gathers and of copies from host memory, so use the scope of the
        // value's user.
        let reader = || if category.is_transfer() { self.scope_of_reader(i) } else { String::new() };
        Purpose { category, scope: if scope.is_empty() { reader() } else { scope } }
    }

    pub(super) fn category(&self, i: &InstructionProto) -> OpCategory {
        if let Some(kind) = CollectiveKind::of_any(&i.opcode) {
            return OpCategory::Collective(kind);
        }
        let copy = if i.opcode == "copy-done" { self.operand(i, 0).unwrap_or(i) } else { i };
        if self.host_copy(copy).is_some() {
            return OpCategory::HostCopy;
        }
        let in_attention = trim(i.scope()).split('/').any(|part| part == ATTENTION);
        match i.opcode.as_str() {
            "fusion" => self.called(i).map_or(OpCategory::Other, |c| self.fused_category(c, in_attention)),
            "async-start" => {
                let inside = self.called(i).and_then(|c| self.root(c));
                inside.map_or(OpCategory::Other, |root| self.category(root))
            }
            "async-update" | "async-done" => match self.async_start(i) {
                Some(start) => self.category(start),
                None => OpCategory::Other,
            },
            "while" | "call" | "conditional" | "partition-id" | "replica-id" => OpCategory::Other,
            opcode if MOVES.contains(&opcode) => OpCategory::Copy,
            _ => single(i, in_attention),
        }
    }

    /// Returns the start instruction of an asynchronous operation.
    fn async_start<'a>(&'a self, i: &'a InstructionProto) -> Option<&'a InstructionProto> {
        let mut at = i;
        while matches!(at.opcode.as_str(), "async-update" | "async-done") {
            at = self.operand(at, 0)?;
        }
        Some(at)
    }

    /// Returns the category of a fusion. A fusion that contains a collective has the category of the collective, and
    /// one that only moves data is a copy. In the scope of attention, other fusions are attention. Elsewhere, the
    /// category is the first in the order of [`OpCategory`] that the fusion contains.
    fn fused_category(&self, c: &ComputationProto, in_attention: bool) -> OpCategory {
        if let Some((_, collective)) = self.fused_collectives(c).first() {
            return CollectiveKind::from_opcode(&collective.opcode).map_or(OpCategory::Other, OpCategory::Collective);
        }
        let mut found = OpCategory::Copy;
        for i in &c.instructions {
            let category = match i.opcode.as_str() {
                "fusion" => self.called(i).map_or(OpCategory::Copy, |c| self.fused_category(c, in_attention)),
                opcode if MOVES.contains(&opcode) || is_async_marker(i) || (is_index(i) && i.id != c.root_id) => {
                    continue;
                }
                _ => single(i, in_attention),
            };
            if category == OpCategory::Other {
                continue;
            }
            // Categories are ordered by priority, except for copy, which is the fallback.
            if found == OpCategory::Copy || category < found {
                found = category;
            }
        }
        // If attention is not fused into one kernel, its matmuls still count as attention.
        if in_attention && found != OpCategory::Copy { OpCategory::Attention } else { found }
    }
}

fn single(i: &InstructionProto, in_attention: bool) -> OpCategory {
    match i.opcode.as_str() {
        "custom-call" => match i.custom_call_target.as_str() {
            target if target.starts_with("__cudnn$fmha") => OpCategory::Attention,
            _ if in_attention => OpCategory::Attention,
            target if target.starts_with("__cublas") || target.starts_with("__cudnn$conv") => OpCategory::Matmul,
            target if target.starts_with("__") && target.to_lowercase().contains("dot") => OpCategory::Matmul,
            "__gpu$xla.gpu.triton" => of_triton_kernel(&i.backend_config),
            _ => OpCategory::Other,
        },
        _ if in_attention => OpCategory::Attention,
        "dot" | "convolution" | "scaled-dot" => OpCategory::Matmul,
        _ => OpCategory::Elementwise,
    }
}

/// Returns the category of a Triton kernel from the MLIR attributes of its call: `name = "neighborhood"`.
fn of_triton_kernel(attributes: &[u8]) -> OpCategory {
    let text = String::from_utf8_lossy(attributes);
    let name = text.split_once("name = \"").and_then(|(_, rest)| rest.split_once('"'));
    name.map_or(OpCategory::Other, |(name, _)| of_name(name))
}

/// Returns whether an instruction is arithmetic on a single integer or boolean, such as a slice index.
fn is_index(i: &InstructionProto) -> bool {
    let single = |s: &ShapeProto| {
        s.dimensions.is_empty() && s.tuple_shapes.is_empty() && !dtype_name(s.element_type).contains('f')
    };
    i.opcode != "reduce" && i.shape.as_ref().is_some_and(single)
}

/// Returns the category of a trace event from its name alone. The event may be a kernel, a copy, or an instruction
/// whose module is not in the trace.
pub(crate) fn of_name(name: &str) -> OpCategory {
    let name = name.to_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| name.contains(word));
    if let Some(kind) = collective_of_name(&name) {
        return OpCategory::Collective(kind);
    }
    if has(&["flash", "fmha", "sdpa", "attention", "neighborhood"]) {
        return OpCategory::Attention;
    }
    if has(&["gemm", "nvjet", "cutlass", "cublas", "matmul", "convolution", "conv2d", "conv3d", "wgrad", "dgrad"])
        || name.starts_with("dot")
        || name.contains("splitk")
    {
        return OpCategory::Matmul;
    }
    if has(&["memcpyh2d", "memcpyhtod"]) {
        return OpCategory::HostCopy;
    }
    if has(&["memcpy", "memset", "copy", "transpose", "dynamic_slice", "dynamic-slice", "dynamic_update_slice"]) {
        return OpCategory::Copy;
    }
    let moves = ["concatenate", "slice", "pad", "broadcast", "reshape", "bitcast"];
    if has(&["fusion", "wrapped_", "reduce", "triton", "quantize"]) {
        // `loop_concatenate_fusion` only moves data; `loop_add_slice_fusion` also does arithmetic.
        let words = name.split(['_', '.', '-']).filter(|w| !w.is_empty() && w.parse::<u64>().is_err());
        let mut rest = words.filter(|w| !["loop", "fusion", "wrapped", "input", "kernel"].contains(w)).peekable();
        let only_moves = rest.peek().is_some() && rest.all(|w| moves.contains(&w));
        return if only_moves { OpCategory::Copy } else { OpCategory::Elementwise };
    }
    if moves.iter().any(|word| name.starts_with(word)) {
        return OpCategory::Copy;
    }
    OpCategory::Other
}

/// Returns the kind of a collective from the lower-case name that NCCL, NVSHMEM, XLA or HLO gives it.
fn collective_of_name(name: &str) -> Option<CollectiveKind> {
    let letters: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
    let found = CollectiveKind::NAMES.iter().find(|(_, name)| letters.contains(&name.replace('-', "")));
    match found {
        Some((kind, _)) => Some(*kind),
        // NCCL implements both permutes and all-to-alls with send/recv; only the program tells which one it is.
        None if letters.contains("sendrecv") => Some(CollectiveKind::CollectivePermute),
        None => {
            (letters.contains("nccl") && letters.contains("broadcast")).then_some(CollectiveKind::CollectiveBroadcast)
        }
    }
}

/// Returns the category for the `hlo_category` that a TPU trace states for an event; `None` if it is unknown.
pub(crate) fn of_category(category: &str) -> Option<OpCategory> {
    if let Some(kind) = collective_of_name(&category.to_lowercase()) {
        return Some(OpCategory::Collective(kind));
    }
    match category {
        "convolution" | "convolution fusion" | "dot" | "output fusion" => Some(OpCategory::Matmul),
        "copy" | "copy-start" | "copy-done" | "data formatting" | "async-copy" => Some(OpCategory::Copy),
        "loop fusion" | "non-fusion elementwise" | "reduce" | "input fusion" => Some(OpCategory::Elementwise),
        "while" | "call" | "conditional" => Some(OpCategory::Other),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sketch::{self, computation, decode, shape};

    fn instruction(id: i64, name: &str, opcode: &str, scope: &str) -> InstructionProto {
        let (shape, metadata) = (Some(shape(16, &[8, 8])), sketch::scope(scope));
        InstructionProto { name: name.into(), shape, metadata, ..sketch::instruction(id, opcode, &[]) }
    }

    fn purposes(computations: Vec<ComputationProto>) -> HashMap<String, Purpose> {
        decode(1, computations).unwrap().purposes()
    }

    #[test]
    fn category_follows_from_opcode_fused_contents_and_scope() {
        let fusion = |id, name: &str, scope: &str, called| InstructionProto {
            called_computation_ids: vec![called],
            ..instruction(id, name, "fusion", scope)
        };
        let call = |id, name: &str, scope: &str, target: &str| InstructionProto {
            custom_call_target: target.into(),
            ..instruction(id, name, "custom-call", scope)
        };
        let triton = |id, kernel: &str| InstructionProto {
            backend_config: format!("{{flops = 12 : i64, ir = \"module {{}}\", name = \"{kernel}\"}}").into(),
            ..call(id, kernel, "", "__gpu$xla.gpu.triton")
        };
        let single = |id, element_type| InstructionProto {
            shape: Some(shape(element_type, &[])),
            ..instruction(id, "i", "add", "")
        };
        let all = purposes(vec![
            computation(
                1,
                vec![
                    instruction(10, "dot.1", "dot", "blocks/ff/proj/dot_general"),
                    call(11, "custom-call.2", "blocks/attn1/to_q/dot_general", "__cublas$lt$matmul"),
                    call(12, "custom-call.3", "", "__cudnn$fmhaSoftmax"),
                    call(13, "flash", "blocks/attn1/sdpa/tpu_custom_call", "tpu_custom_call"),
                    fusion(14, "loop_add_fusion", "blocks/norm/add", 2),
                    fusion(15, "slice_fusion", "blocks/attn1/slice", 3),
                    fusion(16, "gemm_fusion", "blocks/ff/dot_general", 4),
                    fusion(17, "softmax", "blocks/attn1/sdpa/exp", 2),
                    fusion(18, "gather_fusion", "blocks/ff/dot_general", 5),
                    instruction(19, "all-gather-done", "all-gather-done", "blocks/attn1/sdpa/gather"),
                    instruction(20, "copy.4", "copy", "blocks/attn1/sdpa/transpose"),
                    instruction(21, "while.5", "while", ""),
                    fusion(24, "mean_fusion", "", 7),
                    fusion(25, "loop_counter", "", 8),
                    triton(26, "rotate_quantize"),
                    triton(27, "neighborhood"),
                ],
            ),
            computation(2, vec![instruction(30, "a", "add", ""), instruction(31, "r", "reduce", "")]),
            computation(3, vec![single(33, 4), instruction(32, "d", "dynamic-slice", "")]),
            computation(7, vec![single(70, 11), instruction(71, "s", "slice", "")]),
            computation(8, vec![single(80, 4)]),
            computation(4, vec![instruction(40, "c", "convert", ""), instruction(41, "e", "dot", "")]),
            computation(5, vec![instruction(50, "g", "all-gather", ""), instruction(51, "h", "dot", "")]),
        ]);
        let of = |name: &str| all[name].category;
        assert_eq!(of("dot.1"), OpCategory::Matmul);
        assert_eq!(of("custom-call.2"), OpCategory::Matmul);
        assert_eq!(of("custom-call.3"), OpCategory::Attention);
        assert_eq!(of("flash"), OpCategory::Attention);
        assert_eq!(of("rotate_quantize"), OpCategory::Elementwise);
        assert_eq!(of("neighborhood"), OpCategory::Attention);
        assert_eq!(of("loop_add_fusion"), OpCategory::Elementwise);
        assert_eq!(of("slice_fusion"), OpCategory::Copy, "arithmetic on an index is ignored");
        assert_eq!(of("mean_fusion"), OpCategory::Elementwise, "arithmetic on a single float counts");
        assert_eq!(of("loop_counter"), OpCategory::Elementwise, "arithmetic on an index counts if it is the result");
        assert_eq!(of("gemm_fusion"), OpCategory::Matmul);
        assert_eq!(of("softmax"), OpCategory::Attention);
        assert_eq!(of("gather_fusion"), OpCategory::Collective(CollectiveKind::AllGather));
        assert_eq!(of("all-gather-done"), OpCategory::Collective(CollectiveKind::AllGather));
        assert_eq!(of("copy.4"), OpCategory::Copy, "copies in attention count as copies");
        assert_eq!(of("while.5"), OpCategory::Other);
        assert_eq!(all["dot.1"].scope, "blocks/ff/proj");
    }

    #[test]
    fn async_done_has_the_category_of_its_start() {
        let inner = computation(6, vec![instruction(60, "rs", "reduce-scatter", "")]);
        let start = InstructionProto { called_computation_ids: vec![6], ..instruction(22, "s", "async-start", "") };
        let done = InstructionProto { operand_ids: vec![22], ..instruction(23, "d", "async-done", "") };
        let all = purposes(vec![computation(1, vec![start, done]), inner]);
        assert_eq!(all["s"].category, OpCategory::Collective(CollectiveKind::ReduceScatter));
        assert_eq!(all["d"].category, OpCategory::Collective(CollectiveKind::ReduceScatter));
    }

    #[test]
    fn cyclic_operands_and_unbounded_calls_are_rejected() {
        let fusion = |id, called: &[i64]| InstructionProto {
            called_computation_ids: called.to_vec(),
            ..instruction(id, "f", "fusion", "")
        };
        let decode = |computations| decode(1, computations).map(drop).map_err(|e| e.to_string());
        let done = |id, of| InstructionProto { operand_ids: vec![of], ..instruction(id, "d", "async-done", "") };
        assert_eq!(
            decode(vec![computation(1, vec![done(10, 11), done(11, 10)])]).unwrap_err(),
            "operand 11 does not precede its user 'd'"
        );
        let own = computation(1, vec![fusion(10, &[1])]);
        assert!(decode(vec![own]).unwrap_err().contains("computation 1 calls itself"));
        // Each computation calls the next one twice, which expands to 2^40 instructions.
        let twice = (1..=40).map(|n| computation(n, vec![fusion(100 + n, &[n + 1]), fusion(200 + n, &[n + 1])]));
        assert!(decode(twice.collect()).unwrap_err().contains("expand to more than"));
        let chain = |length| (1..=length).map(|n| computation(n, vec![fusion(1000 + n, &[n + 1])])).collect();
        assert_eq!(decode(chain(60)), Ok(()));
        assert!(decode(chain(70)).unwrap_err().contains("nested more than 64 deep"));
    }

    #[test]
    fn kernels_are_categorized_by_name() {
        let named = [
            ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_bias_TNT", OpCategory::Matmul),
            ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", OpCategory::Matmul),
            ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", OpCategory::Matmul),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", OpCategory::Attention),
            (
                "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)",
                OpCategory::Collective(CollectiveKind::AllGather),
            ),
            ("ncclDevKernel_ReduceScatter_Sum_bf16_RING", OpCategory::Collective(CollectiveKind::ReduceScatter)),
            ("all-reduce-scatter.2", OpCategory::Collective(CollectiveKind::ReduceScatter)),
            ("ncclDevKernel_SendRecv", OpCategory::Collective(CollectiveKind::CollectivePermute)),
            ("all-to-all-start.3", OpCategory::Collective(CollectiveKind::AllToAll)),
            ("MemcpyD2D", OpCategory::Copy),
            ("MemcpyH2D", OpCategory::HostCopy),
            ("wrapped_transpose", OpCategory::Copy),
            ("loop_concatenate_fusion_3", OpCategory::Copy),
            ("loop_convert_fusion_3", OpCategory::Elementwise),
            ("input_reduce_fusion", OpCategory::Elementwise),
            ("loop_broadcast_add_fusion", OpCategory::Elementwise),
            ("rotate_quantize", OpCategory::Elementwise),
            ("neighborhood", OpCategory::Attention),
            ("some_kernel", OpCategory::Other),
        ];
        for (name, category) in named {
            assert_eq!(of_name(name), category, "{name}");
        }
        assert_eq!(of_category("convolution fusion"), Some(OpCategory::Matmul));
        assert_eq!(of_category("all-gather fusion"), Some(OpCategory::Collective(CollectiveKind::AllGather)));
        assert_eq!(of_category("custom-call"), None);
    }
}
