//! Neighborhood attention: each cell of a grid attends to a window of cells around it. Queries are processed in blocks.
//!
//! A window of size `k` starts at `i - k/2` and is shifted inward at the borders, so that it always has `k` cells. A
//! block of queries attends to a slab: the keys that its windows cover. A bias masks the keys outside each query's own
//! window. The program loops over blocks of frames; blocks of rows and columns are batched. No tensor grows
//! quadratically with the grid.
//!
//! If the grid is sharded, each device has a shard of rows or columns, extended by a halo: as many cells of the
//! neighbouring devices as the windows need. Windows are shifted inward only at the borders of the complete grid.

use std::ops::Range;

use super::window_features;
use ltx2_nn::kernels::{self, GridAxis, WindowAttention};
use ltx2_nn::{Attention, Axis, Lowering, MASK_VALUE, Padding, Params, ShardedDim, SpatialShards, WindowForm};
use ltx2_stablehlo::{Builder, Comparison, DType, Type, Value};

/// Frames, rows and columns of a block of queries. With larger blocks, slabs contain fewer keys per query, but more
/// memory is needed.
const BLOCK: [usize; 3] = [4, 8, 8];

/// One axis of the grid, divided into blocks.
struct Blocks {
    length: usize,
    window: usize,
    /// Number of queries per block.
    block: usize,
    /// Number of keys per slab.
    slab: usize,
    /// Start of each block and of its slab. The last block is shifted inward if it would extend beyond the axis, so
    /// some queries are computed twice.
    starts: Vec<[usize; 2]>,
    /// This device's shard of the axis; `None` if the axis is not sharded. In a shard, slab positions are relative to
    /// the start of the halo.
    shard: Option<AxisShard>,
}

/// One device's shard of an axis.
struct AxisShard {
    /// Number of cells on this device.
    own: usize,
    /// Number of cells of the neighbouring device that are added at each end.
    reach: usize,
    /// Index of this device's first cell in the complete grid, i32.
    first: Value,
}

/// Returns the numbers of frames, rows and columns of a block of queries.
pub(super) fn block(lowering: Lowering) -> [usize; 3] {
    match lowering.windows {
        WindowForm::Bias => BLOCK,
        WindowForm::Features => window_features::BLOCK,
    }
}

/// Returns whether windows extend at most into the neighbouring shards if an axis has `own` cells per device. `even`:
/// whether all devices have the same number of cells.
pub(super) fn reaches_neighbors_only(own: usize, even: bool, window: usize, block: usize) -> bool {
    kernels::window_reach(block.min(own), even, window) <= own
}

impl Blocks {
    fn new(length: usize, window: usize, block: usize) -> Self {
        let block = block.min(length);
        let slab = (block + window - 1).min(length);
        let start = |i: usize| {
            let first = (i * block).min(length - block);
            [first, first.saturating_sub(window / 2).min(length - slab)]
        };
        Blocks { length, window, block, slab, starts: (0..length.div_ceil(block)).map(start).collect(), shard: None }
    }

    /// Divides this device's shard of an axis, `own` cells, into blocks.
    fn sharded(dim: &ShardedDim, own: usize, window: usize, block: usize) -> Self {
        let (length, block) = (dim.global_size(own), block.min(own));
        let reach = kernels::window_reach(block, own * dim.groups.size() == length, window);
        let start = |i: usize| [(i * block).min(own - block); 2];
        let starts = (0..own.div_ceil(block)).map(start).collect();
        let shard = Some(AxisShard { own, reach, first: dim.first(own) });
        Blocks { length, window, block, slab: block + 2 * reach, starts, shard }
    }

    /// Returns the number of cells on this device.
    fn own(&self) -> usize {
        self.shard.as_ref().map_or(self.length, |shard| shard.own)
    }

    /// Extends keys or values `x` by the halo.
    fn extended(&self, x: &Value, dim: Option<&ShardedDim>) -> Value {
        let reach = self.shard.as_ref().map_or(0, |shard| shard.reach);
        dim.filter(|_| reach > 0).map_or_else(|| x.clone(), |dim| dim.extend(x, reach, Padding::Zeros))
    }

    /// Returns `[blocks, size]`: the consecutive positions from each of `starts [blocks]`.
    fn positions(b: &Builder, starts: &Value, size: usize) -> Value {
        let blocks = starts.ty().elements();
        starts.reshape(vec![blocks, 1]) + b.iota(Type::new(DType::I32, [blocks, size]), 1)
    }

