//! Splits a tensor by rows, multiplies its rows by factors, or adds a number to its values, as it is read.

use std::sync::Arc;

use super::Checkpoint;
use super::view::decoder::{ByRow, Codes, NumberDecoder, RowOperator, Shifted};
use crate::error::WeightsError;
use ltx2_stablehlo::DType;

impl Checkpoint {
    /// Replaces a tensor by parts with equal numbers of rows. Scales per row are split in the same way. Each part gets
    /// a copy of a scale of the whole tensor or of its activations.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing or its rows are not divisible by the number of parts.
    pub(crate) fn split_rows(&mut self, name: &str, parts: &[String]) -> Result<(), WeightsError> {
        let whole = self.entry(name)?.clone();
        let view = &whole.view;
        let (rows, count) = (view.shape.first().copied().unwrap_or(1), parts.len());
        if !rows.is_multiple_of(count) || view.shape.is_empty() {
            let (path, key) = (view.shard.path.clone(), view.key.to_string());
            let reason = format!("its rows cannot be divided equally among {}", parts.join(", "));
            return Err(WeightsError::UnsupportedShape { path, key, got: view.shape.to_vec(), reason });
        }
        self.remove(name);
        let size = rows / count * whole.columns();
        for (i, part) in parts.iter().enumerate() {
            let mut entry = whole.clone();
            entry.view.shape = [rows / count].iter().chain(&view.shape[1..]).copied().collect();
            if whole.view.decoder.is_some() {
                entry.view.first += i * size;
            } else {
                let bytes = (size * view.dtype.size()) as u64;
                let start = view.range.start + i as u64 * bytes;
                entry.view.range = start..start + bytes;
            }
            self.put(part, entry);
        }
        let weight_scale = |name: &str| format!("{name}_scale");
        let input_scale = |name: &str| format!("{}input_scale", name.trim_end_matches("weight"));
        for scale_of in [weight_scale, input_scale] {
            let (scale, of_parts) = (scale_of(name), parts.iter().map(|part| scale_of(part)).collect::<Vec<_>>());
            let Some(entry) = self.tensors.get(&scale).cloned() else { continue };
            if entry.view.shape.iter().product::<usize>() > 1 {
                self.split_rows(&scale, &of_parts)?;
            } else {
                self.remove(&scale);
                of_parts.iter().for_each(|part| self.put(part, entry.clone()));
            }
        }
        Ok(())
    }

    /// Changes how a tensor is read: each row is multiplied by the corresponding value of the tensor `factors`, in f32.
    ///
    /// # Errors
    /// Returns an error if one of the tensors is missing or not bf16, f16 or f32, or if there is not one factor per
    /// row.
    pub(crate) fn scale_rows(&mut self, name: &str, factors: &str) -> Result<(), WeightsError> {
        let [mut entry, by] = [self.entry(name)?.clone(), self.entry(factors)?.clone()];
        for one in [&entry, &by] {
            if !(one.is_known && matches!(one.view.dtype, DType::BF16 | DType::F16 | DType::F32)) {
                return Err(self.wrong_dtype(one, "bf16, f16 or f32"));
            }
        }
        let operand = by.view.expect_shape(&entry.view.shape[..entry.view.shape.len().min(1)])?;
        let dtype = entry.view.dtype;
        let inner: Arc<dyn NumberDecoder> = entry.view.decoder.clone().unwrap_or_else(|| Arc::new(Codes::Plain(dtype)));
        let columns = entry.columns();
        entry.view.decoder =
            Some(Arc::new(ByRow { start: entry.view.first, inner, columns, operand, operator: RowOperator::Multiply }));
        self.put(name, entry);
        Ok(())
    }

    /// Changes how a tensor is read: `number` is added to all values, which become f32.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing.
    pub(crate) fn add_to_all(&mut self, name: &str, number: f32) -> Result<(), WeightsError> {
        let mut entry = self.entry(name)?.clone();
        let inner = entry.view.decoder.clone().unwrap_or_else(|| Arc::new(Codes::Plain(entry.view.dtype)));
        let type_name = entry.type_name.clone();
        entry.decode(&type_name, DType::F32, Arc::new(Shifted { inner, number }));
        self.put(name, entry);
        Ok(())
    }
}
