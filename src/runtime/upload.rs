//! Parameters from mapped files to the device, without a host copy of a stack.

use std::collections::HashMap;
use std::path::PathBuf;

use super::engine::{Engine, RuntimeError};
use crate::dtype::DType;
use crate::nn::{Param, Source};
use crate::pjrt::{Buffer, HostBuffer, SharedBytes, TransferShape};
use crate::tensor::Tensor;

/// A tensor as a checkpoint stores it.
pub struct StoredTensor {
    /// Its element type in the file.
    pub dtype: DType,
    /// Its shape in the file.
    pub shape: Vec<usize>,
    /// Its bytes; the owner keeps the file mapped while the device reads.
    pub bytes: SharedBytes,
    /// The file, for messages.
    pub file: PathBuf,
    /// Its name in the file, for messages.
    pub key: String,
}

/// Where parameters come from.
pub trait ParameterSource {
    /// One tensor of a component by its checkpoint name, checked to hold numbers only.
    ///
    /// # Errors
    /// One line naming file and tensor.
    fn tensor(&self, component: &'static str, key: &str) -> Result<StoredTensor, String>;
}

/// Parameters on the device, by argument name.
#[derive(Default)]
pub struct Parameters {
    buffers: HashMap<String, Buffer>,
    bytes: usize,
}

impl Parameters {
    /// One parameter.
    pub fn get(&self, name: &str) -> Option<&Buffer> {
        self.buffers.get(name)
    }

    /// Bytes of all.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Uploads those of `params` that are not there yet.
    ///
    /// # Errors
    /// A tensor that is missing, of another shape, not a float or not finite, with file and name; the plugin's message.
    pub fn load(
        &mut self,
        engine: &Engine,
        params: &[Param],
        source: &dyn ParameterSource,
    ) -> Result<(), RuntimeError> {
        for param in params.iter().filter(|p| !self.buffers.contains_key(&p.name)).collect::<Vec<_>>() {
            let buffer = upload(engine, param, source)?;
            self.bytes += param.ty.bytes();
            self.buffers.insert(param.name.clone(), buffer);
        }
        Ok(())
    }
}

fn upload(engine: &Engine, param: &Param, source: &dyn ParameterSource) -> Result<Buffer, RuntimeError> {
    let dtype = param.ty.dtype;
    match &param.source {
        Source::View { key, shape, strides } => {
            let bytes = read(param, key, shape, source)?;
            let strides: Vec<i64> = strides.iter().map(|s| (s * dtype.size()) as i64).collect();
            let host =
                HostBuffer { byte_strides: Some(&strides), ..HostBuffer::dense(bytes.bytes(), dtype, &param.ty.dims) };
            Ok(engine.client().upload(engine.device(), host)?)
        }
        Source::Stack { keys, shape } if keys.len() == 1 => {
            let bytes = read(param, &keys[0], shape, source)?;
            Ok(engine.client().upload(engine.device(), HostBuffer::dense(bytes.bytes(), dtype, &param.ty.dims))?)
        }
        Source::Stack { keys, shape } => {
            let shapes = [TransferShape { dtype, dims: param.ty.dims.clone(), layout: None }];
            let transfer = engine.client().transfer(engine.device(), &shapes)?;
            let mut offset = 0;
            for (i, key) in keys.iter().enumerate() {
                let bytes = read(param, key, shape, source)?;
                let length = bytes.bytes().len();
                transfer.write_shared(0, offset, &bytes, i + 1 == keys.len())?;
                offset += length;
            }
            Ok(transfer.buffer(0)?)
        }
    }
}

/// A tensor's bytes in the parameter's element type: the mapped ones where the file has that type.
fn read(param: &Param, key: &str, shape: &[usize], source: &dyn ParameterSource) -> Result<SharedBytes, RuntimeError> {
    let stored = source.tensor(param.component, key).map_err(RuntimeError::Parameter)?;
    let fail =
        |what: String| RuntimeError::Parameter(format!("{}: tensor '{}' {what}", stored.file.display(), stored.key));
    if stored.shape != shape {
        return Err(fail(format!("has shape {:?}, the configuration asks for {shape:?}", stored.shape)));
    }
    if !stored.dtype.is_float() {
        return Err(fail(format!("is {}, weights must be floats (bf16, f16, f32)", stored.dtype)));
    }
    if stored.dtype == param.ty.dtype {
        return Ok(stored.bytes);
    }
    let converted = Tensor::from_bytes(stored.dtype, shape, stored.bytes.bytes())?.cast(param.ty.dtype)?;
    Ok(SharedBytes::from(converted.bytes().into_owned()))
}
