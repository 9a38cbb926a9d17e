//! Merges LoRA updates into weights, with the rounding of the reference implementations.

use half::{bf16, f16};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayViewMut2, Ix2, s};
use rayon::prelude::*;

use super::checkpoint::{TensorView, widen};
use super::error::WeightsError;
use super::lora::{LoraFile, Update};
use super::merge_order::MergeOrder;
use super::validate::{finite_tensor, read_finite};
use ltx2_stablehlo::DType;

/// Rows per block: large enough that `A` is rarely reread, small enough to occupy all cores.
const ROWS: usize = 128;

/// The data of a merged tensor.
pub enum Merged {
    /// 16-bit floats in row-major order: their type (bf16 or f16), and the bits of each value.
    Half(DType, Vec<u16>),
    /// f32 values in row-major order.
    Single(Vec<f32>),
}

impl Merged {
    /// Returns the element type: bf16, f16 or f32.
    pub fn dtype(&self) -> DType {
        match self {
            Merged::Half(dtype, _) => *dtype,
            Merged::Single(_) => DType::F32,
        }
    }
}

impl AsRef<[u8]> for Merged {
    fn as_ref(&self) -> &[u8] {
        match self {
            Merged::Half(_, words) => bytemuck::cast_slice(words),
            Merged::Single(words) => bytemuck::cast_slice(words),
        }
    }
}

/// Rounds an f32 to the precision of another type.
type Round = fn(f32) -> f32;

fn to_bf16(v: f32) -> f32 {
    bf16::from_f32(v).to_f32()
}

/// One update in f32: `factor * up * down`.
struct Term {
    up: Array2<f32>,
    down: Array2<f32>,
    factor: f32,
}

/// The updates of a weight, with the rounding to apply.
struct Sum {
    order: MergeOrder,
    terms: Vec<Term>,
    /// Rounding to the weight's type.
    round: Round,
}

impl Sum {
    fn new(order: MergeOrder, updates: &[(&LoraFile, &Update, f64)], round: Round) -> Result<Self, WeightsError> {
        let mut terms = Vec::new();
        for (i, (_, update, strength)) in updates.iter().enumerate() {
            let operands: Round = match order {
                MergeOrder::Official => to_bf16,
                MergeOrder::Diffusers => round,
                MergeOrder::Official1 if update.up.dtype() == DType::BF16 => to_bf16,
                MergeOrder::Official1 | MergeOrder::Exact => |v| v,
            };
            let (mut up, down) = (matrix(&update.up)?.mapv(operands), matrix(&update.down)?.mapv(operands));
            let mut factor = update.factor(order, *strength) as f32;
            // Here the factor is multiplied into `B` and the result is rounded. In the other cases the factor is
            // applied in the matmul or to its result.
            if order == MergeOrder::Official1 || order == MergeOrder::Official && i == 0 {
                up.mapv_inplace(|v| operands(v * factor));
                factor = 1.0;
            }
            terms.push(Term { up, down, factor });
        }
        Ok(Sum { order, terms, round })
    }

    /// Adds the updates to a block of the weight's rows that starts at row `first`.
    fn add_to(&self, mut weight: ArrayViewMut2<f32>, first: usize) {
        let rows = first..first + weight.nrows();
        // `to = to * before + factor * up * down`
        let multiply = |term: &Term, factor: f32, before: f32, to: &mut ArrayViewMut2<f32>| {
            general_mat_mul(factor, &term.up.slice(s![rows.clone(), ..]), &term.down, before, to);
        };
        if self.order == MergeOrder::Exact {
            self.terms.iter().for_each(|term| multiply(term, term.factor, 1.0, &mut weight));
            return;
        }
        let mut delta = Array2::<f32>::zeros(weight.dim());
        let mut product = delta.clone();
        for term in &self.terms {
            match self.order {
                MergeOrder::Official => {
                    multiply(term, term.factor, 1.0, &mut delta.view_mut());
                    delta.mapv_inplace(to_bf16);
                }
                MergeOrder::Official1 => {
                    multiply(term, 1.0, 0.0, &mut product.view_mut());
                    delta.zip_mut_with(&product, |sum, v| *sum += to_bf16(*v));
                }
                MergeOrder::Diffusers | MergeOrder::Exact => {
                    multiply(term, 1.0, 0.0, &mut product.view_mut());
                    weight.zip_mut_with(&product, |w, d| *w = (self.round)(*w + (self.round)(d * term.factor)));
                }
            }
        }
        if matches!(self.order, MergeOrder::Official | MergeOrder::Official1) {
            weight.zip_mut_with(&delta, |w, d| *w = to_bf16(*w + to_bf16(*d)));
        }
    }
}

