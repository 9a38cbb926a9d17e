//! Tensors as stored in checkpoints, and the trait for reading them.

use std::path::PathBuf;

use ltx2_pjrt::SharedBytes;
use ltx2_stablehlo::DType;
use ltx2_weights::quantize::{Quantized, QuantizedForm, quantize};
use ltx2_weights::tensor::{Tensor, TensorError};

/// A tensor as stored in a checkpoint.
pub struct StoredTensor {
    /// Element type in the file.
    pub dtype: DType,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// Elements of type `dtype` in row-major order.
    pub bytes: SharedBytes,
    /// Dequantization scales of an 8-bit float tensor: one for all values, or one per row.
    pub scales: Option<Vec<f32>>,
    /// The file, for error messages.
    pub file: PathBuf,
    /// Name in the file, for error messages.
    pub key: String,
}

impl StoredTensor {
    /// Returns the stored scale of each row, or 1 for each row if the tensor has no scales.
    pub(super) fn row_scales(&self) -> Vec<f32> {
        let rows = self.shape.first().copied().unwrap_or(1);
        self.scales.as_deref().unwrap_or(&[1.0]).iter().copied().cycle().take(rows).collect()
    }

    /// Quantizes a float matrix `[rows, columns]`. The stored scales of 8-bit floats become part of the new scales.
    pub(super) fn quantized(&self, form: QuantizedForm) -> Quantized {
        let columns = self.shape.last().copied().unwrap_or(1);
        let mut quantized = quantize(form, self.dtype, columns, self.bytes.bytes());
        quantized.scales.iter_mut().zip(self.row_scales()).for_each(|(scale, stored)| *scale *= stored);
        quantized
    }

    /// Converts the values to `dtype` row by row, and returns their bytes. Rows of 8-bit floats are multiplied by their
    /// scales.
    pub(super) fn cast(&self, dtype: DType) -> Result<Vec<u8>, TensorError> {
        let (scales, bytes) = (self.row_scales(), self.bytes.bytes());
        let columns = bytes.len() / self.dtype.size() / scales.len().max(1);
        let mut cast = Vec::with_capacity(scales.len() * columns * dtype.size());
        for (row, scale) in bytes.chunks_exact((columns * self.dtype.size()).max(1)).zip(scales) {
            let mut wide = Tensor::from_bytes(self.dtype, &[columns], row)?.into_f32();
            if self.dtype == DType::F8E4M3FN {
                wide *= scale;
            }
            cast.extend_from_slice(&Tensor::F32(wide).cast(dtype)?.bytes());
        }
        Ok(cast)
    }
}

/// A tensor that can be read from a file piece by piece.
pub struct FileTensor {
    /// Element type of the values that are read.
    pub dtype: DType,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// Function that reads a range of the tensor's bytes and checks the values for NaN and infinity.
    pub read: ReadPiece,
}

/// A weight `[out, in]` that the checkpoint stores in a quantized form.
pub struct QuantizedTensor {
    /// The 8-bit codes.
    pub codes: FileTensor,
    /// Function that reads the dequantization scale of each row, without reading the codes. Its error is one line with
    /// file and tensor name; a scale that is not finite is an error.
    pub scales: Box<dyn Fn() -> Result<Vec<f32>, String>>,
}

/// Function that fills a slice with the tensor's bytes, starting at a byte offset. The error is one line with file and
/// tensor name.
pub(crate) type ReadPiece = Box<dyn Fn(usize, &mut [u8]) -> Result<(), String> + Send + Sync>;

/// A source of model parameters, such as a checkpoint.
pub trait ParameterSource: Sync {
    /// Returns the tensor, with its values converted to `dtype` where possible, if it can be read piece by piece from
    /// one file; `None` if its values must be computed, for example by merging LoRAs.
    ///
    /// # Errors
    /// Returns one line with file and tensor name if the tensor cannot be found or read.
    fn in_file(&self, component: &'static str, key: &str, dtype: DType) -> Result<Option<FileTensor>, String>;

    /// Returns the stored codes and scales of a weight in the form `form`; `None` if the weight must be quantized to this
    /// form, or if its values must be computed.
    ///
    /// # Errors
    /// Returns one line with file and tensor name if the tensor cannot be found.
    fn quantized(
        &self,
        component: &'static str,
        key: &str,
        form: QuantizedForm,
    ) -> Result<Option<QuantizedTensor>, String>;

    /// Returns the host memory, in bytes, that [`ParameterSource::tensor`] needs to merge LoRAs into a tensor, in
    /// addition to the stored values; 0 if no LoRAs have to be merged.
    fn merge_bytes(&self, component: &'static str, key: &str) -> usize {
        let _ = (component, key);
        0
    }

    /// Reads one tensor of a component by its checkpoint name and checks it for NaN and infinity.
    ///
    /// # Errors
    /// Returns one line with file and tensor name if the tensor cannot be found or read, or has non-finite values.
    fn tensor(&self, component: &'static str, key: &str) -> Result<StoredTensor, String>;
}

#[cfg(test)]
mod tests {
    use super::*;

    const F8E4M3FN: DType = DType::F8E4M3FN;

    fn stored_tensor(scales: Option<Vec<f32>>) -> StoredTensor {
        let tensor = Tensor::from(ndarray::arr2(&[[1.0f32, -2.0], [8.0, 448.0]])).cast(F8E4M3FN).expect("f8");
        let bytes = SharedBytes::from(tensor.bytes().into_owned());
        let (file, key) = ("a.safetensors".into(), "w".into());
        StoredTensor { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), bytes, scales, file, key }
    }

    #[test]
    fn stored_float8_scales_carry_over_to_int8() {
        let Quantized { codes, scales } = stored_tensor(Some(vec![0.5, 0.25])).quantized(QuantizedForm::Int8);
        assert_eq!(codes.iter().map(|code| code.cast_signed()).collect::<Vec<_>>(), [64, -127, 2, 127]);
        assert_eq!(scales, [2.0 / 127.0 * 0.5, 448.0 / 127.0 * 0.25]);
    }

    #[test]
    fn tensors_stored_in_8_bits_keep_their_scales() {
        for (given, want) in [(None, [1.0, 1.0]), (Some(vec![0.5]), [0.5, 0.5]), (Some(vec![0.5, 0.25]), [0.5, 0.25])] {
            let t = stored_tensor(given);
            assert_eq!(t.row_scales(), want);
            let wide: Vec<f32> = bytemuck::pod_collect_to_vec(&t.cast(DType::F32).expect("f8"));
            assert_eq!(wide, [want[0], -2.0 * want[0], 8.0 * want[1], 448.0 * want[1]]);
        }
    }
}
