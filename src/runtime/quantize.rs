//! Checkpoint tensors in 8 bits, and what the rows of such a tensor are multiplied by.

use rayon::prelude::*;

use super::stored::StoredTensor;
use crate::hlo::{DType, F8};
use crate::nn::largest;
use crate::tensor::{Tensor, TensorError};

/// A tensor `[rows, inner]` of other floats in an 8-bit type, each row divided by its scale.
pub(super) fn narrow(stored: &StoredTensor, dtype: DType) -> Result<Vec<u8>, TensorError> {
    let mut narrow = vec![0u8; stored.shape.iter().product()];
    by_rows(stored, &mut narrow, |row, out| {
        let inverse = scale(row, dtype).recip();
        out.iter_mut().zip(row).for_each(|(out, v)| {
            *out = match dtype {
                DType::I8 => ((v * inverse).round_ties_even() as i8).cast_unsigned(),
                _ => F8::from_f32(v * inverse).0,
            }
        });
    })?;
    Ok(narrow)
}

/// Per-row dequantization scales of a tensor in an 8-bit type: such that a row's largest number is the type's, or, of
/// what is stored in that type, as stored with it.
pub(super) fn scales(stored: &StoredTensor, dtype: DType) -> Result<Vec<f32>, TensorError> {
    let rows = stored.shape.first().copied().unwrap_or(1);
    let given = stored.scales.as_deref().unwrap_or(&[1.0]);
    let given: Vec<f32> = given.iter().copied().cycle().take(rows).collect();
    if stored.dtype == dtype {
        return Ok(given);
    }
    let mut scales = vec![0f32; rows];
    by_rows(stored, &mut scales, |row, out| out[0] = scale(row, dtype))?;
    if stored.dtype == DType::F8E4M3FN {
        scales.iter_mut().zip(given).for_each(|(scale, given)| *scale *= given);
    }
    Ok(scales)
}

/// A tensor of 8-bit floats, each row multiplied by its scale.
pub(super) fn widened(stored: &StoredTensor) -> Result<Tensor, TensorError> {
    let mut wide = Tensor::from_bytes(stored.dtype, &stored.shape, stored.bytes.bytes())?.to_f32();
    for (mut row, scale) in wide.outer_iter_mut().zip(scales(stored, stored.dtype)?) {
        row *= scale;
    }
    Ok(Tensor::F32(wide))
}

fn scale(row: &[f32], dtype: DType) -> f32 {
    // The bound keeps a row of zeros one.
    row.iter().fold(1e-30, |most: f32, v| most.max(v.abs())) / largest(dtype)
}

/// Calls `each(row, its part of out)` for every row of a tensor, on all cores.
fn by_rows<T: Send>(
    stored: &StoredTensor,
    out: &mut [T],
    each: impl Fn(&[f32], &mut [T]) + Sync,
) -> Result<(), TensorError> {
    let rows = stored.shape.first().copied().unwrap_or(1).max(1);
    let inner = stored.shape.iter().product::<usize>() / rows;
    let of_row = out.len() / rows;
    let bytes = stored.bytes.bytes().par_chunks(inner * stored.dtype.size());
    bytes.zip(out.par_chunks_mut(of_row)).try_for_each(|(bytes, out)| {
        let row = Tensor::from_bytes(stored.dtype, &[inner], bytes)?.to_f32();
        each(row.as_slice().expect("made row-major"), out);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pjrt::SharedBytes;

    fn stored(tensor: &Tensor, scales: Option<Vec<f32>>) -> StoredTensor {
        let bytes = SharedBytes::from(tensor.bytes().into_owned());
        let (file, key) = ("a.safetensors".into(), "w".into());
        StoredTensor { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), bytes, scales, file, key }
    }

    fn numbers(bytes: &[u8]) -> Vec<f32> {
        bytes.iter().map(|b| f32::from(F8(*b))).collect()
    }

    const F8E4M3FN: DType = DType::F8E4M3FN;

    #[test]
    fn each_row_fills_the_range() {
        let wide = Tensor::from(ndarray::arr2(&[[1.0f32, -0.5, 0.25], [0.0, 0.0, 0.0], [-3.0, 300.0, 896.0]]));
        for tensor in [wide.clone(), wide.cast(DType::BF16).expect("bf16"), wide.cast(DType::F16).expect("f16")] {
            let t = stored(&tensor, None);
            let (narrow, scales) =
                (numbers(&narrow(&t, F8E4M3FN).expect("floats")), scales(&t, F8E4M3FN).expect("floats"));
            assert_eq!(narrow, [448.0, -224.0, 112.0, 0.0, 0.0, 0.0, -1.5, 144.0, 448.0]);
            assert_eq!((scales[0], scales[2]), (1.0 / 448.0, 2.0));
        }
    }

    /// Halves go to the even number; the largest number stands on both sides of 0.
    #[test]
    fn integers_are_the_nearest() {
        let wide = Tensor::from(ndarray::arr2(&[
            [127.0f32, -127.0, 0.5, 1.5],
            [0.0, 0.0, 0.0, 0.0],
            [-2.54, 1.28, 0.0, 0.01],
        ]));
        let t = stored(&wide, None);
        let bytes = narrow(&t, DType::I8).expect("floats");
        let numbers: Vec<i8> = bytes.iter().map(|b| b.cast_signed()).collect();
        assert_eq!(numbers, [127, -127, 0, 2, 0, 0, 0, 0, -127, 64, 0, 0]);
        assert_eq!(scales(&t, DType::I8).expect("floats"), [1.0, 1e-30 / 127.0, 2.54 / 127.0]);
    }

    #[test]
    fn eight_bit_floats_become_integers_with_their_own_scales() {
        let tensor = Tensor::from(ndarray::arr2(&[[1.0f32, -2.0], [8.0, 448.0]])).cast(F8E4M3FN).expect("f8");
        let t = stored(&tensor, Some(vec![0.5, 0.25]));
        let bytes: Vec<i8> = narrow(&t, DType::I8).expect("f8").iter().map(|b| b.cast_signed()).collect();
        assert_eq!(bytes, [64, -127, 2, 127]);
        assert_eq!(scales(&t, DType::I8).expect("f8"), [2.0 / 127.0 * 0.5, 448.0 / 127.0 * 0.25]);
    }

    #[test]
    fn what_is_stored_narrow_keeps_its_scales() {
        let tensor = Tensor::from(ndarray::arr2(&[[1.0f32, -2.0], [8.0, 448.0]])).cast(DType::F8E4M3FN).expect("f8");
        for (given, want) in [(None, [1.0, 1.0]), (Some(vec![0.5]), [0.5, 0.5]), (Some(vec![0.5, 0.25]), [0.5, 0.25])] {
            let t = stored(&tensor, given);
            assert_eq!(scales(&t, F8E4M3FN).expect("f8"), want);
            let wide = widened(&t).expect("f8").to_f32();
            assert_eq!(wide.as_slice().expect("dense"), [want[0], -2.0 * want[0], 8.0 * want[1], 448.0 * want[1]]);
        }
    }
}
