//! Constants and operations that rearrange elements.

use crate::builder::{Builder, Value};
use crate::counting::merged;
use crate::types::{Type, list};
use crate::{DType, Element};

/// Formats a scalar so that MLIR parses it to the same bits.
fn literal(value: f64, dtype: DType) -> String {
    match dtype {
        DType::Bool => (value != 0.0).to_string(),
        d if !d.is_float() => format!("{}", value as i128),
        _ if value.is_finite() => {
            let text = format!("{value:e}");
            let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            let point = if mantissa.contains('.') { "" } else { ".0" };
            if exponent == "0" { format!("{mantissa}{point}") } else { format!("{mantissa}{point}e{exponent}") }
        }
        // Infinities and NaN have no decimal form.
        DType::F64 => format!("0x{:016X}", value.to_bits()),
        DType::F32 => format!("0x{:08X}", (value as f32).to_bits()),
        DType::BF16 => format!("0x{:04X}", half::bf16::from_f64(value).to_bits()),
        _ => format!("0x{:04X}", half::f16::from_f64(value).to_bits()),
    }
}

impl Builder {
    /// Returns a constant filled with one value.
    pub fn full(&self, value: f64, ty: Type) -> Value {
        self.op("constant", format!("stablehlo.constant dense<{}> : {ty}", literal(value, ty.dtype)), ty)
    }

    /// Returns a constant with `values` in row-major order. The values are part of the program text, so use this only
    /// for small tables.
    pub fn constant<T: Element>(&self, dims: &[usize], values: &[T]) -> Value {
        let ty = Type::new(T::DTYPE, dims);
        if values.len() != ty.elements() {
            return self.poison("constant", format!("{ty} needs {} values, got {}", ty.elements(), values.len()), ty);
        }
        let hex = hex::encode_upper(bytemuck::cast_slice::<T, u8>(values));
        let body = if hex.is_empty() { String::new() } else { format!("\"0x{hex}\"") };
        self.op("constant", format!("stablehlo.constant dense<{body}> : {ty}"), ty)
    }

    /// Returns a constant vector of 32-bit integers.
    pub fn vector_i32(&self, values: &[i32]) -> Value {
        let ty = Type::new(DType::I32, vec![values.len()]);
        self.op("constant", format!("stablehlo.constant dense<[{}]> : {ty}", list(values)), ty)
    }

    /// Returns a value whose elements count 0, 1, 2 … along `axis`.
    pub fn iota(&self, ty: Type, axis: usize) -> Value {
        if axis >= ty.rank() {
            return self.poison("iota", format!("axis {axis} is out of range for {ty}"), ty);
        }
        self.op("iota", format!("stablehlo.iota dim = {axis} : {ty}"), ty)
    }

    /// Concatenates values along an axis.
    pub fn concat(&self, values: &[&Value], axis: isize) -> Value {
        let Some(first) = values.first() else {
            return self.poison("concatenate", "no values to concatenate".into(), Type::scalar(DType::F32));
        };
        if values.len() == 1 {
            return (*first).clone();
        }
        let Some(axis) = first.axis("concatenate", axis) else { return (*first).clone() };
        let mut ty = first.ty.clone();
        ty.dims[axis] = 0;
        for v in values {
            let fits = v.dtype() == ty.dtype
                && v.rank() == ty.rank()
                && (0..ty.rank()).all(|i| i == axis || v.ty.dims[i] == ty.dims[i]);
            if !fits {
                let message = format!("{} and {} cannot be concatenated along axis {axis}", first.ty, v.ty);
                return self.poison("concatenate", message, first.ty.clone());
            }
            ty.dims[axis] += v.ty.dims[axis];
        }
        let names = list(values.iter().map(|v| v.local()));
        let types = list(values.iter().map(|v| &v.ty));
        let sharding = merged(values);
        let sharding = (*first).clone().with_sharding(sharding).carried_but(axis);
        let text = format!("stablehlo.concatenate {names}, dim = {axis} : ({types}) -> {ty}");
        self.op("concatenate", text, ty).with_sharding(sharding)
    }
}

