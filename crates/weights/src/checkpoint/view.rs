//! One tensor of a checkpoint.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use ltx2_stablehlo::DType;

use super::Shard;
use super::eight_bits::EightBits;
use crate::error::WeightsError;
use crate::tensor::Tensor;

/// One tensor of a checkpoint. Shares its open file, so it may outlive the checkpoint; cheap to clone.
#[derive(Clone, Debug)]
pub struct TensorView {
    pub(super) key: Arc<str>,
    pub(super) dtype: DType,
    pub(super) shape: Arc<[usize]>,
    pub(super) shard: Arc<Shard>,
    pub(super) range: Range<u64>,
    /// Factors by which the rows are multiplied: one per row, or one for all. `None`: no factors.
    pub(super) factors: Option<Box<TensorView>>,
    pub(super) eight_bits: Option<EightBits<TensorView>>,
}

impl TensorView {
    /// Returns the tensor's name in the file, before any renaming.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the element type of the bytes that are read, which is not the file's if 8-bit values are read as another
    /// type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the size of the values in bytes; larger than in the file if 8-bit values are read as another type.
    pub fn size(&self) -> usize {
        let bytes = (self.range.end - self.range.start) as usize;
        if self.eight_bits.is_some() { bytes * self.dtype.size() } else { bytes }
    }

    /// Reads row-major little-endian bytes from `offset`. Panics if the range exceeds the tensor.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or has changed since it was opened.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), WeightsError> {
        assert!(offset + into.len() <= self.size(), "{} is {} bytes", self.key, self.size());
        if let Some(form) = &self.eight_bits {
            self.read_eight_bits(form, offset, into)?;
            return self.factors.as_ref().map_or(Ok(()), |factors| self.multiply(factors, offset, into));
        }
        let (path, file) = (&self.shard.path, &self.shard.file);
        let read = file.read_exact_at(into, self.range.start + offset as u64);
        // A read during a change may return a mix of old and new data.
        self.shard.check()?;
        read.map_err(WeightsError::io(path, "cannot read"))?;
        self.factors.as_ref().map_or(Ok(()), |factors| self.multiply(factors, offset, into))
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

    /// Returns the path of the safetensors file that contains the tensor.
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
