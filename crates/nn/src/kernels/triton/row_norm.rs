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
        if !self.is_supported(p) {
            return None;
        }
        let (n, dtype) = (self.x.dim(-1), self.x.dtype());
        let kernel = TritonKernel {
            name: NAME,
            text: self.text(),
            grid: [1; 3],
            warps: (n.next_power_of_two() / WARP_ELEMENTS).clamp(1, WARPS),
            stages: 1,
            flops: 0,
        };
        let rows: Vec<Value> = self.operands().iter().map(|x| x.reshape(vec![n])).collect();
        let results = vec![Type::new(dtype, [n]); self.results()];
        let results = kernel.call(&rows.iter().collect::<Vec<_>>(), &results);
        Some(results.iter().map(|y| y.reshape(self.x.dims().to_vec())).collect())
    }

    /// Returns whether the program uses kernels for single rows, and they support the shapes and element types.
    pub(super) fn is_supported(&self, p: &Params) -> bool {
        let (n, dtype) = (self.x.dim(-1), self.x.dtype());
        let is_row = |x: &&Value| x.ty().elements() == n && x.dtype() == dtype;
        p.has_row_kernels(self.x) && (1..=LARGEST).contains(&n) && self.operands().iter().all(is_row)
    }

    /// Returns the operands: the row, the weight, the residual stream and the second weight.
    pub(super) fn operands(&self) -> Vec<&Value> {
        let next = self.next.as_ref().filter(|_| self.residual.is_some());
        let rest = [self.residual, next.map(|next| &next.weight)];
        [self.x, &self.scale.weight].into_iter().chain(rest.into_iter().flatten()).collect()
    }

    fn results(&self) -> usize {
        self.operands().len().saturating_sub(2).max(1)
    }

    /// Returns the kernel as MLIR text. Its arguments are the operands and the results.
    pub(super) fn text(&self) -> String {
        let arrays = vec![self.x.dtype(); self.operands().len() + self.results()];
        TritonCode::module(NAME, &arrays, |code, arrays| self.write(code, arrays))
    }

    fn write(&self, code: &TritonCode, arrays: &[TritonTile]) {
        let n = self.x.dim(-1);
        let column = code.range(n.next_power_of_two()).row();
        let is_inside = column.is_within(n);
        let results = &arrays[self.operands().len()..];
        for (y, result) in self.write_rows(&column, &is_inside, arrays).iter().zip(results) {
            result.ahead(&column).store_where(y, &is_inside);
        }
    }

    /// Writes the code that computes the results of [`Self::run`] from the operands `arrays`, and returns them. `column`
    /// is the index of each element, `[1, n]` with `n` rounded up to a power of two; elements for which `is_inside` is
    /// not set are 0.
    pub(super) fn write_rows(
        &self,
        column: &TritonTile,
        is_inside: &TritonTile,
        arrays: &[TritonTile],
    ) -> Vec<TritonTile> {
        let (n, dtype) = (self.x.dim(-1), self.x.dtype());
        let load = |array: &TritonTile| array.ahead(column).load_where(is_inside).widened();
        // Elements outside the row are 0, so they do not change the sums.
        let norm = |x: &TritonTile, scale: &RowScale, weight: &TritonTile| {
            let mean = x.row_product_sum(x).over(n as f64);
            scale.scaled(x, &mean, self.eps, weight).narrowed(dtype)
        };
        let loaded: Vec<TritonTile> = (0..self.operands().len()).map(|i| load(&arrays[i])).collect();
        let y = norm(&loaded[0], &self.scale, &loaded[1]);
        let Some(residual) = loaded.get(2) else { return vec![y] };
        let sum = residual.plus(&y.widened()).narrowed(dtype);
        match (&self.next, loaded.get(3)) {
            (Some(scale), Some(weight)) => {
                let next = norm(&sum.widened(), scale, weight);
                vec![sum, next]
            }
            _ => vec![sum],
        }
    }
}
