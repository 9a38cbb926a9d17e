//! Conversion of stored numbers to floats. A stored tensor consists of codes (a contiguous byte range of a file) and a
//! decoder, which converts the codes and reads the scales. To add a format, implement a decoder and add a row to
//! [`FORMATS`](crate::checkpoint::FORMATS), to ComfyUI's formats, or to GGUF's types.

use std::fmt;
use std::sync::Arc;

use half::f16;

use super::TensorView;
use crate::error::WeightsError;
use ltx2_stablehlo::{DType, F8};

/// Elements that are decoded at a time: the codes and values of a block stay in the CPU cache.
const BLOCK: usize = 1 << 16;

/// Conversion of the codes of a stored tensor to values.
pub(in crate::checkpoint) trait NumberDecoder: fmt::Debug + Send + Sync {
    /// Returns the number of elements that are decoded together, and the number of bytes of their codes.
    fn unit(&self) -> (usize, usize);

    /// Converts `codes`, which are whole units from element `first` of the tensor, to f32.
    ///
    /// # Errors
    /// Returns an error if scales cannot be read.
    fn decode(&self, first: usize, codes: &[u8], values: &mut [f32]) -> Result<(), WeightsError>;

    /// Returns the tensors with scales and zero points.
    fn operands(&self) -> Vec<&TensorView> {
        Vec::new()
    }

    /// Returns the scales, one per row or one for all, if the codes are 8-bit integers of rotated rows (int8-convrot),
    /// otherwise `None`.
    fn rotated_scales(&self) -> Option<&TensorView> {
        None
    }
}

/// Decoder of codes that each represent one value, without scales.
#[derive(Clone, Copy, Debug)]
pub(in crate::checkpoint) enum Codes {
    /// Values of a float type or 8-bit integers.
    Plain(DType),
    /// 8-bit floats with 5 exponent and 2 mantissa bits, the upper half of f16.
    E5M2,
}

impl NumberDecoder for Codes {
    fn unit(&self) -> (usize, usize) {
        match self {
            Codes::Plain(dtype) => (1, dtype.size()),
            Codes::E5M2 => (1, 1),
        }
    }

    fn decode(&self, _: usize, codes: &[u8], values: &mut [f32]) -> Result<(), WeightsError> {
        match self {
            Codes::Plain(dtype) => widen(*dtype, codes, values),
            Codes::E5M2 => each(codes, values, |[c]| half_to_f32(u16::from(c) << 8)),
        }
        Ok(())
    }
}

/// Decoder that combines each value with an operand of its row: a scale or a zero point.
#[derive(Debug)]
pub(in crate::checkpoint) struct ByRow {
    pub(in crate::checkpoint) inner: Arc<dyn NumberDecoder>,
    /// Index of the first element of the first row.
    pub(in crate::checkpoint) start: usize,
    /// Elements per row.
    pub(in crate::checkpoint) columns: usize,
    /// One value per row, or one for all.
    pub(in crate::checkpoint) operand: TensorView,
    pub(in crate::checkpoint) operator: RowOperator,
}

/// Operation that combines a value with the operand of its row.
#[derive(Clone, Copy, Debug)]
pub(in crate::checkpoint) enum RowOperator {
    /// The operand is a scale.
    Multiply,
    /// The operand is a zero point.
    Subtract,
}

impl NumberDecoder for ByRow {
    fn unit(&self) -> (usize, usize) {
        self.inner.unit()
    }

    fn decode(&self, first: usize, codes: &[u8], values: &mut [f32]) -> Result<(), WeightsError> {
        self.inner.decode(first, codes, values)?;
        // Units may begin before the first row, and end after the last one.
        let values = &mut values[self.start.saturating_sub(first)..];
        let mut at = first.saturating_sub(self.start);
        let count = self.operand.shape().iter().product::<usize>();
        let rows = at / self.columns..(at + values.len()).div_ceil(self.columns).min(count.max(1));
        let operands = self.operand.floats(if count == 1 { 0..1 } else { rows.clone() })?;
        let mut rest = values;
        while !rest.is_empty() {
            let row = at / self.columns;
            let (own, next) = rest.split_at_mut(rest.len().min((row + 1) * self.columns - at));
            let operand = operands.get(if count == 1 { 0 } else { row - rows.start }).copied().unwrap_or(1.0);
            match self.operator {
                RowOperator::Multiply => own.iter_mut().for_each(|value| *value *= operand),
                RowOperator::Subtract => own.iter_mut().for_each(|value| *value -= operand),
            }
            at += own.len();
            rest = next;
        }
        Ok(())
    }

    fn operands(&self) -> Vec<&TensorView> {
        self.inner.operands().into_iter().chain([&self.operand]).collect()
    }
}

/// Decoder that adds a number to each value.
#[derive(Debug)]
pub(in crate::checkpoint) struct Shifted {
    pub(in crate::checkpoint) inner: Arc<dyn NumberDecoder>,
    pub(in crate::checkpoint) number: f32,
}

impl NumberDecoder for Shifted {
    fn unit(&self) -> (usize, usize) {
        self.inner.unit()
    }

    fn decode(&self, first: usize, codes: &[u8], values: &mut [f32]) -> Result<(), WeightsError> {
        self.inner.decode(first, codes, values)?;
        values.iter_mut().for_each(|value| *value += self.number);
        Ok(())
    }

    fn operands(&self) -> Vec<&TensorView> {
        self.inner.operands()
    }
}

/// Decoder that rounds values to a 16-bit type, because the quantizer defines the tensor in that type.
#[derive(Debug)]
pub(in crate::checkpoint) struct Rounded {
    pub(in crate::checkpoint) inner: Arc<dyn NumberDecoder>,
    pub(in crate::checkpoint) dtype: DType,
}

