//! Shardings of values, carried from operands to results as a partitioner does, so that a program knows the part of each
//! matmul that one device runs. A value without a known sharding counts as replicated.

use std::rc::Rc;

use super::builder::{Builder, Value};
use super::sharding::Sharding;

/// Sharding of a value; `None` if nothing splits it.
pub(super) type Known = Option<Rc<Sharding>>;

/// Sharding of dimensions, without a mesh axis that an earlier dimension has.
pub(super) fn known(dims: Vec<Vec<String>>) -> Known {
    let mut taken: Vec<String> = Vec::new();
    let distinct = dims.into_iter().map(|axes| {
        let own: Vec<String> = axes.into_iter().filter(|a| !taken.contains(a)).collect();
        taken.extend(own.iter().cloned());
        own
    });
    let distinct: Vec<Vec<String>> = distinct.collect();
    (!taken.is_empty()).then(|| Rc::new(Sharding(distinct)))
}

impl Value {
    /// The same value with a sharding.
    pub(super) fn with_sharding(self, sharding: Known) -> Value {
        Value { sharding, ..self }
    }

    /// Mesh axes that split a dimension; none inside a manual region, where a value is one device's own.
    pub(super) fn axes_of(&self, dim: usize) -> Vec<String> {
        if self.b.is_manual() {
            return Vec::new();
        }
        self.sharding.as_ref().and_then(|s| s.0.get(dim).cloned()).unwrap_or_default()
    }

    /// Sharding of a result whose dimension `i` is this value's dimension `from[i]`, or a new one.
    pub(super) fn carried(&self, from: impl IntoIterator<Item = Option<usize>>) -> Known {
        self.sharding.as_ref()?;
        known(from.into_iter().map(|dim| dim.map_or_else(Vec::new, |dim| self.axes_of(dim))).collect())
    }

    /// Sharding of a result of the same dimensions but for one, whose parts are others.
    pub(super) fn carried_but(&self, changed: usize) -> Known {
        self.carried((0..self.rank()).map(|i| (i != changed).then_some(i)))
    }

    /// Sharding of the same elements in row-major order under other dimensions. Mesh axes stay on the outermost dimensions of
    /// those that are joined or taken apart together, where these divide.
    pub(super) fn carried_through_reshape(&self, to: &[usize]) -> Known {
        self.sharding.as_ref()?;
        let from = self.dims();
        let mut dims = vec![Vec::new(); to.len()];
        let (mut i, mut j) = (0, 0);
        while i < from.len() && j < to.len() {
            let (first, start) = (i, j);
            let (mut a, mut b) = (from[i], to[j]);
            while a != b {
                // The sizes have the same product: one of them can grow.
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

    /// Mesh axes of the outermost of some dimensions, and of the next where those have one element a device.
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

/// Sharding of an elementwise result: of each dimension the first operand's that splits it.
pub(super) fn merged(operands: &[&Value]) -> Known {
    let rank = operands.iter().find(|v| v.sharding.is_some())?.rank();
    let split = |dim: usize| operands.iter().map(|v| v.axes_of(dim)).find(|axes| !axes.is_empty());
    known((0..rank).map(|dim| split(dim).unwrap_or_default()).collect())
}

impl Builder {
    /// Number of devices along mesh axes; `None` for an axis that the mesh has not.
    pub(super) fn parts(&self, axes: &[String]) -> Option<usize> {
        let s = self.0.borrow();
        axes.iter().map(|axis| s.mesh.as_ref().and_then(|mesh| mesh.size(axis))).product()
    }

    /// Bytes of a value on one device.
    pub(super) fn local_bytes(&self, v: &Value) -> f64 {
        let axes: Vec<String> = (0..v.rank()).flat_map(|dim| v.axes_of(dim)).collect();
        v.ty.bytes() as f64 / self.parts(&axes).unwrap_or(1) as f64
    }
}
