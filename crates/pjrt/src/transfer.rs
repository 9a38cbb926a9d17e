//! Transfers, which fill device buffers in chunks. A tensor that stacks the weights of all layers can therefore be
//! loaded from files without a host copy of the complete tensor.

use std::sync::Arc;

use super::abi::{self, Struct};
use super::buffer::Buffer;
use super::buffer_type::BufferType;
use super::client::{Client, to_i64};
use super::client_handle::ClientHandle;
use super::device::Device;
use super::error::Result;
use super::event::Event;
use super::host::SharedBytes;
use super::layout::{DeviceLayout, RawLayout, pointer};
use super::raw::Raw;

/// The type, shape and layout of one buffer of a [`Transfer`].
#[derive(Clone, Debug, PartialEq)]
pub struct TransferShape {
    /// Element type.
    pub ty: BufferType,
    /// Dimensions, outermost first.
    pub dims: Vec<usize>,
    /// Device layout. `None`: the default. Must be set for all buffers of a transfer or for none.
    pub layout: Option<DeviceLayout>,
}

/// Buffers of one device that are being filled. Write each byte exactly once and mark the last chunk of each buffer.
/// Bytes must be in the device layout; on CPU and CUDA, the default layout is row-major.
#[derive(Debug)]
pub struct Transfer {
    client: Arc<ClientHandle>,
    raw: Raw,
    sizes: Vec<usize>,
}

/// One chunk of a buffer, for [`Transfer::write_all`].
#[derive(Clone, Copy, Debug)]
pub struct TransferChunk<'a> {
    /// Transfer that fills the buffer.
    pub transfer: &'a Transfer,
    /// Index of the buffer in the transfer.
    pub index: usize,
    /// Position of the chunk in the buffer, in bytes.
    pub offset: usize,
    /// Bytes of the chunk, in the device layout.
    pub bytes: &'a [u8],
    /// Whether this is the last chunk of the buffer.
    pub last: bool,
}

impl Client {
    /// Creates buffers on `device` to be filled in chunks.
    pub fn transfer(&self, device: &Device, shapes: &[TransferShape]) -> Result<Transfer> {
        type Create = abi::ClientCreateBuffersForAsyncHostToDeviceArgs;
        self.owns::<Create>(device)?;
        let dims: Vec<Vec<i64>> = shapes.iter().map(|shape| to_i64(&shape.dims)).collect();
        let spec = |(shape, dims): (&TransferShape, &Vec<i64>)| abi::ShapeSpec {
            dims: pointer(dims),
            num_dims: dims.len(),
            element_type: shape.ty.to_c(),
            ..Struct::new()
        };
        let specs: Vec<abi::ShapeSpec> = shapes.iter().zip(&dims).map(spec).collect();
        let layouts: Vec<RawLayout> = shapes.iter().filter_map(|s| s.layout.as_ref()).map(RawLayout::new).collect();
        if !layouts.is_empty() && layouts.len() != shapes.len() {
            let reason = format!(
                "only {} of {} buffers have a layout: set a layout for all buffers or for none",
                layouts.len(),
                shapes.len()
            );
            return Err(self.plugin().refuse::<Create>(reason));
        }
        let layouts: Vec<*const abi::BufferMemoryLayout> = layouts.iter().map(|l| &raw const l.raw).collect();
        let args = Create {
            client: self.inner().raw.0,
            shape_specs: pointer(&specs),
            num_shape_specs: specs.len(),
            device_layouts: if layouts.is_empty() { std::ptr::null_mut() } else { pointer(&layouts) },
            num_device_layouts: layouts.len(),
            memory: device.default_memory()?,
            ..Struct::new()
        };
        // SAFETY: shapes and layouts outlive the call; the memory space lives as long as the client.
        let args = unsafe { self.plugin().call(args)? };
        let mut transfer =
            Transfer { client: self.inner().clone(), raw: Raw(args.transfer_manager), sizes: Vec::new() };
        for index in 0..shapes.len() {
            transfer.sizes.push(transfer.buffer_size(index)?);
        }
        Ok(transfer)
    }
}

