//! Merges updates of adapters into weights: LoRAs with the rounding of the reference implementations, other kinds in f32
//! as PEFT and LyCORIS merge them.

use std::ops::Range;

use half::{bf16, f16};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayViewMut2, Ix2, s};
use rayon::prelude::*;

use super::checkpoint::{TensorView, widen};
use super::error::WeightsError;
use super::lora::{Delta, LoraFile, Update};
use super::merge_order::MergeOrder;
use super::validate::{finite_tensor, first_non_finite, read_finite};
use ltx2_stablehlo::DType;
use steps::Steps;

mod steps;

/// Rows per block: large enough that `A` is rarely reread, small enough to occupy all cores.
const ROWS: usize = 128;

/// The data of a merged tensor.
pub enum MergedTensor {
    /// 16-bit floats in row-major order: their type (bf16 or f16), and the bits of each value.
    Half(DType, Vec<u16>),
    /// f32 values in row-major order.
    Single(Vec<f32>),
}

impl MergedTensor {
    /// Returns the element type: bf16, f16 or f32.
    pub fn dtype(&self) -> DType {
        match self {
            MergedTensor::Half(dtype, _) => *dtype,
            MergedTensor::Single(_) => DType::F32,
        }
    }
}

impl AsRef<[u8]> for MergedTensor {
    fn as_ref(&self) -> &[u8] {
        match self {
            MergedTensor::Half(_, words) => bytemuck::cast_slice(words),
            MergedTensor::Single(words) => bytemuck::cast_slice(words),
        }
    }
}

/// Rounds an f32 to the precision of another type.
type RoundFn = fn(f32) -> f32;

fn to_bf16(v: f32) -> f32 {
    bf16::from_f32(v).to_f32()
}

/// One LoRA in f32: `factor * up * down`.
struct LoraTerm {
    up: Array2<f32>,
    down: Array2<f32>,
    factor: f32,
}

/// The LoRAs of a weight, with the rounding to apply.
struct Sum {
    order: MergeOrder,
    terms: Vec<LoraTerm>,
    /// Rounding to the weight's type.
    round: RoundFn,
}

impl Sum {
    /// Reads the matrices of `updates`, which must all be LoRAs.
    fn new(order: MergeOrder, updates: &[(&LoraFile, &Update, f64)], round: RoundFn) -> Result<Self, WeightsError> {
        let mut terms = Vec::new();
        for (i, (_, update, strength)) in updates.iter().enumerate() {
            let Delta::LowRank { up, down } = &update.delta else { continue };
            let operands: RoundFn = match order {
                MergeOrder::Official => to_bf16,
                MergeOrder::Diffusers => round,
                MergeOrder::Official1 if up.dtype() == DType::BF16 => to_bf16,
                MergeOrder::Official1 | MergeOrder::Exact => |v| v,
            };
            let (mut up, down) = (matrix(up)?.mapv_into(operands), matrix(down)?.mapv_into(operands));
            let mut factor = update.factor(order, *strength) as f32;
            // Here the factor is multiplied into `B` and the result is rounded. In the other cases the factor is
            // applied in the matmul or to its result.
            if order == MergeOrder::Official1 || order == MergeOrder::Official && i == 0 {
                up.mapv_inplace(|v| operands(v * factor));
                factor = 1.0;
            }
            terms.push(LoraTerm { up, down, factor });
        }
        Ok(Sum { order, terms, round })
    }

