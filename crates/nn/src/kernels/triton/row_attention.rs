//! The kernels of the attention of a single query token over a key/value cache, for text generation.
//!
//! The first kernel normalizes and rotates the token's queries and keys, and writes its keys and values to the cache.
//! Each of its programs computes the softmax over a block of cached tokens for the query heads of one key/value head.
//! The second kernel combines the blocks. Scores, weights and sums are f32.

use super::TritonKernel;
use super::row_norm::RowScale;
use super::text::{TritonCode, TritonTile};
use crate::Params;
use ltx2_stablehlo::{DType, ResultAlias, Type, Value};

/// Names of the kernels in profiles.
const NAMES: [&str; 2] = ["row_attention", "row_attention_sum"];

/// Block sizes in cached tokens. The kernel uses the smallest one that gives at most [`MOST_BLOCKS`] blocks: small blocks
/// are faster, because more programs run in parallel.
const BLOCKS: [usize; 4] = [8, 16, 32, 64];
/// Largest number of blocks, whose results one program combines.
const MOST_BLOCKS: usize = 256;
/// Elements of the cached keys of a block per warp.
const WARP_ELEMENTS: usize = 2048;
const MOST_WARPS: usize = 8;
/// Features of a head that one program of the second kernel combines.
const PART: usize = 32;
/// Maximum number of query heads per key/value head.
const MOST_GROUPED: usize = 8;
/// Minimum and maximum head dimension, which must be a power of two.
const DIMS: [usize; 2] = [64, 512];
/// Lower bound of the maximum of a block's scores, so that no difference of scores is NaN.
const LOWEST: f64 = -1e30;

