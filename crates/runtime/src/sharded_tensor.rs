//! Tensors on the devices of a program, one shard per device.

use std::sync::Arc;

use super::engine::Engine;
use super::error::{MemoryPhase, RuntimeError};
use super::loader::{PinnedArray, is_mapped};
use super::watch::WaitDescription;
use ltx2_base::threads;
use ltx2_pjrt::{Buffer, BufferType, Client, Device, DeviceLayout, HostBuffer};
use ltx2_stablehlo::{DType, DeviceMesh, MemorySpace, Sharding, Type};
use ltx2_weights::tensor::Tensor;

/// The part of a tensor that one device holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Index of the first element along each dimension.
    pub start: Vec<usize>,
    /// Number of elements along each dimension.
    pub size: Vec<usize>,
}

/// Returns the shard of each device of a mesh, in device order; without a sharding, the tensor is replicated.
pub fn shards(ty: &Type, mesh: &DeviceMesh, sharding: Option<&Sharding>) -> Vec<Shard> {
    (0..mesh.devices())
        .map(|device| {
            let mut shard = Shard { start: vec![0; ty.rank()], size: ty.dims.clone() };
            for (i, axes) in sharding.iter().flat_map(|s| s.0.iter().enumerate()) {
                for axis in axes {
                    shard.size[i] /= mesh.size(axis).unwrap_or(1);
                    shard.start[i] += mesh.position(device, axis) * shard.size[i];
                }
            }
            shard
        })
        .collect()
}

/// Maximum bytes of shards downloaded concurrently; a larger shard is downloaded alone.
const IN_FLIGHT: usize = 1 << 28;

/// Function that replicates a tensor that is sharded over several processes; all processes must call it.
pub(super) type Replicate = Box<dyn Fn(&ShardedTensor) -> Result<ShardedTensor, RuntimeError> + Send + Sync>;

/// A tensor with a buffer on each device of this process that holds a shard. Other processes may hold other shards.
pub struct ShardedTensor {
    buffers: Vec<Buffer>,
    /// Memory that holds the buffers.
    memory: MemorySpace,
    /// Mesh index of each buffer's device.
    addressable: Vec<usize>,
    shards: Vec<Shard>,
    ty: Type,
    /// Dimensions without padding.
    logical_dims: Vec<usize>,
    /// Function that replicates the tensor before a download if other processes hold shards.
    replicator: Option<Replicate>,
    watch: Option<WaitDescription>,
    /// Name of the program that produced the tensor.
    program: Option<Arc<str>>,
}

impl ShardedTensor {
    /// Creates a tensor from the buffers of this process's devices, whose mesh indices are `addressable`, and the
    /// shards of all devices.
    pub fn new(
        buffers: Vec<Buffer>,
        addressable: Vec<usize>,
        shards: Vec<Shard>,
        ty: Type,
        logical_dims: Vec<usize>,
    ) -> Self {
        ShardedTensor {
            buffers,
            memory: MemorySpace::Device,
            addressable,
            shards,
            ty,
            logical_dims,
            replicator: None,
            watch: None,
            program: None,
        }
    }

    /// Sets the memory that holds the buffers; the default is that of the devices.
    pub(super) fn in_memory(self, memory: MemorySpace) -> Self {
        ShardedTensor { memory, ..self }
    }

    /// Copies the tensor, whose layout is row-major, to pinned host memory of the same devices.
    pub(super) fn copied_to_host(&self, engine: &Engine) -> Result<Self, RuntimeError> {
        let (ty, memory) = (buffer_type(self.ty.dtype), MemorySpace::PinnedHost);
        let mut buffers = Vec::with_capacity(self.buffers.len());
        for (buffer, place) in self.buffers.iter().zip(&self.addressable) {
            let (device, dims) = (buffer.device()?, &self.shards[*place].size);
            buffers.push(if is_mapped(engine, memory) {
                let array = PinnedArray::new(engine, &device, ty, dims.clone());
                buffer.read(&mut array.memory())?;
                array.finish()?
            } else {
                let bytes = buffer.to_host()?;
                let host = HostBuffer { memory: Some(memory.name()), ..HostBuffer::dense(&bytes, ty, dims) };
                engine.client().upload(&device, host)?
            });
        }
        let (addressable, shards) = (self.addressable.clone(), self.shards.clone());
        let copy = ShardedTensor::new(buffers, addressable, shards, self.ty.clone(), self.logical_dims.clone());
        Ok(copy.in_memory(memory))
    }

