//! The kernels of the attention of a single query token over a key/value cache, for text generation.
//!
//! The first kernel also writes the token's keys and values to the cache. Each of its programs computes the softmax over
//! a block of cached tokens for the query heads of one key/value head. The second kernel combines the blocks. Scores,
//! weights and sums are f32.

use super::TritonKernel;
use super::text::{TritonCode, TritonTile};
use crate::Params;
use ltx2_stablehlo::{DType, ResultAlias, Type, Value};

/// Names of the kernels in profiles.
const NAMES: [&str; 2] = ["row_attention", "row_attention_sum"];

/// Number of cached tokens of a block.
const BLOCK: usize = 64;
/// Largest number of blocks, whose results one program combines.
const MOST_BLOCKS: usize = 256;
/// Features of a head that one program of the second kernel combines.
const PART: usize = 32;
/// Maximum number of query heads per key/value head.
const MOST_GROUPED: usize = 8;
/// Minimum and maximum head dimension, which must be a power of two.
const DIMS: [usize; 2] = [64, 512];
const WARPS: usize = 8;
/// Lower bound of the maximum of a block's scores, so that no difference of scores is NaN.
const LOWEST: f64 = -1e30;

/// Attention of a single query token over a key/value cache.
pub struct RowAttention<'a> {
    /// Queries `[1, 1, heads, dim]`.
    pub q: &'a Value,
    /// Keys of the token, `[1, 1, kv_heads, dim]`.
    pub k: &'a Value,
    /// Values of the token, like the keys.
    pub v: &'a Value,
    /// Cached keys `[1, kv_heads, tokens, dim]`.
    pub keys: &'a Value,
    /// Cached values, like the keys.
    pub values: &'a Value,
    /// Position of the token in the cache, an i32 scalar.
    pub at: &'a Value,
    /// Bias added to the score of each cached token, f32 `[tokens]` with leading dimensions of size 1.
    pub bias: &'a Value,
    /// Scale of the scores.
    pub scale: f64,
}

/// Results of [`RowAttention`].
pub struct RowAttended {
    /// Attention of the token, `[1, 1, heads, dim]`.
    pub attended: Value,
    /// Cached keys with those of the token.
    pub keys: Value,
    /// Cached values with those of the token.
    pub values: Value,
}

