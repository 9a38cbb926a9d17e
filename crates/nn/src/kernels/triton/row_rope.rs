//! The kernel that normalizes and rotates the queries and keys of a single token, for text generation.
//!
//! Each program of the launch grid computes one head.

use super::TritonKernel;
use super::row_norm::RowScale;
use super::text::{TritonCode, TritonTile};
use crate::Params;
use ltx2_stablehlo::{DType, Type, Value};

/// Name of the kernel in profiles.
const NAME: &str = "row_rope";

/// Smallest and largest head dimension.
const DIMS: [usize; 2] = [64, 1024];

/// Queries and keys `[1, 1, heads, dim]` of a single token, to which an RMS norm over each head and RoPE are applied.
pub struct RowRope<'a> {
    /// Queries.
    pub q: &'a Value,
    /// Keys.
    pub k: &'a Value,
    /// Number added to the mean of the squares.
    pub eps: f64,
    /// Scale of the queries' norm.
    pub q_scale: RowScale,
    /// Scale of the keys' norm, with the same offset.
    pub k_scale: RowScale,
    /// Cosines, f32 `[dim / 2]` with leading dimensions of size 1. Features `i` and `i + dim / 2` are a pair.
    pub cos: &'a Value,
    /// Sines, like the cosines.
    pub sin: &'a Value,
}

impl RowRope<'_> {
    /// Returns the queries and the keys, both `[1, 1, heads, dim]`. Returns `None` if the program does not use kernels
    /// for single rows, or if the kernel does not support the shapes or element types.
    pub fn run(&self, p: &Params) -> Option<[Value; 2]> {
        let (q, k, dim, dtype) = (self.q, self.k, self.q.dim(-1), self.q.dtype());
        let weights = [&self.q_scale.weight, &self.k_scale.weight];
        let one_token = |x: &Value| x.ty().elements() == x.dim(-2) * dim && x.dim(-1) == dim && x.dtype() == dtype;
        let is_supported = p.has_row_kernels(q)
            && (DIMS[0]..=DIMS[1]).contains(&dim)
            && dim.is_power_of_two()
            && one_token(q)
            && one_token(k)
            && self.q_scale.offset == self.k_scale.offset
            && weights.iter().all(|w| w.ty().elements() == dim && w.dtype() == dtype)
            && [self.cos, self.sin].iter().all(|t| t.ty().elements() == dim / 2 && t.dtype() == DType::F32);
        if !is_supported {
            return None;
        }
        let heads = [q, k].map(|x| x.dim(-2));
        let kernel = TritonKernel {
            name: NAME,
            text: self.text(),
            grid: [heads[0] + heads[1], 1, 1],
            warps: 1,
            stages: 1,
            flops: 0,
        };
        let operands = [q, k, weights[0], weights[1], self.cos, self.sin].map(|x| x.reshape(vec![x.ty().elements()]));
        let results = [q, k].map(|x| Type::new(dtype, [x.ty().elements()]));
        let results = kernel.call(&operands.each_ref(), &results);
        Some([results[0].reshape(q.dims().to_vec()), results[1].reshape(k.dims().to_vec())])
    }

    /// Returns the kernel as MLIR text. Its arguments are the queries, the keys, the weights, the cosines, the sines and
    /// the results.
    pub(super) fn text(&self) -> String {
        let (narrow, wide) = (self.q.dtype(), DType::F32);
        let arrays = [narrow, narrow, narrow, narrow, wide, wide, narrow, narrow];
        TritonCode::module(NAME, &arrays, |code, arrays| self.write(code, arrays))
    }

    fn write(&self, code: &TritonCode, arrays: &[TritonTile]) {
        let (dim, heads, dtype) = (self.q.dim(-1), self.q.dim(-2), self.q.dtype());
        let place = code.place(0);
        let is_query = place.is_within(heads);
        let own = |q: usize, k: usize| {
            let k = arrays[k].ahead(&place.minus(heads).times(dim));
            is_query.select(&arrays[q].ahead(&place.times(dim)), &k)
        };
        let (from, to, weight) = (own(0, 1), own(6, 7), is_query.select(&arrays[2], &arrays[3]));
        let column = code.range(dim / 2).row();
        let columns = [column.clone(), column.plus(dim / 2)];
        let halves = columns.each_ref().map(|at| from.ahead(at).load().widened());
        let weights = columns.each_ref().map(|at| weight.ahead(at).load());
        let [cos, sin] = [4, 5].map(|table| arrays[table].ahead(&column).load());
        let [a, b] = halves.each_ref().map(|x| x.times(x).row_sum());
        let mean = a.plus(&b).over(dim as f64);
        let norm = |n: usize| self.q_scale.scaled(&halves[n], &mean, self.eps, &weights[n]).narrowed(dtype).widened();
        let (first, second) = (norm(0), norm(1));
        let rotated = [first.times(&cos).minus(&second.times(&sin)), second.times(&cos).plus(&first.times(&sin))];
        for (at, x) in columns.iter().zip(&rotated) {
            to.ahead(at).store(&x.narrowed(dtype));
        }
    }
}
