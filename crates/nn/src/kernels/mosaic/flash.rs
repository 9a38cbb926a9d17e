//! The attention kernel: online softmax over blocks of keys.
//!
//! A block contains tokens of one head or, if a head is narrower than a vector register, of as many heads as fill the
//! lanes of a register. If a head fills complete registers, arrays are `[batch, heads, tokens, dim]`: the order in
//! which the surrounding matmuls write them and in which the text keys of all layers are stored, so that no copy is
//! needed. For narrower heads, this order would leave lanes empty, so arrays are `[batch, tokens, heads · dim]`.
//! Sharing lanes costs nothing, because the depth of a matrix unit equals the width of a register. In the queries, the
//! features of other heads are masked out; in the weighted values, the lanes of other heads are computed and discarded.

use std::f64::consts::{LN_2, LOG2_E};

use super::blocks::BlockSizes;
use super::module::{BlockIndex, Frame, GridOrder, Window};
use super::shape::AttentionShape;
use super::text::{Int, LANES, Matrix, MosaicCode, VmemBlock};
use ltx2_stablehlo::DType;

impl AttentionShape {
    /// Returns the window of an array whose blocks have `tokens` tokens of one head, or of the heads that fill a
    /// register.
    fn window(&self, dtype: DType, tokens: usize, at: BlockIndex, head: BlockIndex) -> Window {
        let lanes = self.lanes();
        match self.is_heads_first() {
            true => Window {
                dtype,
                block: vec![1, 1, tokens, lanes],
                at: vec![BlockIndex::Axis(ROWS), head, at, BlockIndex::First],
            },
            false => Window { dtype, block: vec![1, tokens, lanes], at: vec![BlockIndex::Axis(ROWS), at, head] },
        }
    }
}

/// Results that the kernel returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelResults {
    /// Normalized values in the element type of the operands.
    Normalized,
    /// Unnormalized values, and the largest score and the sum of weights of each head (one lane per head); all f32.
    Partial,
}

/// Initial value of the running maximum: the smallest finite f32, so that differences are not NaN.
const LEAST: f32 = f32::MIN;

/// Writes the kernel as MLIR text.
pub(super) fn kernel(shape: &AttentionShape, wanted: KernelResults, blocks: BlockSizes, scale: f64) -> String {
    let writer = KernelWriter { shape, wanted, blocks, scale, steps: shape.keys.div_ceil(blocks.keys) };
    writer.frame().module("attention", |code, all| writer.body(code, all))
}

struct KernelWriter<'a> {
    shape: &'a AttentionShape,
    wanted: KernelResults,
    blocks: BlockSizes,
    scale: f64,
    /// Number of key blocks.
    steps: usize,
}

/// Indices of the head and query axes of the grid.
struct Axes {
    heads: usize,
    queries: usize,
}

const ROWS: usize = 0;
const KEYS: usize = 3;

