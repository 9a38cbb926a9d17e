//! Windows as features of queries and keys, for kernels that take no bias of each query.
//!
//! The bias of a block of queries and its slab is a sum over frames, rows and columns, so it is a product: a query has the
//! biases of its place on each axis to all places of the slab there, a key a one at its own places. Behind the features of
//! a head they make scores with the bias in them. Biases are 0 or one number that no score reaches: nothing is rounded.

use crate::hlo::{Builder, Comparison, DType, Type, Value};
use crate::nn::{Attention, Params};

/// Frames, rows and columns of a block of queries. Scores stay in a kernel, but slabs are written to memory and read again: of
/// larger blocks they are fewer. The published windows of 11 cells have slabs of 18, 18 and 26, with heads of 64 no more than
/// 128 features.
pub(super) const BLOCK: [usize; 3] = [8, 8, 16];

/// Heads of a multiple of so many features fill the registers of a kernel.
const FEATURES: usize = 128;

/// Attention of blocks of queries to their slabs, `[videos · places, cells, heads, dim]`. `biases` are those of frames `[1,
/// block, slab]`, and of rows and columns `[blocks, block, slab]`, whose product are the places.
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

/// Biases of each query, which a kernel scales as it scales scores: `[videos · places, queries, 1, slabs]`.
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

/// Ones at each key's places, `[1, keys, 1, slabs]`.
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
