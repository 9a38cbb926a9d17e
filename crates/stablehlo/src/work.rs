//! What one device does in a program: its matmuls, and what it receives from others.

use super::DType;
use super::builder::{Builder, Value};
use super::sharding::{Groups, Sharding};

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
    pub keys: usize,
    /// Whether it is of a part of the keys, and is joined with that of others.
    pub is_partial: bool,
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

impl Builder {
    /// Adds attention that a custom call computes: of queries `[rows, queries, heads, dim]` to keys and values of that form.
    pub fn count_attention(&self, q: &Value, k: &Value, v: &Value, is_partial: bool) {
        let [rows, queries, heads, dim] = [0, 1, 2, 3].map(|axis| q.dim(axis));
        let keys = k.dim(1);
        let flops = 4.0 * (rows * heads * queries * keys * dim) as f64;
        let [of_q, of_k, of_v] = [q, k, v].map(|x| self.local_bytes(x));
        let attention = Some(Attention { heads: rows * heads, queries, keys, is_partial });
        let matmul = Matmul { flops, bytes: [of_q, of_k + of_v, of_q], dtype: q.dtype(), attention, times: 1.0 };
        self.0.borrow_mut().work.matmuls.push(matmul);
    }

    /// Adds a collective whose result on one device is `bytes`.
    pub(super) fn count_transfer(&self, pattern: Pattern, bytes: f64, groups: &Groups) {
        if groups.size() > 1 {
            let transfer = Transfer { pattern, bytes, groups: groups.clone(), times: 1.0 };
            self.0.borrow_mut().work.transfers.push(transfer);
        }
    }

    /// Adds the all-reduce of a value whose parts are sums over devices along `axes`.
    pub(super) fn count_sum(&self, of: &Value, axes: &[String]) {
        let names: Vec<&str> = axes.iter().map(String::as_str).collect();
        let groups = self.0.borrow().mesh.as_ref().map(|mesh| mesh.groups(&names));
        if let (Some(groups), false) = (groups, self.is_manual() || axes.is_empty()) {
            self.count_transfer(Pattern::AllReduce, self.local_bytes(of), &groups);
        }
    }

    /// Adds the all-gather that a constraint asks for: over the axes of `from` that `to` does not have.
    pub(super) fn count_gather(&self, from: &Value, to: &Sharding) {
        let Some(own) = &from.sharding else { return };
        let kept: Vec<&String> = to.0.iter().flatten().collect();
        let gone: Vec<&str> = own.0.iter().flatten().filter(|a| !kept.contains(a)).map(String::as_str).collect();
        let groups = self.0.borrow().mesh.as_ref().map(|mesh| mesh.groups(&gone));
        if let (Some(groups), false) = (groups, gone.is_empty()) {
            let bytes = self.local_bytes(from) * groups.size() as f64;
            self.count_transfer(Pattern::AllGather, bytes, &groups);
        }
    }
}
