//! Predicted time of a program's step from what one device does in it, without compiling.
//!
//! | part | counted |
//! |---|---|
//! | matmuls | each by the roofline of its own part: padded rows and heads count, and so does what devices repeat |
//! | other operations | [`PASSES`] more passes of a matmul's activations and result through device memory |
//! | copies | [`COPIES`] passes of what an all-gather or an all-to-all puts in place through device memory |
//! | links | each collective of the program, and those that its shardings ask of the partitioner |
//!
//! The parts are added, but for gathers of weights, which the work hides.

use crate::analysis::{Chip, CollectiveKind, Work};
use crate::hlo::{DType, Matmul, Pattern, Program, Transfer};

/// Passes of a matmul's left operand and result through device memory in the norms, rotations and sums around it: what compiled
/// modules of the published models have on H100s is 2.1.
const PASSES: f64 = 2.0;

/// Passes of the result of an all-gather or an all-to-all, read and written again: its parts do not lie in the order that the
/// next operation reads. A ring's permutes need none; compiled modules for two and four H100s differ by 1.6 to 2.2.
const COPIES: f64 = 2.0;

/// Time of a step in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepTime {
    pub(crate) matmuls: f64,
    pub(crate) passes: f64,
    pub(crate) copies: f64,
    pub(crate) links: f64,
}

impl StepTime {
    /// The sum without the part of `gathers`, the milliseconds in which weights are gathered, that the work hides: only its own
    /// matmul waits for a layer's weights, so compilers start the gathers ahead.
    pub(crate) fn total(&self, gathers: f64) -> f64 {
        let work = self.matmuls + self.passes;
        work + self.copies + self.links - gathers.min(self.links).min(work)
    }

    /// Time of a program's step. A loop whose trip count is data counts as one step.
    pub(crate) fn of(program: &Program, chip: &Chip) -> StepTime {
        let work = &program.work;
        let matmuls: f64 = work.matmuls.iter().map(|m| m.times * matmul(m, chip)).sum();
        let passes: f64 = work.matmuls.iter().map(|m| m.times * passes(m, chip)).sum();
        let copies: f64 = work.transfers.iter().map(|t| t.times * copies(t, chip)).sum();
        let links: f64 = work.transfers.iter().map(|t| t.times * link(t, chip)).sum();
        StepTime { matmuls: matmuls * 1e3, passes: passes * 1e3, copies: copies * 1e3, links: links * 1e3 }
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
