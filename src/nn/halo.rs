//! Pictures cut into blocks of rows and columns, one a device: a convolution fetches from the neighbours what it reads
//! beyond its own block. Everything here runs on one device's block, inside a manual region.

use super::conv::Padding;
use crate::hlo::{Comparison, DType, Groups, Type, Value};

/// The dimensions of `[b, channels, frames, height, width]` that may be cut.
pub const CUT: [usize; 2] = [3, 4];

/// One direction of a picture, cut into equal blocks. Where the picture does not divide, the last blocks reach beyond
/// it: what they hold there is arbitrary, and no pixel of the picture depends on it.
#[derive(Clone)]
pub struct Side {
    /// The dimension, one of [`CUT`].
    pub axis: usize,
    /// The devices that hold one picture, in the order of its blocks.
    pub groups: Groups,
    /// The device's place among them, an i32 scalar.
    pub position: Value,
    /// The picture's size where the network begins.
    pub size: usize,
    /// A block's size there.
    pub block: usize,
}

impl Side {
    /// The picture's size where a block has `block` rows or columns: a network scales both alike, rounding up.
    pub fn whole(&self, block: usize) -> usize {
        (self.size * block).div_ceil(self.block)
    }

    /// The block with `n` more rows or columns at both ends: the neighbours', and `padding` beyond the picture.
    fn extend(&self, x: &Value, n: usize, padding: Padding) -> Value {
        let axis = self.axis as isize;
        let block = x.dim(axis);
        let whole = self.whole(block);
        if block < n || (padding == Padding::Reflect && whole <= n) {
            let message = format!(
                "{padding:?} padding of {n} needs more than {whole} elements along axis {axis} of a picture and as many \
                 of a block {}",
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
        let even = block * self.groups.size() == whole;
        let [above, below] = match padding {
            Padding::Zeros if even => return joined,
            Padding::Zeros => return self.inside(&joined, whole, block, n),
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
            index.compare(Comparison::Eq, &index.like((whole + i) as f64)).select(&moved, &y)
        })
    }

    /// An extended block with zeros beyond the picture.
    fn inside(&self, joined: &Value, whole: usize, block: usize, n: usize) -> Value {
        let index = self.index(joined, block, n);
        let inside = index.compare(Comparison::Lt, &index.like(whole as f64));
        inside.select(joined, &joined.like(0.0))
    }

    /// Where the elements of a block that was extended by `n` lie in the picture.
    fn index(&self, joined: &Value, block: usize, n: usize) -> Value {
        let mut dims = vec![1; joined.rank()];
        dims[self.axis] = joined.dim(self.axis as isize);
        let own = joined.builder().iota(Type::new(DType::I32, dims), self.axis);
        own + (&self.position * block as f64 - n as f64)
    }
}

/// How the pictures that a network computes are cut; not at all by default.
#[derive(Clone, Default)]
pub struct Blocks {
    /// The directions that are cut, height first.
    pub sides: Vec<Side>,
}

impl Blocks {
    /// Whether a dimension is cut.
    pub fn cut(&self, axis: usize) -> bool {
        self.sides.iter().any(|s| s.axis == axis)
    }

    /// The size of whole pictures along a dimension of a block.
    pub fn whole(&self, x: &Value, axis: usize) -> usize {
        let block = x.dim(axis as isize);
        self.sides.iter().find(|s| s.axis == axis).map_or(block, |s| s.whole(block))
    }

    /// The sum over `axes` of whole pictures, whatever lies beyond them, kept as dimensions of one.
    pub fn sum_keep(&self, x: &Value, axes: &[isize]) -> Value {
        let cut = || self.sides.iter().filter(|side| axes.contains(&(side.axis as isize)));
        let own = cut().fold(x.clone(), |x, side| {
            let block = x.dim(side.axis as isize);
            let whole = side.whole(block);
            if block * side.groups.size() == whole { x } else { side.inside(&x, whole, block, 0) }
        });
        cut().fold(own.sum_keep(axes), |sum, side| sum.all_reduce_sum(&side.groups))
    }

    /// A block with `reach` more rows and columns at both ends of the directions that are cut. Corners come along: the
    /// second direction is extended where the first already is.
    pub fn extend(&self, x: &Value, reach: [usize; 2], padding: Padding) -> Value {
        self.sides.iter().fold(x.clone(), |x, side| {
            let n: usize = CUT.iter().zip(reach).filter(|(axis, _)| **axis == side.axis).map(|(_, n)| n).sum();
            if n == 0 { x } else { side.extend(&x, n, padding) }
        })
    }
}
