//! A tensor on the devices of a program: which part lies where.

use super::engine::RuntimeError;
use super::gather::Whole;
use crate::hlo::{DType, Mesh, Sharding, Type};
use crate::pjrt::{Buffer, BufferType, Client, Device, DeviceLayout, HostBuffer};
use crate::tensor::Tensor;

/// The part of a tensor that one device holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// First element along each dimension.
    pub start: Vec<usize>,
    /// Elements along each dimension.
    pub size: Vec<usize>,
}

/// The part of each device of a mesh, in device order; without a sharding every device holds all.
pub fn parts(ty: &Type, mesh: &Mesh, sharding: Option<&Sharding>) -> Vec<Part> {
    (0..mesh.devices())
        .map(|device| {
            let mut part = Part { start: vec![0; ty.rank()], size: ty.dims.clone() };
            for (i, axes) in sharding.iter().flat_map(|s| s.0.iter().enumerate()) {
                for axis in axes {
                    part.size[i] /= mesh.size(axis).unwrap_or(1);
                    part.start[i] += mesh.position(device, axis) * part.size[i];
                }
            }
            part
        })
        .collect()
}

/// A tensor with a buffer on each device of this process, and where other processes hold parts of it.
pub struct Distributed {
    buffers: Vec<Buffer>,
    /// The place of each buffer's device among all.
    held: Vec<usize>,
    parts: Vec<Part>,
    ty: Type,
    /// The leading part of each dimension that callers know of.
    content: Vec<usize>,
    /// How the other processes' parts come here.
    whole: Option<Whole>,
}

impl Distributed {
    /// From the buffers of this process's devices, whose places among all are `held`, and the parts of all.
    pub fn new(buffers: Vec<Buffer>, held: Vec<usize>, parts: Vec<Part>, ty: Type, content: Vec<usize>) -> Self {
        Distributed { buffers, held, parts, ty, content, whole: None }
    }

    /// The same, brought whole by a program where not every process holds all parts.
    pub(super) fn gathered_by(self, whole: Option<Whole>) -> Self {
        Distributed { whole, ..self }
    }

    /// The sizes that callers know of.
    pub fn dims(&self) -> &[usize] {
        &self.content
    }

    /// The type over all devices, filled up where the mesh needs it.
    pub fn ty(&self) -> &Type {
        &self.ty
    }

    /// The part of each device, in device order.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The buffers of this process's devices, in device order.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Bytes of a device's part.
    pub fn device_bytes(&self) -> usize {
        self.parts.first().map_or(0, |p| p.size.iter().product::<usize>() * self.ty.dtype.size())
    }

    /// Waits until every device has its part.
    ///
    /// # Errors
    /// That of the program or transfer that should have filled it.
    pub fn wait(&self) -> Result<(), RuntimeError> {
        Ok(self.buffers.iter().try_for_each(Buffer::wait)?)
    }

    /// Copies a host tensor of at most `ty`'s sizes to this process's devices, given with their places among all, each its
    /// part; behind the tensor lie zeros.
    ///
    /// # Errors
    /// The plugin's, or a tensor of other sizes.
    pub fn upload(
        client: &Client,
        devices: &[(usize, &Device)],
        tensor: &Tensor,
        ty: &Type,
        parts: Vec<Part>,
        layout: Option<&DeviceLayout>,
    ) -> Result<Self, RuntimeError> {
        let content = tensor.shape().to_vec();
        let converted = if tensor.dtype() == ty.dtype { None } else { Some(tensor.cast(ty.dtype)?) };
        let tensor = converted.as_ref().unwrap_or(tensor);
        let bytes = if content == ty.dims { tensor.bytes() } else { padded(tensor, &ty.dims).into() };
        let strides = strides(&ty.dims, ty.dtype.size());
        let mut buffers = Vec::with_capacity(devices.len());
        for (place, device) in devices {
            let part = &parts[*place];
            let first: usize = part.start.iter().zip(&strides).map(|(s, stride)| s * *stride as usize).sum();
            let host = HostBuffer {
                byte_strides: (part.size != ty.dims).then_some(&strides),
                layout,
                ..HostBuffer::dense(&bytes[first..], buffer_type(ty.dtype), &part.size)
            };
            buffers.push(client.upload(device, host)?);
        }
        let held = devices.iter().map(|(place, _)| *place).collect();
        Ok(Distributed::new(buffers, held, parts, ty.clone(), content))
    }