/// Merges updates into the matrix `weight`. 8-bit floats are multiplied by `scales` (one, or one per row) and become
/// bf16; f64 becomes f32.
///
/// # Errors
/// Returns an error if a tensor is not a matrix or contains non-finite values.
pub fn merge(
    weight: &TensorView,
    scales: Option<&[f32]>,
    order: MergeOrder,
    updates: &[(&LoraFile, &Update, f64)],
) -> Result<Merged, WeightsError> {
    let &[rows, inner] = weight.shape() else {
        return Err(not_a_matrix(weight));
    };
    let round: Round = match weight.dtype() {
        DType::F32 | DType::F64 => |v| v,
        DType::F16 => |v| f16::from_f32(v).to_f32(),
        _ => to_bf16,
    };
    let sum = Sum::new(order, updates, round)?;
    let width = inner * weight.dtype().size();
    let stored = read_finite(weight)?;
    // Computes block `i` of the rows in f32.
    let block = |i: usize| -> Vec<f32> {
        let (first, count) = (i * ROWS, ROWS.min(rows - i * ROWS));
        let bytes = &stored[first * width..(first + count) * width];
        let mut values = vec![0f32; count * inner];
        widen(weight.dtype(), bytes, &mut values);
        if let Some(scales) = scales {
            for (row, values) in values.chunks_exact_mut(inner.max(1)).enumerate() {
                let scale = scales[if scales.len() == 1 { 0 } else { first + row }];
                values.iter_mut().for_each(|v| *v *= scale);
            }
        }
        sum.add_to(ArrayViewMut2::from_shape((count, inner), &mut values).expect("count rows of inner values"), first);
        values
    };
    let half = |round: fn(f32) -> u16| {
        let mut words = vec![0u16; rows * inner];
        let blocks = words.par_chunks_mut(ROWS * inner.max(1)).enumerate();
        blocks.for_each(|(i, out)| out.iter_mut().zip(block(i)).for_each(|(out, v)| *out = round(v)));
        words
    };
    Ok(match weight.dtype() {
        DType::F32 | DType::F64 => {
            let mut words = vec![0f32; rows * inner];
            let blocks = words.par_chunks_mut(ROWS * inner.max(1)).enumerate();
            blocks.for_each(|(i, out)| out.copy_from_slice(&block(i)));
            Merged::Single(words)
        }
        DType::F16 => Merged::Half(DType::F16, half(|v| f16::from_f32(v).to_bits())),
        _ => Merged::Half(DType::BF16, half(|v| bf16::from_f32(v).to_bits())),
    })
}

fn matrix(view: &TensorView) -> Result<Array2<f32>, WeightsError> {
    let values = finite_tensor(view)?.into_f32();
    values.into_dimensionality::<Ix2>().map_err(|_| not_a_matrix(view))
}

fn not_a_matrix(view: &TensorView) -> WeightsError {
    WeightsError::UnsupportedShape {
        path: view.file().to_path_buf(),
        key: view.key().into(),
        got: view.shape().to_vec(),
        reason: "LoRAs consist of matrices and update matrices".into(),
    }
}
