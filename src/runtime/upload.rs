//! Parameters on the devices, each its shard: from mapped files, without a host copy of a stack, or made there.

use std::collections::{BTreeMap, HashMap};

use super::engine::{Engine, device_layout};
use super::error::RuntimeError;
use super::sharded_tensor::{Shard, ShardedTensor, buffer_type, cut, offset, shards, strides};
use super::stored::ParameterSource;
use super::{quantize, random};
use crate::failpoint;
use crate::hlo::{DType, Program};
use crate::nn::{Param, Source};
use crate::pjrt::{Buffer, DeviceLayout, HostBuffer, SharedBytes, TransferShape};
use crate::tensor::Tensor;

/// Parameters on the devices, by argument name.
#[derive(Default)]
pub(crate) struct Parameters {
    tensors: HashMap<String, LoadedParameter>,
    bytes: usize,
}

/// A parameter on the devices and what it was read from.
struct LoadedParameter {
    tensor: ShardedTensor,
    component: &'static str,
    source: Source,
}

impl Parameters {
    pub(crate) fn get(&self, name: &str) -> Option<&ShardedTensor> {
        self.tensors.get(name).map(|loaded| &loaded.tensor)
    }

    /// Bytes of all on one device.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Uploads those of `params`, arguments of `program`, that are not there yet.
    ///
    /// # Errors
    /// A tensor that is missing, of another shape, not a float or not finite, with file and name; the plugin's message.
    pub(crate) fn load(
        &mut self,
        engine: &Engine,
        program: &Program,
        params: &[Param],
        source: &dyn ParameterSource,
    ) -> Result<(), RuntimeError> {
        for param in self.missing(params) {
            let argument = program.argument(&param.name).map(|i| &program.arguments[i]);
            let shards = shards(&param.ty, &program.mesh, argument.and_then(|a| a.sharding.as_ref()));
            let layout = argument.map(device_layout).transpose()?.flatten();
            let buffers = upload(engine, param, &shards, layout.as_ref(), source)?;
            let addressable = engine.addressable(shards.len()).into_iter().map(|(place, _)| place).collect();
            failpoint::reach("load", &param.name);
            self.insert(
                param,
                ShardedTensor::new(buffers, addressable, shards, param.ty.clone(), param.ty.dims.clone()),
            );
        }
        Ok(())
    }

    /// Makes those of `params`, arguments of `program`, that are not there yet of random numbers, each as its
    /// [`Init`](crate::nn::Init) says. They follow from `seed`, the parameter's name and the element's indices alone.
    pub(crate) fn draw(
        &mut self,
        engine: &Engine,
        program: &Program,
        params: &[Param],
        seed: u64,
    ) -> Result<(), RuntimeError> {
        let missing = self.missing(params);
        if missing.is_empty() {
            return Ok(());
        }
        for (param, tensor) in missing.iter().zip(random::parameters(engine, program, &missing, seed)?) {
            self.insert(param, tensor);
        }
        Ok(())
    }

    /// Takes out every parameter that reads a tensor `(component, checkpoint name)` for which `stale` holds.
    pub(crate) fn take_reading(&mut self, stale: impl Fn(&'static str, &str) -> bool) -> Parameters {
        let reads =
            |loaded: &LoadedParameter| loaded.source.tensors().iter().any(|(key, _)| stale(loaded.component, key));
        self.remove(reads)
    }

    pub(crate) fn take_component(&mut self, component: &str) -> Parameters {
        self.remove(|loaded| loaded.component == component)
    }

    /// Adds parameters that were taken out.
    pub(crate) fn put_back(&mut self, taken: Parameters) {
        self.bytes += taken.bytes;
        self.tensors.extend(taken.tensors);
    }

    /// Bytes of each component's parameters on one device.
    pub(crate) fn bytes_of_components(&self) -> BTreeMap<&'static str, usize> {
        let mut all = BTreeMap::new();
        for loaded in self.tensors.values() {
            *all.entry(loaded.component).or_default() += loaded.tensor.device_bytes();
        }
        all
    }

    /// Bytes on one device of those of `params`, arguments of `program`, that are not there yet.
    pub(crate) fn missing_bytes(&self, program: &Program, params: &[Param]) -> usize {
        self.missing(params).into_iter().map(|param| device_bytes(program, param)).sum()
    }

    fn remove(&mut self, which: impl Fn(&LoadedParameter) -> bool) -> Parameters {
        let tensors: HashMap<String, LoadedParameter> = self.tensors.extract_if(|_, loaded| which(loaded)).collect();
        let bytes = tensors.values().map(|loaded| loaded.tensor.device_bytes()).sum();
        self.bytes -= bytes;
        Parameters { tensors, bytes }
    }

    fn missing<'a>(&self, params: &'a [Param]) -> Vec<&'a Param> {
        params.iter().filter(|p| !self.tensors.contains_key(&p.name)).collect()
    }

    fn insert(&mut self, param: &Param, tensor: ShardedTensor) {
        self.bytes += tensor.device_bytes();
        let loaded = LoadedParameter { tensor, component: param.component, source: param.source.clone() };
        self.tensors.insert(param.name.clone(), loaded);
    }
}