    /// Copies the tensor to the host: each part once, the filling left out. Where not every device holds all of a result of
    /// several processes, they bring it together first: each of them has to call this.
    ///
    /// # Errors
    /// The plugin's, or an element type without a host form.
    pub fn download(&self) -> Result<Tensor, RuntimeError> {
        if let Some(whole) = self.whole.as_ref().filter(|_| self.parts.iter().any(|p| p.size != self.ty.dims)) {
            return whole.of(self)?.download();
        }
        let (dtype, content) = (self.ty.dtype, &self.content);
        if self.parts.first().is_some_and(|p| p.size == self.ty.dims) && *content == self.ty.dims {
            return Tensor::filled(dtype, content, |whole| Ok(self.buffers[0].read(whole)?));
        }
        Tensor::filled(dtype, content, |whole| {
            let to = strides(content, dtype.size());
            let mut seen: Vec<&Vec<usize>> = Vec::new();
            for (buffer, part) in self.buffers.iter().zip(self.held.iter().map(|place| &self.parts[*place])) {
                if seen.contains(&&part.start) {
                    continue;
                }
                seen.push(&part.start);
                let inside = content.iter().zip(&part.start).zip(&part.size);
                let size: Vec<usize> =
                    inside.map(|((all, start), size)| all.saturating_sub(*start).min(*size)).collect();
                let from = strides(&part.size, dtype.size());
                copy(&buffer.to_host()?, &from, whole, &to, &part.start, &size, dtype.size());
            }
            Ok(())
        })
    }
}

/// Bytes between neighbours along each dimension of a dense row-major array.
pub(super) fn strides(dims: &[usize], size: usize) -> Vec<i64> {
    let mut strides = vec![size as i64; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i] as i64;
    }
    strides
}

/// A tensor's bytes with zeros behind each dimension.
fn padded(tensor: &Tensor, dims: &[usize]) -> Vec<u8> {
    let size = tensor.dtype().size();
    let mut bytes = vec![0; dims.iter().product::<usize>() * size];
    let first = vec![0; dims.len()];
    let (from, to) = (strides(tensor.shape(), size), strides(dims, size));
    copy(&tensor.bytes(), &from, &mut bytes, &to, &first, tensor.shape(), size);
    bytes
}

/// Copies a block of `size` elements from the start of `from` to `at` in `to`. Both are row-major.
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
    let offset = |index: &[usize], strides: &[i64]| -> usize {
        index.iter().zip(strides).map(|(i, stride)| i * *stride as usize).sum()
    };
    // Trailing dimensions that lie without gaps on both sides are one run of bytes.
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
        // The next index, the last dimension fastest.
        let Some(step) = (0..outer.len()).rev().find(|&d| index[d] + 1 < outer[d]) else { return };
        index[step] += 1;
        index[step + 1..].fill(0);
    }
}

/// The bytes of one device's part of a tensor of `dims`, row-major.
pub(super) fn cut(bytes: &[u8], dims: &[usize], part: &Part, dtype: DType) -> Vec<u8> {
    let size = dtype.size();
    let from = strides(dims, size);
    let first: usize = part.start.iter().zip(&from).map(|(s, stride)| s * *stride as usize).sum();
    let mut out = vec![0; part.size.iter().product::<usize>() * size];
    let to = strides(&part.size, size);
    copy(&bytes[first..], &from, &mut out, &to, &vec![0; dims.len()], &part.size, size);
    out
}

/// PJRT's element type.
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
    fn parts_follow_the_mesh() {
        let mesh = Mesh::new(&[("cfg", 2), ("context", 2)]);
        let ty = Type::new(DType::F32, [4, 6]);
        let all = parts(&ty, &mesh, Some(&Sharding::new(&[&["context", "cfg"], &[]])));
        let starts: Vec<usize> = all.iter().map(|p| p.start[0]).collect();
        // Device (cfg, context) holds row 2·context + cfg.
        assert_eq!(starts, [0, 2, 1, 3]);
        assert!(all.iter().all(|p| p.size == [1, 6]));
        assert!(parts(&ty, &mesh, None).iter().all(|p| p.size == [4, 6]));
    }

    #[test]
    fn blocks_are_cut_and_filled_up() {
        let bytes: Vec<u8> = (0..12).collect();
        let part = Part { start: vec![1, 2], size: vec![2, 2] };
        // Rows of four bytes: rows 1 and 2, columns 2 and 3.
        let byte = |dims: &[usize], part: &Part| {
            let from = strides(dims, 1);
            let mut out = vec![0; 4];
            let first: usize = part.start.iter().zip(&from).map(|(s, t)| s * *t as usize).sum();
            copy(&bytes[first..], &from, &mut out, &strides(&part.size, 1), &[0, 0], &part.size, 1);
            out
        };
        assert_eq!(byte(&[3, 4], &part), [6, 7, 10, 11]);
        // Whole trailing dimensions are copied at once.
        let rows = cut(&bytes, &[3, 2, 2], &Part { start: vec![1, 0, 0], size: vec![2, 2, 2] }, DType::U8);
        assert_eq!(rows, (4..12).collect::<Vec<u8>>());
        let columns = cut(&bytes, &[3, 2, 2], &Part { start: vec![0, 1, 0], size: vec![3, 1, 2] }, DType::U8);
        assert_eq!(columns, [2, 3, 6, 7, 10, 11]);
        let t = Tensor::from(ndarray::array![[1i32, 2], [3, 4]]);
        let wide: Vec<i32> = bytemuck::pod_collect_to_vec(&padded(&t, &[3, 3]));
        assert_eq!(wide, [1, 2, 0, 3, 4, 0, 0, 0, 0]);
    }
}
