//! Neighborhood attention with window masks encoded as extra features of queries and keys, for attention kernels
//! without a per-query bias.
//!
//! A block of queries attends to a slab: the keys that the windows of its queries cover. The bias that masks keys
//! outside a query's window is a sum over frames, rows and columns, so it can be written as a dot product. For each
//! axis, a query has its biases for all positions of the slab as features, and a key has a one-hot vector of its
//! position. Appended to the features of a head, these add the bias to the scores. A bias is either 0 or one constant
//! beyond the range of any score, so rounding has no effect.

use ltx2_nn::{Attention, Params};
use ltx2_stablehlo::{Builder, Comparison, DType, Type, Value};

/// Frames, rows and columns of a block of queries. Larger blocks need fewer slabs, each of which is written to memory
/// and read back. With the published windows of 11 cells, a slab has 18 frames, 18 rows and 26 columns. These sizes and
/// the 64 features of a head sum to 126 features, which fit into [`FEATURES`].
pub(super) const BLOCK: [usize; 3] = [8, 8, 16];

/// Granularity to which the number of features is padded, so that the features fill the kernel's registers.
const FEATURES: usize = 128;

/// Computes attention of blocks of queries over their slabs. The operands in `plain` are `[videos · places, cells,
/// heads, dim]`, where `places` is the number of blocks of rows times the number of blocks of columns. `biases` mask
/// frames (`[1, block, slab]`), rows and columns (both `[blocks, block, slab]`).
pub(super) fn attention(p: &Params, plain: &Attention, biases: [&Value; 3]) -> Value {
    let Attention { q, k, v, scale, .. } = *plain;
    let dim = q.dim(3);
    let all = dim + biases.iter().map(|x| x.dim(2)).sum::<usize>();
    let width = all.next_multiple_of(FEATURES) - dim;
    let [of_queries, of_keys] = [queries(biases, scale, q), keys(p.builder(), biases, k)];
    let wider = |x: &Value, features: &Value| {
        let features = features.pad(3, 0, width - features.dim(3), 0.0).to(x.dtype());
        let features = features.broadcast_to(&[&x.dims()[..3], &[width]].concat());
        p.builder().concat(&[x, &features], 3)
    };
    let [q, k] = [wider(q, &of_queries), wider(k, &of_keys)];
    let v = v.pad(3, 0, width, 0.0);
    Attention { q: &q, k: &k, v: &v, ..*plain }.here(p).slice(3, 0, dim)
}

/// Returns the extra features of each query, `[videos · places, queries, 1, slabs]`: its biases along the three axes.
/// `slabs` is the sum of the three slab sizes. The biases are divided by `scale`, because the kernel multiplies all
/// scores by it.
fn queries(biases: [&Value; 3], scale: f64, q: &Value) -> Value {
    let places = [biases[1].dim(0), biases[2].dim(0)];
    let block = biases.map(|x| x.dim(1));
    let of_axis = |(axis, x): (usize, &Value)| {
        let (mut dims, mut all) = (vec![1; 6], [&places[..], &block].concat());
        (dims[2 + axis], dims[5]) = (x.dim(1), x.dim(2));
        all.push(x.dim(2));
        if axis > 0 {
            dims[axis - 1] = x.dim(0);
        }
        (x / scale).reshape(dims).broadcast_to(&all)
    };
    let of_axes: Vec<Value> = biases.into_iter().enumerate().map(of_axis).collect();
    let b = q.builder();
    let all = b.concat(&of_axes.iter().collect::<Vec<_>>(), 5);
    let places = places.iter().product();
    let all = all.reshape(vec![places, q.dim(1), 1, all.dim(5)]);
    b.concat(&vec![&all; q.dim(0) / places], 0)
}

/// Returns the extra features of each key, `[1, keys, 1, slabs]`: its one-hot positions along the three axes.
fn keys(b: &Builder, biases: [&Value; 3], k: &Value) -> Value {
    let slab = biases.map(|x| x.dim(2));
    let of_axis = |axis: usize| {
        let square = |which| b.iota(Type::new(DType::I32, [slab[axis]; 2]), which);
        let is_own = square(0).compare(Comparison::Eq, &square(1));
        let ones = is_own.select(&b.scalar(1.0, DType::F32), &b.scalar(0.0, DType::F32));
        let mut dims = vec![1; 4];
        (dims[axis], dims[3]) = (slab[axis], slab[axis]);
        ones.reshape(dims).broadcast_to(&[&slab[..], &[slab[axis]]].concat())
    };
    let of_axes = [0, 1, 2].map(of_axis);
    let all = b.concat(&of_axes.iter().collect::<Vec<_>>(), 3);
    all.reshape(vec![1, k.dim(1), 1, all.dim(3)])
}
