//! A program with only the rotary embedding of queries and keys.

use ltx2::hlo::{DType, Type};
use ltx2::models::Network;
use ltx2::nn::rope::{Pairing, rotate};
use ltx2::nn::{Axis, Build, Lowering, Params, RoundingPoints};

/// Shapes of self-attention for 8 video frames of 12x12 and for 25 audio tokens, with two videos in two branches.
pub const ROPES: [[usize; 4]; 2] = [[4, 1152, 32, 128], [4, 25, 32, 64]];

/// Returns a program that rotates `x` of these dimensions with the tables `cos` and `sin`.
pub fn rope(dims: [usize; 4], numerics: RoundingPoints, lowering: Lowering) -> Network {
    let p = Params::new("rope", "transformer", &Build { lowering, ..Build::new(DType::BF16) });
    let whole = [Axis::Replicated; 4];
    let x = p.input("x", Type::new(DType::BF16, dims), &whole);
    let table = Type::new(DType::F32, [1, dims[1], dims[2], dims[3] / 2]);
    let (cos, sin) = (p.input("cos", table.clone(), &whole), p.input("sin", table, &whole));
    let y = rotate(&p, &x, &cos, &sin, Pairing::Split, numerics);
    Network::finish(&p, vec![p.output("y", &y, &whole, &dims)]).expect("builds")
}
