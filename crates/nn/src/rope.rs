//! Rotary position embedding: tables are computed on the host, rotation in the program.
//!
//! A table has a (cos, sin) pair for each pair of features of a head: `[b or 1, tokens, heads, head_dim / 2]`, f32, the
//! layout in which queries and keys are rotated. The two published variants differ only in which features form a pair:
//! `split` pairs `j` with `j + head_dim/2`, `interleaved` pairs `2j` with `2j + 1`.

use std::collections::HashMap;
use std::f64::consts::PI;

use half::bf16;
use ndarray::{Array2, Array3, Array4, ArrayView3};
use serde::Deserialize;

use super::attention::Heads;
use super::build::{RopeForm, RoundingPoints};
use super::params::Params;
use ltx2_base::threads::for_each_complete_row;
use ltx2_stablehlo::{Builder, DType, Value};

/// Pairing of the features of a head: RoPE rotates the two features of each pair together.
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
    /// Cosines; 1 for feature pairs that are not rotated.
    pub cos: Array4<f32>,
    /// Sines; 0 for feature pairs that are not rotated.
    pub sin: Array4<f32>,
}

/// Returns `theta^(i / (n-1)) · π / 2` for `i` in `0..n`, rounded to f32. With `double`, intermediate values are f64;
/// otherwise every operation rounds to f32, as in the reference.
pub fn frequencies(theta: f64, n: usize, double: bool) -> Vec<f32> {
    let steps = n.saturating_sub(1);
    (0..n)
        .map(|i| {
            // Like torch.linspace, count each half from its own end, so that both ends are exact.
            let from_start = i < n / 2 || n == 1;
            if double {
                let step = if steps == 0 { 0.0 } else { 1.0 / steps as f64 };
                let e = if from_start { step * i as f64 } else { 1.0 - step * (steps - i) as f64 };
                (theta.powf(e) * PI / 2.0) as f32
            } else {
                let step = if steps == 0 { 0.0 } else { 1.0 / steps as f32 };
                // Torch's AVX2 and AVX-512 kernels use a fused multiply-add.
                let e = if from_start { step * i as f32 } else { (-step).mul_add((steps - i) as f32, 1.0) };
                let power = (theta as f32 as f64).powf(f64::from(e)) as f32;
                power * PI as f32 / 2.0
            }
        })
        .collect()
}

/// Computes the table for token positions `[b, tokens, axes]` in [-1, 1], as returned by [`grid`].
///
/// Angles are `position·ω`; the frequencies `ω` are computed from `theta`, in f64 with `double`, otherwise in f32. The
/// feature pairs of all heads are numbered consecutively. The first pairs, for which no frequency is left, are not
/// rotated; the others alternate between the axes.
pub fn table(positions: ArrayView3<f32>, heads: Heads, theta: f64, double: bool) -> Table {
    let (b, tokens, axes) = positions.dim();
    let pairs = heads.width() / 2;
    let omega = frequencies(theta, heads.width() / (2 * axes), double);
    let pad = pairs - omega.len() * axes;
    // Grid tokens share few distinct positions per axis, so compute the angles of each position only once.
    let mut grids = Vec::new();
    let mut known = HashMap::new();
    let mut row_of = |position: &f32| {
        *known.entry(position.to_bits()).or_insert_with(|| {
            grids.push(*position);
            grids.len() - 1
        })
    };
    let rows: Vec<usize> = positions.iter().map(&mut row_of).collect();
    let make = |f: fn(f64) -> f64, fixed: f32| {
        let mut distinct = vec![0f32; grids.len() * omega.len()];
        for_each_complete_row(&mut distinct, omega.len(), |row, values| {
            for (v, w) in values.iter_mut().zip(&omega) {
                *v = f(f64::from(grids[row] * w)) as f32;
            }
        });
        let mut all = Array4::from_elem((b, tokens, heads.count, heads.dim / 2), 0f32);
        for_each_complete_row(all.as_slice_mut().expect("made row-major"), pairs, |token, values| {
            let (fixed_ones, rotated) = values.split_at_mut(pad);
            fixed_ones.fill(fixed);
            for (axis, row) in rows[token * axes..][..axes].iter().enumerate() {
                let of_axis = rotated.iter_mut().skip(axis).step_by(axes);
                of_axis.zip(&distinct[row * omega.len()..]).for_each(|(v, known)| *v = *known);
            }
        });
        all
    };
    Table { cos: make(f64::cos, 1.0), sin: make(f64::sin, 0.0) }
}