    /// Returns the bias `[blocks, block, slab]`, for blocks that start at `first` and slabs that start at `slab`, both
    /// `[blocks]`.
    fn bias(&self, b: &Builder, first: &Value, slab: &Value) -> Value {
        let [mut query, mut key] =
            [(first, self.block), (slab, self.slab)].map(|(x, size)| Self::positions(b, x, size));
        if let Some(shard) = &self.shard {
            query = query + &shard.first;
            key = key + (&shard.first - shard.reach as f64);
        }
        let begin = (query + -((self.window / 2) as f64)).clamp(0.0, (self.length - self.window) as f64).unsqueeze(2);
        let key = key.unsqueeze(1);
        let offset = key - begin;
        let within = offset.compare(Comparison::Ge, &offset.like(0.0));
        let within = within.and(&offset.compare(Comparison::Lt, &offset.like(self.window as f64)));
        let zero = b.full(0.0, Type::new(DType::F32, within.dims()));
        within.select(&zero, &zero.like(MASK_VALUE))
    }

    /// Returns the starts of all blocks and of all slabs.
    fn starts(&self, b: &Builder) -> [Value; 2] {
        [0, 1].map(|which| b.vector_i32(&self.starts.iter().map(|s| s[which] as i32).collect::<Vec<_>>()))
    }

    /// Concatenates the cells of all blocks (`which = 0`) or slabs (`which = 1`) along `axis`.
    fn spread(&self, x: &Value, axis: usize, which: usize) -> Value {
        let size = [self.block, self.slab][which];
        let cells: Vec<usize> = self.starts.iter().flat_map(|s| s[which]..s[which] + size).collect();
        x.index_select(axis as isize, &cells)
    }

    /// Joins the results of all blocks along `axis`, keeping each query once.
    fn joined(&self, x: &Value, axis: usize) -> Value {
        let place = |i: usize| {
            let n = (i / self.block).min(self.starts.len() - 1);
            n * self.block + i - self.starts[n][0]
        };
        x.index_select(axis as isize, &(0..self.own()).map(place).collect::<Vec<_>>())
    }
}

/// Queries, keys and values of windowed attention, all `[b, frames, rows, columns, heads, dim]`.
pub(super) struct Windowed<'a> {
    pub(super) q: &'a Value,
    pub(super) k: &'a Value,
    pub(super) v: &'a Value,
    /// Window in frames, rows and columns.
    pub(super) kernel: [usize; 3],
    pub(super) scale: f64,
    /// Returns an upper bound of the absolute values of `q · k`, f32 `[1]`.
    pub(super) bound: &'a dyn Fn() -> Value,
}

/// Computes attention within windows.
pub(super) fn attention(p: &Params, windowed: &Windowed<'_>, shards: &SpatialShards) -> Value {
    let Windowed { q, k, v, kernel, scale, .. } = *windowed;
    let b = p.builder();
    let _scope = b.scope("neighborhood");
    let grid = [1, 2, 3].map(|axis| shards.global_size(q, axis));
    if (0..3).any(|axis| grid[axis] < kernel[axis]) {
        b.reject("neighborhood", format!("a grid of {grid:?} cells is smaller than the attention window {kernel:?}"));
        return q.clone();
    }
    let axes = [0, 1, 2].map(|axis| grid_axis(grid[axis], q.dim(1 + axis as isize), kernel[axis]));
    if kernels::has_windows(p.lowering().attention, q, axes) {
        return fused(windowed, axes, shards);
    }
    let block = block(p.lowering());
    let [time, rows, columns] = [0, 1, 2].map(|axis| match shards.along(1 + axis) {
        Some(dim) => Blocks::sharded(dim, q.dim(1 + axis as isize), kernel[axis], block[axis]),
        None => Blocks::new(grid[axis], kernel[axis], block[axis]),
    });
    // Extending the columns of the already extended rows also fetches the corner cells.
    let [k, v] = [k, v].map(|x| columns.extended(&rows.extended(x, shards.along(2)), shards.along(3)));
    let places = [rows.starts.len(), columns.starts.len()];
    let [row_bias, column_bias] = [&rows, &columns].map(|axis| {
        let [first, slab] = axis.starts(b);
        axis.bias(b, &first, &slab)
    });
    let starts = time.starts(b);
    let frames = |t: &Value, done: &Value| {
        let [query_t, key_t] = [0, 1].map(|which| starts[which].index(t));
        let cut = |x: &Value, start: &Value, length: usize, which: usize| {
            let frames = x.dynamic_slice(1, start, length);
            batched(&columns.spread(&rows.spread(&frames, 2, which), 3, which), places)
        };
        let query = cut(q, &query_t, time.block, 0);
        let [key, value] = [&k, &v].map(|x| cut(x, &key_t, time.slab, 1));
        let time_bias = time.bias(b, &query_t, &key_t);
        let biases = [&time_bias, &row_bias, &column_bias];
        let sequence = [Axis::Replicated; 2];
        let plain = Attention { q: &query, k: &key, v: &value, bias: None, scale, sequence };
        let o = match p.lowering().windows {
            WindowForm::Bias => Attention { bias: Some(&repeated(&joint_bias(biases), q.dim(0))), ..plain }.here(p),
            WindowForm::Features => window_features::attention(p, &plain, biases),
        };
        let o = unbatched(&o, places, [time.block, rows.block, columns.block]);
        done.dynamic_update(1, &query_t, &columns.joined(&rows.joined(&o, 2), 3))
    };
    let empty = b.full(0.0, q.ty().clone());
    b.repeat(time.starts.len(), &[empty], |t, done| vec![frames(t, &done[0])]).remove(0)
}

