//! Updates of any kind, merged one after another in f32.
//!
//! In the table, `D` is the change, `s` the strength, `a` alpha / rank, `W0` the stored weight, `W` the weight after
//! the earlier updates, and `m` the magnitude. Each operation is rounded to f32.
//!
//! | kind | merged |
//! |---|---|
//! | LoRA, LoHa, LoKr, difference | `W + D·(s·a)` |
//! | DoRA, PEFT's `lora_magnitude_vector` | `(m / norm(W0 + D·(s·a))) · (W + D·(s·a))`, norms of rows |
//! | DoRA, LyCORIS' `dora_scale` | `(s·(m / (norm(V) + ε) − 1) + 1) · V` with `V = W + D·a`, norms of rows or columns |
//!
//! `D` is `B·A` of a LoRA, `(w1_a·w1_b) ∘ (w2_a·w2_b)` of a LoHa, and `w1 ⊗ w2` of a LoKr. Norms are summed in f64. Sums
//! and products have the order of PEFT 0.21 and LyCORIS 4.1, except for the order of terms in matmuls and norms.

use std::ops::Range;

use ndarray::{Array1, Array2, Axis, Zip, s};

use super::{WeightBlocks, matrix, widened};
use crate::checkpoint::TensorView;
use crate::error::WeightsError;
use crate::lora::{Delta, Factor, LoraFile, Norms, Update};
use crate::merge_order::MergeOrder;
use crate::validate::{finite_tensor, read_finite};
use ltx2_stablehlo::DType;

/// A change whose matrices are in memory.
enum Loaded {
    Product([Array2<f32>; 2]),
    Hadamard([[Array2<f32>; 2]; 2]),
    Kronecker([Array2<f32>; 2]),
    /// Type and bytes of a difference.
    Full(DType, Vec<u8>),
}

/// The magnitude of a DoRA.
struct Magnitude {
    values: Array1<f32>,
    norms: Norms,
    strength: f32,
    /// Norms of the columns of the updated weight, if the DoRA replaces column norms.
    columns: Option<Array1<f32>>,
}

/// One update.
struct MergeStep {
    delta: Loaded,
    factor: f32,
    magnitude: Option<Magnitude>,
}

/// The updates of a weight, in order.
pub(super) struct Steps(Vec<MergeStep>);

impl Loaded {
    fn read(delta: &Delta) -> Result<Self, WeightsError> {
        let product = |[a, b]: &[TensorView; 2]| Ok([matrix(a)?, matrix(b)?]);
        let factor = |factor: &Factor| match factor {
            Factor::Whole(view) => matrix(view),
            Factor::Product(pair) => product(pair).map(|[a, b]: [Array2<f32>; 2]| a.dot(&b)),
        };
        Ok(match delta {
            Delta::LowRank { up, down } => Loaded::Product([matrix(up)?, matrix(down)?]),
            Delta::Hadamard([one, two]) => Loaded::Hadamard([product(one)?, product(two)?]),
            Delta::Kronecker([one, two]) => Loaded::Kronecker([factor(one)?, factor(two)?]),
            Delta::Full(view) => Loaded::Full(view.dtype(), read_finite(view)?),
        })
    }

    /// Computes rows of the change.
    fn rows(&self, rows: Range<usize>, columns: usize) -> Array2<f32> {
        let product = |[a, b]: &[Array2<f32>; 2]| a.slice(s![rows.clone(), ..]).dot(b);
        match self {
            Loaded::Product(pair) => product(pair),
            Loaded::Hadamard([one, two]) => product(one) * product(two),
            Loaded::Kronecker([one, two]) => Array2::from_shape_fn((rows.len(), columns), |(i, j)| {
                let (row, [height, width]) = (rows.start + i, [two.nrows(), two.ncols()]);
                one[[row / height, j / width]] * two[[row % height, j % width]]
            }),
            Loaded::Full(dtype, bytes) => {
                let width = columns * dtype.size();
                let values = widened(*dtype, &bytes[rows.start * width..rows.end * width]);
                Array2::from_shape_vec((rows.len(), columns), values).expect("rows of columns values")
            }
        }
    }
}

