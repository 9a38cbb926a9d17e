//! The work of one device: the matmuls and collectives of a program.

use super::DType;
use super::sharding::Groups;

/// The share of one device in a matmul, or in attention that a fused kernel computes.
#[derive(Clone, Debug, PartialEq)]
pub struct Matmul {
    /// FLOPs of one run; a multiply-add counts as two.
    pub flops: f64,
    /// Sizes in bytes of the left operand, the right operand and the result.
    pub bytes: [f64; 3],
    /// Element type of the operands.
    pub dtype: DType,
    /// Sizes of the attention operands. `None`: the work is a matmul.
    pub attention: Option<FusedAttention>,
    /// Number of runs; includes loop trip counts where these are known.
    pub times: f64,
}

/// Sizes of attention that runs in a fused kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedAttention {
    /// Number of heads, summed over all batch rows.
    pub heads: usize,
    /// Number of query tokens of a head.
    pub queries: usize,
}

/// Communication pattern of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Every device gets the concatenated values of its group.
    AllGather,
    /// Every device sends a different part of its value to each device of its group.
    AllToAll,
    /// Every device gets the sum over its group.
    AllReduce,
    /// Every device gets its part of the sum over its group.
    ReduceScatter,
    /// Every device sends its value to at most one other device.
    Permute,
}

/// A collective: either part of the program, or one that the partitioner must insert because of the shardings.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveTransfer {
    /// Communication pattern.
    pub pattern: Pattern,
    /// Size in bytes of the result on one device.
    pub bytes: f64,
    /// Groups of devices that communicate with each other.
    pub groups: Groups,
    /// Number of runs; includes loop trip counts where these are known.
    pub times: f64,
}

/// The work of one device: its matmuls and collectives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProgramWork {
    /// Matmuls, in program order.
    pub matmuls: Vec<Matmul>,
    /// Collectives, in program order.
    pub transfers: Vec<CollectiveTransfer>,
}

/// A position in the program: the numbers of matmuls and of collectives before it.
pub(super) type Mark = [usize; 2];

impl ProgramWork {
    pub(super) fn mark(&self) -> Mark {
        [self.matmuls.len(), self.transfers.len()]
    }

    /// Multiplies the run counts of everything that was counted after a mark by `times`.
    pub(super) fn repeat(&mut self, since: Mark, times: f64) {
        self.matmuls[since[0]..].iter_mut().for_each(|m| m.times *= times);
        self.transfers[since[1]..].iter_mut().for_each(|t| t.times *= times);
    }

    /// Removes and returns everything that was counted after a mark.
    pub(super) fn take(&mut self, since: Mark) -> ProgramWork {
        ProgramWork { matmuls: self.matmuls.split_off(since[0]), transfers: self.transfers.split_off(since[1]) }
    }

    pub(super) fn extend(&mut self, other: &ProgramWork) {
        self.matmuls.extend_from_slice(&other.matmuls);
        self.transfers.extend_from_slice(&other.transfers);
    }

    /// Returns the total FLOPs of all runs of all matmuls.
    pub fn flops(&self) -> f64 {
        self.matmuls.iter().map(|m| m.flops * m.times).sum()
    }
}