impl Transfer {
    /// Returns the size of buffer `index` on the device, in bytes.
    fn buffer_size(&self, index: usize) -> Result<usize> {
        let args = abi::AsyncHostToDeviceTransferManagerBufferSizeArgs {
            transfer_manager: self.raw.0,
            buffer_index: index as i32,
            ..Struct::new()
        };
        // SAFETY: the transfer manager is alive.
        let args = unsafe { self.client.plugin.call(args)? };
        Ok(args.buffer_size)
    }

    /// Returns the size of each buffer on the device, in bytes.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Writes `bytes` at byte `offset` of buffer `index`, and waits until they have been read. `last` marks the last
    /// chunk of the buffer.
    pub fn write(&self, index: usize, offset: usize, bytes: &[u8], last: bool) -> Result<()> {
        self.send(index, offset, bytes, last)?.wait()
    }

    /// Writes chunks of several transfers concurrently, and waits until all of them have been read.
    ///
    /// # Errors
    /// Returns the first error. When this function returns, no chunk is being read any more.
    pub fn write_all(pieces: &[TransferChunk<'_>]) -> Result<()> {
        let sent: Vec<Result<Event>> =
            pieces.iter().map(|p| p.transfer.send(p.index, p.offset, p.bytes, p.last)).collect();
        let waited: Vec<Result<()>> = sent.into_iter().map(|event| event?.wait()).collect();
        waited.into_iter().collect()
    }

    /// Writes a chunk like [`Transfer::write`], but in the background. Keeps the owner of the bytes alive until they
    /// have been read.
    pub fn write_shared(&self, index: usize, offset: usize, bytes: &SharedBytes, last: bool) -> Result<()> {
        self.send(index, offset, bytes.bytes(), last)?.keep_until_ready(Box::new(bytes.clone()))
    }

    fn send(&self, index: usize, offset: usize, bytes: &[u8], last: bool) -> Result<Event> {
        type Data = abi::AsyncHostToDeviceTransferManagerTransferDataArgs;
        let plugin = &self.client.plugin;
        let size = self.size_of::<Data>(index)?;
        if offset.checked_add(bytes.len()).is_none_or(|end| end > size) {
            let len = bytes.len();
            return Err(
                plugin.refuse::<Data>(format!("{len} bytes at byte {offset} exceed buffer {index} of {size} bytes"))
            );
        }
        let args = Data {
            transfer_manager: self.raw.0,
            buffer_index: index as i32,
            data: pointer(bytes),
            offset: offset as i64,
            transfer_size: bytes.len() as i64,
            is_last_transfer: last,
            ..Struct::new()
        };
        // SAFETY: the range is inside the buffer; the callers keep the bytes until the event fires. We own the event.
        unsafe {
            let args = plugin.call(args)?;
            Ok(Event::from_raw(plugin, args.done_with_h2d_transfer))
        }
    }

    /// Returns buffer `index`, even before it is filled. The buffer becomes ready when its last chunk has been written.
    /// Call this once per buffer.
    pub fn buffer(&self, index: usize) -> Result<Buffer> {
        type Retrieve = abi::AsyncHostToDeviceTransferManagerRetrieveBufferArgs;
        self.size_of::<Retrieve>(index)?;
        let args = Retrieve { transfer_manager: self.raw.0, buffer_index: index as i32, ..Struct::new() };
        // SAFETY: the transfer manager is alive; we own the buffer.
        unsafe {
            let args = self.client.plugin.call(args)?;
            Ok(Buffer::from_raw(&self.client, args.buffer_out))
        }
    }

    fn size_of<A: abi::ArgumentStruct>(&self, index: usize) -> Result<usize> {
        let count = self.sizes.len();
        let size = self.sizes.get(index).copied();
        size.ok_or_else(|| {
            self.client.plugin.refuse::<A>(format!("there is no buffer {index}: the transfer has {count} buffers"))
        })
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // SAFETY: we own the transfer manager and do not use it again.
        unsafe {
            self.client.plugin.destroy(abi::AsyncHostToDeviceTransferManagerDestroyArgs {
                transfer_manager: self.raw.0,
                ..Struct::new()
            })
        };
    }
}