impl Steps {
    /// Reads the matrices of the updates, and computes the column norms that DoRAs replace.
    pub(super) fn new(updates: &[(&LoraFile, &Update, f64)], blocks: &WeightBlocks) -> Result<Self, WeightsError> {
        let mut steps = Steps(Vec::new());
        for (_, update, strength) in updates {
            let of_lycoris = update.magnitude.as_ref().is_some_and(|(_, norms)| *norms != Norms::PeftRows);
            let factor = update.factor(MergeOrder::Exact, if of_lycoris { 1.0 } else { *strength }) as f32;
            let magnitude = update.magnitude.as_ref().map(|(view, norms)| {
                let values = Array1::from_iter(finite_tensor(view)?.into_f32());
                Ok(Magnitude { values, norms: *norms, strength: *strength as f32, columns: None })
            });
            steps.0.push(MergeStep { delta: Loaded::read(&update.delta)?, factor, magnitude: magnitude.transpose()? });
            if update.magnitude.as_ref().is_some_and(|(_, norms)| *norms == Norms::Columns) {
                let norms = steps.column_norms(blocks);
                if let Some(MergeStep { magnitude: Some(magnitude), .. }) = steps.0.last_mut() {
                    magnitude.columns = Some(norms);
                }
            }
        }
        Ok(steps)
    }

    /// Returns the norms of the columns before the magnitude of the last step is applied.
    fn column_norms(&self, blocks: &WeightBlocks) -> Array1<f32> {
        let squares = blocks.map(|i| {
            let mut values = blocks.read(i);
            self.apply(&mut values, blocks.range(i));
            values.mapv(|v| f64::from(v) * f64::from(v)).sum_axis(Axis(0))
        });
        let sum = squares.into_iter().fold(Array1::<f64>::zeros(blocks.columns), |sum, squares| sum + squares);
        sum.mapv(|square| square.sqrt() as f32)
    }

    /// Merges the updates into a block of the weight's rows.
    pub(super) fn apply(&self, weight: &mut Array2<f32>, rows: Range<usize>) {
        let stored = (self.0.len() > 1).then(|| weight.clone());
        for MergeStep { delta, factor, magnitude } in &self.0 {
            let mut delta = delta.rows(rows.clone(), weight.ncols());
            delta.mapv_inplace(|v| v * factor);
            let peft = magnitude.as_ref().filter(|magnitude| magnitude.norms == Norms::PeftRows);
            let base = peft.map(|_| row_norms(&(stored.as_ref().unwrap_or(weight) + &delta)));
            *weight += &delta;
            let Some(magnitude) = magnitude else { continue };
            let (m, strength) = (&magnitude.values, magnitude.strength);
            let scale = |m: f32, norm: f32| {
                let scale = m / (norm + f32::EPSILON);
                if strength == 1.0 { scale } else { strength * (scale - 1.0) + 1.0 }
            };
            let m = if magnitude.norms == Norms::Columns { m.view() } else { m.slice(s![rows.clone()]) };
            match (&base, &magnitude.columns, magnitude.norms) {
                (Some(norms), ..) => {
                    let scales = Zip::from(&m).and(norms).map_collect(|m, norm| m / norm);
                    *weight *= &scales.insert_axis(Axis(1));
                }
                (None, Some(norms), _) => *weight *= &Zip::from(&m).and(norms).map_collect(|m, n| scale(*m, *n)),
                // The norms of the columns are not known yet.
                (None, None, Norms::Columns) => {}
                (None, None, _) => {
                    let scales = Zip::from(&m).and(&row_norms(weight)).map_collect(|m, n| scale(*m, *n));
                    *weight *= &scales.insert_axis(Axis(1));
                }
            }
        }
    }
}

/// Returns the norm of each row.
fn row_norms(values: &Array2<f32>) -> Array1<f32> {
    let norm = |row: ndarray::ArrayView1<f32>| row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>().sqrt();
    values.outer_iter().map(|row| norm(row) as f32).collect()
}
