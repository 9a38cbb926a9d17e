//! Propagates shardings, and counts the work of one device, while a program is built.

use super::builder::{Builder, Value};
use super::propagation::{KnownSharding, known};
use super::sharding::{Groups, Sharding};
use super::work::{CollectiveTransfer, FusedAttention, Matmul, Pattern};

impl Value {
    pub(super) fn with_sharding(self, sharding: KnownSharding) -> Value {
        Value { sharding, ..self }
    }

    /// Returns the mesh axes that shard a dimension; empty inside a manual region, because a value is already the
    /// device's shard there.
    pub(super) fn axes_of(&self, dim: usize) -> Vec<String> {
        if self.b.is_manual() {
            return Vec::new();
        }
        self.sharding.as_ref().and_then(|s| s.0.get(dim).cloned()).unwrap_or_default()
    }

    /// Returns the sharding of a result whose dimension `i` is this value's dimension `from[i]`; if `from[i]` is
    /// `None`, the dimension is new and not sharded.
    pub(super) fn carried(&self, from: impl IntoIterator<Item = Option<usize>>) -> KnownSharding {
        self.sharding.as_ref()?;
        known(from.into_iter().map(|dim| dim.map_or_else(Vec::new, |dim| self.axes_of(dim))).collect())
    }

    /// Returns the sharding of a result that differs from this value only in the size of dimension `changed`. That
    /// dimension is not sharded.
    pub(super) fn carried_but(&self, changed: usize) -> KnownSharding {
        self.carried((0..self.rank()).map(|i| (i != changed).then_some(i)))
    }

    /// Returns the sharding after a reshape to `to`. If dimensions are merged or split, their mesh axes shard the
    /// outermost new dimensions whose sizes are divisible.
    pub(super) fn carried_through_reshape(&self, to: &[usize]) -> KnownSharding {
        self.sharding.as_ref()?;
        let from = self.dims();
        let mut dims = vec![Vec::new(); to.len()];
        let (mut i, mut j) = (0, 0);
        while i < from.len() && j < to.len() {
            let (first, start) = (i, j);
            let (mut a, mut b) = (from[i], to[j]);
            while a != b {
                // Both shapes have the same number of elements, so the products become equal when further dimensions
                // are included.
                if a < b && i + 1 < from.len() {
                    i += 1;
                    a *= from[i];
                } else if j + 1 < to.len() {
                    j += 1;
                    b *= to[j];
                } else {
                    return known(dims);
                }
            }
            (i, j) = (i + 1, j + 1);
            let mut axes = self.outer_axes(first..i).into_iter().peekable();
            for at in start..j {
                let mut left = to[at];
                while let Some(size) = axes.peek().and_then(|axis| self.b.parts(std::slice::from_ref(axis))) {
                    if !left.is_multiple_of(size) {
                        break;
                    }
                    left /= size;
                    dims[at].extend(axes.next());
                }
                if left > 1 {
                    break;
                }
            }
        }
        known(dims)
    }

    /// Returns the mesh axes of the outermost dimension in a range. If that dimension is fully sharded (one element per
    /// device), adds those of the next dimension, and so on.
    fn outer_axes(&self, dims: std::ops::Range<usize>) -> Vec<String> {
        let mut all = Vec::new();
        for dim in dims {
            let own = self.axes_of(dim);
            let whole = self.b.parts(&own) == Some(self.ty.dims[dim]);
            all.extend(own);
            if !whole {
                break;
            }
        }
        all
    }
}

/// Returns the sharding of an elementwise result. Each dimension is sharded as in the first operand that shards this
/// dimension.
pub(super) fn merged(operands: &[&Value]) -> KnownSharding {
    let rank = operands.iter().find(|v| v.sharding.is_some())?.rank();
    let split = |dim: usize| operands.iter().map(|v| v.axes_of(dim)).find(|axes| !axes.is_empty());
    known((0..rank).map(|dim| split(dim).unwrap_or_default()).collect())
}

impl Builder {
    /// Returns the number of devices along mesh axes; `None` if the mesh does not have one of the axes.
    pub(super) fn parts(&self, axes: &[String]) -> Option<usize> {
        let s = self.0.borrow();
        axes.iter().map(|axis| s.mesh.as_ref().and_then(|mesh| mesh.size(axis))).product()
    }

    /// Returns the size in bytes of a value's shard on one device.
    pub(super) fn local_bytes(&self, v: &Value) -> f64 {
        let axes: Vec<String> = (0..v.rank()).flat_map(|dim| v.axes_of(dim)).collect();
        v.ty.bytes() as f64 / self.parts(&axes).unwrap_or(1) as f64
    }
}

impl Builder {
    /// Counts the work of attention that runs in a custom call. `q`, `k` and `v` have the shape `[batch, tokens, heads,
    /// head_dim]`.
    pub fn count_attention(&self, q: &Value, k: &Value, v: &Value) {
        let [rows, queries, heads, dim] = [0, 1, 2, 3].map(|axis| q.dim(axis));
        let keys = k.dim(1);
        let flops = 4.0 * (rows * heads * queries * keys * dim) as f64;
        let [of_q, of_k, of_v] = [q, k, v].map(|x| self.local_bytes(x));
        let attention = Some(FusedAttention { heads: rows * heads, queries });
        let matmul = Matmul { flops, bytes: [of_q, of_k + of_v, of_q], dtype: q.dtype(), attention, times: 1.0 };
        self.0.borrow_mut().work.matmuls.push(matmul);
    }

    /// Counts a collective whose result has `bytes` bytes on one device.
    pub(super) fn count_transfer(&self, pattern: Pattern, bytes: f64, groups: &Groups) {
        if groups.size() > 1 {
            let transfer = CollectiveTransfer { pattern, bytes, groups: groups.clone(), times: 1.0 };
            self.0.borrow_mut().work.transfers.push(transfer);
        }
    }

    /// Counts the all-reduce that adds partial sums over the devices along `axes`.
    pub(super) fn count_sum(&self, of: &Value, axes: &[String]) {
        let names: Vec<&str> = axes.iter().map(String::as_str).collect();
        let groups = self.0.borrow().mesh.as_ref().map(|mesh| mesh.groups(&names));
        if let (Some(groups), false) = (groups, self.is_manual() || axes.is_empty()) {
            self.count_transfer(Pattern::AllReduce, self.local_bytes(of), &groups);
        }
    }

    /// Counts the all-gather that a sharding constraint implies. It gathers along the mesh axes that shard `from` but
    /// not `to`.
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
