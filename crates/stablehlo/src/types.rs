//! The type of a value: an element type and static dimensions.

use std::fmt;

use crate::DType;

/// A ranked tensor type with static dimensions. Displays as in the program's text, `tensor<2x3xbf16>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Type {
    pub dtype: DType,
    /// Dimensions, outer first; empty for a scalar.
    pub dims: Vec<usize>,
}

impl Type {
    /// A type from its parts.
    pub fn new(dtype: DType, dims: impl Into<Vec<usize>>) -> Self {
        Type { dtype, dims: dims.into() }
    }

    /// A scalar type.
    pub fn scalar(dtype: DType) -> Self {
        Type { dtype, dims: Vec::new() }
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Dense bytes.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// The same dimensions with another element type.
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

/// Joins with `, `, the form of every list in the text.
pub(super) fn list<T: fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|i| i.to_string()).collect::<Vec<_>>().join(", ")
}

/// The numpy broadcast of two shapes, aligned at the last dimension; `None` when they do not fit.
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
