//! Halo exchange for video sharded by height and width: a convolution fetches the rows and columns beyond the local
//! block from the neighboring devices. All functions run on the local block inside a manual region.

use serde::Deserialize;

use ltx2_stablehlo::{Comparison, DType, Groups, Type, Value};

/// Padding of a convolution at frame edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Padding {
    /// Elements beyond the edge are 0.
    Zeros,
    /// Elements are mirrored at the edge; the edge element is not repeated.
    Reflect,
    /// The edge element is repeated.
    Replicate,
}

/// Dimensions of `[b, channels, frames, height, width]` that may be sharded.
pub(crate) const SPATIAL_DIMS: [usize; 2] = [3, 4];

/// A dimension that is sharded into equal blocks. If its size is not divisible by the number of blocks, the last blocks
/// extend beyond the edge of the frame; the values there are arbitrary and do not affect the video.
#[derive(Clone)]
pub struct ShardedDim {
    /// Index of the dimension in the tensor.
    pub axis: usize,
    /// Groups of devices that share one video. Each group lists its devices in block order.
    pub groups: Groups,
    /// Index of this device in its group, an i32 scalar.
    pub position: Value,
    /// Global size at the input of the network.
    pub size: usize,
    /// Block size at the input of the network.
    pub block: usize,
}

impl ShardedDim {
    /// Returns the global size, rounded up, at the point of the network where a block has `block` rows or columns. The
    /// network scales blocks and global size by the same factor.
    pub fn global_size(&self, block: usize) -> usize {
        (self.size * block).div_ceil(self.block)
    }

    /// Returns the global index of the first row or column of this device's block, an i32 scalar.
    pub fn first(&self, block: usize) -> Value {
        &self.position * block as f64
    }

    /// Extends the block by `n` rows or columns at both ends. The added values come from the neighboring blocks; beyond
    /// the edge of the frame, `padding` determines them.
    pub fn extend(&self, x: &Value, n: usize, padding: Padding) -> Value {
        let axis = self.axis as isize;
        let block = x.dim(axis);
        let size = self.global_size(block);
        if block < n || (padding == Padding::Reflect && size <= n) {
            let message = format!(
                "{} padding of {n} along axis {axis} is too large for a frame of size {size} in blocks of type {}",
                format!("{padding:?}").to_lowercase(),
                x.ty()
            );
            x.builder().reject("pad", message);
            return x.clone();
        }
        let pairs = || self.groups.0.iter().flat_map(|g| g.windows(2).map(|w| (w[0], w[1])));
        let down: Vec<(usize, usize)> = pairs().collect();
        let up: Vec<(usize, usize)> = pairs().map(|(first, second)| (second, first)).collect();
        // Devices without a neighbor receive zeros.
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
        // The frame may end inside a block: element `i` after the edge is copied from the mirrored or nearest element
        // before the edge.
        (0..n).fold(joined.clone(), |y, i| {
            let distance = if padding == Padding::Reflect { 2 * (i + 1) } else { i + 1 };
            let length = joined.dim(axis);
            let moved = joined.slice(axis, 0, length - distance).pad(axis, distance, 0, 0.0);
            index.compare(Comparison::Eq, &index.like((size + i) as f64)).select(&moved, &y)
        })
    }

    /// Sets the elements of an extended block that are beyond the edge of the frame to 0.
    fn inside(&self, joined: &Value, size: usize, block: usize, n: usize) -> Value {
        let index = self.index(joined, block, n);
        let inside = index.compare(Comparison::Lt, &index.like(size as f64));
        inside.select(joined, &joined.like(0.0))
    }

    /// Returns the global index of each element along this dimension for a block that was extended by `n`.
    fn index(&self, joined: &Value, block: usize, n: usize) -> Value {
        let mut dims = vec![1; joined.rank()];
        dims[self.axis] = joined.dim(self.axis as isize);
        let own = joined.builder().iota(Type::new(DType::I32, dims), self.axis);
        own + (&self.position * block as f64 - n as f64)
    }
}

/// Sharded dimensions of a video; none by default.
#[derive(Clone, Default)]
pub struct SpatialShards {
    /// Sharded dimensions, height first.
    pub dims: Vec<ShardedDim>,
}

impl SpatialShards {
    /// Returns these shards for the same video with channels last: each axis index decreases by one.
    pub fn channels_last(&self) -> Self {
        SpatialShards { dims: self.dims.iter().map(|dim| ShardedDim { axis: dim.axis - 1, ..dim.clone() }).collect() }
    }

    /// Returns the sharding of dimension `axis`; `None` if it is not sharded.
    pub fn along(&self, axis: usize) -> Option<&ShardedDim> {
        self.dims.iter().find(|dim| dim.axis == axis)
    }

    /// Returns whether dimension `axis` is sharded.
    pub fn is_sharded(&self, axis: usize) -> bool {
        self.dims.iter().any(|s| s.axis == axis)
    }

    /// Returns the global size of dimension `axis`; `x` is the local block.
    pub fn global_size(&self, x: &Value, axis: usize) -> usize {
        let block = x.dim(axis as isize);
        self.along(axis).map_or(block, |s| s.global_size(block))
    }

    /// Returns the sum over `axes` across the blocks of all devices; the summed axes keep size 1. Elements beyond the
    /// edge of the frame are excluded.
    pub fn sum_keep(&self, x: &Value, axes: &[isize]) -> Value {
        let sharded = || self.dims.iter().filter(|dim| axes.contains(&(dim.axis as isize)));
        let own = sharded().fold(x.clone(), |x, dim| {
            let block = x.dim(dim.axis as isize);
            let size = dim.global_size(block);
            if block * dim.groups.size() == size { x } else { dim.inside(&x, size, block, 0) }
        });
        sharded().fold(own.sum_keep(axes), |sum, dim| sum.all_reduce_sum(&dim.groups))
    }

    /// Extends a block by `reach` rows and columns at both ends of the sharded dimensions. The dimensions are extended
    /// one after the other, so corners are included.
    pub fn extend(&self, x: &Value, reach: [usize; 2], padding: Padding) -> Value {
        self.dims.iter().fold(x.clone(), |x, dim| {
            let n: usize = SPATIAL_DIMS.iter().zip(reach).filter(|(axis, _)| **axis == dim.axis).map(|(_, n)| n).sum();
            if n == 0 { x } else { dim.extend(&x, n, padding) }
        })
    }
}
