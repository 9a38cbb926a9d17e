//! Slices and gathers. Indices are either constants or computed when the program runs.

use crate::DType;
use crate::builder::{Value, axis_of};
use crate::propagation::known;
use crate::types::{Type, list};

impl Value {
    /// Returns `size` elements of a dimension, beginning at `start`. `start` is an integer scalar; XLA clamps it so
    /// that the slice is in range.
    pub fn dynamic_slice(&self, axis: isize, start: &Value, size: usize) -> Value {
        let Some(axis) = self.dynamic_axis("dynamic_slice", axis, start, size) else {
            return self.b.value("%poison".into(), self.ty.clone());
        };
        let mut ty = self.ty.clone();
        ty.dims[axis] = size;
        let starts = self.starts(axis, start);
        let text = format!(
            "stablehlo.dynamic_slice {}, {}, sizes = [{}] : ({}, {}) -> {ty}",
            self.local(),
            list(starts.iter().map(|s| s.local())),
            list(&ty.dims),
            self.ty,
            list(starts.iter().map(|s| &s.ty))
        );
        let sharding = if ty == self.ty { self.sharding.clone() } else { self.carried_but(axis) };
        self.b.op("dynamic_slice", text, ty).with_sharding(sharding)
    }

    /// Returns element `at` of the first dimension and removes this dimension. For example, this selects the weights of
    /// one layer from a tensor that stacks the weights of all layers.
    pub fn index(&self, at: &Value) -> Value {
        let row = self.dynamic_slice(0, at, 1);
        let dims = row.ty.dims.get(1..).unwrap_or_default().to_vec();
        row.reshape(dims)
    }

    /// Returns a copy of this value in which `part` replaces the elements of a dimension that begin at position
    /// `start`.
    pub fn dynamic_update(&self, axis: isize, start: &Value, part: &Value) -> Value {
        let size = if part.rank() == self.rank() { part.dim(axis) } else { usize::MAX };
        let Some(axis) = self.dynamic_axis("dynamic_update_slice", axis, start, size) else {
            return self.clone();
        };
        self.update_slice(&self.starts(axis, start), part)
    }

    /// Returns a copy of this value in which `part` replaces the elements that begin at the positions `starts`, which
    /// has one integer scalar for each dimension. XLA clamps the positions so that the slice is in range.
    pub fn update_slice(&self, starts: &[Value], part: &Value) -> Value {
        let fits = part.rank() == self.rank()
            && part.dtype() == self.dtype()
            && starts.len() == self.rank()
            && part.ty.dims.iter().zip(&self.ty.dims).all(|(part, all)| part <= all);
        if !fits {
            let message = format!("{} with {} positions does not fit into {}", part.ty, starts.len(), self.ty);
            return self.b.poison("dynamic_update_slice", message, self.ty.clone());
        }
        let text = format!(
            "stablehlo.dynamic_update_slice {}, {}, {} : ({}, {}, {}) -> {}",
            self.local(),
            part.local(),
            list(starts.iter().map(|s| s.local())),
            self.ty,
            part.ty,
            list(starts.iter().map(|s| &s.ty)),
            self.ty
        );
        self.b.op("dynamic_update_slice", text, self.ty.clone()).with_sharding(self.sharding.clone())
    }

    fn dynamic_axis(&self, op: &'static str, axis: isize, start: &Value, size: usize) -> Option<usize> {
        let found = axis_of(axis, self.rank()).filter(|&a| size <= self.ty.dims[a]);
        if found.is_none() || start.rank() != 0 || start.dtype().is_float() {
            let message = format!(
                "expected an axis of {} with at least {size} elements and an integer scalar as start, got axis {axis} and start {}",
                self.ty, start.ty
            );
            self.b.fail(op, message);
            return None;
        }
        found
    }

    fn starts(&self, axis: usize, start: &Value) -> Vec<Value> {
        let zero = self.b.scalar(0.0, start.dtype());
        (0..self.rank()).map(|i| if i == axis { start.clone() } else { zero.clone() }).collect()
    }

