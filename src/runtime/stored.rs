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
    /// Its bytes; the owner keeps the file mapped while the device reads.
    pub(crate) bytes: SharedBytes,
    /// Dequantization scales of 8-bit floats: one, or one per row.
    pub(crate) scales: Option<Vec<f32>>,
    /// The file, for messages.
    pub(crate) file: PathBuf,
    /// Its name in the file, for messages.
    pub(crate) key: String,
}

/// A source of parameters.
pub trait ParameterSource {
    /// One tensor of a component by its checkpoint name, checked to hold numbers only.
    ///
    /// # Errors
    /// One line naming file and tensor.
    fn tensor(&self, component: &'static str, key: &str) -> Result<StoredTensor, String>;
}
