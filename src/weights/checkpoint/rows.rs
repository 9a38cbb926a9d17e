//! Tensors that a file holds in another form: several as the rows of one, or with a factor for each row apart.

use std::sync::Arc;

use half::{bf16, f16};

use super::{Checkpoint, Entry, TensorView, known};
use crate::hlo::DType;
use crate::weights::error::WeightsError;

impl Checkpoint {
    /// Puts parts of equal numbers of rows in the place of a tensor.
    ///
    /// # Errors
    /// The tensor is missing, or its rows do not divide.
    pub(in crate::weights) fn split_rows(&mut self, name: &str, parts: &[String]) -> Result<(), WeightsError> {
        let whole = self.tensors.get(name).cloned().ok_or_else(|| self.missing(name))?;
        let (rows, count) = (whole.shape.first().copied().unwrap_or(1), parts.len());
        if !rows.is_multiple_of(count) || whole.shape.is_empty() {
            let want = [&[rows.next_multiple_of(count)], whole.shape.get(1..).unwrap_or_default()].concat();
            let path = self.shards[whole.shard].path.clone();
            return Err(WeightsError::Shape { path, key: whole.key.to_string(), got: whole.shape.to_vec(), want });
        }
        let shape: Arc<[usize]> = [&[rows / count], &whole.shape[1..]].concat().into();
        let bytes = (whole.range.end - whole.range.start) / count as u64;
        let tensors = Arc::make_mut(&mut self.tensors);
        tensors.remove(name);
        for (i, part) in parts.iter().enumerate() {
            let start = whole.range.start + i as u64 * bytes;
            tensors.insert(part.clone(), Entry { shape: shape.clone(), range: start..start + bytes, ..whole.clone() });
        }
        Ok(())
    }

    /// Multiplies a tensor's rows by the numbers of another, in f32, when it is read.
    ///
    /// # Errors
    /// One of them is missing, is not bf16, f16 or f32, or there is not a number for each row.
    pub(in crate::weights) fn scale_rows(&mut self, name: &str, factors: &str) -> Result<(), WeightsError> {
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

    /// Leaves a tensor out.
    pub(in crate::weights) fn remove(&mut self, name: &str) {
        Arc::make_mut(&mut self.tensors).remove(name);
    }
}

impl TensorView {
    /// Multiplies what was read from `offset` on by the factors of its rows.
    pub(super) fn multiply(&self, factors: &TensorView, offset: usize, read: &mut [u8]) -> Result<(), WeightsError> {
        let factors: Vec<f32> = factors.to_tensor()?.to_f32().into_iter().collect();
        let (size, row) = (self.dtype.size(), self.shape[1..].iter().product::<usize>());
        let first = offset / size;
        let of = |i: usize| factors[(first + i) / row];
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
