//! Quantization of weight matrices to 8 bits, with a scale per row, or per matrix for fp8 files.

use std::array;
use std::ops::Range;

use rayon::prelude::*;

use super::checkpoint::widen;
pub use super::rotation::GROUP;
use super::rotation::rotate;
use ltx2_stablehlo::{DType, F8};

/// 8-bit form of a weight matrix `[out, in]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantizedForm {
    /// Floats with 4 exponent and 3 mantissa bits; the largest magnitude of a row becomes 448.
    Fp8,
    /// Integers; the largest magnitude of a row becomes 127.
    Int8,
    /// Integers as in `Int8`, but each row is rotated in groups of [`GROUP`] columns before quantization (ComfyUI's
    /// int8-convrot format).
    Int8Convrot,
}

impl QuantizedForm {
    /// All forms.
    pub const ALL: [QuantizedForm; 3] = [QuantizedForm::Fp8, QuantizedForm::Int8, QuantizedForm::Int8Convrot];

    /// Returns the name in configurations and messages: `fp8`, `int8` or `int8-convrot`.
    pub fn name(self) -> &'static str {
        match self {
            QuantizedForm::Fp8 => "fp8",
            QuantizedForm::Int8 => "int8",
            QuantizedForm::Int8Convrot => "int8-convrot",
        }
    }

    /// Returns the element type of the codes.
    pub fn dtype(self) -> DType {
        if self == QuantizedForm::Fp8 { DType::F8E4M3FN } else { DType::I8 }
    }

    /// Returns the largest magnitude of a code.
    fn largest(self) -> f32 {
        if self == QuantizedForm::Fp8 { F8::MAX } else { f32::from(i8::MAX) }
    }

    /// Returns whether matrices with this number of columns can be quantized to this form.
    pub fn fits(self, columns: usize) -> bool {
        self != QuantizedForm::Int8Convrot || columns.is_multiple_of(GROUP)
    }
}

/// A quantized matrix. The codes multiplied by the scales of their rows give the values, which are still rotated if the
/// form is [`QuantizedForm::Int8Convrot`].
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// One byte per value, in row-major order.
    pub codes: Vec<u8>,
    /// One scale per row.
    pub scales: Vec<f32>,
}

/// Quantizes a row-major matrix of `columns` columns, whose little-endian values have the float type `dtype`. Rows are
/// processed in parallel.
///
/// # Panics
/// Panics if `dtype` is not a float type, or if the form does not [fit](QuantizedForm::fits).
pub fn quantize(form: QuantizedForm, dtype: DType, columns: usize, values: &[u8]) -> Quantized {
    let row = columns.max(1) * dtype.size();
    let mut codes = vec![0; values.len() / dtype.size()];
    let mut scales = vec![0.0; values.len() / row];
    let rows = values.par_chunks_exact(row).zip(codes.par_chunks_exact_mut(columns.max(1))).zip(&mut scales);
    rows.for_each(|((values, codes), scale)| quantize_rows(form, dtype, values, codes, std::slice::from_mut(scale)));
    Quantized { codes, scales }
}

/// Quantizes rows on the calling thread: writes one code per value, and one scale per row.
///
/// # Panics
/// Panics if `dtype` is not a float type, or if the form does not [fit](QuantizedForm::fits).
pub fn quantize_rows(form: QuantizedForm, dtype: DType, values: &[u8], codes: &mut [u8], scales: &mut [f32]) {
    let columns = codes.len().checked_div(scales.len()).unwrap_or_default().max(1);
    assert!(dtype.is_float() && form.fits(columns), "{form:?} of {columns} columns of {dtype}");
    let mut wide = vec![0.0; columns];
    let rows = values.chunks_exact(columns * dtype.size()).zip(codes.chunks_exact_mut(columns));
    for ((values, codes), scale) in rows.zip(scales) {
        widen(dtype, values, &mut wide);
        *scale = quantize_row(form, &mut wide, codes);
    }
}

/// Returns the blocks of a transformer with `count` blocks that the forms fp8 and int8 quantize. The first block and
/// about the last tenth are not quantized (of 48 blocks: 0 and 43 to 47).
pub fn quantized_blocks(count: usize) -> Range<usize> {
    1..count.saturating_sub((5 * count + 24) / 48)
}

/// Returns the largest magnitude of little-endian values of the float type `dtype`.
pub(crate) fn largest_magnitude(dtype: DType, values: &[u8]) -> f32 {
    let mut wide = vec![0.0; values.len() / dtype.size()];
    widen(dtype, values, &mut wide);
    largest_of(&wide)
}