impl RowAttention<'_> {
    /// Runs the kernels. Returns `None` if the program does not use kernels for single rows, or if they do not support
    /// the shapes or element types.
    pub fn run(&self, p: &Params) -> Option<RowAttended> {
        if !self.is_supported(p) {
            return None;
        }
        let (q, dim, dtype) = (self.q, self.q.dim(-1), self.q.dtype());
        let (heads, kv_heads, blocks) = (q.dim(2), self.k.dim(2), self.blocks());
        let flat = |x: &Value| x.reshape(vec![x.ty().elements()]);
        let [q_row, k, v, bias] = [q, self.k, self.v, self.bias].map(flat);
        let kernel = TritonKernel {
            name: NAMES[0],
            text: self.text(),
            grid: [blocks, kv_heads, 1],
            warps: WARPS,
            stages: 1,
            flops: 4 * heads * dim * blocks * BLOCK,
        };
        let at = self.at.reshape(vec![1]);
        let operands = [&q_row, &k, &v, &bias, &at, self.keys, self.values];
        let statistics = Type::new(DType::F32, [heads, blocks]);
        let results = [
            Type::new(DType::F32, [heads, blocks, dim]),
            statistics.clone(),
            statistics,
            self.keys.ty().clone(),
            self.values.ty().clone(),
        ];
        let aliases = vec![ResultAlias { result: 3, operand: 5 }, ResultAlias { result: 4, operand: 6 }];
        let parts = kernel.call_in_place(&operands, &results, aliases);
        let kernel = TritonKernel {
            name: NAMES[1],
            text: self.sum_text(),
            grid: [heads, dim / PART, 1],
            warps: 4,
            stages: 1,
            flops: 0,
        };
        let attended = kernel.call(&[&parts[0], &parts[1], &parts[2]], &[Type::new(dtype, [heads * dim])]).remove(0);
        Some(RowAttended {
            attended: attended.reshape(q.dims().to_vec()),
            keys: parts[3].clone(),
            values: parts[4].clone(),
        })
    }

    fn is_supported(&self, p: &Params) -> bool {
        let (q, k, keys, dtype) = (self.q, self.k, self.keys, self.q.dtype());
        if [q, k, self.v, keys, self.values].iter().any(|x| x.rank() != 4 || x.dtype() != dtype) {
            return false;
        }
        let (heads, kv_heads, tokens, dim) = (q.dim(2), k.dim(2), keys.dim(2), q.dim(3));
        p.has_row_kernels(q)
            && q.ty().elements() == heads * dim
            && k.dims() == [1, 1, kv_heads, dim]
            && self.v.dims() == k.dims()
            && keys.dims() == [1, kv_heads, tokens, dim]
            && self.values.dims() == keys.dims()
            && heads.is_multiple_of(kv_heads)
            && heads / kv_heads <= MOST_GROUPED
            && tokens.is_multiple_of(BLOCK)
            && self.blocks() <= MOST_BLOCKS
            && dim.is_power_of_two()
            && (DIMS[0]..=DIMS[1]).contains(&dim)
            && self.bias.ty().elements() == tokens
            && self.bias.dtype() == DType::F32
            && self.at.ty().elements() == 1
            && self.at.dtype() == DType::I32
    }

    fn blocks(&self) -> usize {
        self.keys.dim(2) / BLOCK
    }

    /// Returns the first kernel as MLIR text. Its arguments are the queries, the token's keys and values, the bias, the
    /// position, the caches and the results: the blocks' weighted sums of values, the maxima of their scores and the
    /// sums of their weights, and the caches.
    pub(super) fn text(&self) -> String {
        let (narrow, wide) = (self.q.dtype(), DType::F32);
        let arrays = [narrow, narrow, narrow, wide, DType::I32, narrow, narrow, wide, wide, wide, narrow, narrow];
        TritonCode::module(NAMES[0], &arrays, |code, arrays| self.write(code, arrays))
    }

    fn write(&self, code: &TritonCode, arrays: &[TritonTile]) {
        let (dim, tokens, blocks) = (self.q.dim(3), self.keys.dim(2), self.blocks());
        let grouped = self.q.dim(2) / self.k.dim(2);
        let (block, head) = (code.place(0), code.place(1));
        let feature = code.range(dim).row();
        let token = block.times(BLOCK).plus(&code.range(BLOCK));
        let offsets = code.range(BLOCK).times(dim).column().plus(&feature);
        let start = head.wide().times(tokens * dim).plus(&block.times(BLOCK * dim).wide());
        let is_new = token.equals(&arrays[4].load()).column().broadcast(&[BLOCK, dim]);
        let cached = |cache: usize| arrays[cache].ahead(&start).ahead(&offsets).load();
        let (keys, values) = (cached(5), cached(6));
        let own = |array: usize| arrays[array].ahead(&head.times(dim)).ahead(&feature).load().broadcast(&[BLOCK, dim]);
        let merged = |new: usize, cached: &TritonTile, result: usize| {
            let all = is_new.select(&own(new), cached);
            arrays[result].ahead(&start).ahead(&offsets).store_where(&all, &is_new);
            all.widened()
        };
        let (keys, values) = (merged(1, &keys, 10), merged(2, &values, 11));
        let bias = arrays[3].ahead(&token).load().times(std::f64::consts::LOG2_E).column();
        for n in 0..grouped {
            let query_head = head.times(grouped).plus(n);
            let q = arrays[0].ahead(&query_head.times(dim)).ahead(&feature).load().widened();
            let q = q.times(self.scale * std::f64::consts::LOG2_E);
            let scores = keys.times(&q).row_sum().column().plus(&bias);
            let largest = scores.column_max_propagating_nan().max_propagating_nan(LOWEST);
            let weights = scores.minus(&largest.column()).exp2();
            let sums = values.times(&weights).column_sum().row();
            let part = query_head.times(blocks).plus(&block);
            arrays[7].ahead(&part.times(dim)).ahead(&feature).store(&sums);
            for (array, x) in [(8, largest), (9, weights.column_sum())] {
                arrays[array].ahead(&part).ahead(&code.range(1)).store(&x);
            }
        }
    }

    /// Returns the second kernel as MLIR text. Its arguments are the first three results of the first kernel, and the
    /// result.
    pub(super) fn sum_text(&self) -> String {
        let arrays = [DType::F32, DType::F32, DType::F32, self.q.dtype()];
        TritonCode::module(NAMES[1], &arrays, |code, arrays| self.write_sum(code, arrays))
    }

    fn write_sum(&self, code: &TritonCode, arrays: &[TritonTile]) {
        let (dim, blocks) = (self.q.dim(3), self.blocks());
        let (head, part) = (code.place(0), code.place(1));
        let block = code.range(blocks.next_power_of_two()).column();
        let is_block = block.is_within(blocks);
        let feature = part.times(PART).plus(&code.range(PART)).row();
        let first = head.times(blocks);
        // Blocks past the end have no weights. Their maximum is that of the last block, which does not change the
        // largest one.
        let largest = arrays[1].ahead(&first.plus(&block.at_most(blocks - 1))).load();
        let shares = largest.minus(&largest.column_max_propagating_nan().column()).exp2();
        let total = arrays[2].ahead(&first.plus(&block)).load_where(&is_block).times(&shares).column_sum().column();
        let offsets = block.times(dim).plus(&feature);
        let sums = arrays[0].ahead(&first.times(dim)).ahead(&offsets).load_where(&is_block);
        let attended = sums.times(&shares).column_sum().row().over(&total);
        arrays[3].ahead(&head.times(dim)).ahead(&feature).store(&attended.narrowed(self.q.dtype()));
    }
}
