//! Tensors that a file stores in another form: several tensors as the rows of one, rows with separate factors, or 8-bit
//! values.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use half::{bf16, f16};

use super::eight_bits::EightBits;
use super::{Checkpoint, Entry, TensorView, known};
use crate::error::WeightsError;
use ltx2_stablehlo::DType;

/// Converts e5m2 to f32: e5m2 is the upper half of f16.
fn e5m2(bits: u8) -> f32 {
    f16::from_bits(u16::from(bits) << 8).to_f32()
}

impl Entry {
    /// Returns the entry with its shard index increased by `shards`, for a checkpoint that is appended to another.
    pub(super) fn behind(&self, shards: usize) -> Self {
        let moved = |other: &Entry| Box::new(other.behind(shards));
        let eight_bits = self.eight_bits.as_ref().map(|form| form.map(moved));
        let factors = self.factors.as_deref().map(moved);
        Entry { shard: self.shard + shards, factors, eight_bits, ..self.clone() }
    }

    /// Returns part `index` of `count` parts with equal numbers of rows. Factors and zero points are split as well,
    /// unless one value applies to all rows.
    fn part(&self, index: usize, count: usize) -> Self {
        let rows = self.shape.first().map_or(1, |rows| rows / count);
        let shape = self.shape.iter().skip(1).fold(vec![rows], |mut all, n| {
            all.push(*n);
            all
        });
        let bytes = (self.range.end - self.range.start) / count as u64;
        let start = self.range.start + index as u64 * bytes;
        let of_rows = |other: &Entry| match other.shape.first() {
            Some(1) | None => Box::new(other.clone()),
            Some(_) => Box::new(other.part(index, count)),
        };
        let eight_bits = self.eight_bits.as_ref().map(|form| form.map(of_rows));
        let factors = self.factors.as_deref().map(of_rows);
        Entry { shape: shape.into(), range: start..start + bytes, factors, eight_bits, ..self.clone() }
    }
}

impl Checkpoint {
    /// Replaces a tensor by parts with equal numbers of rows.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing or its rows are not divisible by the number of parts.
    pub(crate) fn split_rows(&mut self, name: &str, parts: &[String]) -> Result<(), WeightsError> {
        let whole = self.tensors.get(name).cloned().ok_or_else(|| self.missing(name))?;
        let (rows, count) = (whole.shape.first().copied().unwrap_or(1), parts.len());
        if !rows.is_multiple_of(count) || whole.shape.is_empty() {
            let (path, key) = (self.shards[whole.shard].path.clone(), whole.key.to_string());
            let reason = format!("its rows cannot be split equally into {}", parts.join(", "));
            return Err(WeightsError::UnsupportedShape { path, key, got: whole.shape.to_vec(), reason });
        }
        let tensors = Arc::make_mut(&mut self.tensors);
        tensors.remove(name);
        tensors.extend(parts.iter().enumerate().map(|(i, part)| (part.clone(), whole.part(i, count))));
        Ok(())
    }

    /// Changes how a tensor is read: each row is multiplied by the corresponding value of the tensor `factors`, in f32.
    ///
    /// # Errors
    /// Returns an error if one of the tensors is missing or not bf16, f16 or f32, or if there is not one factor per
    /// row.
    pub(crate) fn scale_rows(&mut self, name: &str, factors: &str) -> Result<(), WeightsError> {
        let [entry, by] = [name, factors].map(|name| self.tensors.get(name).cloned().ok_or_else(|| self.missing(name)));
        let (entry, by) = (entry?, by?);
        for one in [&entry, &by] {
            if !matches!(known(one.dtype), Some(DType::BF16 | DType::F16 | DType::F32)) {
                return Err(self.wrong_dtype(one, "bf16, f16 or f32"));
            }
        }
        self.view(&by)?.expect_shape(&entry.shape[..entry.shape.len().min(1)])?;
        let scaled = Entry { factors: Some(Box::new(by)), ..entry };
        Arc::make_mut(&mut self.tensors).insert(name.to_string(), scaled);
        Ok(())
    }

    pub(crate) fn remove(&mut self, name: &str) {
        Arc::make_mut(&mut self.tensors).remove(name);
    }
}

/// Returns the value for a row, from one value per row or one for all.
fn by_row<T: Copy>(values: &[T], row: usize) -> T {
    if values.len() == 1 { values[0] } else { values[row] }
}

impl TensorView {
    /// Reads 8-bit values as floats, starting at byte `offset` of the floats; subtracts the zero points of integers.
    /// The float type represents all these values exactly.
    pub(super) fn read_eight_bits(
        &self,
        form: &EightBits<TensorView>,
        offset: usize,
        into: &mut [u8],
    ) -> Result<(), WeightsError> {
        let (size, row) = (self.dtype.size(), self.shape[1..].iter().product::<usize>());
        let first = offset / size;
        let points = match form {
            EightBits::Integers { zero_points: Some(points) } => {
                points.read()?.into_iter().map(|point| point as i8).collect()
            }
            EightBits::Integers { zero_points: None } | EightBits::E5M2 => vec![0],
        };
        let mut numbers = vec![0; into.len() / size];
        let read = self.shard.file.read_exact_at(&mut numbers, self.range.start + first as u64);
        // A read during a change may return a mix of old and new data.
        self.shard.check()?;
        read.map_err(WeightsError::io(&self.shard.path, "cannot read"))?;
        for (i, (number, float)) in numbers.into_iter().zip(into.chunks_exact_mut(size)).enumerate() {
            let value = match form {
                EightBits::Integers { .. } => f32::from(number as i8) - f32::from(by_row(&points, (first + i) / row)),
                EightBits::E5M2 => e5m2(number),
            };
            match self.dtype {
                DType::BF16 => float.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                DType::F16 => float.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
                _ => float.copy_from_slice(&value.to_le_bytes()),
            }
        }
        Ok(())
    }

    /// Multiplies values by the factors of their rows, in place. `offset` is the byte offset at which the values were
    /// read.
    pub(super) fn multiply(&self, factors: &TensorView, offset: usize, read: &mut [u8]) -> Result<(), WeightsError> {
        let factors: Vec<f32> = factors.to_tensor()?.to_f32().into_iter().collect();
        let (size, row) = (self.dtype.size(), self.shape[1..].iter().product::<usize>());
        let first = offset / size;
        let of = |i: usize| by_row(&factors, (first + i) / row);
        let elements = read.chunks_exact_mut(size).enumerate();
        match self.dtype {
            DType::BF16 => elements.for_each(|(i, x)| {
                let value = bf16::from_le_bytes([x[0], x[1]]).to_f32() * of(i);
                x.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
            }),
            DType::F16 => elements.for_each(|(i, x)| {
                let value = f16::from_le_bytes([x[0], x[1]]).to_f32() * of(i);
                x.copy_from_slice(&f16::from_f32(value).to_le_bytes());
            }),
            _ => elements.for_each(|(i, x)| {
                let value = f32::from_le_bytes([x[0], x[1], x[2], x[3]]) * of(i);
                x.copy_from_slice(&value.to_le_bytes());
            }),
        }
        Ok(())
    }
}
