//! The kernel that applies RMS norms to a single row of activations, for text generation.
//!
//! One program computes the row, so that one launch replaces those of a sum and of the operations that depend on it.

use super::TritonKernel;
use super::text::{TritonCode, TritonTile};
use crate::Params;
use ltx2_stablehlo::{Type, Value};

/// Name of the kernel in profiles.
const NAME: &str = "row_norm";

/// Largest number of elements of a row: 32 per thread.
const LARGEST: usize = 16384;
/// Largest number of warps of the program.
const WARPS: usize = 16;
/// Number of elements that a warp loads together: 8 per thread.
const WARP_ELEMENTS: usize = 256;

/// Learned scale of an RMS norm: normalized values are multiplied by `weight + offset`.
#[derive(Clone)]
pub struct RowScale {
    /// Weight, as long as the row.
    pub weight: Value,
    /// Number added to the weight.
    pub offset: f64,
}

impl RowScale {
    /// Applies the RMS norm to the tile `x`, whose squares have the mean `mean`. Rounds the result to `dtype`.
    pub(super) fn scaled(&self, x: &TritonTile, mean: &TritonTile, eps: f64, weight: &TritonTile) -> TritonTile {
        let root = mean.plus(eps).sqrt().column();
        let weight = weight.widened();
        let weight = if self.offset == 0.0 { weight } else { weight.plus(self.offset) };
        x.over(&root).times(&weight)
    }
}

/// An RMS norm of a single row `x [1…, n]`, optionally followed by a residual connection and a second norm.
pub struct RowNorm<'a> {
    /// The row.
    pub x: &'a Value,
    /// Number added to the mean of the squares.
    pub eps: f64,
    /// Scale of the norm.
    pub scale: RowScale,
    /// Residual stream, to which the normalized row is added.
    pub residual: Option<&'a Value>,
    /// Scale of the norm of the sum.
    pub next: Option<RowScale>,
}

impl RowNorm<'_> {
    /// Returns the normalized row, or with a residual stream, the sum and, if `next` is set, the normalized sum. All
    /// have the shape of `x`. Returns `None` if the program does not use kernels for single rows, or if the kernel does
    /// not support the shapes or element types.
    pub fn run(&self, p: &Params) -> Option<Vec<Value>> {
        let (n, dtype) = (self.x.dim(-1), self.x.dtype());
        let is_supported = p.has_row_kernels(self.x) && (1..=LARGEST).contains(&n);
        let operands: Vec<&Value> = [
            Some(self.x),
            Some(&self.scale.weight),
            self.residual,
            self.next.as_ref().filter(|_| self.residual.is_some()).map(|next| &next.weight),
        ]
        .into_iter()
        .flatten()
        .collect();
        if !is_supported || operands.iter().any(|x| x.ty().elements() != n || x.dtype() != dtype) {
            return None;
        }
        let kernel = TritonKernel {
            name: NAME,
            text: self.text(operands.len()),
            grid: [1; 3],
            warps: (n.next_power_of_two() / WARP_ELEMENTS).clamp(1, WARPS),
            stages: 1,
            flops: 0,
        };
        let rows: Vec<Value> = operands.iter().map(|x| x.reshape(vec![n])).collect();
        let results = vec![Type::new(dtype, [n]); operands.len().saturating_sub(2).max(1)];
        let results = kernel.call(&rows.iter().collect::<Vec<_>>(), &results);
        Some(results.iter().map(|y| y.reshape(self.x.dims().to_vec())).collect())
    }

    /// Returns the kernel as MLIR text. Its arguments are the row, the weight, the residual stream, the second weight
    /// and the results.
    pub(super) fn text(&self, operands: usize) -> String {
        let arrays = vec![self.x.dtype(); operands + operands.saturating_sub(2).max(1)];
        TritonCode::module(NAME, &arrays, |code, arrays| self.write(code, arrays))
    }

    fn write(&self, code: &TritonCode, arrays: &[TritonTile]) {
        let (n, dtype) = (self.x.dim(-1), self.x.dtype());
        let column = code.range(n.next_power_of_two()).row();
        let is_inside = column.is_within(n);
        let load = |array: &TritonTile| array.ahead(&column).load_where(&is_inside).widened();
        let store = |array: &TritonTile, x: &TritonTile| array.ahead(&column).store_where(x, &is_inside);
        // Elements outside the row are 0, so they do not change the sums.
        let norm = |x: &TritonTile, scale: &RowScale, weight: &TritonTile| {
            let mean = x.times(x).row_sum().over(n as f64);
            scale.scaled(x, &mean, self.eps, weight).narrowed(dtype)
        };
        let weight = load(&arrays[1]);
        let Some(_) = self.residual else {
            store(&arrays[2], &norm(&load(&arrays[0]), &self.scale, &weight));
            return;
        };
        let (residual, next) = (load(&arrays[2]), self.next.as_ref().map(|scale| (scale, load(&arrays[3]))));
        let y = norm(&load(&arrays[0]), &self.scale, &weight).widened();
        let sum = residual.plus(&y).narrowed(dtype);
        match next {
            None => store(&arrays[3], &sum),
            Some((scale, weight)) => {
                store(&arrays[4], &sum);
                store(&arrays[5], &norm(&sum.widened(), scale, &weight));
            }
        }
    }
}