    /// Sets the function that replicates the tensor before a download if other processes hold shards.
    pub(super) fn with_replicator(self, replicator: Option<Replicate>) -> Self {
        ShardedTensor { replicator, ..self }
    }

    /// Sets the description with which the watchdog reports waits for this tensor.
    pub(super) fn with_watch(self, watch: Option<WaitDescription>) -> Self {
        ShardedTensor { watch, ..self }
    }

    /// Sets the name of the program that produced the tensor, for error messages.
    pub(super) fn of_program(self, name: Arc<str>) -> Self {
        ShardedTensor { program: Some(name), ..self }
    }

    /// Adds the producing program's name to an out-of-memory error.
    fn failed(&self, error: RuntimeError) -> RuntimeError {
        match &self.program {
            Some(name) => error.during(MemoryPhase::Run, name),
            None => error,
        }
    }

    /// Returns the dimensions without padding.
    pub fn dims(&self) -> &[usize] {
        &self.logical_dims
    }

    /// Returns the global type, including padding.
    pub fn ty(&self) -> &Type {
        &self.ty
    }

    /// Returns the shard of each device, in device order.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Returns the buffers of this process's devices, in device order.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Returns the memory that holds the buffers.
    pub(super) fn memory(&self) -> MemorySpace {
        self.memory
    }

    /// Returns the bytes of device memory that one shard takes: 0 if it is in host memory.
    pub fn device_bytes(&self) -> usize {
        if self.memory == MemorySpace::Device { self.shard_bytes() } else { 0 }
    }

    /// Returns the size of one shard in bytes.
    pub(super) fn shard_bytes(&self) -> usize {
        self.shards.first().map_or(0, |p| p.size.iter().product::<usize>() * self.ty.dtype.size())
    }

    /// Waits until every device of this process holds its shard. Returns an error if the program or transfer that fills
    /// the tensor failed.
    pub fn wait(&self) -> Result<(), RuntimeError> {
        for (place, buffer) in self.buffers.iter().enumerate() {
            let _guard = self.watch.as_ref().map(|watch| watch.guard_wait(place));
            buffer.wait().map_err(|e| self.failed(e.into()))?;
        }
        self.watch.iter().for_each(WaitDescription::ended);
        Ok(())
    }

    /// Copies a host tensor to `devices` of this process, which are given with their mesh indices; each device gets its
    /// shard. The tensor is zero-padded to the shape of `ty`.
    pub fn upload(
        client: &Client,
        devices: &[(usize, &Device)],
        tensor: &Tensor,
        ty: &Type,
        shards: Vec<Shard>,
        layout: Option<&DeviceLayout>,
        watch: Option<WaitDescription>,
    ) -> Result<Self, RuntimeError> {
        let logical_dims = tensor.shape().to_vec();
        let converted = if tensor.dtype() == ty.dtype { None } else { Some(tensor.cast(ty.dtype)?) };
        let tensor = converted.as_ref().unwrap_or(tensor);
        let bytes = if logical_dims == ty.dims { tensor.bytes() } else { padded(tensor, &ty.dims).into() };
        let strides = strides(&ty.dims, ty.dtype.size());
        let mut buffers = Vec::with_capacity(devices.len());
        for (i, (place, device)) in devices.iter().enumerate() {
            let shard = &shards[*place];
            let first = offset(&shard.start, &strides);
            let host = HostBuffer {
                byte_strides: (shard.size != ty.dims).then_some(&strides),
                layout,
                ..HostBuffer::dense(&bytes[first..], buffer_type(ty.dtype), &shard.size)
            };
            let size = shard.size.iter().product::<usize>() * ty.dtype.size();
            let _guard = watch.as_ref().map(|watch| watch.guard_upload(i, size));
            buffers.push(client.upload(device, host)?);
        }
        let addressable = devices.iter().map(|(place, _)| *place).collect();
        Ok(ShardedTensor::new(buffers, addressable, shards, ty.clone(), logical_dims).with_watch(watch))
    }

