//! Reductions. The `…_keep` variants keep each reduced axis as an axis of size 1.

use crate::DType;
use crate::builder::{Value, axis_of};
use crate::types::{Type, list};

impl Value {
    fn reduce(&self, op: &'static str, init: f64, axes: &[isize]) -> Value {
        let mut at: Vec<usize> = Vec::new();
        for &a in axes {
            match axis_of(a, self.rank()) {
                Some(i) if !at.contains(&i) => at.push(i),
                _ => {
                    let message = format!("axes {axes:?} of {} are out of range or repeated", self.ty);
                    return self.b.poison("reduce", message, self.ty.clone());
                }
            }
        }
        at.sort_unstable();
        let init = self.like(init);
        let dims: Vec<usize> =
            self.ty.dims.iter().enumerate().filter(|(i, _)| !at.contains(i)).map(|(_, &d)| d).collect();
        let ty = Type::new(self.dtype(), dims);
        let text = format!(
            "stablehlo.reduce({} init: {}) applies stablehlo.{op} across dimensions = [{}] : ({}, {}) -> {ty}",
            self.local(),
            init.local(),
            list(&at),
            self.ty,
            init.ty
        );
        let sharding = self.carried((0..self.rank()).filter(|i| !at.contains(i)).map(Some));
        let result = self.b.op("reduce", text, ty).with_sharding(sharding);
        let parts: Vec<String> = at.iter().flat_map(|&i| self.axes_of(i)).collect();
        self.b.count_sum(&result, &parts);
        result
    }

    fn keep(&self, reduced: &Value, axes: &[isize]) -> Value {
        let mut dims = self.ty.dims.clone();
        for &a in axes {
            if let Some(i) = axis_of(a, self.rank()) {
                dims[i] = 1;
            }
        }
        reduced.reshape(dims)
    }

    /// Sums over axes and removes them.
    pub fn sum(&self, axes: &[isize]) -> Value {
        self.reduce("add", 0.0, axes)
    }

    /// Sums over axes and keeps them with size 1.
    pub fn sum_keep(&self, axes: &[isize]) -> Value {
        self.keep(&self.sum(axes), axes)
    }

    /// Averages over axes and keeps them with size 1.
    pub fn mean_keep(&self, axes: &[isize]) -> Value {
        let n: usize = axes.iter().map(|&a| self.dim(a)).product();
        self.sum_keep(axes) / n as f64
    }

    /// Takes the maximum over axes and keeps them with size 1. For booleans, this is "any".
    pub fn max_keep(&self, axes: &[isize]) -> Value {
        let r = match self.dtype() {
            DType::Bool => self.reduce("or", 0.0, axes),
            d if d.is_float() => self.reduce("maximum", f64::NEG_INFINITY, axes),
            _ => self.reduce("maximum", f64::from(i32::MIN), axes),
        };
        self.keep(&r, axes)
    }

    /// Takes the minimum over axes and keeps them with size 1. For booleans, this is "all".
    pub fn min_keep(&self, axes: &[isize]) -> Value {
        let r = match self.dtype() {
            DType::Bool => self.reduce("and", 1.0, axes),
            d if d.is_float() => self.reduce("minimum", f64::INFINITY, axes),
            _ => self.reduce("minimum", f64::from(i32::MAX), axes),
        };
        self.keep(&r, axes)
    }
}