impl Value {
    /// Reshapes to `dims`. The row-major order of the elements stays the same.
    pub fn reshape(&self, dims: impl Into<Vec<usize>>) -> Value {
        let ty = Type::new(self.dtype(), dims.into());
        if ty == self.ty {
            return self.clone();
        }
        if ty.elements() != self.ty.elements() {
            let message = format!(
                "cannot reshape {} with {} elements to {ty} with {} elements",
                self.ty,
                self.ty.elements(),
                ty.elements()
            );
            return self.b.poison("reshape", message, ty);
        }
        let sharding = self.carried_through_reshape(&ty.dims);
        let text = format!("stablehlo.reshape {} : ({}) -> {ty}", self.local(), self.ty);
        self.b.op("reshape", text, ty).with_sharding(sharding)
    }

    /// Permutes the dimensions: result dimension `i` is operand dimension `order[i]`.
    pub fn transpose(&self, order: &[usize]) -> Value {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        if sorted != (0..self.rank()).collect::<Vec<_>>() {
            let message = format!("{order:?} is not a permutation of the dimensions of {}", self.ty);
            return self.b.poison("transpose", message, self.ty.clone());
        }
        if order.windows(2).all(|w| w[0] < w[1]) {
            return self.clone();
        }
        let ty = Type::new(self.dtype(), order.iter().map(|&i| self.ty.dims[i]).collect::<Vec<_>>());
        let text = format!("stablehlo.transpose {}, dims = [{}] : ({}) -> {ty}", self.local(), list(order), self.ty);
        self.b.op("transpose", text, ty).with_sharding(self.carried(order.iter().map(|&i| Some(i))))
    }

    /// Swaps two dimensions.
    pub fn swap(&self, a: usize, b: usize) -> Value {
        let mut order: Vec<usize> = (0..self.rank()).collect();
        if a < order.len() && b < order.len() {
            order.swap(a, b);
        }
        self.transpose(&order)
    }

    /// Broadcasts as numpy does: aligns the last dimensions and repeats dimensions of size 1.
    pub fn broadcast_to(&self, dims: &[usize]) -> Value {
        if self.ty.dims == dims {
            return self.clone();
        }
        let shift = dims.len().wrapping_sub(self.rank());
        let map: Vec<usize> = (0..self.rank()).map(|i| i.wrapping_add(shift)).collect();
        self.broadcast_in_dim(dims, &map)
    }

    /// Broadcasts to `dims`. Operand dimension `i` becomes result dimension `map[i]`; all other result dimensions are
    /// new.
    pub fn broadcast_in_dim(&self, dims: &[usize], map: &[usize]) -> Value {
        let ty = Type::new(self.dtype(), dims.to_vec());
        let fits = map.len() == self.rank()
            && map.iter().zip(&self.ty.dims).all(|(&m, &d)| m < dims.len() && (d == 1 || d == dims[m]));
        if !fits {
            let message = format!("{} does not broadcast to {ty} with dimensions {map:?}", self.ty);
            return self.b.poison("broadcast_in_dim", message, ty);
        }
        let text =
            format!("stablehlo.broadcast_in_dim {}, dims = [{}] : ({}) -> {ty}", self.local(), list(map), self.ty);
        let from = |to: usize| map.iter().position(|&m| m == to).filter(|&i| self.ty.dims[i] == dims[to]);
        self.b.op("broadcast_in_dim", text, ty).with_sharding(self.carried((0..dims.len()).map(from)))
    }

    /// Inserts a dimension of size 1 before `axis`.
    pub fn unsqueeze(&self, axis: usize) -> Value {
        let mut dims = self.ty.dims.clone();
        dims.insert(axis.min(dims.len()), 1);
        self.reshape(dims)
    }

    /// Returns every `step`-th element in `[begin, end)` of a dimension.
    pub fn slice_step(&self, axis: isize, begin: usize, end: usize, step: usize) -> Value {
        let Some(axis) = self.axis("slice", axis) else { return self.clone() };
        if begin > end || end > self.ty.dims[axis] || step == 0 {
            let message =
                format!("{begin}..{end} with step {step} is not a valid range for axis {axis} of {}", self.ty);
            return self.b.poison("slice", message, self.ty.clone());
        }
        if begin == 0 && end == self.ty.dims[axis] && step == 1 {
            return self.clone();
        }
        let mut ty = self.ty.clone();
        ty.dims[axis] = (end - begin).div_ceil(step);
        let ranges = list(self.ty.dims.iter().enumerate().map(|(i, d)| match i == axis {
            true if step == 1 => format!("{begin}:{end}"),
            true => format!("{begin}:{end}:{step}"),
            false => format!("0:{d}"),
        }));
        let text = format!("stablehlo.slice {} [{ranges}] : ({}) -> {ty}", self.local(), self.ty);
        self.b.op("slice", text, ty).with_sharding(self.carried_but(axis))
    }

