//! Tensors as stored in checkpoints, and the trait for reading them.

use std::path::PathBuf;

use ltx2_pjrt::SharedBytes;
use ltx2_stablehlo::DType;

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

/// A tensor that can be read from a file piece by piece.
pub struct FileTensor {
    /// Element type of the values that are read.
    pub dtype: DType,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// Reads bytes of the tensor and checks them for NaN and infinity.
    pub read: ReadPiece,
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

    /// Reads one tensor of a component by its checkpoint name and checks it for NaN and infinity.
    ///
    /// # Errors
    /// Returns one line with file and tensor name if the tensor cannot be found or read, or has non-finite values.
    fn tensor(&self, component: &'static str, key: &str) -> Result<StoredTensor, String>;
}
