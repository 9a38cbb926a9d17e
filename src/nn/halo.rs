//! Video sharded by height and width: a convolution fetches the halo that it reads beyond its own block from the
//! neighbours. Everything here runs on one device's block, inside a manual region.

use serde::Deserialize;

use crate::hlo::{Comparison, DType, Groups, Type, Value};

/// Padding of a convolution at the edge of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Padding {
    Zeros,
    /// The frame mirrored at its edge, which is not repeated.
    Reflect,
    /// Edge values repeated.
    Replicate,
}

/// The dimensions of `[b, channels, frames, height, width]` that may be sharded.
pub(crate) const SPATIAL_DIMS: [usize; 2] = [3, 4];

/// One sharded dimension, in equal blocks. Where its size does not divide, the last blocks reach beyond the edge: what
/// they hold there is arbitrary, and no pixel of the video depends on it.
#[derive(Clone)]
pub(crate) struct ShardedDim {
    /// The dimension, one of `SPATIAL_DIMS` in their order.
    pub(crate) axis: usize,
    /// Devices that hold one video, in the order of its blocks.
    pub(crate) groups: Groups,
    /// This device's index in its group, an i32 scalar.
    pub(crate) position: Value,
    /// Global size at the network's input.
    pub(crate) size: usize,
    /// Block size at the network's input.
    pub(crate) block: usize,
}

impl ShardedDim {
    /// Global size where a block has `block` rows or columns: a network scales both alike, rounding up.
    pub(crate) fn global_size(&self, block: usize) -> usize {
        (self.size * block).div_ceil(self.block)
    }

    /// Global index of the first of this device's `block` rows or columns, an i32 scalar.
    pub(crate) fn first(&self, block: usize) -> Value {
        &self.position * block as f64
    }

    /// The block with `n` more rows or columns at both ends: the neighbours', and `padding` beyond the edge.
    pub(crate) fn extend(&self, x: &Value, n: usize, padding: Padding) -> Value {
        let axis = self.axis as isize;
        let block = x.dim(axis);
        let size = self.global_size(block);
        if block < n || (padding == Padding::Reflect && size <= n) {
            let message = format!(
                "{} padding of {n} needs more than {size} elements along axis {axis} of a frame and as many \
                 of a block {}",
                format!("{padding:?}").to_lowercase(),
                x.ty()
            );
            x.builder().reject("pad", message);
            return x.clone();
        }
        let pairs = || self.groups.0.iter().flat_map(|g| g.windows(2).map(|w| (w[0], w[1])));
        let down: Vec<(usize, usize)> = pairs().collect();
        let up: Vec<(usize, usize)> = pairs().map(|(first, second)| (second, first)).collect();
        // Where there is no neighbour zeros arrive.
        let before = x.slice(axis, block - n, block).collective_permute(&down);
        let after = x.slice(axis, 0, n).collective_permute(&up);
        let joined = x.builder().concat(&[&before, x, &after], axis);
        let even = block * self.groups.size() == size;
        let [above, below] = match padding {
            Padding::Zeros if even => return joined,
            Padding::Zeros => return self.inside(&joined, size, block, n),
            Padding::Reflect => [(n + 1, 2 * n + 1), (block - 1, block + n - 1)]
                .map(|(begin, end)| joined.slice(axis, begin, end).reverse(axis)),
            Padding::Replicate => [0, block - 1].map(|i| {
                let edge = x.slice(axis, i, i + 1);
                x.builder().concat(&vec![&edge; n], axis)
            }),
        };
        let is = |place: usize| self.position.compare(Comparison::Eq, &self.position.like(place as f64));
        let before = is(0).select(&above, &before);
        if even {
            let after = is(self.groups.size() - 1).select(&below, &after);
            return x.builder().concat(&[&before, x, &after], axis);
        }
        let joined = x.builder().concat(&[&before, x, &after], axis);
        let index = self.index(&joined, block, n);
        // The border lies somewhere in a block: the element `i` behind it takes the one as far before it.
        (0..n).fold(joined.clone(), |y, i| {
            let distance = if padding == Padding::Reflect { 2 * (i + 1) } else { i + 1 };
            let length = joined.dim(axis);
            let moved = joined.slice(axis, 0, length - distance).pad(axis, distance, 0, 0.0);
            index.compare(Comparison::Eq, &index.like((size + i) as f64)).select(&moved, &y)
        })
    }

    /// An extended block with zeros beyond the edge.
    fn inside(&self, joined: &Value, size: usize, block: usize, n: usize) -> Value {
        let index = self.index(joined, block, n);
        let inside = index.compare(Comparison::Lt, &index.like(size as f64));
        inside.select(joined, &joined.like(0.0))
    }

    /// Global index of each element along this dimension, for a block that was extended by `n`.
    fn index(&self, joined: &Value, block: usize, n: usize) -> Value {
        let mut dims = vec![1; joined.rank()];
        dims[self.axis] = joined.dim(self.axis as isize);
        let own = joined.builder().iota(Type::new(DType::I32, dims), self.axis);
        own + (&self.position * block as f64 - n as f64)
    }
}

/// Sharded dimensions of the video that a network computes; none by default.
#[derive(Clone, Default)]
pub struct SpatialShards {
    /// Sharded dimensions, height first.
    pub(crate) dims: Vec<ShardedDim>,
}

impl SpatialShards {
    /// The same dimensions where channels lie behind all others.
    pub(crate) fn channels_last(&self) -> Self {
        SpatialShards { dims: self.dims.iter().map(|dim| ShardedDim { axis: dim.axis - 1, ..dim.clone() }).collect() }
    }

    /// A sharded dimension.
    pub(crate) fn along(&self, axis: usize) -> Option<&ShardedDim> {
        self.dims.iter().find(|dim| dim.axis == axis)
    }

    pub(crate) fn is_sharded(&self, axis: usize) -> bool {
        self.dims.iter().any(|s| s.axis == axis)
    }

    /// Global size along a dimension of a block.
    pub(crate) fn global_size(&self, x: &Value, axis: usize) -> usize {
        let block = x.dim(axis as isize);
        self.along(axis).map_or(block, |s| s.global_size(block))
    }

    /// The sum over `axes` of all blocks without what lies beyond the edge, kept as dimensions of one.
    pub(crate) fn sum_keep(&self, x: &Value, axes: &[isize]) -> Value {
        let sharded = || self.dims.iter().filter(|dim| axes.contains(&(dim.axis as isize)));
        let own = sharded().fold(x.clone(), |x, dim| {
            let block = x.dim(dim.axis as isize);
            let size = dim.global_size(block);
            if block * dim.groups.size() == size { x } else { dim.inside(&x, size, block, 0) }
        });
        sharded().fold(own.sum_keep(axes), |sum, dim| sum.all_reduce_sum(&dim.groups))
    }

    /// A block with `reach` more rows and columns at both ends of the sharded dimensions. Corners come along: the second
    /// dimension is extended where the first already is.
    pub(crate) fn extend(&self, x: &Value, reach: [usize; 2], padding: Padding) -> Value {
        self.dims.iter().fold(x.clone(), |x, dim| {
            let n: usize = SPATIAL_DIMS.iter().zip(reach).filter(|(axis, _)| **axis == dim.axis).map(|(_, n)| n).sum();
            if n == 0 { x } else { dim.extend(&x, n, padding) }
        })
    }
}