/// Returns the midpoints of token bounds `[b, axes, tokens, 2]`, divided by the largest position of each axis and
/// mapped to [-1, 1]: `[b, tokens, axes]`. Every operation rounds to `dtype`.
pub fn grid(bounds: ndarray::ArrayView4<f32>, largest: &[f32], dtype: DType) -> Array3<f32> {
    let round = |x: f32| if dtype == DType::BF16 { bf16::from_f32(x).to_f32() } else { x };
    let (b, _, tokens, _) = bounds.dim();
    Array3::from_shape_fn((b, tokens, largest.len()), |(bi, t, a)| {
        let [start, end] = [0, 1].map(|side| round(bounds[[bi, a, t, side]]));
        let fraction = round(round(start + end) / 2.0 / largest[a]);
        round(fraction * 2.0 - 1.0)
    })
}

/// Rotates `x [b, tokens, heads, dim]` by `cos` and `sin` `[b or 1, tokens, heads or 1, dim / 2]`.
pub fn rotate(p: &Params, x: &Value, cos: &Value, sin: &Value, pairing: Pairing, numerics: RoundingPoints) -> Value {
    let b = x.builder();
    let _scope = b.scope("rope");
    let wide = x.to(DType::F32);
    let (cos, sin) = match numerics {
        RoundingPoints::Default => (cos.clone(), sin.clone()),
        RoundingPoints::Official => (cos.round_to(x.dtype()), sin.round_to(x.dtype())),
    };
    let by_cos = |v: &Value, cos: &Value| match numerics {
        RoundingPoints::Default => v * cos,
        RoundingPoints::Official => (v * cos).round_to(x.dtype()),
    };
    let half = x.dim(3) / 2;
    // The features of a head are reshaped to two axes, one of which has length 2. `axis` is the index of that axis in
    // the tensor; `pairs` has the sizes of both.
    let (axis, pairs) = match pairing {
        Pairing::Split => (3, [2, half]),
        Pairing::Interleaved => (4, [half, 2]),
    };
    let y = match p.lowering().rope {
        RopeForm::Product => {
            let rotated_half =
                b.einsum("bnhi,io->bnho", x, &rotate_half_matrix(b, half, pairing).to(x.dtype()), DType::F32);
            let full = |t: &Value| {
                let dims = &t.dims()[..3];
                t.unsqueeze(axis).broadcast_to(&[dims, &pairs].concat()).reshape([dims, &[2 * half]].concat())
            };
            by_cos(&wide, &full(&cos)) + rotated_half * full(&sin)
        }
        RopeForm::Reversal => {
            let own = wide.reshape([&x.dims()[..3], &pairs].concat());
            let sign = b.vector_i32(&[-1, 1]).to(DType::F32).reshape([vec![2], vec![1; 4 - axis]].concat());
            let (cos, sin) = (cos.unsqueeze(axis), sin.unsqueeze(axis));
            by_cos(&own, &cos) + own.reverse(axis as isize) * (sin * sign)
        }
        RopeForm::Halves => {
            let (first, second) = match pairing {
                Pairing::Split => (wide.slice(3, 0, half), wide.slice(3, half, 2 * half)),
                Pairing::Interleaved => (wide.slice_step(3, 0, 2 * half, 2), wide.slice_step(3, 1, 2 * half, 2)),
            };
            let rotated = [by_cos(&first, &cos) - &second * &sin, by_cos(&second, &cos) + &first * &sin];
            match pairing {
                Pairing::Split => b.concat(&[&rotated[0], &rotated[1]], 3),
                Pairing::Interleaved => b.concat(&[&rotated[0].unsqueeze(4), &rotated[1].unsqueeze(4)], 4),
            }
        }
    };
    y.reshape(x.dims().to_vec()).to(x.dtype())
}