/// Returns the largest magnitude of values.
fn largest_of(values: &[f32]) -> f32 {
    // Independent maxima by comparison, which compilers vectorize.
    let (chunks, rest) = values.as_chunks::<LANES>();
    let larger = |most: f32, value: &f32| if value.abs() > most { value.abs() } else { most };
    let lanes =
        chunks.iter().fold([0f32; LANES], |most, chunk| array::from_fn(|lane| larger(most[lane], &chunk[lane])));
    lanes.iter().chain(rest).fold(0f32, larger)
}

/// Number of independent running maxima (SIMD lanes).
const LANES: usize = 16;

/// 1.5 * 2^23. Adding it to a value of magnitude at most 2^22 leaves the value, rounded to the nearest integer (ties to
/// even), in the low mantissa bits.
const WITHOUT_FRACTION: f32 = 12_582_912.0;

/// Rounds a number of magnitude below 127.5 to the nearest integer, ties to even.
fn rounded(value: f32) -> i8 {
    (value + WITHOUT_FRACTION).to_bits() as i8
}

/// Returns the scale that maps the magnitude `largest` to the largest code. The scale is at least 1e-30, which avoids a
/// division by zero if all values are zero.
pub(crate) fn scale(form: QuantizedForm, largest: f32) -> f32 {
    (largest / form.largest()).max(1e-30)
}

/// Quantizes little-endian values of the float type `dtype` to 8-bit floats with a single scale. The codes equal those
/// of comfy-kitchen's f32 kernel bit for bit.
pub(crate) fn fp8_codes(dtype: DType, scale: f32, values: &[u8]) -> Vec<u8> {
    let mut wide = vec![0.0; values.len() / dtype.size()];
    widen(dtype, values, &mut wide);
    let inverse = scale.recip();
    wide.iter().map(|v| F8::from_f32(v * inverse).0).collect()
}

/// Quantizes a row: writes the codes, and returns the scale. Integer codes equal those of comfy-kitchen's f32 kernels
/// on a CPU bit for bit.
fn quantize_row(form: QuantizedForm, row: &mut [f32], codes: &mut [u8]) -> f32 {
    if form == QuantizedForm::Int8Convrot {
        rotate(row);
    }
    let scale = scale(form, largest_of(row));
    match form {
        QuantizedForm::Fp8 => {
            let inverse = scale.recip();
            codes.iter_mut().zip(row).for_each(|(code, v)| *code = F8::from_f32(*v * inverse).0);
        }
        QuantizedForm::Int8 | QuantizedForm::Int8Convrot => {
            codes.iter_mut().zip(row).for_each(|(code, v)| *code = rounded(*v / scale).cast_unsigned());
        }
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    fn quantized(form: QuantizedForm, tensor: &Tensor) -> Quantized {
        quantize(form, tensor.dtype(), tensor.shape()[1], &tensor.bytes())
    }

    #[test]
    fn each_row_is_scaled_to_the_full_range() {
        let wide = Tensor::from(ndarray::arr2(&[[1.0f32, -0.5, 0.25], [0.0, 0.0, 0.0], [-3.0, 300.0, 896.0]]));
        for tensor in [wide.clone(), wide.cast(DType::BF16).expect("bf16"), wide.cast(DType::F16).expect("f16")] {
            let Quantized { codes, scales } = quantized(QuantizedForm::Fp8, &tensor);
            let codes: Vec<f32> = codes.iter().map(|code| f32::from(F8(*code))).collect();
            assert_eq!(codes, [448.0, -224.0, 112.0, 0.0, 0.0, 0.0, -1.5, 144.0, 448.0]);
            assert_eq!(scales, [1.0 / 448.0, 1e-30, 2.0]);
        }
    }

    #[test]
    fn rounding_equals_round_ties_even() {
        // Every multiple of 2^-13, which includes all ties, with both of its neighbors.
        for step in -(127 << 13)..=127 << 13 {
            let value = step as f32 / 8192.0;
            for value in [value.next_down(), value, value.next_up()] {
                assert_eq!(f32::from(rounded(value)), value.round_ties_even(), "{value:e}");
            }
        }
        assert_eq!([(-127.5f32).next_up(), 127.5f32.next_down()].map(rounded), [-127, 127]);
        assert_eq!([-0.0, f32::MIN_POSITIVE, -1e-45].map(rounded), [0; 3]);
    }

    #[test]
    fn largest_magnitude_includes_all_values() {
        for count in [1, 15, 16, 17, 40] {
            for at in 0..count {
                let mut values = vec![1.0; count];
                values[at] = -2.0;
                assert_eq!(largest_of(&values), 2.0, "{at} of {count}");
            }
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
        let Quantized { codes, scales } = quantized(QuantizedForm::Int8, &wide);
        let codes: Vec<i8> = codes.iter().map(|code| code.cast_signed()).collect();
        assert_eq!(codes, [127, -127, 0, 2, 0, 0, 0, 0, -127, 64, 0, 0]);
        assert_eq!(scales, [1.0, 1e-30, 2.54 / 127.0]);
    }
}