impl NumberDecoder for Rounded {
    fn unit(&self) -> (usize, usize) {
        self.inner.unit()
    }

    fn decode(&self, first: usize, codes: &[u8], values: &mut [f32]) -> Result<(), WeightsError> {
        self.inner.decode(first, codes, values)?;
        match self.dtype {
            DType::F16 => values.iter_mut().for_each(|value| *value = f16::from_f32(*value).to_f32()),
            _ => values.iter_mut().for_each(|value| *value = f32::from_bits(u32::from(to_bf16(*value)) << 16)),
        }
        Ok(())
    }

    fn operands(&self) -> Vec<&TensorView> {
        self.inner.operands()
    }
}

impl TensorView {
    /// Reads the values in a range of elements.
    pub(in crate::checkpoint) fn floats(&self, elements: std::ops::Range<usize>) -> Result<Vec<f32>, WeightsError> {
        let size = self.dtype.size();
        let (mut bytes, mut values) = (vec![0; elements.len() * size], vec![0.0; elements.len()]);
        self.read_at(elements.start * size, &mut bytes)?;
        widen(self.dtype, &bytes, &mut values);
        Ok(values)
    }

    /// Decodes values from byte `offset` of the decoded tensor. Needs memory for one block of codes and values.
    pub(in crate::checkpoint) fn decode_at(
        &self,
        decoder: &dyn NumberDecoder,
        offset: usize,
        into: &mut [u8],
    ) -> Result<(), WeightsError> {
        let (size, (unit, unit_bytes)) = (self.dtype.size(), decoder.unit());
        let step = (BLOCK / unit).max(1) * unit;
        let (mut codes, mut values) = (Vec::new(), Vec::new());
        let (begin, end) = (self.first + offset / size, self.first + (offset + into.len()) / size);
        let mut at = begin;
        while at < end {
            let from = at / unit * unit;
            let to = (from + step).min(end.next_multiple_of(unit));
            let stop = to.min(end);
            codes.resize((to - from) / unit * unit_bytes, 0);
            values.resize(to - from, 0.0);
            self.shard.read(self.range.start + (from / unit * unit_bytes) as u64, &mut codes)?;
            decoder.decode(from, &codes, &mut values)?;
            narrow(self.dtype, &values[at - from..stop - from], &mut into[(at - begin) * size..(stop - begin) * size]);
            at = stop;
        }
        Ok(())
    }
}

fn each<const N: usize>(bytes: &[u8], values: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    values.iter_mut().zip(bytes.as_chunks::<N>().0).for_each(|(to, code)| *to = value(*code));
}

/// Converts little-endian values of a float type, or 8-bit integers, to f32.
pub(crate) fn widen(dtype: DType, bytes: &[u8], values: &mut [f32]) {
    match dtype {
        DType::I8 => each(bytes, values, |[c]| f32::from(c.cast_signed())),
        DType::F8E4M3FN => each(bytes, values, |[c]| f32::from(F8(c))),
        DType::F16 => each(bytes, values, |c| half_to_f32(u16::from_le_bytes(c))),
        DType::F32 => each(bytes, values, f32::from_le_bytes),
        DType::F64 => each(bytes, values, |c| f64::from_le_bytes(c) as f32),
        // A plain shift vectorizes; `to_f32` does not, because it quiets NaNs.
        _ => each(bytes, values, |c| f32::from_bits(u32::from(u16::from_le_bytes(c)) << 16)),
    }
}

/// Returns the value of an f16. Equals `f16::to_f32`, but has no branches and therefore vectorizes.
pub(in crate::checkpoint) fn half_to_f32(bits: u16) -> f32 {
    // The bits at their place in an f32, whose exponent bias is 127 instead of 15.
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let normal = magnitude + ((127 - 15) << 23);
    // Mantissa bits below 2^-14, without an implicit leading 1.
    let small = f32::from_bits(magnitude + ((127 - 14) << 23)) - f32::from_bits((127 - 14) << 23);
    let magnitude = match bits & 0x7c00 {
        0 => small.to_bits(),
        0x7c00 => magnitude | 0x7f80_0000,
        _ => normal,
    };
    f32::from_bits(magnitude | u32::from(bits & 0x8000) << 16)
}

/// Returns the bits of a value that is rounded to bf16, ties to even. Equals `bf16::from_f32`, but has no branches and
/// therefore vectorizes.
fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

/// Rounds values to bf16 or f16, or copies them as f32.
fn narrow(dtype: DType, values: &[f32], into: &mut [u8]) {
    fn each<const N: usize>(values: &[f32], into: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
        into.as_chunks_mut::<N>().0.iter_mut().zip(values).for_each(|(to, value)| *to = bytes(*value));
    }
    match dtype {
        DType::BF16 => each(values, into, |value| to_bf16(value).to_le_bytes()),
        DType::F16 => each(values, into, |value| f16::from_f32(value).to_le_bytes()),
        _ => each(values, into, f32::to_le_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn half_conversion_equals_that_of_the_crate_half() {
        for bits in 0..=u16::MAX {
            let (got, want) = (half_to_f32(bits), f16::from_bits(bits).to_f32());
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:x}");
        }
    }

    #[test]
    fn bf16_rounding_equals_that_of_the_crate_half() {
        // Every upper half, with lower halves around the midpoint and at both ends.
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(upper) << 16 | lower);
                assert_eq!(to_bf16(value), bf16::from_f32(value).to_bits(), "{value:e}");
            }
        }
    }
}
