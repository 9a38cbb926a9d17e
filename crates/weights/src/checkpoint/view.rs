//! One tensor of a checkpoint.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ltx2_stablehlo::DType;

use super::shard::ShardFile;
use crate::error::WeightsError;
use crate::tensor::Tensor;
use crate::validate::finite_tensor;

pub(super) mod decoder;

use decoder::{Codes, NumberDecoder, Rounded};

/// One tensor of a checkpoint. The tensor shares the open file, so it may outlive the checkpoint, and is cheap to
/// clone.
#[derive(Clone, Debug)]
pub struct TensorView {
    pub(super) key: Arc<str>,
    pub(super) dtype: DType,
    pub(super) shape: Arc<[usize]>,
    pub(super) shard: Arc<ShardFile>,
    /// Location of the values or codes.
    pub(super) range: Range<u64>,
    /// Conversion of the codes to `dtype`. `None`: the file stores the values themselves.
    pub(super) decoder: Option<Arc<dyn NumberDecoder>>,
    /// Index of the tensor's first element in the stored tensor; not 0 if the tensor is only a part of it.
    pub(super) first: usize,
}

impl TensorView {
    /// Returns the tensor's name in the file, before any renaming.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the element type of the bytes that are read. It differs from the type in the file if quantized values
    /// are decoded.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the size of the values in bytes; larger than in the file if the file stores them in fewer bits.
    pub fn size(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }

    /// Returns the size of the values in the file in bytes, without scales.
    pub(crate) fn stored_size(&self) -> usize {
        let (unit, bytes) = self.decoder.as_ref().map_or((1, self.dtype.size()), |decoder| decoder.unit());
        self.shape.iter().product::<usize>() / unit * bytes
    }

    /// Reads row-major little-endian bytes from `offset`. Panics if the range exceeds the tensor.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or has changed since it was opened.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), WeightsError> {
        assert!(offset + into.len() <= self.size(), "{} is {} bytes", self.key, self.size());
        match &self.decoder {
            Some(decoder) => self.decode_at(&**decoder, offset, into),
            None => self.shard.read(self.range.start + offset as u64, into),
        }
    }

    /// Reads all row-major little-endian bytes.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or has changed since it was opened.
    pub fn read(&self) -> Result<Vec<u8>, WeightsError> {
        let mut bytes = vec![0; self.size()];
        self.read_at(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns the codes of an int8-convrot weight; `None` if the tensor is stored in another form. Does not read the
    /// file.
    pub fn rotated_codes(&self) -> Option<TensorView> {
        let is_rotated = self.decoder.as_ref().is_some_and(|decoder| decoder.rotated_scales().is_some());
        (is_rotated && self.shape.len() == 2).then(|| self.codes(DType::I8))
    }

    /// Reads the scales of an int8-convrot weight, one per row; `None` if the tensor is stored in another form.
    ///
    /// # Errors
    /// Returns an error if the scales cannot be read or are not finite.
    pub fn rotated_scales(&self) -> Result<Option<Vec<f32>>, WeightsError> {
        let scales = self.decoder.as_ref().and_then(|decoder| decoder.rotated_scales());
        let (Some(scales), &[rows, columns]) = (scales, &*self.shape) else { return Ok(None) };
        let first = self.first / columns.max(1);
        let scales = finite_tensor(scales)?.to_f32().into_iter().collect::<Vec<f32>>();
        Ok(Some(if let [one] = *scales { vec![one; rows] } else { scales[first..first + rows].to_vec() }))
    }

    /// Returns the stored codes of a tensor with one byte per value.
    pub(super) fn codes(&self, dtype: DType) -> TensorView {
        let start = self.range.start + self.first as u64;
        let range = start..start + self.shape.iter().product::<usize>() as u64;
        TensorView { dtype, decoder: None, first: 0, range, ..self.clone() }
    }

    /// Returns the path of the file that contains the tensor.
    pub fn file(&self) -> &Path {
        &self.shard.path
    }

    /// Reads the tensor into host memory.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or has changed since it was opened.
    pub fn to_tensor(&self) -> Result<Tensor, WeightsError> {
        self.with_bytes(&self.read()?)
    }

    /// Creates a host tensor from bytes that were read before.
    pub(crate) fn with_bytes(&self, bytes: &[u8]) -> Result<Tensor, WeightsError> {
        Tensor::from_bytes(self.dtype, &self.shape, bytes).map_err(|source| WeightsError::Tensor {
            path: self.file().to_path_buf(),
            key: self.key.to_string(),
            source,
        })
    }

    /// Returns the tensor with its values converted to `dtype` as they are read, if both types have 16 bits or more;
    /// otherwise unchanged. Narrower types are rounded to nearest even.
    pub fn converted(self, dtype: DType) -> Self {
        let is_wide = |dtype: DType| dtype.is_float() && dtype != DType::F8E4M3FN;
        if dtype == self.dtype || dtype == DType::F64 || !is_wide(dtype) || !is_wide(self.dtype) {
            return self;
        }
        let decoder: Arc<dyn NumberDecoder> = match self.decoder {
            None => Arc::new(Codes::Plain(self.dtype)),
            Some(inner) if matches!(self.dtype, DType::BF16 | DType::F16) => {
                Arc::new(Rounded { inner, dtype: self.dtype })
            }
            Some(inner) => inner,
        };
        TensorView { dtype, decoder: Some(decoder), ..self }
    }

    /// Returns the tensor if it has the given shape, otherwise an error.
    pub fn expect_shape(self, want: &[usize]) -> Result<Self, WeightsError> {
        if *self.shape == *want {
            return Ok(self);
        }
        Err(WeightsError::Shape {
            path: self.file().to_path_buf(),
            key: self.key.to_string(),
            got: self.shape.to_vec(),
            want: want.to_vec(),
        })
    }
}