    /// Adds the updates to a block of the weight's rows that starts at row `first`.
    fn add_to(&self, mut weight: ArrayViewMut2<f32>, first: usize) {
        let rows = first..first + weight.nrows();
        // `to = to * before + factor * up * down`
        let multiply = |term: &LoraTerm, factor: f32, before: f32, to: &mut ArrayViewMut2<f32>| {
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

/// A stored weight, divided into blocks of rows. A tensor that is not a matrix is treated as one: its first dimension
/// is the rows.
struct WeightBlocks<'a> {
    dtype: DType,
    bytes: &'a [u8],
    scales: Option<&'a [f32]>,
    rows: usize,
    columns: usize,
}

impl WeightBlocks<'_> {
    /// Returns the rows of block `i`.
    fn range(&self, i: usize) -> Range<usize> {
        i * ROWS..self.rows.min((i + 1) * ROWS)
    }

    /// Returns block `i` in f32, multiplied by the scales.
    fn read(&self, i: usize) -> Array2<f32> {
        let (rows, width) = (self.range(i), self.columns * self.dtype.size());
        let mut values = widened(self.dtype, &self.bytes[rows.start * width..rows.end * width]);
        if let Some(scales) = self.scales {
            for (row, values) in values.chunks_exact_mut(self.columns.max(1)).enumerate() {
                let scale = scales[if scales.len() == 1 { 0 } else { rows.start + row }];
                values.iter_mut().for_each(|v| *v *= scale);
            }
        }
        Array2::from_shape_vec((rows.len(), self.columns), values).expect("rows of columns values")
    }

    /// Computes a value for every block, in parallel, and returns the values in order.
    fn map<T: Send>(&self, compute: impl Fn(usize) -> T + Send + Sync) -> Vec<T> {
        (0..self.rows.div_ceil(ROWS)).into_par_iter().map(compute).collect()
    }
}

/// The updates of a weight: a sum of LoRAs, or steps if there are other kinds.
enum WeightChange {
    Sum(Sum),
    Steps(Steps),
}

/// Merges updates into `weight`. 8-bit floats are multiplied by `scales` (one, or one per row) and become bf16; f64 becomes
/// f32. `order` applies to weights that only LoRAs update; other kinds are merged in f32, one update after another, and
/// rounded once.
///
/// # Errors
/// Returns an error if the shapes differ, if a tensor contains non-finite values, or if a merged value is not finite.
pub fn merge(
    weight: &TensorView,
    scales: Option<&[f32]>,
    order: MergeOrder,
    updates: &[(&LoraFile, &Update, f64)],
) -> Result<MergedTensor, WeightsError> {
    if let Some((_, update, _)) = updates.iter().find(|(_, update, _)| update.shape() != weight.shape()) {
        return Err(misshaped(weight, format!("`{}` updates a tensor of shape {:?}", update.key(), update.shape())));
    }
    let round: RoundFn = match weight.dtype() {
        DType::F32 | DType::F64 => |v| v,
        DType::F16 => |v| f16::from_f32(v).to_f32(),
        _ => to_bf16,
    };
    let stored = read_finite(weight)?;
    let (rows, columns) = (weight.shape().first().copied().unwrap_or(1), weight.shape().iter().skip(1).product());
    let blocks = WeightBlocks { dtype: weight.dtype(), bytes: &stored, scales, rows, columns };
    let change = match updates.iter().all(|(_, update, _)| update.is_lora()) {
        true => WeightChange::Sum(Sum::new(order, updates, round)?),
        false => WeightChange::Steps(Steps::new(updates, &blocks)?),
    };
    // Computes block `i` of the rows in f32.
    let block = |i: usize| {
        let mut values = blocks.read(i);
        match &change {
            WeightChange::Sum(sum) => sum.add_to(values.view_mut(), blocks.range(i).start),
            WeightChange::Steps(steps) => steps.apply(&mut values, blocks.range(i)),
        }
        values
    };
    let half = |round: fn(f32) -> u16| {
        let mut words = vec![0u16; rows * columns];
        let parts = words.par_chunks_mut(ROWS * columns.max(1)).enumerate();
        parts.for_each(|(i, out)| out.iter_mut().zip(block(i)).for_each(|(out, v)| *out = round(v)));
        words
    };
    let merged = match weight.dtype() {
        DType::F32 | DType::F64 => {
            let mut words = vec![0f32; rows * columns];
            let parts = words.par_chunks_mut(ROWS * columns.max(1)).enumerate();
            parts.for_each(|(i, out)| out.iter_mut().zip(block(i)).for_each(|(out, v)| *out = v));
            MergedTensor::Single(words)
        }
        DType::F16 => MergedTensor::Half(DType::F16, half(|v| f16::from_f32(v).to_bits())),
        _ => MergedTensor::Half(DType::BF16, half(|v| bf16::from_f32(v).to_bits())),
    };
    match (first_non_finite(merged.dtype(), merged.as_ref()), updates.first()) {
        (Some(_), Some((file, update, strength))) => Err(WeightsError::Lora {
            path: file.path().to_path_buf(),
            key: update.key().into(),
            reason: format!(
                "with strength {strength} gives values of `{}` that are not finite; check its alpha and the strength",
                weight.key()
            ),
        }),
        _ => Ok(merged),
    }
}

/// Returns the host memory, in bytes, that [`merge`] needs in addition to the stored values: the merged values, the
/// updates' tensors in f32, two more copies of the tensor that is being read, and three blocks of rows for each thread.
pub fn memory(weight: &TensorView, updates: &[(&LoraFile, &Update, f64)]) -> usize {
    let count = |view: &TensorView| view.shape().iter().product::<usize>();
    let (values, rows) = (count(weight), weight.shape().first().copied().unwrap_or(1));
    let merged = if matches!(weight.dtype(), DType::F32 | DType::F64) { 4 } else { 2 };
    let views = || updates.iter().flat_map(|(_, update, _)| update.views()).map(count);
    let block = ROWS.min(rows) * (values / rows.max(1));
    let blocks = rayon::current_num_threads().min(rows.div_ceil(ROWS)) * block;
    merged * values + 4 * views().sum::<usize>() + 8 * views().max().unwrap_or(0) + 3 * 4 * blocks
}

/// Reads a matrix in f32.
fn matrix(view: &TensorView) -> Result<Array2<f32>, WeightsError> {
    let values = finite_tensor(view)?.into_f32();
    values.into_dimensionality::<Ix2>().map_err(|_| misshaped(view, "LoRAs consist of matrices".into()))
}

fn misshaped(view: &TensorView, reason: String) -> WeightsError {
    WeightsError::UnsupportedShape {
        path: view.file().to_path_buf(),
        key: view.key().into(),
        got: view.shape().to_vec(),
        reason,
    }
}

/// Converts unaligned little-endian values to f32.
fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0f32; bytes.len() / dtype.size()];
    widen(dtype, bytes, &mut values);
    values
}