    /// Copies the tensor to the host without padding, reading each distinct shard once. A result that is sharded over
    /// several processes is replicated first, so all of them must call this.
    ///
    /// # Errors
    /// Returns the plugin's error, or an error if host tensors do not support the element type.
    pub fn download(&self) -> Result<Tensor, RuntimeError> {
        if let Some(replicator) =
            self.replicator.as_ref().filter(|_| self.shards.iter().any(|p| p.size != self.ty.dims))
        {
            return replicator(self)?.download();
        }
        let tensor = self.copy_to_host().map_err(|e| self.failed(e))?;
        self.watch.iter().for_each(WaitDescription::ended);
        Ok(tensor)
    }

    fn copy_to_host(&self) -> Result<Tensor, RuntimeError> {
        let guard = |place| self.watch.as_ref().map(|watch| watch.guard_download(place, self.shard_bytes()));
        let (dtype, logical_dims) = (self.ty.dtype, &self.logical_dims);
        if self.shards.first().is_some_and(|p| p.size == self.ty.dims) && *logical_dims == self.ty.dims {
            let _guard = guard(0);
            return Tensor::filled(dtype, logical_dims, |whole| Ok(self.buffers[0].read(whole)?));
        }
        let mut different: Vec<(usize, &Shard)> = Vec::new();
        for (i, shard) in self.addressable.iter().map(|place| &self.shards[*place]).enumerate() {
            if different.iter().all(|(_, known)| known.start != shard.start) {
                different.push((i, shard));
            }
        }
        Tensor::filled(dtype, logical_dims, |whole| {
            let to = strides(logical_dims, dtype.size());
            for at_once in different.chunks((IN_FLIGHT / self.shard_bytes().max(1)).max(1)) {
                // Each shard is read over its own device's link. This thread creates the watchdog guards, because the
                // current step is thread-local.
                let guards: Vec<_> = at_once.iter().map(|(i, _)| guard(*i)).collect();
                let parts = threads::try_in_order(at_once, at_once.len(), |(i, _)| self.buffers[*i].to_host())?;
                drop(guards);
                for ((_, shard), part) in at_once.iter().zip(parts) {
                    let inside = logical_dims.iter().zip(&shard.start).zip(&shard.size);
                    let size: Vec<usize> =
                        inside.map(|((all, start), size)| all.saturating_sub(*start).min(*size)).collect();
                    let from = strides(&shard.size, dtype.size());
                    copy(&part, &from, whole, &to, &shard.start, &size, dtype.size());
                }
            }
            Ok(())
        })
    }
}

/// Returns the byte strides of a dense row-major array with elements of `size` bytes.
pub(super) fn strides(dims: &[usize], size: usize) -> Vec<i64> {
    let mut strides = vec![size as i64; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i] as i64;
    }
    strides
}

/// Returns the byte offset of an element.
pub(super) fn offset(index: &[usize], strides: &[i64]) -> usize {
    index.iter().zip(strides).map(|(i, stride)| i * *stride as usize).sum()
}

/// Returns a tensor's bytes, zero-padded at the end of each dimension.
fn padded(tensor: &Tensor, dims: &[usize]) -> Vec<u8> {
    let size = tensor.dtype().size();
    let mut bytes = vec![0; dims.iter().product::<usize>() * size];
    let first = vec![0; dims.len()];
    let (from, to) = (strides(tensor.shape(), size), strides(dims, size));
    copy(&tensor.bytes(), &from, &mut bytes, &to, &first, tensor.shape(), size);
    bytes
}

