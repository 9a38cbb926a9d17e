//! Access to tensor bytes and metadata as stored in the files, for fingerprints and conversions.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::view::decoder::{ByRow, Codes, NumberDecoder, RowOperator};
use super::{Checkpoint, TensorView, WeightsError};
use crate::quantize::QuantizedForm;
use ltx2_stablehlo::DType;

impl Checkpoint {
    /// Returns the stored codes and scales of a matrix in the form `form`; `None` if it is stored in another form. If
    /// the file contains no scales, they are `None`, which means 1.
    ///
    /// # Errors
    /// Returns an error if the matrix is missing or 8-bit floats have scales of an unsupported shape.
    pub(crate) fn codes(
        &self,
        name: &str,
        form: QuantizedForm,
    ) -> Result<Option<(TensorView, Option<TensorView>)>, WeightsError> {
        let entry = self.entry(name)?;
        let scales = match (form, &entry.view.decoder) {
            _ if entry.view.shape.len() != 2 => return Ok(None),
            (QuantizedForm::Fp8, None) if entry.view.dtype == DType::F8E4M3FN => self.scales_of(name)?,
            (QuantizedForm::Int8 | QuantizedForm::Int8Convrot, Some(decoder)) if entry.type_name == form.name() => {
                decoder.operands().first().copied().cloned()
            }
            _ => return Ok(None),
        };
        Ok(Some((entry.view.codes(form.dtype()), scales)))
    }

    /// Returns a tensor whose values are read as floats of 16 bits or more: 8-bit floats are multiplied by their scales.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing or not floating point, or if its scales have an unsupported shape.
    pub fn dequantized(&self, name: &str) -> Result<TensorView, WeightsError> {
        let view = self.get_float(name)?;
        if view.dtype != DType::F8E4M3FN {
            return Ok(view);
        }
        let mut decoder: Arc<dyn NumberDecoder> = Arc::new(Codes::Plain(view.dtype));
        if let Some(operand) = self.scales_of(name)? {
            let columns = self.entry(name)?.columns();
            decoder = Arc::new(ByRow { start: 0, columns, inner: decoder, operand, operator: RowOperator::Multiply });
        }
        Ok(TensorView { dtype: DType::F32, decoder: Some(decoder), ..view })
    }

    /// Returns whether the file stores a tensor in fewer bits than its values have.
    pub(crate) fn is_quantized(&self, name: &str) -> bool {
        let is_narrow = |view: &TensorView| view.decoder.is_some() || view.dtype == DType::F8E4M3FN;
        self.tensors.get(name).is_some_and(|entry| is_narrow(&entry.view))
    }

    /// Reads ranges of a tensor's stored bytes, whatever its element type. `ranges` returns the ranges to read for a
    /// given number of stored bytes. If the tensor has scales or zero points, the ranges of their bytes follow.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing, or if the file cannot be read or has changed since it was opened.
    pub(crate) fn read_stored(
        &self,
        name: &str,
        ranges: impl Fn(u64) -> Vec<Range<u64>>,
    ) -> Result<Vec<u8>, WeightsError> {
        let mut bytes = Vec::new();
        let view = &self.entry(name)?.view;
        let operands = view.decoder.as_ref().map_or(Vec::new(), |decoder| decoder.operands());
        for view in [view].into_iter().chain(operands) {
            let stored = view.range.clone();
            for range in ranges(stored.end - stored.start) {
                let start = bytes.len();
                bytes.resize(start + (range.end - range.start) as usize, 0);
                view.shard.read(stored.start + range.start, &mut bytes[start..])?;
            }
        }
        Ok(bytes)
    }

    /// Returns the files' free-form header metadata, sorted by key.
    pub(crate) fn all_metadata(&self) -> BTreeMap<&str, &str> {
        let of_shards = self.shards.iter().flat_map(|shard| &shard.metadata);
        of_shards.map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }
}
