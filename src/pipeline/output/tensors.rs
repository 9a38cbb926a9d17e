//! Reads and writes safetensors files: inputs and outputs of components, dumps, and checkpoints.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use ndarray::{Array, ArrayD, Dimension};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::atomic_file;
use crate::hlo::DType;
use crate::pipeline::error::{PipelineError, Result};
use crate::tensor::Tensor;
use crate::weights::Checkpoint;

/// Reads all tensors of a safetensors file, by name.
///
/// # Errors
/// Returns an error if the file is not a safetensors file or contains a tensor with an unsupported element type.
pub fn read(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let file = Checkpoint::open(path)?;
    file.names().map(|name| Ok((name.to_string(), file.get(name)?.to_tensor()?))).collect()
}

/// Writes tensors atomically to a safetensors file. Replaces an existing file.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn write(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    write_with(path, tensors, None, true)
}

/// Writes tensors atomically to a safetensors file. `about`: metadata for the header. Unless `replace` is set, an
/// existing file is an error.
pub(crate) fn write_with(
    path: &Path,
    tensors: &[(String, Tensor)],
    about: Option<HashMap<String, String>>,
    replace: bool,
) -> Result<()> {
    let fail = |e: safetensors::SafeTensorError| PipelineError::File { path: path.into(), reason: e.to_string() };
    let bytes: Vec<_> = tensors.iter().map(|(_, t)| t.bytes()).collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, t), data)| Ok((name.as_str(), TensorView::new(dtype(t.dtype()), t.shape().to_vec(), data)?)))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(fail)?;
    Ok(atomic_file::write_file(path, &safetensors::serialize(views, about).map_err(fail)?, replace)?)
}

fn dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::Bool => Dtype::BOOL,
        DType::I8 => Dtype::I8,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::U8 => Dtype::U8,
        DType::U16 => Dtype::U16,
        DType::U32 => Dtype::U32,
        DType::U64 => Dtype::U64,
        DType::F8E4M3FN => Dtype::F8_E4M3,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
    }
}

/// Converts an array of dynamic rank to a fixed rank.
pub(crate) fn fixed<A, D: Dimension>(a: ArrayD<A>) -> Result<Array<A, D>> {
    a.into_dimensionality().map_err(|e| PipelineError::Input(e.to_string()))
}