impl KernelWriter<'_> {
    fn axes(&self) -> Axes {
        match self.wanted {
            KernelResults::Normalized => Axes { heads: 1, queries: 2 },
            // All heads of a block of queries write to the same block of maxima and sums, so their grid steps must be
            // consecutive.
            KernelResults::Partial => Axes { heads: 2, queries: 1 },
        }
    }

    fn frame(&self) -> Frame {
        let (shape, axes, lanes) = (self.shape, self.axes(), self.shape.lanes());
        let mut grid = vec![(1, GridOrder::Any); 4];
        grid[ROWS] = (shape.rows, GridOrder::Any);
        grid[axes.queries] = (shape.queries.div_ceil(self.blocks.queries), GridOrder::Any);
        let heads_order = if self.wanted == KernelResults::Normalized { GridOrder::Any } else { GridOrder::InTurn };
        grid[axes.heads] = (shape.heads / shape.together(), heads_order);
        grid[KEYS] = (self.steps, GridOrder::InTurn);
        let of_queries = |dtype| {
            shape.window(dtype, self.blocks.queries, BlockIndex::Axis(axes.queries), BlockIndex::Axis(axes.heads))
        };
        let head = match shape.heads / shape.kv_heads {
            1 => BlockIndex::Axis(axes.heads),
            shared => BlockIndex::Shared(axes.heads, shared),
        };
        let of_keys = || shape.window(shape.dtype, self.blocks.keys, BlockIndex::Axis(KEYS), head);
        let mut windows = vec![of_queries(shape.dtype), of_keys(), of_keys()];
        if let Some(rows) = shape.bias {
            let row = if rows == 1 { BlockIndex::First } else { BlockIndex::Axis(ROWS) };
            windows.push(Window {
                dtype: DType::F32,
                block: vec![1, 1, self.blocks.keys],
                at: vec![row, BlockIndex::First, BlockIndex::Axis(KEYS)],
            });
        }
        let sums = || Window {
            dtype: DType::F32,
            block: vec![1, self.blocks.queries, LANES],
            at: vec![BlockIndex::Axis(ROWS), BlockIndex::Axis(axes.queries), BlockIndex::First],
        };
        match self.wanted {
            KernelResults::Normalized => windows.push(of_queries(shape.dtype)),
            KernelResults::Partial => windows.extend([of_queries(DType::F32), sums(), sums()]),
        }
        let kept = [self.blocks.queries, LANES];
        let scratch = match self.steps {
            1 => Vec::new(),
            _ => [vec![[self.blocks.queries, lanes]], vec![kept; 2 * shape.together()]].concat(),
        };
        Frame { grid, windows, scratch }
    }

    fn body(&self, code: &MosaicCode, all: &[VmemBlock]) {
        let operands = 3 + usize::from(self.shape.bias.is_some());
        let results = if self.wanted == KernelResults::Normalized { 1 } else { 3 };
        let (operands, rest) = all.split_at(operands);
        let (results, scratch) = rest.split_at(results);
        let step = code.place(KEYS);
        if self.steps > 1 {
            code.when(&step.is(0), || self.clear(code, scratch));
        }
        let q = code.load(&operands[0]);
        let k = code.load(&operands[1]);
        let v = self.values(code, &operands[2], &step);
        let heads: Vec<Head> = (0..self.shape.together())
            .map(|i| {
                let scores = self.scores(code, &self.of_head(code, &q, i), &k, operands.get(3), &step);
                self.head(code, &scores, &v, scratch.get(1 + 2 * i..).and_then(|s| s.get(..2)))
            })
            .collect();
        let fresh = self.side_by_side(code, &heads, |h| h.values.clone());
        if self.steps == 1 {
            return self.finish(code, results, &fresh, &heads);
        }
        let kept = code.load(&scratch[0]);
        let shrunk =
            kept.times(&self.side_by_side(code, &heads, |h| self.widened(h.shrink.as_ref().unwrap_or(&h.sum))));
        let values = shrunk.plus(&fresh);
        code.store(&scratch[0], &values);
        code.when(&step.is(self.steps - 1), || self.finish(code, results, &values, &heads));
    }

    fn clear(&self, code: &MosaicCode, scratch: &[VmemBlock]) {
        for (n, block) in scratch.iter().enumerate() {
            let dims = [block.dims[0], block.dims[1]];
            // Scratch arrays with odd index hold maxima.
            code.store(block, &code.full(if n % 2 == 1 { LEAST } else { 0.0 }, dims));
        }
    }

    /// Returns whether the last block of keys extends beyond the last key.
    fn has_partial_block(&self) -> bool {
        !self.shape.keys.is_multiple_of(self.blocks.keys)
    }

    /// Loads the values of a block and sets those beyond the last key to 0. A weight of 0 would not be enough, because
    /// the padding is arbitrary and may be NaN or infinite.
    fn values(&self, code: &MosaicCode, block: &VmemBlock, step: &Int) -> Matrix {
        let v = code.load(block);
        if !self.has_partial_block() {
            return v;
        }
        let there = code.iota(v.dims, 0).shifted(&step.times(self.blocks.keys)).lt(self.shape.keys);
        there.select(&v.to(DType::F32), &code.full(0.0, v.dims)).to(v.dtype)
    }

    /// Returns the queries with the features of all heads except the `i`th of the block set to 0.
    fn of_head(&self, code: &MosaicCode, q: &Matrix, i: usize) -> Matrix {
        match self.shape.together() {
            1 => q.clone(),
            _ => self.lanes_of(code, q.dims, i).select(&q.to(DType::F32), &code.full(0.0, q.dims)).to(q.dtype),
        }
    }

    /// Returns a mask of the lanes of the `i`th head of the block.
    fn lanes_of(&self, code: &MosaicCode, dims: [usize; 2], i: usize) -> Matrix {
        let lane = code.iota(dims, 1);
        let (start, end) = (i * self.shape.dim, (i + 1) * self.shape.dim);
        lane.at_least(start).and(&lane.lt(end))
    }

    /// Returns scores multiplied by `log2 e`, for use with `exp2`.
    fn scores(&self, code: &MosaicCode, q: &Matrix, k: &Matrix, bias: Option<&VmemBlock>, step: &Int) -> Matrix {
        let mut scores = q.product(k, true).scaled(self.scale * LOG2_E);
        if let Some(bias) = bias {
            scores = scores.plus(&code.load(bias).scaled(LOG2_E));
        }
        if !self.has_partial_block() {
            return scores;
        }
        let there = code.iota(scores.dims, 1).shifted(&step.times(self.blocks.keys)).lt(self.shape.keys);
        there.select(&scores, &code.full(LEAST, scores.dims))
    }

    /// Updates the online softmax of one head with a block of keys. `kept` holds the maximum and the sum of weights of
    /// the previous blocks; `None` if there is only one block.
    fn head(&self, code: &MosaicCode, scores: &Matrix, v: &Matrix, kept: Option<&[VmemBlock]>) -> Head {
        let weighted = |weights: &Matrix| weights.to(v.dtype).product(v, false);
        let Some([largest, sum]) = kept else {
            let largest = scores.row_max();
            let weights = scores.minus(&largest).exp2();
            return Head { values: weighted(&weights), sum: weights.row_sum(), largest, shrink: None };
        };
        let before = code.load(largest);
        let now = before.maximum(&scores.row_max());
        let weights = scores.minus(&now.repeated(self.blocks.keys / LANES)).exp2();
        let shrink = before.minus(&now).exp2();
        let total = shrink.times(&code.load(sum)).plus(&weights.row_sum());
        code.store(largest, &now);
        code.store(sum, &total);
        Head { values: weighted(&weights), sum: total, largest: now, shrink: Some(shrink) }
    }

    /// Broadcasts one value per query to all lanes of a block. `x` is a column, or a register in which all lanes of a
    /// row are equal.
    fn widened(&self, x: &Matrix) -> Matrix {
        if x.dims[1] == 1 { x.clone() } else { x.repeated(self.shape.lanes() / LANES) }
    }

    /// Combines one matrix per head into a single matrix, in which each head occupies its own lanes.
    fn side_by_side(&self, code: &MosaicCode, heads: &[Head], of: impl Fn(&Head) -> Matrix) -> Matrix {
        let dims = [self.blocks.queries, self.shape.lanes()];
        let mut parts = heads.iter().map(of).enumerate();
        let first = parts.next().map_or_else(|| code.full(0.0, dims), |(_, first)| first);
        parts.fold(first, |all, (i, part)| self.lanes_of(code, dims, i).select(&part, &all))
    }

    fn finish(&self, code: &MosaicCode, results: &[VmemBlock], values: &Matrix, heads: &[Head]) {
        if self.wanted == KernelResults::Normalized {
            let sums = self.side_by_side(code, heads, |h| self.widened(&h.sum));
            return code.store(&results[0], &values.div(&sums));
        }
        code.store(&results[0], values);
        let block = code.place(self.axes().heads);
        code.when(&block.is(0), || {
            for sums in &results[1..] {
                code.store(sums, &code.full(0.0, [self.blocks.queries, LANES]));
            }
        });
        let lane = code.iota([self.blocks.queries, LANES], 1);
        for (i, head) in heads.iter().enumerate() {
            let own = lane.equals(&block.times(heads.len()).plus(i));
            for (to, what) in [(&results[1], head.largest.scaled(LN_2)), (&results[2], head.sum.clone())] {
                code.store(to, &own.select(&what, &code.load(to)));
            }
        }
    }
}

/// State of the online softmax of one head after a block of keys.
struct Head {
    /// Weighted sum of the values of this block, including the lanes of other heads.
    values: Matrix,
    /// Sum of all weights so far.
    sum: Matrix,
    /// Largest score so far, times `log2 e`.
    largest: Matrix,
    /// Factor that rescales previous values and sums to the new maximum; `None` if there is only one block.
    shrink: Option<Matrix>,
}
