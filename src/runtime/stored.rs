//! Parameters as a checkpoint stores them.

use std::path::PathBuf;

use crate::hlo::DType;
use crate::pjrt::SharedBytes;

/// A tensor as a checkpoint stores it.
pub struct StoredTensor {
    /// Its element type in the file.
    pub dtype: DType,
    /// Its shape in the file.
    pub shape: Vec<usize>,
    /// Its bytes; the owner keeps the file mapped while the device reads.
    pub bytes: SharedBytes,
    /// Dequantization scales of 8-bit floats: one, or one per row.
    pub scales: Option<Vec<f32>>,
    /// The file, for messages.
    pub file: PathBuf,
    /// Its name in the file, for messages.
    pub key: String,
}

/// A source of parameters.
pub trait ParameterSource {
    /// One tensor of a component by its checkpoint name, checked to hold numbers only.
    ///
    /// # Errors
    /// One line naming file and tensor.
    fn tensor(&self, component: &'static str, key: &str) -> Result<StoredTensor, String>;
}
