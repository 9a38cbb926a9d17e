//! Tensor types: an element type and static dimensions.

use std::fmt;

use crate::DType;

/// A ranked tensor type with static dimensions, displayed as in MLIR: `tensor<2x3xbf16>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Type {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost dimension first; empty for a scalar.
    pub dims: Vec<usize>,
}

impl Type {
    /// Creates a type.
    pub fn new(dtype: DType, dims: impl Into<Vec<usize>>) -> Self {
        Type { dtype, dims: dims.into() }
    }

    /// Creates a scalar type.
    pub fn scalar(dtype: DType) -> Self {
        Type { dtype, dims: Vec::new() }
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Returns the size in bytes of a dense tensor of this type.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// Returns the type with the same dimensions and element type `dtype`.
    pub fn with_dtype(&self, dtype: DType) -> Self {
        Type { dtype, dims: self.dims.clone() }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensor<")?;
        for d in &self.dims {
            write!(f, "{d}x")?;
        }
        write!(f, "{}>", self.dtype.mlir())
    }
}

/// Joins items with `, `.
pub(super) fn list<T: fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|i| i.to_string()).collect::<Vec<_>>().join(", ")
}

/// Broadcasts two shapes as numpy does, aligned at the last dimension; `None` if they are incompatible.
pub(super) fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |s: &[usize], i: usize| if i + s.len() < rank { 1 } else { s[i + s.len() - rank] };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Some(x),
            (1, y) => Some(y),
            (x, 1) => Some(x),
            _ => None,
        })
        .collect()
}
