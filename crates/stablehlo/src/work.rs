//! What one device does in a program: its matmuls, and what it receives from others.

use super::DType;
use super::sharding::Groups;

/// A matmul as one device runs it, or attention in a fused kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Matmul {
    /// FLOPs, a multiply-add counted as two.
    pub flops: f64,
    /// Bytes of the left and the right operand and of the result.
    pub bytes: [f64; 3],
    /// Element type of the operands.
    pub dtype: DType,
    /// Attention in a fused kernel.
    pub attention: Option<Attention>,
    /// Runs, times the trip counts of loops where they are known.
    pub times: f64,
}

/// Sizes of attention in a fused kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Heads of all rows.
    pub heads: usize,
    pub queries: usize,
}

/// Pattern of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    AllGather,
    AllToAll,
    AllReduce,
    ReduceScatter,
    Permute,
}

/// A collective that the program contains, or that its shardings ask of the partitioner.
#[derive(Clone, Debug, PartialEq)]
pub struct Transfer {
    pub pattern: Pattern,
    /// Bytes of the result on one device.
    pub bytes: f64,
    pub groups: Groups,
    /// Runs, times the trip counts of loops where they are known.
    pub times: f64,
}

/// Work of one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Work {
    pub matmuls: Vec<Matmul>,
    pub transfers: Vec<Transfer>,
}

/// Number of matmuls and transfers at a point of a program.
pub(super) type Mark = [usize; 2];

impl Work {
    pub(super) fn mark(&self) -> Mark {
        [self.matmuls.len(), self.transfers.len()]
    }

    /// Multiplies the runs of what came after a mark.
    pub(super) fn repeat(&mut self, since: Mark, times: f64) {
        self.matmuls[since[0]..].iter_mut().for_each(|m| m.times *= times);
        self.transfers[since[1]..].iter_mut().for_each(|t| t.times *= times);
    }

    /// Removes what came after a mark.
    pub(super) fn take(&mut self, since: Mark) -> Work {
        Work { matmuls: self.matmuls.split_off(since[0]), transfers: self.transfers.split_off(since[1]) }
    }

    pub(super) fn extend(&mut self, other: &Work) {
        self.matmuls.extend_from_slice(&other.matmuls);
        self.transfers.extend_from_slice(&other.transfers);
    }

    /// FLOPs of all matmuls.
    pub fn flops(&self) -> f64 {
        self.matmuls.iter().map(|m| m.flops * m.times).sum()
    }
}