/// Bytes of a parameter, argument of `program`, on one device.
pub(crate) fn device_bytes(program: &Program, param: &Param) -> usize {
    let argument = program.argument(&param.name).map(|i| &program.arguments[i]);
    let shards = shards(&param.ty, &program.mesh, argument.and_then(|a| a.sharding.as_ref()));
    shards.first().map_or(0, |p| p.size.iter().product::<usize>() * param.ty.dtype.size())
}

/// Uploads to each device of this process its shard of a parameter; every stored tensor is read once.
fn upload(
    engine: &Engine,
    param: &Param,
    shards: &[Shard],
    layout: Option<&DeviceLayout>,
    source: &dyn ParameterSource,
) -> Result<Vec<Buffer>, RuntimeError> {
    let dtype = param.ty.dtype;
    match &param.source {
        Source::View { key, strides, .. } => {
            let bytes = read(param, key, source)?;
            let strides: Vec<i64> = strides.iter().map(|s| (s * dtype.size()) as i64).collect();
            strided(engine, dtype, bytes.bytes(), &strides, shards)
        }
        Source::Stack { keys, .. } | Source::Scales { keys, .. } if keys.len() == 1 => {
            let bytes = read(param, &keys[0], source)?;
            strided(engine, dtype, bytes.bytes(), &strides(&param.ty.dims, dtype.size()), shards)
        }
        Source::Stack { keys, .. } | Source::Scales { keys, .. } => {
            // The leading dimensions count the tensors; they are never split.
            let elements = param.ty.elements() / keys.len();
            let outer = (1..=param.ty.rank()).find(|&i| param.ty.dims[i..].iter().product::<usize>() == elements);
            let outer = outer.filter(|&i| shards.iter().all(|p| p.size[..i] == param.ty.dims[..i]));
            let Some(outer) = outer else {
                let message = format!("parameter '{}' {}: a layout splits its layers", param.name, param.ty);
                return Err(RuntimeError::Parameter(message));
            };
            let dims = &param.ty.dims[outer..];
            let addressable = engine.addressable(shards.len());
            let transfers = addressable.iter().map(|(place, device)| {
                let shape = TransferShape {
                    ty: buffer_type(dtype),
                    dims: shards[*place].size.clone(),
                    layout: layout.cloned(),
                };
                engine.client().transfer(device, &[shape])
            });
            let transfers: Vec<_> = transfers.collect::<Result<_, _>>()?;
            for (i, key) in keys.iter().enumerate() {
                let bytes = read(param, key, source)?;
                let mut last: Option<(Shard, SharedBytes)> = None;
                for (transfer, shard) in transfers.iter().zip(addressable.iter().map(|(place, _)| &shards[*place])) {
                    let inner = Shard { start: shard.start[outer..].to_vec(), size: shard.size[outer..].to_vec() };
                    // Devices with the same shard share its copy.
                    let piece = match &last {
                        Some((known, piece)) if *known == inner => piece.clone(),
                        _ if inner.size == dims => bytes.clone(),
                        _ => SharedBytes::from(cut(bytes.bytes(), dims, &inner, dtype)),
                    };
                    let length = piece.bytes().len();
                    transfer.write_shared(0, i * length, &piece, i + 1 == keys.len())?;
                    last = Some((inner, piece));
                }
            }
            Ok(transfers.iter().map(|t| t.buffer(0)).collect::<Result<_, _>>()?)
        }
    }
}

/// Uploads to each device of this process its shard of a mapped array, read by strides: no host copy.
fn strided(
    engine: &Engine,
    dtype: DType,
    bytes: &[u8],
    strides: &[i64],
    shards: &[Shard],
) -> Result<Vec<Buffer>, RuntimeError> {
    let each = engine.addressable(shards.len()).into_iter().map(|(place, device)| {
        let shard = &shards[place];
        let dense = HostBuffer::dense(&bytes[offset(&shard.start, strides)..], buffer_type(dtype), &shard.size);
        let host = HostBuffer { byte_strides: Some(strides), ..dense };
        Ok(engine.client().upload(device, host)?)
    });
    each.collect()
}

/// A tensor's bytes as the parameter takes them: the mapped ones where the file has that type.
fn read(param: &Param, key: &str, source: &dyn ParameterSource) -> Result<SharedBytes, RuntimeError> {
    let stored = source.tensor(param.component, key).map_err(RuntimeError::Parameter)?;
    let fail =
        |what: String| RuntimeError::Parameter(format!("{}: tensor '{}' {what}", stored.file.display(), stored.key));
    let shape = param.source.shape();
    if stored.shape != shape {
        return Err(fail(format!("has shape {:?}, the configuration asks for {shape:?}", stored.shape)));
    }
    if !stored.dtype.is_float() {
        return Err(fail(format!("is {}, weights must be floats (bf16, f16, f32, f8_e4m3)", stored.dtype)));
    }
    Ok(match (&param.source, stored.dtype, param.ty.dtype) {
        (Source::Scales { of, .. }, ..) => bytemuck::cast_slice(&quantize::scales(&stored, *of)?).to_vec().into(),
        (_, file, wanted) if file == wanted => stored.bytes,
        (_, _, narrow @ (DType::F8E4M3FN | DType::I8)) => quantize::narrow(&stored, narrow)?.into(),
        (_, file, wanted) => {
            let wide = match file {
                DType::F8E4M3FN => quantize::widened(&stored)?,
                _ => Tensor::from_bytes(file, shape, stored.bytes.bytes())?,
            };
            wide.cast(wanted)?.bytes().into_owned().into()
        }
    })
}
