//! Rotary position embedding: tables from the host, rotation in the program.
//!
//! A table holds one (cos, sin) pair for each pair of a head's features, as `[b or 1, tokens, heads, head_dim / 2]` in
//! f32: the layout in which queries and keys are rotated. The two published arrangements differ only in which features
//! form a pair: `split` pairs `j` with `j + head_dim/2`, `interleaved` pairs `2j` with `2j + 1`.

use std::f64::consts::PI;

use ndarray::{Array3, Array4, ArrayView3};
use serde::Deserialize;

use super::attention::Heads;
use super::params::{Numerics, Params};
use crate::dtype::DType;
use crate::hlo::Value;

/// Which features of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pairing {
    /// `2j` with `2j + 1`.
    Interleaved,
    /// `j` with `j + head_dim / 2`.
    Split,
}

/// Cosines and sines on the host, `[b, tokens, heads, head_dim / 2]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Cosines.
    pub cos: Array4<f32>,
    /// Sines.
    pub sin: Array4<f32>,
}

/// `theta^(i / (n-1)) · π / 2` for `i` in `0..n`, rounded to f32. In double precision the grid is exact to f64; without
/// it every operation rounds to f32, as the reference does then.
pub fn frequencies(theta: f64, n: usize, double: bool) -> Vec<f32> {
    let steps = n.saturating_sub(1);
    (0..n)
        .map(|i| {
            // The halves are measured from their own end, so that both ends are exact.
            let from_start = i < n / 2 || n == 1;
            if double {
                let step = if steps == 0 { 0.0 } else { 1.0 / steps as f64 };
                let e = if from_start { step * i as f64 } else { 1.0 - step * (steps - i) as f64 };
                (theta.powf(e) * PI / 2.0) as f32
            } else {
                let step = if steps == 0 { 0.0 } else { 1.0 / steps as f32 };
                let e = if from_start { step * i as f32 } else { 1.0 - step * (steps - i) as f32 };
                let power = (theta as f32 as f64).powf(f64::from(e)) as f32;
                power * PI as f32 / 2.0
            }
        })
        .collect()
}

/// The table of token positions `[b, tokens, axes]`, each already divided by the axis' largest position.
///
/// Angles are `(2·position - 1)·ω`; the axes alternate fastest; features that no frequency is left for come first and
/// are not rotated.
pub fn table(positions: ArrayView3<f32>, heads: Heads, theta: f64, double: bool) -> Table {
    let (b, tokens, axes) = positions.dim();
    let pairs = heads.width() / 2;
    let omega = frequencies(theta, heads.width() / (2 * axes), double);
    let pad = pairs - omega.len() * axes;
    let angle = |bi: usize, t: usize, pair: usize| -> Option<f64> {
        let entry = pair.checked_sub(pad)?;
        let grid = positions[[bi, t, entry % axes]] * 2.0 - 1.0;
        Some(f64::from(grid * omega[entry / axes]))
    };
    let half = heads.dim / 2;
    let make = |f: fn(f64) -> f64, fixed: f32| {
        Array4::from_shape_fn((b, tokens, heads.count, half), |(bi, t, h, j)| {
            angle(bi, t, h * half + j).map_or(fixed, |a| f(a) as f32)
        })
    };
    Table { cos: make(f64::cos, 1.0), sin: make(f64::sin, 0.0) }
}

/// Midpoints of token bounds `[b, axes, tokens, 2]` as fractions of the largest position of each axis:
/// `[b, tokens, axes]`.
pub fn fractions(bounds: ndarray::ArrayView4<f32>, largest: &[f32]) -> Array3<f32> {
    let (b, _, tokens, _) = bounds.dim();
    Array3::from_shape_fn((b, tokens, largest.len()), |(bi, t, a)| {
        ((bounds[[bi, a, t, 0]] + bounds[[bi, a, t, 1]]) / 2.0) / largest[a]
    })
}

/// Rotates `x [b, tokens, heads, dim]` by `cos`, `sin` `[b or 1, tokens, heads or 1, dim / 2]`.
pub fn rotate(p: &Params, x: &Value, cos: &Value, sin: &Value, pairing: Pairing, numerics: Numerics) -> Value {
    let b = x.builder();
    let _scope = b.scope("rope");
    let wide = x.to(DType::F32);
    let (cos, sin) = match numerics {
        Numerics::Default => (cos.clone(), sin.clone()),
        Numerics::Official => (cos.round_to(x.dtype()), sin.round_to(x.dtype())),
    };
    let by_cos = |v: &Value, cos: &Value| match numerics {
        Numerics::Default => v * cos,
        Numerics::Official => (v * cos).round_to(x.dtype()),
    };
    let half = x.dim(3) / 2;
    let y = if p.lowering().rope_reverses {
        let (axis, pairs) = match pairing {
            Pairing::Split => (3, [2, half]),
            Pairing::Interleaved => (4, [half, 2]),
        };
        let own = wide.reshape([&x.dims()[..3], &pairs].concat());
        let sign = b.vector_i32(&[-1, 1]).to(DType::F32).reshape([vec![2], vec![1; 4 - axis]].concat());
        let (cos, sin) = (cos.unsqueeze(axis), sin.unsqueeze(axis));
        by_cos(&own, &cos) + own.reverse(axis as isize) * (sin * sign)
    } else {
        let (first, second) = match pairing {
            Pairing::Split => (wide.slice(3, 0, half), wide.slice(3, half, 2 * half)),
            Pairing::Interleaved => (wide.slice_step(3, 0, 2 * half, 2), wide.slice_step(3, 1, 2 * half, 2)),
        };
        let rotated = [by_cos(&first, &cos) - &second * &sin, by_cos(&second, &cos) + &first * &sin];
        match pairing {
            Pairing::Split => b.concat(&[&rotated[0], &rotated[1]], 3),
            Pairing::Interleaved => b.concat(&[&rotated[0].unsqueeze(4), &rotated[1].unsqueeze(4)], 4),
        }
    };
    y.reshape(x.dims().to_vec()).to(x.dtype())
}
