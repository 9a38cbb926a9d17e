//! Predicted time of a program's step from what one device does in it, without compiling.
//!
//! | part | counted | GPUs behind a switch | TPUs in a torus |
//! |---|---|---|---|
//! | matmuls | each by the roofline of its own part: padded rows and heads count, and so does what devices repeat | yes | yes |
//! | other operations | [`PASSES`] more passes of a matmul's activations and result through device memory | yes | no: fused into matmuls |
//! | copies | [`COPIES`] passes of what an all-gather or an all-to-all puts in place through device memory | yes | no |
//! | links | each collective of the program, and those that its shardings ask of the partitioner | yes | yes |
//! | hidden | what the work hides of the links | gathers of weights | [`HIDDEN`] of gathers of weights; others behind the chip's `window` |
//!
//! The parts are added, without the hidden one.

use crate::analysis::{Chip, CollectiveKind, Links, Work};
use crate::hlo::{DType, Matmul, Pattern, Program, Transfer};

/// Passes of a matmul's left operand and result through device memory in the norms, rotations and sums around it: what compiled
/// modules of the published models have on H100s is 2.1.
const PASSES: f64 = 2.0;

/// Passes of the result of an all-gather or an all-to-all, read and written again: its parts do not lie in the order that the
/// next operation reads. A ring's permutes need none; compiled modules for two and four H100s differ by 1.6 to 2.2.
const COPIES: f64 = 2.0;

/// Fraction of a weight's all-gather that the TPU's compiler hides behind matmuls. With it and the chips' windows, estimates of the
/// 150 modules of benchmarks/tpu-slices.md and benchmarks/search of libtpu 0.0.52 are 7 % (root mean square) from their times, and
/// the layout of the least estimate is at most 0.8 % behind the best, but for one of 28 slices and shapes (4.4 %).
const HIDDEN: f64 = 0.5;

/// Time of a step in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepTime {
    pub(crate) matmuls: f64,
    pub(crate) passes: f64,
    pub(crate) copies: f64,
    pub(crate) links: f64,
    /// The part of `links` that takes no time of its own.
    pub(crate) hidden: f64,
}

impl StepTime {
    /// The sum of the parts.
    pub(crate) fn total(&self) -> f64 {
        self.matmuls + self.passes + self.copies + self.links - self.hidden
    }

    /// Time of a program's step, of whose links `weights` milliseconds gather weights. A loop whose trip count is data counts as one
    /// step.
    pub(crate) fn of(program: &Program, chip: &Chip, weights: f64) -> StepTime {
        let work = &program.work;
        let of_matmuls = |of: fn(&Matmul, &Chip) -> f64| work.matmuls.iter().map(|m| m.times * of(m, chip) * 1e3).sum();
        let of_transfers =
            |of: fn(&Transfer, &Chip) -> f64| work.transfers.iter().map(|t| t.times * of(t, chip) * 1e3).sum();
        let (matmuls, links): (f64, f64) = (of_matmuls(matmul), of_transfers(link));
        match chip.links {
            // Only its own matmul waits for a layer's weights, so compilers start their gathers ahead.
            Links::Switch { .. } => {
                let (passes, copies) = (of_matmuls(passes), of_transfers(copies));
                StepTime { matmuls, passes, copies, links, hidden: weights.min(links).min(matmuls + passes) }
            }
            Links::Torus { window, .. } => {
                let gathers: f64 = of_transfers(gather);
                let weights = weights.min(gathers);
                let hidden = HIDDEN * weights + (gathers - weights).min(window * matmuls);
                StepTime { matmuls, links, hidden: hidden.min(matmuls), ..StepTime::default() }
            }
        }
    }
}

fn matmul(m: &Matmul, chip: &Chip) -> f64 {
    let of = |is: bool| if is { m.flops } else { 0.0 };
    let work = Work {
        flops: m.flops,
        fp8: of(m.dtype == DType::F8E4M3FN),
        int8: of(m.dtype == DType::I8),
        f32: of(m.dtype == DType::F32),
        attention: of(m.attention.is_some()),
        idle: m.attention.map_or(0.0, |a| chip.idle_flops(a.heads as f64, a.queries as f64, m.flops)),
        bytes: m.bytes.iter().sum(),
        kernels: 1.0,
    };
    chip.op_time(work).total()
}

fn passes(m: &Matmul, chip: &Chip) -> f64 {
    let [left, _, result] = m.bytes;
    chip.op_time(Work { bytes: PASSES * (left + result), kernels: PASSES, ..Work::default() }).total()
}

fn copies(t: &Transfer, chip: &Chip) -> f64 {
    match t.pattern {
        Pattern::AllGather | Pattern::AllToAll => {
            chip.op_time(Work { bytes: COPIES * t.bytes, ..Work::default() }).total()
        }
        Pattern::AllReduce | Pattern::ReduceScatter | Pattern::Permute => 0.0,
    }
}

fn link(t: &Transfer, chip: &Chip) -> f64 {
    let groups: Vec<Vec<i64>> = t.groups.0.iter().map(|g| g.iter().map(|d| *d as i64).collect()).collect();
    chip.link_seconds(kind(t), wire_bytes(t), &groups)
}

fn gather(t: &Transfer, chip: &Chip) -> f64 {
    if t.pattern == Pattern::AllGather { link(t, chip) } else { 0.0 }
}

fn kind(t: &Transfer) -> CollectiveKind {
    match t.pattern {
        Pattern::AllGather => CollectiveKind::AllGather,
        Pattern::AllToAll => CollectiveKind::AllToAll,
        Pattern::AllReduce => CollectiveKind::AllReduce,
        Pattern::ReduceScatter => CollectiveKind::ReduceScatter,
        Pattern::Permute => CollectiveKind::CollectivePermute,
    }
}

/// Bytes that a device receives in one run.
fn wire_bytes(t: &Transfer) -> f64 {
    kind(t).wire_bytes(t.bytes, t.groups.size())
}

/// Bytes that a device receives in a step.
pub(crate) fn received(program: &Program) -> f64 {
    program.work.transfers.iter().map(|t| t.times * wire_bytes(t)).sum()
}