    /// Gathers the slices at `indices` of the first dimension. The result shape is the shape of `indices`, followed by
    /// the other dimensions of this value.
    pub fn gather_rows(&self, indices: &Value) -> Value {
        if self.rank() == 0 || indices.dtype().is_float() || indices.dtype() == DType::Bool {
            let message = format!(
                "expected at least one dimension and integer indices, got {} and indices {}",
                self.ty, indices.ty
            );
            return self.b.poison("gather", message, self.ty.clone());
        }
        let (rows, rest) = (indices.rank(), &self.ty.dims[1..]);
        let ty = Type::new(self.dtype(), [&indices.ty.dims[..], rest].concat());
        let sizes = list(std::iter::once(1).chain(rest.iter().copied()));
        let text = format!(
            "\"stablehlo.gather\"({}, {}) <{{dimension_numbers = #stablehlo.gather<offset_dims = [{}], \
             collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = {rows}>, \
             indices_are_sorted = false, slice_sizes = array<i64: {sizes}>}}> : ({}, {}) -> {ty}",
            self.local(),
            indices.local(),
            list(rows..rows + rest.len()),
            self.ty,
            indices.ty
        );
        let of_rows = (0..rows).map(|i| indices.axes_of(i)).chain((1..self.rank()).map(|i| self.axes_of(i)));
        self.b.op("gather", text, ty).with_sharding(known(of_rows.collect()))
    }

    /// Returns the slices at constant `indices` of a dimension, concatenated along this dimension.
    pub fn index_select(&self, axis: isize, indices: &[usize]) -> Value {
        let within = axis_of(axis, self.rank()).filter(|&a| indices.iter().all(|i| *i < self.ty.dims[a]));
        let Some(axis) = within else {
            let message = format!("indices {indices:?} are out of range for axis {axis} of {}", self.ty);
            return self.b.poison("gather", message, self.ty.clone());
        };
        let places = self.b.vector_i32(&indices.iter().map(|i| *i as i32).collect::<Vec<_>>());
        let (mut ty, mut sizes) = (self.ty.clone(), self.ty.dims.clone());
        (ty.dims[axis], sizes[axis]) = (indices.len(), 1);
        let text = format!(
            "\"stablehlo.gather\"({}, {}) <{{dimension_numbers = #stablehlo.gather<offset_dims = [{}], \
             collapsed_slice_dims = [{axis}], start_index_map = [{axis}], index_vector_dim = 1>, \
             indices_are_sorted = false, slice_sizes = array<i64: {}>}}> : ({}, {}) -> {ty}",
            self.local(),
            places.local(),
            list((0..self.rank()).filter(|d| *d != axis)),
            list(sizes),
            self.ty,
            places.ty
        );
        self.b.op("gather", text, ty).with_sharding(self.carried_but(axis))
    }

    /// Gathers the positions `indices [b, t]` in each batch row of this value `[b, s, rest…]`. The result is `[b, t,
    /// rest…]`.
    pub fn take_along(&self, indices: &Value) -> Value {
        let fits = self.rank() >= 2
            && indices.rank() == 2
            && indices.ty.dims[0] == self.ty.dims[0]
            && !indices.dtype().is_float();
        if !fits {
            let message =
                format!("expected [b, s, …] and integer indices [b, t], got {} and indices {}", self.ty, indices.ty);
            return self.b.poison("gather", message, self.ty.clone());
        }
        let (b, t) = (indices.ty.dims[0], indices.ty.dims[1]);
        let rest = &self.ty.dims[2..];
        let ty = Type::new(self.dtype(), [&[b, t], rest].concat());
        let column = indices.reshape(vec![b, t, 1]);
        let sizes = list([1, 1].into_iter().chain(rest.iter().copied()));
        let text = format!(
            "\"stablehlo.gather\"({}, {}) <{{dimension_numbers = #stablehlo.gather<offset_dims = [{}], \
             collapsed_slice_dims = [1], operand_batching_dims = [0], start_indices_batching_dims = [0], \
             start_index_map = [1], index_vector_dim = 2>, indices_are_sorted = false, \
             slice_sizes = array<i64: {sizes}>}}> : ({}, {}) -> {ty}",
            self.local(),
            column.local(),
            list(2..2 + rest.len()),
            self.ty,
            column.ty
        );
        self.b.op("gather", text, ty).with_sharding(self.carried_but(1))
    }
}