/// Returns the matrix that rotates feature pairs by 90°: it swaps the features of each pair and negates one. Its
/// entries are 0, 1 and -1, so a product with it is exact.
fn rotate_half_matrix(b: &Builder, half: usize, pairing: Pairing) -> Value {
    let place = |pair: usize, member: usize| match pairing {
        Pairing::Split => member * half + pair,
        Pairing::Interleaved => 2 * pair + member,
    };
    let mut matrix = Array2::<f32>::zeros((2 * half, 2 * half));
    for pair in 0..half {
        let [first, second] = [0, 1].map(|member| place(pair, member));
        matrix[[second, first]] = -1.0;
        matrix[[first, second]] = 1.0;
    }
    b.constant(matrix.shape(), matrix.as_slice().expect("row-major"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rope_table_matches_its_definition_bitwise() {
        // Frames, rows and columns of a grid with more tokens than one thread processes; three axes with five
        // frequencies each.
        let (frames, rows, columns) = (24, 16, 24);
        let heads = Heads { count: 3, dim: 10 };
        let positions = Array3::from_shape_fn((2, frames * rows * columns, 3), |(b, t, axis)| {
            let at = [t / (rows * columns), t / columns % rows, t % columns][axis];
            (at + b) as f32 / [20.0, 2048.0, 31.0][axis] * 2.0 - 1.0
        });
        let table = table(positions.view(), heads, 10000.0, true);
        let omega = frequencies(10000.0, 5, true);
        let angle = |(b, t, h, j): (usize, usize, usize, usize)| {
            let pair = h * 5 + j;
            f64::from(positions[[b, t, pair % 3]] * omega[pair / 3])
        };
        assert!(table.cos.indexed_iter().all(|(at, v)| v.to_bits() == (angle(at).cos() as f32).to_bits()));
        assert!(table.sin.indexed_iter().all(|(at, v)| v.to_bits() == (angle(at).sin() as f32).to_bits()));
    }

    /// Result of `torch.linspace(0, 1, 30, dtype=torch.float32)` on a CPU with AVX2 or AVX-512.
    const TORCH_LINSPACE: [f32; 30] = [
        0.0, 0.03448276, 0.06896552, 0.10344827, 0.13793103, 0.1724138, 0.20689654, 0.2413793, 0.27586207, 0.31034482,
        0.3448276, 0.37931034, 0.4137931, 0.44827586, 0.4827586, 0.51724136, 0.55172414, 0.5862069, 0.62068963,
        0.6551724, 0.6896552, 0.7241379, 0.7586207, 0.79310346, 0.82758623, 0.86206895, 0.8965517, 0.9310345,
        0.9655172, 1.0,
    ];

    /// The last bits of these values reveal whether the CPU kernel of torch uses a fused multiply-add.
    #[test]
    fn f32_frequencies_match_torch() {
        let want = TORCH_LINSPACE.map(|e: f32| (10000f64.powf(f64::from(e)) as f32) * PI as f32 / 2.0);
        assert_eq!(frequencies(10000.0, 30, false), want);
    }

    #[test]
    fn grid_rounds_every_operation_to_dtype() {
        let at = |t: usize, side: usize| (8 * (t + side)) as f32 / 24.0;
        let bounds = Array4::from_shape_fn((1, 1, 16, 2), |(.., t, side)| at(t, side));
        let all: Vec<f32> = grid(bounds.view(), &[20.0], DType::BF16).into_iter().collect();
        let r = |x: f32| bf16::from_f32(x).to_f32();
        let of = |t| r(r(r(r(at(t, 0)) + r(at(t, 1))) / 2.0 / 20.0) * 2.0 - 1.0);
        assert_eq!(all, (0..16).map(of).collect::<Vec<_>>());
        assert_ne!(all, grid(bounds.view(), &[20.0], DType::F32).into_iter().map(r).collect::<Vec<_>>());
    }

    #[test]
    fn features_without_frequency_are_first_and_not_rotated() {
        let heads = Heads { count: 2, dim: 8 };
        let positions = Array3::from_elem((1, 2, 3), 0.5f32);
        let table = table(positions.view(), heads, 10000.0, false);
        // Two frequencies on three axes cover six of eight pairs.
        assert_eq!((table.cos[[0, 1, 0, 1]], table.sin[[0, 1, 0, 1]]), (1.0, 0.0));
        let angle = f64::from(0.5 * frequencies(10000.0, 2, false)[0]);
        for (head, pair) in [(0, 2), (0, 3), (1, 0)] {
            assert_eq!(table.cos[[0, 1, head, pair]], angle.cos() as f32);
            assert_eq!(table.sin[[0, 1, head, pair]], angle.sin() as f32);
        }
    }
}