/// Returns the fused kernel's description of a grid axis of `length` cells, of which each device has `own`.
fn grid_axis(length: usize, own: usize, window: usize) -> GridAxis {
    let axis = GridAxis { length, own, reach: 0, window };
    if own == length { axis } else { GridAxis { reach: axis.needed_reach(), ..axis } }
}

/// Computes neighborhood attention with a fused kernel.
fn fused(windowed: &Windowed<'_>, axes: [GridAxis; 3], shards: &SpatialShards) -> Value {
    let Windowed { q, scale, .. } = *windowed;
    let dims = [2, 3].map(|dim| shards.along(dim));
    // Extending the columns of the already extended rows also fetches the corner cells.
    let [k, v] = [windowed.k, windowed.v].map(|x| {
        let along = dims.iter().zip(&axes[1..]).filter_map(|(dim, axis)| dim.zip(Some(axis)));
        along
            .filter(|(_, axis)| axis.reach > 0)
            .fold(x.clone(), |x, (dim, axis)| dim.extend(&x, axis.reach, Padding::Zeros))
    });
    let b = q.builder();
    let zero = || b.full(0.0, Type::new(DType::I32, [1]));
    let first = |(dim, axis): (&Option<&ShardedDim>, &GridAxis)| {
        dim.map_or_else(zero, |dim| dim.first(axis.own).reshape(vec![1]))
    };
    let firsts = dims.iter().any(Option::is_some).then(|| {
        let firsts: Vec<Value> = dims.iter().zip(&axes[1..]).map(first).collect();
        b.concat(&firsts.iter().collect::<Vec<_>>(), 0)
    });
    let bound = (windowed.bound)();
    WindowAttention { q, k: &k, v: &v, axes, firsts: firsts.as_ref(), scale, bound: &bound }.fused()
}

/// Moves the `n` blocks of rows and `m` blocks of columns into the batch: `[b, t, n·h, m·w, heads, dim]` becomes
/// `[b·n·m, t·h·w, heads, dim]`.
fn batched(x: &Value, [n, m]: [usize; 2]) -> Value {
    let [b, t, h, w, heads, dim] = [0, 1, 2, 3, 4, 5].map(|axis| x.dim(axis));
    let y = x.reshape(vec![b, t, n, h / n, m, w / m, heads, dim]).transpose(&[0, 2, 4, 1, 3, 5, 6, 7]);
    y.reshape(vec![b * n * m, t * h * w / (n * m), heads, dim])
}

/// Moves blocks of `[t, h, w]` cells back from the batch, the inverse of [`batched`].
fn unbatched(x: &Value, [n, m]: [usize; 2], [t, h, w]: [usize; 3]) -> Value {
    let (b, heads, dim) = (x.dim(0) / (n * m), x.dim(2), x.dim(3));
    let y = x.reshape(vec![b, n, m, t, h, w, heads, dim]).transpose(&[0, 3, 1, 4, 2, 5, 6, 7]);
    y.reshape(vec![b, t, n * h, m * w, heads, dim])
}

/// Adds the biases of the axes (`[1, block, slab]` for frames, `[blocks, block, slab]` for rows and columns). Returns
/// `[places, 1, queries, keys]`, where `places` is the number of blocks of rows times the number of blocks of columns.
fn joint_bias(biases: [&Value; 3]) -> Value {
    let sum = biases.into_iter().enumerate().map(|(axis, x)| {
        let mut dims = vec![1; 8];
        (dims[2 + axis], dims[5 + axis]) = (x.dim(1), x.dim(2));
        if axis > 0 {
            dims[axis - 1] = x.dim(0);
        }
        x.reshape(dims)
    });
    let sum = sum.reduce(|sum, x| sum + x).expect("three axes");
    let cells = |axes: Range<isize>| axes.map(|axis| sum.dim(axis)).product::<usize>();
    sum.reshape(vec![cells(0..2), 1, cells(2..5), cells(5..8)])
}

/// Repeats the bias of one video for all videos of the batch.
fn repeated(bias: &Value, videos: usize) -> Value {
    bias.builder().concat(&vec![bias; videos], 0)
}