/// RMS norm over each head of queries and keys, and RoPE.
pub struct RowRope<'a> {
    /// Number added to the mean of the squares.
    pub eps: f64,
    /// Scale of the queries' norm.
    pub q_scale: RowScale,
    /// Scale of the keys' norm.
    pub k_scale: RowScale,
    /// Cosines, f32 `[dim / 2]` with leading dimensions of size 1. Features `i` and `i + dim / 2` are a pair.
    pub cos: &'a Value,
    /// Sines, like the cosines.
    pub sin: &'a Value,
}

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
    /// Norm and RoPE of the queries and the token's keys. `None`: unchanged.
    pub rope: Option<RowRope<'a>>,
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
            warps: (self.block() * dim / WARP_ELEMENTS).clamp(1, MOST_WARPS),
            stages: 1,
            flops: 4 * heads * dim * self.keys.dim(2),
        };
        let at = self.at.reshape(vec![1]);
        let rope: Vec<Value> = self.rope_operands().into_iter().map(flat).collect();
        let operands = [&q_row, &k, &v, &bias, &at, self.keys, self.values];
        let operands: Vec<&Value> = operands.into_iter().chain(&rope).collect();
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
            && tokens.is_multiple_of(self.block())
            && self.blocks() <= MOST_BLOCKS
            && dim.is_power_of_two()
            && (DIMS[0]..=DIMS[1]).contains(&dim)
            && self.bias.ty().elements() == tokens
            && self.bias.dtype() == DType::F32
            && self.at.ty().elements() == 1
            && self.at.dtype() == DType::I32
            && self.rope.as_ref().is_none_or(|rope| rope.is_supported(dim, dtype))
    }

    /// Returns the number of cached tokens of a block.
    fn block(&self) -> usize {
        let tokens = self.keys.dim(2);
        let fits = |block: &usize| tokens / block <= MOST_BLOCKS;
        BLOCKS.into_iter().find(fits).unwrap_or(BLOCKS[BLOCKS.len() - 1])
    }

    fn blocks(&self) -> usize {
        self.keys.dim(2) / self.block()
    }

    /// Returns the scales' weights, the cosines and the sines.
    fn rope_operands(&self) -> Vec<&Value> {
        self.rope.as_ref().map(RowRope::operands).unwrap_or_default()
    }

    /// Returns the first kernel as MLIR text. Its arguments are the queries, the token's keys and values, the bias, the
    /// position, the caches, the operands of RoPE and the results: the blocks' weighted sums of values, the maxima of
    /// their scores and the sums of their weights, and the caches.
    pub(super) fn text(&self) -> String {
        let (narrow, wide) = (self.q.dtype(), DType::F32);
        let operands = [narrow, narrow, narrow, wide, DType::I32, narrow, narrow];
        let rope = self.rope_operands().into_iter().map(Value::dtype);
        let results = [wide, wide, wide, narrow, narrow];
        let arrays: Vec<DType> = operands.into_iter().chain(rope).chain(results).collect();
        TritonCode::module(NAMES[0], &arrays, |code, arrays| self.write(code, arrays))
    }

    fn write(&self, code: &TritonCode, arrays: &[TritonTile]) {
        let (dim, tokens, size) = (self.q.dim(3), self.keys.dim(2), self.block());
        let grouped = self.q.dim(2) / self.k.dim(2);
        let (block, head) = (code.place(0), code.place(1));
        let (results, tables) = (&arrays[arrays.len() - 5..], &arrays[7..]);
        let (feature, half) = (code.range(dim).row(), code.range(dim / 2).row());
        // Queries and keys are loaded as halves, because RoPE rotates pairs of features of both halves.
        let halves = [half.clone(), half.plus(dim / 2)];
        let token = block.times(size).plus(&code.range(size));
        let row = code.range(size).times(dim).column();
        let start = head.wide().times(tokens * dim).plus(&block.times(size * dim).wide());
        let places = [&halves[0], &halves[1], &feature].map(|at| row.plus(at));
        let load_halves = |array: &TritonTile, head: &TritonTile| {
            halves.each_ref().map(|at| array.ahead(&head.times(dim)).ahead(at).load())
        };
        let query_heads: Vec<TritonTile> = (0..grouped).map(|n| head.times(grouped).plus(n)).collect();
        // All loads come before the first use, so that the program waits only once.
        let at = arrays[4].load();
        let rope = self.rope.as_ref().map(|rope| rope.load(tables, &halves));
        let k = load_halves(&arrays[1], &head);
        let queries: Vec<[TritonTile; 2]> = query_heads.iter().map(|head| load_halves(&arrays[0], head)).collect();
        let v = arrays[2].ahead(&head.times(dim)).ahead(&feature).load();
        let bias = arrays[3].ahead(&token).load();
        let cached = |cache: usize, place: usize| arrays[cache].ahead(&start).ahead(&places[place]).load();
        let cached = [cached(5, 0), cached(5, 1), cached(6, 2)];
        let is_new = token.equals(&at).column();
        let [k0, k1] = rope.as_ref().map_or(k.clone(), |rope| rope.apply(&k, 1));
        let merged = |n: usize, own: &TritonTile, result: usize| {
            let dims = [size, if n < 2 { dim / 2 } else { dim }];
            let all = is_new.broadcast(&dims).select(&own.broadcast(&dims), &cached[n]);
            results[result].ahead(&start).ahead(&places[n]).store_where(&all, &is_new);
            all.widened()
        };
        let (keys, values) = ([merged(0, &k0, 3), merged(1, &k1, 3)], merged(2, &v, 4));
        let bias = bias.times(std::f64::consts::LOG2_E).column();
        for (query_head, q) in query_heads.iter().zip(&queries) {
            let q = rope.as_ref().map_or(q.clone(), |rope| rope.apply(q, 0));
            let q = q.map(|half| half.widened().times(self.scale * std::f64::consts::LOG2_E));
            let scores = keys[0].times_plus(&q[0], &keys[1].times(&q[1])).row_sum().column().plus(&bias);
            let largest = scores.column_max_propagating_nan().max_propagating_nan(LOWEST);
            let weights = scores.minus(&largest.column()).exp2();
            let sums = values.column_product_sum(&weights).row();
            let part = query_head.times(self.blocks()).plus(&block);
            results[0].ahead(&part.times(dim)).ahead(&feature).store(&sums);
            for (array, x) in [(1, largest), (2, weights.column_sum())] {
                results[array].ahead(&part).ahead(&code.range(1)).store(&x);
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
        let total = arrays[2].ahead(&first.plus(&block)).load_where(&is_block).column_product_sum(&shares).column();
        let offsets = block.times(dim).plus(&feature);
        let sums = arrays[0].ahead(&first.times(dim)).ahead(&offsets).load_where(&is_block);
        let attended = sums.column_product_sum(&shares).row().over(&total);
        arrays[3].ahead(&head.times(dim)).ahead(&feature).store(&attended.narrowed(self.q.dtype()));
    }
}

impl RowRope<'_> {
    fn operands(&self) -> Vec<&Value> {
        vec![&self.q_scale.weight, &self.k_scale.weight, self.cos, self.sin]
    }

    fn is_supported(&self, dim: usize, dtype: DType) -> bool {
        let weights = [&self.q_scale.weight, &self.k_scale.weight];
        weights.iter().all(|w| w.ty().elements() == dim && w.dtype() == dtype)
            && [self.cos, self.sin].iter().all(|t| t.ty().elements() == dim / 2 && t.dtype() == DType::F32)
    }

    /// Writes the code that loads the operands `arrays`: the scales' weights, the cosines and the sines. `halves` are the
    /// indices of the two halves of a head.
    fn load(&self, arrays: &[TritonTile], halves: &[TritonTile; 2]) -> LoadedRope<'_> {
        let load = |array: &TritonTile, at: &TritonTile| array.ahead(at).load();
        LoadedRope {
            scales: [&self.q_scale, &self.k_scale],
            eps: self.eps,
            weights: [0, 1].map(|n| halves.each_ref().map(|at| load(&arrays[n], at))),
            cos: load(&arrays[2], &halves[0]),
            sin: load(&arrays[3], &halves[0]),
        }
    }
}

/// Operands of [`RowRope`] in registers.
struct LoadedRope<'a> {
    /// Scales of queries and keys, and both halves of their weights.
    scales: [&'a RowScale; 2],
    weights: [[TritonTile; 2]; 2],
    eps: f64,
    cos: TritonTile,
    sin: TritonTile,
}

impl LoadedRope<'_> {
    /// Normalizes and rotates both halves of a head. `kind`: 0 for queries, 1 for keys.
    fn apply(&self, halves: &[TritonTile; 2], kind: usize) -> [TritonTile; 2] {
        let (dtype, half) = (self.scales[kind].weight.dtype(), self.scales[kind].weight.ty().elements() / 2);
        let wide = halves.each_ref().map(TritonTile::widened);
        let [a, b] = wide.each_ref().map(|x| x.row_product_sum(x));
        let mean = a.plus(&b).over(2.0 * half as f64);
        let norm = |n: usize| {
            let y = self.scales[kind].scaled(&wide[n], &mean, self.eps, &self.weights[kind][n]);
            y.narrowed(dtype).widened()
        };
        let (first, second) = (norm(0), norm(1));
        let (cos, sin) = (&self.cos, &self.sin);
        [first.times(cos).minus(&second.times(sin)), second.times(cos).plus(&first.times(sin))]
            .map(|x| x.narrowed(dtype))
    }
}