    /// Returns the elements in `[begin, end)` of a dimension.
    pub fn slice(&self, axis: isize, begin: usize, end: usize) -> Value {
        self.slice_step(axis, begin, end, 1)
    }

    /// Returns element `index` of a dimension and removes the dimension.
    pub fn at(&self, axis: isize, index: usize) -> Value {
        let Some(a) = self.axis("slice", axis) else { return self.clone() };
        let part = self.slice(axis, index, index + 1);
        let mut dims = part.ty.dims.clone();
        dims.remove(a);
        part.reshape(dims)
    }

    /// Splits an axis into equal parts.
    pub fn split(&self, axis: isize, parts: usize) -> Vec<Value> {
        let size = self.dim(axis);
        if parts == 0 || !size.is_multiple_of(parts) {
            self.b.fail("slice", format!("axis {axis} of {} cannot be split into {parts} equal parts", self.ty));
            return vec![self.clone(); parts];
        }
        let n = size / parts;
        (0..parts).map(|i| self.slice(axis, i * n, (i + 1) * n)).collect()
    }

    /// Pads a dimension with `low` elements before and `high` elements after it, all equal to `value`.
    pub fn pad(&self, axis: isize, low: usize, high: usize, value: f64) -> Value {
        let Some(axis) = self.axis("pad", axis) else { return self.clone() };
        if low == 0 && high == 0 {
            return self.clone();
        }
        let fill = self.like(value);
        let mut ty = self.ty.clone();
        ty.dims[axis] += low + high;
        let at = |n: usize| list((0..self.rank()).map(|i| if i == axis { n } else { 0 }));
        let text = format!(
            "stablehlo.pad {}, {}, low = [{}], high = [{}], interior = [{}] : ({}, {}) -> {ty}",
            self.local(),
            fill.local(),
            at(low),
            at(high),
            at(0),
            self.ty,
            fill.ty
        );
        self.b.op("pad", text, ty).with_sharding(self.carried_but(axis))
    }

    /// Reverses the order of a dimension's elements.
    pub fn reverse(&self, axis: isize) -> Value {
        let Some(axis) = self.axis("reverse", axis) else { return self.clone() };
        let ty = self.ty.clone();
        let text = format!("stablehlo.reverse {}, dims = [{axis}] : {ty}", self.local());
        self.b.op("reverse", text, ty).with_sharding(self.sharding.clone())
    }

    /// Pads a dimension by reflection, without repeating the edge elements.
    pub fn pad_reflect(&self, axis: isize, low: usize, high: usize) -> Value {
        let n = self.dim(axis);
        if low >= n || high >= n {
            let message = format!(
                "reflection padding of {low} and {high} must be less than the {n} elements of axis {axis} of {}",
                self.ty
            );
            return self.b.poison("pad", message, self.ty.clone());
        }
        let before = (low > 0).then(|| self.slice(axis, 1, low + 1).reverse(axis));
        let after = (high > 0).then(|| self.slice(axis, n - 1 - high, n - 1).reverse(axis));
        let parts: Vec<&Value> = before.iter().chain(std::iter::once(self)).chain(after.iter()).collect();
        self.b.concat(&parts, axis)
    }

    /// Pads a dimension by repeating its first and its last element.
    pub fn pad_edge(&self, axis: isize, low: usize, high: usize) -> Value {
        let n = self.dim(axis);
        let (first, last) = (self.slice(axis, 0, 1.min(n)), self.slice(axis, n.saturating_sub(1), n));
        let mut parts = vec![&first; low];
        parts.push(self);
        parts.extend(std::iter::repeat_n(&last, high));
        self.b.concat(&parts, axis)
    }
}