/// Copies a block of `size` elements from the start of `from` to index `at` of `to`. Both are row-major.
fn copy(
    from: &[u8],
    from_strides: &[i64],
    to: &mut [u8],
    to_strides: &[i64],
    at: &[usize],
    size: &[usize],
    item: usize,
) {
    if size.contains(&0) {
        return;
    }
    // Merges trailing dimensions that are contiguous in both tensors into one range of bytes.
    let (mut run, mut outer) = (item, size);
    while let Some((&length, rest)) = outer.split_last() {
        let dense = |strides: &[i64]| strides[rest.len()] as usize == run;
        if !(dense(from_strides) && dense(to_strides)) {
            break;
        }
        (run, outer) = (run * length, rest);
    }
    let first = offset(at, to_strides);
    let mut index = vec![0; outer.len()];
    loop {
        let (source, target) = (offset(&index, from_strides), first + offset(&index, to_strides));
        to[target..][..run].copy_from_slice(&from[source..][..run]);
        // Advances the index, last dimension fastest.
        let Some(step) = (0..outer.len()).rev().find(|&d| index[d] + 1 < outer[d]) else { return };
        index[step] += 1;
        index[step + 1..].fill(0);
    }
}

/// Copies one shard of a row-major tensor with dimensions `dims` into `out`, which has the shard's size.
pub(super) fn cut_into(bytes: &[u8], dims: &[usize], shard: &Shard, dtype: DType, out: &mut [u8]) {
    let size = dtype.size();
    let (from, to) = (strides(dims, size), strides(&shard.size, size));
    copy(&bytes[offset(&shard.start, &from)..], &from, out, &to, &vec![0; dims.len()], &shard.size, size);
}

pub(super) fn buffer_type(dtype: DType) -> BufferType {
    match dtype {
        DType::Bool => BufferType::Pred,
        DType::I8 => BufferType::S8,
        DType::I16 => BufferType::S16,
        DType::I32 => BufferType::S32,
        DType::I64 => BufferType::S64,
        DType::U8 => BufferType::U8,
        DType::U16 => BufferType::U16,
        DType::U32 => BufferType::U32,
        DType::U64 => BufferType::U64,
        DType::F8E4M3FN => BufferType::F8E4M3Fn,
        DType::F16 => BufferType::F16,
        DType::BF16 => BufferType::Bf16,
        DType::F32 => BufferType::F32,
        DType::F64 => BufferType::F64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_offsets_follow_sharding_axis_order() {
        let mesh = DeviceMesh::new(&[("cfg", 2), ("context", 2)]);
        let ty = Type::new(DType::F32, [4, 6]);
        let all = shards(&ty, &mesh, Some(&Sharding::new(&[&["context", "cfg"], &[]])));
        let starts: Vec<usize> = all.iter().map(|p| p.start[0]).collect();
        // Device (cfg, context) holds row 2·context + cfg.
        assert_eq!(starts, [0, 2, 1, 3]);
        assert!(all.iter().all(|p| p.size == [1, 6]));
        assert!(shards(&ty, &mesh, None).iter().all(|p| p.size == [4, 6]));
    }

    #[test]
    fn shards_are_copied_and_tensors_are_zero_padded() {
        let bytes: Vec<u8> = (0..12).collect();
        let cut = |bytes: &[u8], dims: &[usize], shard: &Shard, dtype| {
            let mut out = vec![0; shard.size.iter().product()];
            cut_into(bytes, dims, shard, dtype, &mut out);
            out
        };
        let shard = Shard { start: vec![1, 2], size: vec![2, 2] };
        // Rows of four bytes: rows 1 and 2, columns 2 and 3.
        assert_eq!(cut(&bytes, &[3, 4], &shard, DType::U8), [6, 7, 10, 11]);
        // Complete trailing dimensions are copied as one contiguous range of bytes.
        let rows = cut(&bytes, &[3, 2, 2], &Shard { start: vec![1, 0, 0], size: vec![2, 2, 2] }, DType::U8);
        assert_eq!(rows, (4..12).collect::<Vec<u8>>());
        let columns = cut(&bytes, &[3, 2, 2], &Shard { start: vec![0, 1, 0], size: vec![3, 1, 2] }, DType::U8);
        assert_eq!(columns, [2, 3, 6, 7, 10, 11]);
        let t = Tensor::from(ndarray::array![[1i32, 2], [3, 4]]);
        let wide: Vec<i32> = bytemuck::pod_collect_to_vec(&padded(&t, &[3, 3]));
        assert_eq!(wide, [1, 2, 0, 3, 4, 0, 0, 0, 0]);
    }
}
