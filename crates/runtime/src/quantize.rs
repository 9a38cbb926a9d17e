//! Quantizes checkpoint tensors to 8 bits with one scale per row.

use rayon::prelude::*;

use super::checkpoint_tensor::StoredTensor;
use ltx2_nn::largest;
use ltx2_stablehlo::{DType, F8};
use ltx2_weights::tensor::{Tensor, TensorError};

/// Converts a float tensor `[rows, inner]` to an 8-bit type, dividing each row by its scale.
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

/// Returns the dequantization scale of each row for an 8-bit type. A tensor already stored in that type keeps its
/// stored scales; otherwise a scale maps the type's largest value to the row's largest magnitude.
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

/// Converts a tensor of 8-bit floats to f32, multiplying each row by its scale.
pub(super) fn widened(stored: &StoredTensor) -> Result<Tensor, TensorError> {
    let mut wide = Tensor::from_bytes(stored.dtype, &stored.shape, stored.bytes.bytes())?.to_f32();
    for (mut row, scale) in wide.outer_iter_mut().zip(scales(stored, stored.dtype)?) {
        row *= scale;
    }
    Ok(Tensor::F32(wide))
}

fn scale(row: &[f32], dtype: DType) -> f32 {
    // The lower bound avoids dividing a row of zeros by zero.
    row.iter().fold(1e-30, |most: f32, v| most.max(v.abs())) / largest(dtype)
}

/// Calls `each(row, row's part of out)` for every row of a tensor, in parallel.
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
        each(row.as_slice().expect("created in row-major order"), out);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ltx2_pjrt::SharedBytes;

    fn stored_tensor(tensor: &Tensor, scales: Option<Vec<f32>>) -> StoredTensor {
        let bytes = SharedBytes::from(tensor.bytes().into_owned());
        let (file, key) = ("a.safetensors".into(), "w".into());
        StoredTensor { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), bytes, scales, file, key }
    }

    fn numbers(bytes: &[u8]) -> Vec<f32> {
        bytes.iter().map(|b| f32::from(F8(*b))).collect()
    }

    const F8E4M3FN: DType = DType::F8E4M3FN;

    #[test]
    fn each_row_is_scaled_to_the_full_range() {
        let wide = Tensor::from(ndarray::arr2(&[[1.0f32, -0.5, 0.25], [0.0, 0.0, 0.0], [-3.0, 300.0, 896.0]]));
        for tensor in [wide.clone(), wide.cast(DType::BF16).expect("bf16"), wide.cast(DType::F16).expect("f16")] {
            let t = stored_tensor(&tensor, None);
            let (narrow, scales) =
                (numbers(&narrow(&t, F8E4M3FN).expect("floats")), scales(&t, F8E4M3FN).expect("floats"));
            assert_eq!(narrow, [448.0, -224.0, 112.0, 0.0, 0.0, 0.0, -1.5, 144.0, 448.0]);
            assert_eq!((scales[0], scales[2]), (1.0 / 448.0, 2.0));
        }
    }

    /// Ties round to even; the range is symmetric around 0.
    #[test]
    fn integers_round_to_nearest_even() {
        let wide = Tensor::from(ndarray::arr2(&[
            [127.0f32, -127.0, 0.5, 1.5],
            [0.0, 0.0, 0.0, 0.0],
            [-2.54, 1.28, 0.0, 0.01],
        ]));
        let t = stored_tensor(&wide, None);
        let bytes = narrow(&t, DType::I8).expect("floats");
        let numbers: Vec<i8> = bytes.iter().map(|b| b.cast_signed()).collect();
        assert_eq!(numbers, [127, -127, 0, 2, 0, 0, 0, 0, -127, 64, 0, 0]);
        assert_eq!(scales(&t, DType::I8).expect("floats"), [1.0, 1e-30 / 127.0, 2.54 / 127.0]);
    }

    #[test]
    fn stored_float8_scales_carry_over_to_int8() {
        let tensor = Tensor::from(ndarray::arr2(&[[1.0f32, -2.0], [8.0, 448.0]])).cast(F8E4M3FN).expect("f8");
        let t = stored_tensor(&tensor, Some(vec![0.5, 0.25]));
        let bytes: Vec<i8> = narrow(&t, DType::I8).expect("f8").iter().map(|b| b.cast_signed()).collect();
        assert_eq!(bytes, [64, -127, 2, 127]);
        assert_eq!(scales(&t, DType::I8).expect("f8"), [2.0 / 127.0 * 0.5, 448.0 / 127.0 * 0.25]);
    }

    #[test]
    fn tensors_stored_in_8_bits_keep_their_scales() {
        let tensor = Tensor::from(ndarray::arr2(&[[1.0f32, -2.0], [8.0, 448.0]])).cast(DType::F8E4M3FN).expect("f8");
        for (given, want) in [(None, [1.0, 1.0]), (Some(vec![0.5]), [0.5, 0.5]), (Some(vec![0.5, 0.25]), [0.5, 0.25])] {
            let t = stored_tensor(&tensor, given);
            assert_eq!(scales(&t, F8E4M3FN).expect("f8"), want);
            let wide = widened(&t).expect("f8").to_f32();
            assert_eq!(wide.as_slice().expect("dense"), [want[0], -2.0 * want[0], 8.0 * want[1], 448.0 * want[1]]);
        }
    }
}
