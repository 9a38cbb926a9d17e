//! Parameters as a checkpoint stores them.

use std::path::PathBuf;

use crate::hlo::DType;
use crate::pjrt::SharedBytes;

/// A tensor as a checkpoint stores it.
pub struct StoredTensor {
    /// Its element type in the file.
    pub(crate) dtype: DType,
    /// Its shape in the file.
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: SharedBytes,
    /// Dequantization scales of 8-bit floats: one, or one per row.
    pub(crate) scales: Option<Vec<f32>>,
    /// The file, for messages.
    pub(crate) file: PathBuf,
    /// Its name in the file, for messages.
    pub(crate) key: String,
}

/// A tensor whose bytes lie in a file as they are, to be read piece by piece.
pub struct FileTensor {
    /// Its element type in the file.
    pub(crate) dtype: DType,
    /// Its shape in the file.
    pub(crate) shape: Vec<usize>,
    /// Reads its bytes from an offset on, checked to be numbers only; an error is one line naming file and tensor.
    pub(crate) read: ReadPiece,
}

/// Fills memory with a tensor's bytes from an offset on.
pub(crate) type ReadPiece = Box<dyn Fn(usize, &mut [u8]) -> Result<(), String> + Send + Sync>;

/// A source of parameters.
pub trait ParameterSource: Sync {
    /// One tensor's file; none where its numbers are made of those of several.
    ///
    /// # Errors
    /// One line naming file and tensor.
    fn in_file(&self, component: &'static str, key: &str) -> Result<Option<FileTensor>, String>;

    /// One tensor of a component by its checkpoint name, checked to hold numbers only.
    ///
    /// # Errors
    /// One line naming file and tensor.
    fn tensor(&self, component: &'static str, key: &str) -> Result<StoredTensor, String>;
}
